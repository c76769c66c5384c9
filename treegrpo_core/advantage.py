"""From rewards at the leaves to an advantage for every edge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["softmax", "uniform"]
Normalisation = Literal["none", "per depth", "siblings"]


def standardise(values: Tensor) -> Tensor:
    """(values - mean) / std over dimension 0, exactly 0 where all values of a column are equal.

    The standard deviation is the population's (no Bessel correction), so that two leaves give +1 and -1.
    """
    values = values.double()
    centred = values - values.mean(0)
    std = values.std(0, correction=0)
    # Equal rewards can have a rounding-sized std; dividing by it would train on noise.
    flat = values.amax(0) == values.amin(0)
    return torch.where(flat, 0.0, centred / torch.where(flat, 1.0, std)).float()


def leaf_advantages(rewards: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
    """Weighted sum over reward models of each model's standardised rewards.

    rewards: (R, L, ...) for R reward models and the L leaves of one prompt group (trailing dimensions are further
    groups); weights: R numbers. Returns (L, ...). Advantages are summed, not rewards, so the scale of a reward is
    irrelevant.
    Raises ValueError for fewer than two leaves, non-finite rewards or a wrong number of weights.
    """
    weights = torch.as_tensor(weights, dtype=torch.float32)
    if weights.shape != rewards.shape[:1]:
        raise ValueError(f"{len(rewards)} rewards need as many weights, got {weights.numel()}")
    if rewards.shape[1] < 2:
        raise ValueError(f"a group needs at least 2 leaves to compare, this one has {rewards.shape[1]}")
    if not torch.isfinite(rewards).all():
        raise ValueError(f"{int((~torch.isfinite(rewards)).sum())} of {rewards.numel()} rewards are NaN or infinite")
    total = torch.zeros(rewards.shape[1:])
    for weight, values in zip(weights, rewards, strict=True):
        if weight != 0:
            total += weight * standardise(values)
    return total


def back_up(
    leaf: Tensor, log_probs: Sequence[Tensor], branching: Sequence[int], *, estimator: Estimator = "softmax"
) -> list[Tensor]:
    """Advantage of every edge, bottom-up (TreeGRPO).

    A parent edge gets the average of its child edges, weighted by ``softmax`` of the siblings' log-probabilities at
    rollout, or plainly (``uniform``). One child: identity.

    leaf: (L, ...); log_probs[j]: (edges into level j + 1, ...), of the last level L edges; branching[j]: children
    per node of stochastic step j. Returns a list with the shapes of log_probs.
    """
    if estimator not in ("softmax", "uniform"):
        raise ValueError(f"estimator {estimator!r} is unknown; use softmax or uniform")
    advantages = [leaf]
    for log_prob, k in zip(reversed(log_probs[1:]), reversed(branching[1:]), strict=True):
        siblings = advantages[0].unflatten(0, (-1, k))
        if estimator == "softmax":
            weight = log_prob.unflatten(0, (-1, k)).softmax(dim=1)
            advantages.insert(0, (weight * siblings).sum(1))
        else:
            advantages.insert(0, siblings.mean(1))
    return advantages


def normalise_per_depth(advantages: Sequence[Tensor]) -> list[Tensor]:
    """Standardise the edges of every depth among themselves (BranchGRPO), per trailing group."""
    return [standardise(level) for level in advantages]


def against_siblings(advantages: Sequence[Tensor], branching: Sequence[int]) -> list[Tensor]:
    """What each edge has over the plain mean of its siblings, itself included; an only child keeps its advantage.

    That leaves out what all siblings share, which is the merit of the edges above them.
    """
    return [
        level - level.unflatten(0, (-1, k)).mean(1).repeat_interleave(k, 0) if k > 1 else level
        for level, k in zip(advantages, branching, strict=True)
    ]


NORMALISATIONS: dict[str, Callable[[Sequence[Tensor], Sequence[int]], list[Tensor]]] = {
    "none": lambda advantages, _: list(advantages),
    "per depth": lambda advantages, _: normalise_per_depth(advantages),
    "siblings": against_siblings,
}


def worth_training(
    advantages: Sequence[Tensor], branching: Sequence[int], steps: int, share: float
) -> Iterator[Tensor | None]:
    """Of each level the parents to train, (M, P) indices in order; None: all; M = 0: none, the level is left out.

    advantages: (edges, P) of each level. What a parent can teach is how far its children's advantages lie apart, the
    sum of the squares of :func:`against_siblings`; a level's worth is the mean over its edges. The first of equals is
    kept.
    """
    apart = [level.square() for level in against_siblings(advantages, branching)]
    worth = torch.stack([level.mean() for level in apart])
    kept = set(worth.sort(descending=True, stable=True).indices[:steps].tolist())
    for depth, (level, k) in enumerate(zip(apart, branching, strict=True)):
        parents = level.unflatten(0, (-1, k)).sum(1)
        # A share of 0.07 of 100 is 7, whatever the last binary digit says.
        count = math.ceil(share * len(parents) - 1e-9) if depth in kept else 0
        if count == len(parents):
            yield None
        else:
            yield parents.sort(dim=0, descending=True, stable=True).indices[:count].sort(dim=0).values
