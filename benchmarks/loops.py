"""A loop of thousands of updates in one Queue: the last must cost what the first does."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tools.client import Graph
from tools.host import Server

from .host import quickstart

UPDATES = 5000
WARM = 200
"""Updates at the start that are not compared: the allocator still finds its sizes."""


class Watch:
    """Counts what the server says and holds, update by update."""

    def __init__(self, comfy: Server, graph: Graph) -> None:
        self.comfy, self.end = comfy, graph.find("TreeGRPOLoopEnd").id
        self.messages = self.bytes = 0
        self.rows: list[dict[str, float]] = []
        """Of the end of every update: time, what the server has used, messages so far and their bytes."""

    def __call__(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "tick":
            return
        self.messages += 1
        self.bytes += len(json.dumps([kind, data]))
        if kind == "progress" and data["node"] == self.end:
            self.rows.append(
                {"time": time.time(), **self.comfy.usage(), "messages": self.messages, "bytes": self.bytes}
            )

    def per_update(self, name: str) -> list[float]:
        """What every update but the first added."""
        return [after[name] - before[name] for before, after in pairwise(self.rows)]


def smallest(run_name: str, updates: int) -> Graph:
    """The quickstart with two pictures of one prompt, drawn in three steps."""
    graph = quickstart(run_name, updates, prompts=1)
    graph.inputs(graph.find("BasicScheduler"))["steps"] = 3
    graph.inputs(graph.find("TreeSampler")).update(branching=2, depth=1, window="fixed", start=0, tail_steps=0)
    graph.inputs(graph.find("TreeGRPOPolicy"))["rank"] = 2
    reward = graph.add("TreeGRPORewardModel", name="jpeg", weight=1.0)
    graph.inputs(graph.find("RewardScorer"))["reward"] = reward[0]
    return graph


def watched(comfy: Server, updates: int) -> Watch:
    """So many updates of the smallest loop, and one in a Queue after it, which must work too."""
    graph = smallest("loop", updates)
    watch = Watch(comfy, graph)
    comfy.run(graph, timeout=24 * 3600, on_event=watch)
    log = comfy.output / "treegrpo" / "loop" / "metrics.jsonl"
    lines = len(log.read_text().splitlines())
    assert lines == len(watch.rows) == updates, f"{lines} updates and {len(watch.rows)} reports, not {updates}"
    comfy.run(smallest("loop", 1))
    assert len(log.read_text().splitlines()) == updates + 1
    return watch


def measure(updates: int = UPDATES, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """The figures of a loop in a new server: the last hundred updates beside the first after warming up."""
    with Server(arguments=["--cpu", *arguments]) as comfy:
        watch = watched(comfy, updates)
    memory = [row["memory"] for row in watch.rows]
    seconds, computing = watch.per_update("time"), watch.per_update("computing")
    every = max(1, updates // 250)
    curve = [
        {
            "update": at,
            "seconds": statistics.median(seconds[at : at + every]),
            "computing": statistics.median(computing[at : at + every]),
            "memory": memory[at],
        }
        for at in range(0, updates - 1, every)
    ]
    warm, part = min(WARM, updates // 3), min(100, updates // 3)
    found: dict[str, Any] = {"updates": updates, "arguments": list(arguments), "compared": part, "warm": warm}
    for name, begin in (("first", warm), ("last", updates - 1 - part)):
        where = slice(begin, begin + part)
        found[name] = {
            "seconds": statistics.median(seconds[where]),
            "computing": mean_computing(curve, begin, part),
            "memory": statistics.median(memory[where]),
            "messages": statistics.mean(watch.per_update("messages")[where]),
            "bytes": statistics.mean(watch.per_update("bytes")[where]),
        }
    return {**found, "curve": curve}


def mean_computing(curve: Sequence[dict[str, Any]], begin: int, count: int) -> float:
    """Mean over the curve's points among these updates: the system counts in hundredths, and medians are such."""
    return statistics.mean(point["computing"] for point in curve if begin <= point["update"] < begin + count)


if __name__ == "__main__":
    found = measure(int(sys.argv[1]), sys.argv[2:])
    print(json.dumps({key: value for key, value in found.items() if key != "curve"}, indent=1))
