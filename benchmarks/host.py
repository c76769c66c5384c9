"""``python -m benchmarks.host`` measures what is waited for beside the training: import, first forward, the graph."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.client import Graph
from tools.host import ROOT, Server, comfyui_folder, install_pack

QUICKSTART = ROOT / "tests" / "graphs" / "treegrpo_quickstart.json"


def quickstart(run_name: str, updates: int, prompts: int | None = None) -> Graph:
    """The quickstart's graph with a run of its own, another number of updates and, if given, of prompts."""
    graph = Graph.load(QUICKSTART)
    graph.inputs(graph.find("TreeGRPOPolicy"))["run_name"] = run_name
    graph.inputs(graph.find("TreeGRPOExport"))["file_name"] = run_name
    graph.inputs(graph.find("TreeGRPOLoopStart"))["iterations"] = updates
    if prompts:
        graph.inputs(graph.find("TreeGRPOPrompts"))["prompts_per_step"] = prompts
    return graph


def import_seconds(repetitions: int) -> dict[str, float]:
    """Seconds that core's own loader takes for the pack, each time in a new process with core imported already."""
    with tempfile.TemporaryDirectory() as folder:
        pack = Path(folder) / "pack"
        install_pack(ROOT, pack)
        command = [sys.executable, "-m", "benchmarks.host", "--import", str(pack)]
        seconds = []
        for _ in range(repetitions + 1):  # the first one compiles
            done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
            seconds.append(float(done.stdout.splitlines()[-1]))
    return _spread(seconds[1:])


def _import(pack: str) -> float:
    """What a server has imported before its custom nodes, then the pack."""
    sys.argv = [sys.argv[0], "--cpu"]
    sys.path[0] = str(comfyui_folder())
    import comfy.options

    comfy.options.enable_args_parsing()
    import utils.extra_config  # noqa: F401 I001 - before nodes, which puts a folder with another utils first
    import nodes
    import server  # noqa: F401

    asyncio.run(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
    start = time.perf_counter()
    loaded = asyncio.run(nodes.load_custom_node(pack))
    seconds = time.perf_counter() - start
    if not loaded:
        raise RuntimeError("ComfyUI could not load the pack; its log is above")
    return seconds


class TimedServer(Server):
    """A server that knows when its last graph was queued."""

    queued = 0.0

    def submit(self, graph: dict[str, dict[str, Any]]) -> str:
        self.queued = time.time()
        return super().submit(graph)

    def first_forward(self, graph: Graph) -> float:
        """Seconds from Queue to the end of TreeSampler's first model forward."""
        sampler, found = graph.find("TreeSampler").id, []

        def watch(kind: str, data: dict[str, Any]) -> None:
            if kind == "progress" and data["node"] == sampler:
                found.append(time.time() - self.queued)

        self.run(graph, on_event=watch)
        return found[0]

    def whole(self, graph: Graph) -> float:
        """Seconds from Queue to the end of the graph, by the server's clock."""
        run = self.submit(graph)
        self.wait(run)
        messages = dict(self.get(f"/history/{run}")[run]["status"]["messages"])
        return float(messages["execution_success"]["timestamp"] / 1000 - self.queued)


def first_forward(repetitions: int) -> dict[str, Any]:
    """Seconds from Queue to the first forward of the quickstart: in a new server, and when it has run before."""
    comfy = TimedServer()
    with comfy:
        graph = quickstart("first forward", 1)
        cold = comfy.first_forward(graph)
        warm = [comfy.first_forward(graph) for _ in range(repetitions)]
    return {"cold": cold, "warm": _spread(warm)}


def graph_seconds(updates: int, prompts: int) -> dict[str, float]:
    """Seconds per update that are in no stage of it: of a loop of so many updates, and of as many Queues of one.

    A loop's figure is what further updates cost; what a Queue costs by itself is in the other one.
    """
    comfy = TimedServer()
    with comfy:

        def beside(run_name: str, count: int) -> float:
            log = comfy.output / "treegrpo" / run_name / "metrics.jsonl"
            known = len(log.read_text().splitlines()) if log.exists() else 0
            wall = comfy.whole(quickstart(run_name, count, prompts))
            entries = [json.loads(line) for line in log.read_text().splitlines()[known:]]
            stages.extend(entry["seconds"] for entry in entries)
            return wall - sum(entry["seconds"] for entry in entries)

        stages: list[float] = []
        beside("loop", 1)  # warms up
        one, many = beside("loop", 1), beside("loop", updates + 1)
        beside("single", 1)
        queues = [beside("single", 1) for _ in range(updates)]
    return {
        "prompts": prompts,
        "updates": updates,
        "update": statistics.median(stages),
        "loop": (many - one) / updates,
        "queues": statistics.median(queues),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"seconds": statistics.median(values), "low": min(values), "high": max(values)}


def measure(repetitions: int = 5, updates: int = 20) -> dict[str, Any]:
    """All figures."""
    return {
        "import": import_seconds(repetitions),
        "first forward": first_forward(repetitions),
        "graph": [graph_seconds(updates, prompts) for prompts in (1, 6)],
    }


def main() -> None:
    """Print all figures."""
    if len(sys.argv) == 3 and sys.argv[1] == "--import":
        print(_import(sys.argv[2]))
        return
    print(json.dumps(measure(), indent=1))


if __name__ == "__main__":
    main()
