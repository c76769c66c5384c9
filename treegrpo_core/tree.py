"""The tree as arrays, level by level: no node objects, no pointers.

A tree is really a forest: P prompts times R roots, grown together. Every level is one tensor ``(N, P, *latent)``
with the nodes outside and the prompts inside; the children of node n are ``n * k .. n * k + k - 1``, so backing up
is a reshape.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import advantage
from .plan import Plan

if TYPE_CHECKING:
    from .policy import Policy


@dataclass(frozen=True)
class Level:
    """The edges of one stochastic step.

    parents: (N, P, *latent); children: (N * k, P, *latent), both in storage dtype; log_prob: (N * k, P) float32, of
    the policy that drew them.
    """

    step: int
    branching: int
    parents: Tensor
    children: Tensor
    log_prob: Tensor

    def only(self, chosen: Tensor) -> Level:
        """These parents, (M, P) indices, with all their children."""
        edges = children_of(chosen, self.branching)
        return replace(
            self,
            parents=taken(self.parents, chosen),
            children=taken(self.children, edges),
            log_prob=taken(self.log_prob, edges),
        )


@dataclass
class Growth:
    """What sampling produced.

    leaves: (L, P, *latent); forwards: model forwards per prompt it took; thumbnails: (L, P, h, w, 3) uint8, of the
    decoded leaves once they are scored. Shared by all stages of one tree, so that memory is released wherever the
    tree is still referred to.
    """

    levels: list[Level]
    leaves: Tensor
    forwards: int
    thumbnails: Tensor | None = None

    def free(self) -> None:
        """Drop the latents. The tree keeps its rewards and its picture, but can no longer be trained on or decoded."""
        self.levels = []
        self.leaves = self.leaves[:0].clone()

    def forget(self) -> None:
        """Drop the pictures too."""
        self.free()
        self.thumbnails = None


@dataclass(frozen=True)
class Rewards:
    """values: (R, L, P) float32 of R reward models; weight 0 marks a reward that is logged, never trained on."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    values: Tensor

    def plus(self, name: str, weight: float, values: Tensor) -> Rewards:
        """With one more reward, values (L, P). ValueError if there is one of that name already."""
        if name in self.names:
            raise ValueError(f"the tree has a reward named {name!r} already; give this one another name")
        return Rewards((*self.names, name), (*self.weights, weight), torch.cat([self.values, values[None]]))

    @property
    def total(self) -> Tensor:
        """(L, P): the weighted sum of the rewards that are trained on."""
        return torch.tensordot(torch.tensor(self.weights), self.values, dims=1)

    @property
    def standing(self) -> Tensor:
        """(L, P): how each leaf stands among those of its prompt, by the weighted sum of the standardised rewards.

        ValueError if all weights are 0.
        """
        if not any(self.weights):
            raise ValueError("rewards: all weights are 0, so no leaf is better than another; give one reward a weight")
        if self.values.shape[1] < 2:
            return torch.zeros(self.values.shape[1:])
        return advantage.leaf_advantages(self.values, self.weights)

    def best(self, count: int) -> Tensor:
        """(count, P): the leaves of each prompt that stand highest, best first."""
        return self.standing.argsort(stable=True, dim=0, descending=True)[:count]


@dataclass(frozen=True)
class Tree:
    """One forest on its way through the graph: grown, then scored, then with an advantage on every edge."""

    plan: Plan
    sigmas: tuple[float, ...]
    kernel: str
    eta: float
    prompts: tuple[str, ...]
    policy: Policy
    iteration: int
    growth: Growth
    rewards: Rewards | None = None
    advantages: tuple[Tensor, ...] | None = None
    trained: tuple[Tensor | None, ...] = ()
    """Of each level the parents that are trained, (M, P) indices; None: all of it. Empty: all of all levels."""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def leaves(self) -> Tensor:
        """(L, P, *latent) in the space the denoiser works in. ValueError if the tree was freed."""
        if not self.growth.levels:
            raise ValueError(
                "this tree's latents were freed after its update; connect TreeGRPOLoopEnd's tree output, which "
                "keeps the "
                "last one, or read the tree before LoRAUpdate's loop goes on"
            )
        return self.growth.leaves

    def scored(self, rewards: Rewards) -> Tree:
        """The tree with rewards at its leaves. ValueError for a wrong shape and for NaN or infinite rewards."""
        expected = (len(rewards.names), self.plan.leaves, len(self.prompts))
        if tuple(rewards.values.shape) != expected:
            raise ValueError(f"rewards have shape {tuple(rewards.values.shape)}, the tree needs {expected}")
        bad = (~torch.isfinite(rewards.values)).nonzero().tolist()
        if bad:
            reward, leaf, prompt = bad[0]
            raise ValueError(
                f"rewards: {rewards.names[reward]} of leaf {leaf} of prompt {prompt} is "
                f"{float(rewards.values[reward, leaf, prompt])}; "
                "every reward must be a finite number"
            )
        return replace(self, rewards=rewards, advantages=None, trained=())

    def with_advantages(
        self,
        *,
        estimator: advantage.Estimator = "softmax",
        normalisation: advantage.Normalisation = "none",
        train_steps: int = 0,
        train_share: float = 1.0,
    ) -> Tree:
        """The tree with an advantage (edges, P) for every edge of every level.

        ``train_steps``: train only so many of its stochastic steps, 0: all; ``train_share``: train only this share of
        each step's parents, at least one per prompt. Those are kept whose children lie furthest apart
        (:func:`.advantage.worth_training`). This drops edges from training alone; every leaf counts in the advantages.
        """
        if self.rewards is None:
            raise ValueError("the tree has no rewards yet; connect a RewardScorer or TreeGRPORewardFromFloats before")
        if not any(self.rewards.weights):
            raise ValueError("rewards: all weights are 0, so there is nothing to train on; give one reward a weight")
        if self.plan.beam:
            raise ValueError(
                f"tree: it was searched with beam {self.plan.beam}, so siblings are missing that advantages compare; "
                "train on trees of TreeSampler"
            )
        if normalisation not in advantage.NORMALISATIONS:
            raise ValueError(f"normalisation {normalisation!r} is unknown; use {', '.join(advantage.NORMALISATIONS)}")
        leaf = advantage.leaf_advantages(self.rewards.values, self.rewards.weights)
        log_probs = [level.log_prob.cpu() for level in self.growth.levels]
        edges = advantage.back_up(leaf, log_probs, self.plan.branching, estimator=estimator)
        edges = advantage.NORMALISATIONS[normalisation](edges, self.plan.branching)
        return replace(self, advantages=tuple(edges), trained=self._trained(edges, train_steps, train_share))

    def _trained(self, edges: list[Tensor], steps: int, share: float) -> tuple[Tensor | None, ...]:
        if not 0 < share <= 1:
            raise ValueError(f"train_share is {share}; it must lie above 0 and be at most 1")
        if not 0 <= steps <= len(edges):
            raise ValueError(
                f"train_steps is {steps}, but the plan has {len(edges)} stochastic steps; lower it, or 0 for all"
            )
        return tuple(advantage.worth_training(edges, self.plan.branching, steps or len(edges), share))


def taken(values: Tensor, chosen: Tensor) -> Tensor:
    """Of (N, P, ...) the rows ``chosen``, (M, P) indices of each prompt: (M, P, ...)."""
    chosen = chosen.to(values.device)
    return values[chosen, torch.arange(values.shape[1], device=values.device)]


def children_of(chosen: Tensor, k: int) -> Tensor:
    """(M, P) indices of parents -> (M * k, P) indices of their children."""
    return (chosen[:, None] * k + torch.arange(k, device=chosen.device)[:, None]).flatten(0, 1)


def timed(tree: Tree, stage: str, seconds: float) -> Tree:
    """The tree with the seconds one stage took added to its record."""
    return replace(tree, seconds={**tree.seconds, stage: tree.seconds.get(stage, 0.0) + seconds})


def by_prompt(values: Tensor) -> Tensor:
    """(L, P, ...) -> (P * L, ...): all leaves of the first prompt, then the second: the order users see."""
    return values.transpose(0, 1).flatten(0, 1)


def by_leaf(values: Tensor, prompts: int) -> Tensor:
    """(P * L, ...) -> (L, P, ...): the inverse of :func:`by_prompt`."""
    return values.unflatten(0, (prompts, -1)).transpose(0, 1)
