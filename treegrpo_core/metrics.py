"""What one update reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import BaseModel
from torch import Tensor

from . import signals
from .tree import Tree


@dataclass
class Tally:
    """Sums over the edges and parents of one pass."""

    edges: int = 0
    loss: float = 0.0
    ratio: float = 0.0
    clipped: int = 0
    clip: float = 0.0
    """The largest range below 1 that was used."""
    max_log_ratio: float = 0.0
    noise: float = 0.0
    """Squares of log(replay / rollout), over the edges of fresh trees."""
    noise_edges: int = 0
    max_noise: float = 0.0
    kl: float = 0.0
    parents: int = 0
    grad_norm: float = 0.0

    def add(self, other: Tally) -> None:
        """Add the sums over other edges and parents."""
        largest = {"clip", "max_log_ratio", "max_noise"}
        for name, value in vars(other).items():
            own = getattr(self, name)
            setattr(self, name, max(own, value) if name in largest else own + value)

    def add_ratios(self, log_ratio: Tensor, low: float, high: float) -> None:
        """Count edges by what the policy now makes of them: log_ratio (E,), limits 1 - low and 1 + high."""
        self.edges += len(log_ratio)
        self.clip = max(self.clip, low)
        self.ratio += float(log_ratio.exp().sum())
        change = log_ratio.expm1()
        self.clipped += int(((change < -low) | (change > high)).sum())
        self.max_log_ratio = max(self.max_log_ratio, _largest(log_ratio))

    def add_noise(self, log_ratio: Tensor) -> None:
        """Count what replay and rollout make different although no weight has changed: log_ratio (E,)."""
        self.noise += float(log_ratio.square().sum())
        self.noise_edges += len(log_ratio)
        self.max_noise = max(self.max_noise, _largest(log_ratio))

    @property
    def replay_noise(self) -> float:
        """Root mean square of log(replay / rollout); 0 if no tree was fresh, or if it is not finite."""
        return math.sqrt(self.noise / max(self.noise_edges, 1)) if math.isfinite(self.noise) else 0.0


def _largest(values: Tensor) -> float:
    """Largest magnitude; a NaN counts as infinite."""
    largest = float(values.abs().max())
    return largest if math.isfinite(largest) else math.inf


class Metrics(BaseModel):
    """What one update reports; one line of metrics.jsonl, where numbers that are not finite are null."""

    iteration: int
    reward_mean: float
    reward_std: float
    """Standard deviation within a prompt's leaves, averaged over prompts."""
    rewards: dict[str, float]
    """Mean of every reward, evaluation-only ones included."""
    reward_spread: dict[str, float] = {}
    """Standard deviation of every reward within a prompt's leaves, averaged over prompts."""
    zero_spread: float = 0.0
    """Share of the prompts whose leaves all get the same weighted reward."""
    correlation: dict[str, float] = {}
    """Of every two rewards, over leaves and relative to their prompt's mean."""
    step_spread: list[float | None] = []
    """Standard deviation of the weighted reward that each step of ``window`` brings about; None: it does not branch."""
    effective_leaves: float = 0.0
    """Pictures that share only a tree's initial noises and would tell their mean reward as well as its leaves do."""
    diversity: float | None = None
    """Mean distance of two leaves of one prompt, 0 to 1; None if the leaves were never decoded."""
    loss: float
    """Mean over the edges of the optimizer steps that were taken; NaN if none was finite."""
    ratio_mean: float
    log_ratio_max: float
    """Largest |log ratio| of an edge; in the first pass over fresh trees, between replay and rollout."""
    replay_noise: float = 0.0
    """Root mean square of log(replay / rollout) over fresh trees: rounding alone, no weight has changed."""
    clip: float = 0.0
    """The clip range used: the one asked for, or more if the replay noise needs it."""
    clip_fraction: float
    kl: float
    grad_norm: float
    adapter_norm: float
    skipped: int
    """Optimizer steps left out because the gradient was not finite."""
    nfe_sample: int
    nfe_train: int
    """Model forwards of all prompts; guidance passes and the reference forwards of the KL are not counted."""
    seconds: float
    stages: dict[str, float]
    window: list[int]
    """Indices of the stochastic steps."""


def next_loss(losses: Sequence[float], loss: float | None) -> float:
    """What comes next in a run's curve: an update's loss, or again the last one if it has none, all steps left out."""
    if loss is not None and math.isfinite(loss):
        return loss
    return losses[-1] if losses else 0.0


def curve(losses: Sequence[float]) -> list[float]:
    """Losses as a plot needs them that divides by their range: a flat one (of one update, say) ends a hair higher."""
    values = list(losses) or [0.0]
    return values if min(values) < max(values) else [*values, math.nextafter(values[-1], math.inf)]


def summary(
    trees: Sequence[Tree], passes: Sequence[Tally], *, adapter_norm: float, iteration: int, clip: float, seconds: float
) -> Metrics:
    """Means over the passes' edges and parents, together with what the trees know."""
    rewards = [tree.rewards for tree in trees if tree.rewards is not None]
    total = [reward.total for reward in rewards]
    stages: dict[str, float] = {"update": seconds}
    for tree in trees:
        for stage, spent in tree.seconds.items():
            stages[stage] = stages.get(stage, 0.0) + spent
    steps = [tally for tally in passes if math.isfinite(tally.grad_norm)]
    edges, parents = sum(tally.edges for tally in steps), sum(tally.parents for tally in steps)
    none = math.nan if passes else 0.0
    components = signals.variance_components(
        [values for tree, values in zip(trees, total, strict=False) if tree.plan == trees[0].plan], trees[0].plan
    )
    return Metrics(
        iteration=iteration,
        reward_mean=float(torch.cat([values.flatten() for values in total]).mean()),
        reward_std=float(torch.cat([values.std(0, correction=0) for values in total]).mean()),
        rewards={
            name: float(torch.stack([reward.values[index].mean() for reward in rewards]).mean())
            for index, name in enumerate(rewards[0].names)
        },
        reward_spread=signals.spread(rewards),
        zero_spread=signals.zero_spread(rewards),
        correlation=signals.correlation(rewards),
        step_spread=[
            math.sqrt(variance) if k > 1 else None
            for variance, k in zip(components[1:], trees[0].plan.branching, strict=True)
        ],
        effective_leaves=signals.effective_leaves(components, trees[0].plan),
        diversity=signals.diversity([tree.growth.thumbnails for tree in trees]),
        loss=sum(tally.loss for tally in steps) / edges if steps else none,
        ratio_mean=sum(tally.ratio for tally in steps) / edges if steps else none + 1,
        log_ratio_max=max((max(tally.max_log_ratio, tally.max_noise) for tally in passes), default=0.0),
        replay_noise=passes[0].replay_noise if passes else 0.0,
        clip=clip,
        clip_fraction=sum(tally.clipped for tally in steps) / edges if steps else none,
        kl=sum(tally.kl for tally in steps) / parents if steps else none,
        grad_norm=sum(tally.grad_norm for tally in steps) / max(len(steps), 1),
        adapter_norm=adapter_norm,
        skipped=len(passes) - len(steps),
        nfe_sample=sum(tree.growth.forwards * len(tree.prompts) for tree in trees),
        nfe_train=sum(tally.parents for tally in passes),
        seconds=sum(stages.values()),
        stages=stages,
        window=list(trees[0].plan.stochastic_steps),
    )
