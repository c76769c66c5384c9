"""Seconds of one update at equal leaves, by method, and what of them is not the model."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

from .session import FLAT, LEAVES, Method, Session

TREE = "3 3 3 0 0 0 0 0 0 0"
METHODS = (
    Method("TreeGRPO, window at 0", TREE),
    Method("TreeGRPO, window at 2", "0 0 3 3 3 0 0 0 0 0"),
    Method("TreeGRPO, window at 0, tail of 3 steps", TREE, tail_steps=3),
    Method("DanceGRPO, 6 of 9 steps trained", FLAT, roots=LEAVES, advantage={"train_steps": 6}),
    Method("DanceGRPO, all 9 steps trained; Flow-GRPO", FLAT, roots=LEAVES),
    Method(
        "DanceGRPO with the first step shared, 6 of 9 trained", "27 1 1 1 1 1 1 1 1 0", advantage={"train_steps": 6}
    ),
    Method("MixGRPO, window of 4", "0 0 1 1 1 1 0 0 0 0", roots=LEAVES),
    Method("BranchGRPO, 3 splits in 3", "3 1 1 3 1 1 3 1 1 0"),
)
BASE = METHODS[0].name


def measure(prompts: list[str], cfg: float, repetitions: int) -> list[dict[str, Any]]:
    """Medians over interleaved repetitions of every method: seconds by stage, forwards, and the ratio to the tree's."""
    session = Session(prompts, cfg=cfg)
    timings: dict[str, list[Any]] = {method.name: [] for method in METHODS}
    for repetition in range(repetitions + 1):
        for method in METHODS:
            gc.collect()
            metrics = session.step(method)
            if repetition:  # the first one warms up
                timings[method.name].append(metrics)
    base = [metrics.seconds for metrics in timings[BASE]]
    rows = []
    for method in METHODS:
        found = timings[method.name]
        ratios = [metrics.seconds / other for metrics, other in zip(found, base, strict=True)]
        rows.append(
            {
                "method": method.name,
                "prompts": len(prompts),
                "cfg": cfg,
                "seconds": statistics.median(metrics.seconds for metrics in found),
                "stages": {
                    stage: statistics.median(metrics.stages[stage] for metrics in found)
                    for stage in ("rollout", "decode", "reward", "update")
                },
                "forwards": found[0].nfe_sample // len(prompts),
                "trained": found[0].nfe_train // len(prompts),
                "ratio": statistics.median(ratios),
                "ratio_low": min(ratios),
                "ratio_high": max(ratios),
            }
        )
    return rows


def overhead(prompts: list[str], repetitions: int) -> dict[str, float]:
    """Rollout and update of the tree, divided by the same forwards and backwards called bare in the same batches."""
    session = Session(prompts)
    ours, bare = [], []
    for repetition in range(repetitions + 1):
        metrics = session.step(METHODS[0])
        seconds = _timed(lambda: _bare(session))
        if repetition:
            ours.append(metrics.stages["rollout"] + metrics.stages["update"])
            bare.append(seconds)
    ratios = [one / other for one, other in zip(ours, bare, strict=True)]
    return {
        "prompts": len(prompts),
        "seconds": statistics.median(ours),
        "bare_seconds": statistics.median(bare),
        "overhead": statistics.median(ratios),
        "overhead_low": min(ratios),
        "overhead_high": max(ratios),
    }


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _bare(session: Session) -> None:
    """The tree's forwards and backwards on random latents, straight through ComfyUI's model."""
    import torch

    plan = session.parts["treegrpo_core.plan"].Plan.parse(METHODS[0].row)
    count, model, adapter = len(session.prompts), session.model.model, session.run.adapter
    encoded = session.guider.original_conds["positive"][0]
    batches = session.parts["treegrpo_core.batches"].MicroBatches(session.max_batch, count)

    def forward(nodes: slice, step: int) -> Any:
        rows = (nodes.stop - nodes.start) * count
        times = nodes.stop - nodes.start
        return model.apply_model(
            torch.randn(rows, 16, 8, 8),
            torch.full((rows,), float(session.sigmas[step])),
            c_crossattn=encoded["cross_attn"].clone().repeat(times, 1, 1),
            y=encoded["pooled_output"].clone().repeat(times, 1),
        )

    def backward(nodes: slice, step: int) -> None:
        torch.autograd.grad(forward(nodes, step).square().sum(), adapter.parameters())

    adapter.put_in(model.diffusion_model)
    try:
        with torch.inference_mode(False):
            for step in range(len(plan.steps)):
                with torch.no_grad():
                    batches.run(plan.nodes(step), count, lambda nodes, step=step: forward(nodes, step))
            for step in plan.stochastic_steps:
                batches.run(plan.nodes(step), count, lambda nodes, step=step: backward(nodes, step))
    finally:
        adapter.take_out(model.diffusion_model)
