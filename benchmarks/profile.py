"""``python -m benchmarks.profile`` says where the seconds of one update of the included model go, item by item."""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from .iteration import TREES
from .session import Session

REST = "other Python of the pack"
ITEMS = (
    "model forward",
    "backward",
    "noise",
    "transition",
    "optimizer",
    "adapter in and out",
    "core, per forward",
    "core, per sampling",
    "decode",
    "reward",
    "advantage",
    "metrics",
    "saving",
    REST,
)
OVERHEAD = ("noise", "transition", "optimizer", "adapter in and out", "core, per forward", "core, per sampling", REST)
"""What rollout and update spend beside the model's own work."""


class Clock:
    """Seconds by item. While a function of one item calls one of another, only the inner one's clock runs."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._running, self._since = [REST], time.perf_counter()

    def timed(self, item: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its seconds added to ``item``."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._lap()
            self._running.append(item)
            try:
                return function(*args, **kwargs)
            finally:
                self._lap()
                self._running.pop()

        return call

    def _lap(self) -> None:
        now = time.perf_counter()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """The seconds since the last call, by item."""
        self._lap()
        taken: dict[str, float] = dict(self.seconds)
        self.seconds.clear()
        return taken


def _places(session: Session) -> dict[str, list[tuple[Any, str]]]:
    """Item -> the functions that do it, each as (where its caller looks it up, name)."""
    import comfy.model_base
    import comfy.samplers
    import torch

    parts, core = session.parts, "treegrpo_core"
    sampler, trainer = parts[f"{core}.sampler"], parts[f"{core}.trainer"]
    adapter, run, tree = type(session.run.adapter), type(session.run), parts[f"{core}.tree"].Tree
    return {
        "model forward": [(comfy.model_base.BaseModel, "apply_model")],
        "backward": [(torch.autograd, "grad")],
        "noise": [(sampler, "level_noise"), (parts["nodes.latents"], "root_noise")],
        "transition": [(sampler, "step"), (sampler, "ode_step"), (trainer, "_scores"), (trainer, "clipped_surrogate")],
        "optimizer": [(trainer, "_step")],
        "adapter in and out": [(adapter, "put_in"), (adapter, "take_out"), (adapter, "to")],
        "core, per forward": [(comfy.samplers.CFGGuider, "__call__")],
        "core, per sampling": [(comfy.samplers.CFGGuider, "sample")],
        REST: [(parts["nodes.guided"]._Session, "sample")],
        "decode": [(parts["nodes.reward"], "decode")],
        "reward": [(parts["nodes.reward"], "rewards_of")],
        "advantage": [(tree, "with_advantages")],
        "metrics": [(trainer, "summary")],
        "saving": [(run, "save")],
    }


@contextmanager
def clocked(session: Session) -> Iterator[Clock]:
    """Inside, updates of the session are timed item by item."""
    clock = Clock()
    with ExitStack() as stack:
        for item, functions in _places(session).items():
            for owner, name in functions:
                stack.enter_context(mock.patch.object(owner, name, clock.timed(item, getattr(owner, name))))
        yield clock


def measure(prompts: list[str], repetitions: int) -> dict[str, Any]:
    """Median seconds of every item in one update of the tree.

    ``overhead``: what rollout and update spend on other things than the model, divided by the model's forwards and
    backwards. ``operators``: the share of an update that is spent in PyTorch's operators; the rest is Python, which the
    profiler makes slower than it is.
    """
    session = Session(prompts)
    session.step(TREES[0])
    found = []
    with clocked(session) as clock:
        for _ in range(repetitions):
            clock.take()
            session.step(TREES[0])
            found.append(clock.take())
    items = {item: statistics.median(entry.get(item, 0.0) for entry in found) for item in ITEMS}
    model = items["model forward"] + items["backward"]
    return {
        "prompts": len(prompts),
        "seconds": statistics.median(sum(entry.values()) for entry in found),
        "items": items,
        "overhead": sum(items[item] for item in OVERHEAD) / model,
        "operators": _operators(session),
    }


def _operators(session: Session) -> float:
    """Share of PyTorch's operators in the wall time of one update, under PyTorch's profiler."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        session.step(TREES[0])
        seconds = time.perf_counter() - start
    return float(sum(event.self_cpu_time_total for event in profiler.key_averages())) / 1e6 / seconds


def main() -> None:
    """Print the items of one update with one prompt and with six."""
    from .__main__ import PROMPTS

    for prompts in (PROMPTS[:1], PROMPTS):
        figures = measure(prompts, 15)
        print(f"{len(prompts)} prompts: {figures['seconds']:.3f} s, overhead {figures['overhead']:.1%}, ", end="")
        print(f"in PyTorch's operators {figures['operators']:.0%}")
        for item, seconds in figures["items"].items():
            print(f"{item:>26} {1000 * seconds:8.2f} ms {seconds / figures['seconds']:7.1%}")


if __name__ == "__main__":
    main()
