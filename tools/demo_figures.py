"""The demo's two figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot

SHOWN, PER_ROW = 24, 8
SMOOTH = 10
"""Updates in a moving average: every update sees other prompts, so single values jump."""


def reward_curves(path: Path, metrics: list[dict[str, Any]]) -> None:
    """Reward by update: the one trained on with its spread inside a group, and below it those that differ from it.

    metrics: a dictionary per update with ``iteration``, ``reward_mean``, ``reward_std`` and ``rewards`` (name -> mean).
    """
    iteration = [line["iteration"] for line in metrics]
    mean = np.array([line["reward_mean"] for line in metrics])
    std = np.array([line["reward_std"] for line in metrics])
    curves = {name: np.array([line["rewards"][name] for line in metrics]) for name in metrics[0]["rewards"]}
    others = {name: values for name, values in curves.items() if not np.allclose(values, mean)}
    figure, axes = pyplot.subplots(1 + len(others), 1, figsize=(7, 2.6 * (1 + len(others))), sharex=True, squeeze=False)
    axes[0, 0].fill_between(iteration, mean - std, mean + std, color="C0", alpha=0.15, linewidth=0)
    titles = {"training reward; band: standard deviation within a prompt's leaves": mean, **others}
    for axis, (title, values) in zip(axes[:, 0], titles.items(), strict=True):
        axis.plot(iteration, values, ".", color="C0", alpha=0.4)
        if len(values) >= SMOOTH:
            axis.plot(iteration[SMOOTH - 1 :], np.convolve(values, np.ones(SMOOTH) / SMOOTH, "valid"), color="C0")
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xlabel(f"update (line: mean of the last {SMOOTH})")
    _save(figure, path)


def before_after(path: Path, prompts: list[str], base: np.ndarray, trained: np.ndarray) -> None:
    """The first held-out prompts, the base model's picture above the trained model's; both (N, H, W, 3) uint8."""
    count = min(SHOWN, len(prompts))
    bands = -(-count // PER_ROW)
    figure, axes = pyplot.subplots(2 * bands, PER_ROW, figsize=(1.3 * PER_ROW, 2.8 * bands), squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for i in range(count):
        band, column = divmod(i, PER_ROW)
        for row, images in enumerate((base, trained)):
            axes[2 * band + row, column].imshow(images[i], interpolation="nearest")
        axes[2 * band, column].set_title(prompts[i], fontsize=6.5)
    figure.suptitle("held-out prompts, same seeds: before (upper row) and after training (lower row)", fontsize=10)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
