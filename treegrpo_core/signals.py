"""What the rewards of an update can teach, and the signs that a run learns the wrong thing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from .plan import Plan
from .tree import Rewards

WINDOW = 10
"""Updates that are compared: the first ten with the last ten."""
STANDARD_ERRORS = 2.0
SATURATED = 0.2
"""A spread below this share of the first updates' is too small to learn from."""
COLLAPSED = 0.5


def spread(rewards: Sequence[Rewards]) -> dict[str, float]:
    """Standard deviation of each reward within a prompt's leaves, averaged over the prompts of all trees."""
    columns = _by_reward(rewards, lambda values: values.std(0, correction=0))
    return {name: float(values.mean()) for name, values in columns.items()}


def zero_spread(rewards: Sequence[Rewards]) -> float:
    """Share of the prompts whose leaves all get the same weighted reward, and so teach nothing: 0 to 1."""
    flat = [entry.total.amax(0) == entry.total.amin(0) for entry in rewards]
    return float(torch.cat(flat).float().mean())


def correlation(rewards: Sequence[Rewards]) -> dict[str, float]:
    """Pearson's r of every two rewards over all leaves, relative to their prompt's mean; absent if one is flat.

    Near -1, two trained rewards pull against each other.
    """
    columns = _by_reward(rewards, lambda values: (values - values.mean(0)).flatten())
    found = {}
    for one, other in combinations(columns, 2):
        norm = float(columns[one].norm() * columns[other].norm())
        if norm > 0:
            found[f"{one}, {other}"] = float(columns[one] @ columns[other]) / norm
    return found


def variance_components(totals: Sequence[Tensor], plan: Plan) -> list[float]:
    """Variance of the reward that the roots and each stochastic step bring about: a nested analysis of variance.

    totals: (L, P) weighted rewards of trees of this plan. A level without siblings (branching 1) cannot be told from
    the one above, which gets its share; with one root, what initial noises bring about is not seen at all. Estimates
    below 0 count as 0.
    """
    means, below = torch.cat(list(totals), 1).double(), 0.0
    components: list[float] = []
    for k in (*reversed(plan.branching), plan.roots):
        siblings = means.unflatten(0, (-1, k))
        if k > 1:
            # The spread of siblings is their own and that of all below them, of which they are means.
            between = float(siblings.var(1).mean())
            components.insert(0, max(0.0, between - below))
            below = between / k
        else:
            components.insert(0, 0.0)
        means = siblings.mean(1)
    return components


def effective_leaves(components: Sequence[float], plan: Plan) -> float:
    """How many pictures that share only the tree's initial noises tell their mean reward as well as its leaves do.

    components: see :func:`variance_components`. From the children of the first branching to L; 0 if all rewards are
    equal.
    """
    nodes = [plan.roots, *(plan.nodes(step + 1) for step in plan.stochastic_steps)]
    variance_of_mean = sum(variance / count for variance, count in zip(components, nodes, strict=True))
    return sum(components) / variance_of_mean if variance_of_mean > 0 else 0.0


class StepSpread:
    """Variance of the reward that each step of the schedule brought about, over a run's updates so far."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, int]] = {}

    def add(self, entry: Mapping[str, Any]) -> None:
        """An update: a line of metrics.jsonl."""
        for step, spread in zip(entry.get("window") or (), entry.get("step_spread") or (), strict=False):
            if _is_number(spread):
                total, count = self._sums.get(step, (0.0, 0))
                self._sums[step] = total + spread**2, count + 1

    def means(self) -> dict[int, float]:
        """Step -> mean over the updates that branched there."""
        return {step: total / count for step, (total, count) in self._sums.items()}


def _by_reward(rewards: Sequence[Rewards], function: Any) -> dict[str, Tensor]:
    names = rewards[0].names
    return {
        name: torch.cat([function(entry.values[index]).flatten() for entry in rewards])
        for index, name in enumerate(names)
    }


def diversity(thumbnails: Sequence[Tensor | None]) -> float | None:
    """Mean distance of two leaves of one prompt: root mean square over pixels and channels, 0 to 1. None: no pictures.

    thumbnails: of each tree (L, P, h, w, 3) uint8.
    """
    distances = []
    for pictures in thumbnails:
        if pictures is None:
            return None
        leaves = pictures.float().flatten(2).transpose(0, 1) / 255
        pairs = leaves.shape[1] * (leaves.shape[1] - 1)
        distances.append(torch.cdist(leaves, leaves).sum((1, 2)) / pairs / math.sqrt(leaves.shape[2]))
    return float(torch.cat(distances).mean())


def warnings(log: Sequence[Mapping[str, Any]], weights: Mapping[str, float]) -> list[str]:
    """Signs of reward hacking in a run's log, as sentences; none before twice :data:`WINDOW` updates.

    log: lines of metrics.jsonl, oldest first, of which the first and the last :data:`WINDOW` are looked at (see
    :meth:`.history.History.ends`); weights: of the rewards now, 0 for those that are only logged.
    """
    if len(log) < 2 * WINDOW:
        return []
    first, last = log[:WINDOW], log[-WINDOW:]
    trained = [name for name, weight in weights.items() if weight and _change(first, last, name) * weight > 0]
    fallen = [name for name, weight in weights.items() if not weight and _change(first, last, name) < 0]
    found = []
    if trained and fallen:
        found.append(f"{', '.join(trained)} rises while {', '.join(fallen)} falls: look at the pictures")
    before, now = _mean(first, "reward_std"), _mean(last, "reward_std")
    if before > 0 and now < SATURATED * before:
        found.append(f"the rewards' spread has shrunk from {before:.2g} to {now:.2g}: there is little left to learn")
    if (idle := _mean(last, "zero_spread")) > 0.5:
        found.append(f"{idle:.0%} of the prompts' leaves all score alike: raise eta or branching, or change the reward")
    before, now = _mean(first, "diversity"), _mean(last, "diversity")
    if before > 0 and now < COLLAPSED * before:
        found.append(f"a prompt's leaves have become alike (diversity {before:.2g} to {now:.2g}): raise kl or stop")
    return found


def _change(first: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]], name: str) -> float:
    """Difference of a reward's means, 0 if it is within :data:`STANDARD_ERRORS`."""
    old, new = (
        torch.tensor([value for entry in part if _is_number(value := entry["rewards"].get(name))], dtype=torch.float64)
        for part in (first, last)
    )
    if len(old) < 2 or len(new) < 2:
        return 0.0
    error = math.sqrt(float(old.var()) / len(old) + float(new.var()) / len(new))
    change = float(new.mean() - old.mean())
    return change if abs(change) > STANDARD_ERRORS * error else 0.0


def _mean(entries: Sequence[Mapping[str, Any]], key: str) -> float:
    values = [entry[key] for entry in entries if _is_number(entry.get(key))]
    return sum(values) / len(values) if values else 0.0


def _is_number(value: Any) -> bool:
    """Logs of a NaN or of older versions hold others."""
    return isinstance(value, (int, float)) and math.isfinite(value)
