"""``python -m tools.measure_memory PICTURE`` measures the peak memory of an update against its leaves and draws it.

Every measurement is a process of its own: a convolution as the denoiser, one prompt, latents of 1 MB, micro-batches of
3 where nothing else is said; on a GPU where there is one, whose memory is then what counts. It prints the peak above
that of an update without a tree's weight, and what the tree itself stores.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.host import ROOT

DEPTHS = (3, 4, 5)
BATCHES = (1, 9, 27)
SHAPE = (4, 256, 256)


def measure(depth: int, max_batch: int = 3) -> dict[str, int]:
    """Leaves, bytes stored and peak bytes of one update over a tree of that depth, in a new process."""
    command = [sys.executable, "-m", "tools.measure_memory", "--child", str(depth), str(max_batch)]
    # glibc: give every freed tensor back at once, or its heap's own growth is measured too.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    figures: dict[str, int] = json.loads(done.stdout)
    return figures


def child(depth: int, max_batch: int) -> dict[str, int]:
    import torch
    from torch import nn

    from treegrpo_core.plan import tree_plan
    from treegrpo_core.sampler import grow
    from treegrpo_core.trainer import UpdateSettings, update
    from treegrpo_core.tree import Rewards, Tree

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(SHAPE[0], SHAPE[0], 1)

        def forward(self, x: torch.Tensor, sigma: float) -> torch.Tensor:
            return self.conv(x) * (1 - sigma)

    class Whole:
        """Trains the convolution itself, which is all that :func:`update` asks of an adapter."""

        def parameters(self) -> list[nn.Parameter]:
            return list(model.parameters())

        def norm(self) -> float:
            return 0.0

        def use(self, work: Callable[[Any], Any], *, train: bool, checkpointing: bool = False) -> Any:
            with torch.set_grad_enabled(train):
                return work(model)

    def one_update(depth: int) -> int:
        plan = tree_plan(10, 3, depth, 1)
        roots = torch.randn(1, 1, *SHAPE, device=device)
        options: dict[str, Any] = {"kernel": "flow_sde", "eta": 0.7, "seed": 0, "max_batch": max_batch}
        growth = policy.use(lambda denoise: grow(denoise, roots, sigmas, plan, **options), train=False)
        tree = Tree(plan, sigmas, "flow_sde", 0.7, ("a",), policy, 0, growth)  # type: ignore[arg-type]
        rewards = torch.arange(plan.leaves).float().view(1, -1, 1)
        scored = tree.scored(Rewards(("order",), (1.0,), rewards)).with_advantages()
        update([scored], policy, optimizer, UpdateSettings(max_batch=max_batch))  # type: ignore[arg-type]
        return plan.stored * roots.nbytes

    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, policy = Denoiser().to(device), Whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    sigmas = tuple(float(sigma) for sigma in torch.linspace(1, 0, 11))
    stored_before, peak_before = one_update(1), _peak()
    stored = one_update(depth)
    return {
        "leaves": 3**depth,
        "max_batch": max_batch,
        "stored": stored - stored_before,
        "peak": _peak() - peak_before,
    }


def _peak() -> int:
    """Most bytes this process has had so far, of the GPU's memory or else of main memory.

    Linux hands getrusage's figure on to new processes, so a child of a large one would begin at its parent's.
    """
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def draw(figures: list[dict[str, int]], path: Path) -> None:
    """Peak and stored memory against leaves."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
    leaves = [entry["leaves"] for entry in figures]
    axes.plot(leaves, [entry["peak"] / 1e6 for entry in figures], "o-", label="peak of the update, measured")
    axes.plot(leaves, [entry["stored"] / 1e6 for entry in figures], "x--", label="latents the tree stores")
    axes.set(xlabel="leaves", ylabel="MB above 3 leaves", xticks=leaves, ylim=0)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    if sys.argv[1] == "--child":
        print(json.dumps(child(int(sys.argv[2]), int(sys.argv[3]))))
        return
    figures = [measure(depth) for depth in DEPTHS]
    for entry in figures:
        ratio = entry["peak"] / entry["stored"]
        print(f"{entry['leaves']} leaves: peak {entry['peak'] / 1e6:.0f} MB, stored {entry['stored'] / 1e6:.0f} MB")
        print(f"    ratio {ratio:.2f}")
    draw(figures, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
