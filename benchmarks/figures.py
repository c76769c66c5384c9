"""The figures of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np

from tools.host import ROOT

from . import learning

matplotlib.use("agg")

from matplotlib import pyplot

IMAGES = ROOT / "docs" / "images"


def draw_iteration(rows: Sequence[dict[str, Any]]) -> None:
    """Seconds of one update by stage, a bar per method."""
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    names, left = [row["method"] for row in rows], np.zeros(len(rows))
    for stage in ("rollout", "decode", "reward", "update"):
        seconds = np.array([row["stages"][stage] for row in rows])
        axes.barh(names, seconds, left=left, label=stage)
        left += seconds
    axes.invert_yaxis()
    axes.set_xlabel("seconds of one update, six prompts with 27 pictures each")
    axes.legend()
    figure.savefig(IMAGES / "iteration.png", dpi=130)


def draw_loop(curve: Sequence[dict[str, Any]]) -> None:
    """Time of an update and memory of the server along one loop."""
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(8, 4.5), layout="constrained")
    updates = [point["update"] for point in curve]
    for name, label in (("seconds", "by the clock"), ("computing", "computing")):
        above.plot(updates, [point[name] for point in curve], label=label)
    memory = [point["memory"] / 1e6 for point in curve]
    below.plot(updates, memory)
    above.set(ylabel="seconds per update", ylim=(0, None))
    below.set(ylabel="resident memory, MB", ylim=(0, 1.2 * max(memory)), xlabel="update")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    above.legend()
    figure.savefig(IMAGES / "loop.png", dpi=130)


def draw_pareto() -> None:
    """Held-out gain against seconds of training, a curve per way, means over seeds."""
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    methods, (reward,) = learning.GROUPS["pareto"]
    for number, method in enumerate(methods):
        curves = list(learning.of(method.name, reward).values())
        if not curves:
            continue
        seconds = np.linspace(0, min(curve[-1]["seconds"] for curve in curves), 20)
        gains = [
            np.interp(seconds, [point["seconds"] for point in curve], [point["rewards"][reward] for point in curve])
            - curve[0]["rewards"][reward]
            for curve in curves
        ]
        style = ["-", "--", ":"][number // 10]
        axes.plot(seconds, np.mean(gains, 0), style, color=f"C{number % 10}", label=method.name)
    axes.set(xlabel="seconds of training, one core", ylabel="held-out gain", ylim=(-0.02, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(IMAGES / "pareto.png", dpi=130)
