"""Seconds of one update at equal leaves, by method, and what of them is not the model."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .session import FLAT, LEAVES, STEPS, Method, Session

STARTS, R = range(STEPS - 3), 0.5
LAW = [R**start for start in STARTS]
"""How often a random window starts where, up to a factor (the default r)."""
BASE = "TreeGRPO"
TREES = tuple(Method(f"window at {start}", window={"policy": "fixed", "start": start}) for start in STARTS)
OTHERS = (
    *(
        Method(f"TreeGRPO, tail of {steps}", tail_steps=steps, window={"policy": "fixed", "start": 1})
        for steps in (3, 2, 1)
    ),
    Method("DanceGRPO, 6 of 9 steps trained", FLAT, roots=LEAVES, trained=6),
    Method("DanceGRPO, all 9 steps trained; Flow-GRPO", FLAT, roots=LEAVES),
    Method(
        "DanceGRPO with the first step shared, 6 of 9 trained", "27 1 1 1 1 1 1 1 1 0", advantage={"train_steps": 6}
    ),
    Method("MixGRPO, window of 4", "0 0 1 1 1 1 0 0 0 0", roots=LEAVES),
    Method("BranchGRPO, 3 splits in 3", "3 1 1 3 1 1 3 1 1 0"),
)
STAGES = ("rollout", "decode", "reward", "update")


@dataclass(frozen=True)
class Cost:
    """Of one update: seconds of every stage, and forwards and trained forwards per prompt."""

    stages: dict[str, float]
    forwards: float
    trained: float

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())


def expected(costs: Sequence[Cost]) -> Cost:
    """The mean over a random window's starts, one cost for each."""
    weights = [weight / sum(LAW) for weight in LAW]

    def mean(values: Iterable[float]) -> float:
        return sum(weight * value for weight, value in zip(weights, values, strict=True))

    return Cost(
        {stage: mean(cost.stages[stage] for cost in costs) for stage in STAGES},
        mean(cost.forwards for cost in costs),
        mean(cost.trained for cost in costs),
    )


def measure(prompts: list[str], cfg: float, repetitions: int) -> list[dict[str, Any]]:
    """Medians over interleaved repetitions of every method: seconds by stage, forwards, and the ratio to the tree's.

    The tree's cost is that of its random window, the mean over its starts.
    """
    session = Session(prompts, cfg=cfg)
    found: dict[str, list[Cost]] = {name: [] for name in (BASE, *(method.name for method in OTHERS))}
    for repetition in range(repetitions + 1):
        trees, others = ([_cost(session, method) for method in methods] for methods in (TREES, OTHERS))
        if repetition:  # the first one warms up
            for name, cost in zip(found, (expected(trees), *others), strict=True):
                found[name].append(cost)
    return [_row(name, costs, found[BASE], len(prompts), cfg) for name, costs in found.items()]


def _cost(session: Session, method: Method) -> Cost:
    gc.collect()
    metrics, prompts = session.step(method), len(session.prompts)
    stages = {stage: metrics.stages[stage] for stage in STAGES}
    return Cost(stages, metrics.nfe_sample / prompts, metrics.nfe_train / prompts)


def _row(name: str, costs: Sequence[Cost], base: Sequence[Cost], prompts: int, cfg: float) -> dict[str, Any]:
    ratios = [cost.seconds / other.seconds for cost, other in zip(costs, base, strict=True)]
    return {
        "method": name,
        "prompts": prompts,
        "cfg": cfg,
        "seconds": statistics.median(cost.seconds for cost in costs),
        "stages": {stage: statistics.median(cost.stages[stage] for cost in costs) for stage in STAGES},
        "forwards": costs[0].forwards,
        "trained": costs[0].trained,
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }


def overhead(prompts: list[str], repetitions: int) -> dict[str, float]:
    """Rollout and update of the tree, divided by the same forwards and backwards called bare in the same batches."""
    session = Session(prompts)
    ours, bare = [], []
    for repetition in range(repetitions + 1):
        metrics = session.step(TREES[0])
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

    plan = session.parts["treegrpo_core.plan"].tree_plan(STEPS, start=0)
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
