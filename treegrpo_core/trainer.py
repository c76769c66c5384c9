"""One update: replay every parent node of the trees with gradient, compare its children, step the adapter."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from .objective import clipped_surrogate, gaussian_kl
from .policy import Adapter, Denoiser
from .transition import moments, step
from .tree import Level, Tree, split_nodes

REPLAY_TOLERANCE = 0.01
"""Largest |log ratio| a fresh tree may show.

Rounding stays below 1e-3; more means rollout and update see different models.
"""


class UpdateSettings(BaseModel):
    """Settings of one update. Unknown names and impossible values are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    clip: float = Field(default=1e-4, gt=0, lt=1)
    """Clip range of the ratio (dimensionless); tiny because log-probabilities are averaged over latent dimensions."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the adapter-free model; 0 spends no forward on it."""
    passes: int = Field(default=1, ge=1)
    """Optimizer steps over the same trees."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    advantage_clip: float = Field(default=5.0, gt=0)
    max_batch: int = Field(default=64, ge=1)
    """Rows per forward with gradient."""


@dataclass
class Tally:
    """Sums over the edges of one update, turned into means at its end."""

    edges: int = 0
    loss: float = 0.0
    ratio: float = 0.0
    clipped: int = 0
    kl: float = 0.0
    parents: int = 0
    forwards: int = 0
    max_log_ratio: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0


class Metrics(BaseModel):
    """What one update reports; one line of metrics.jsonl."""

    iteration: int
    reward_mean: float
    reward_std: float
    """Standard deviation within a prompt's leaves, averaged over prompts."""
    rewards: dict[str, float]
    """Mean of every reward, evaluation-only ones included."""
    loss: float
    ratio_mean: float
    log_ratio_max: float
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


def update(
    trees: Sequence[Tree],
    adapter: Adapter,
    optimizer: torch.optim.Optimizer,
    settings: UpdateSettings,
    *,
    iteration: int = 0,
) -> Metrics:
    """Train ``adapter`` on the trees with ``settings.passes`` optimizer steps and return what happened.

    ``iteration`` is the number of this update in its run; trees grown at another one are stale and train off-policy.

    Every parent node costs one forward and one backward, whatever its number of children. Trees without any
    advantage (all rewards equal) carry no signal: without a KL term nothing is computed and no weight changes. A
    step whose gradient is not finite is left out and counted. Raises RuntimeError if replaying a fresh tree does not
    reproduce its log-probabilities.
    """
    if not trees:
        raise ValueError("no tree to train on; connect at least one tree")
    for tree in trees:
        if tree.advantages is None:
            raise ValueError("a tree has no advantages yet; connect TreeAdvantage between the rewards and LoRAUpdate")
        _ = tree.leaves  # says what to do if the tree was freed
    start = time.perf_counter()
    tally = Tally()
    for _ in range(settings.passes if settings.kl > 0 or _has_signal(trees) else 0):
        _one_pass(trees, adapter, optimizer, settings, tally, iteration)
    return _metrics(trees, adapter, tally, iteration, time.perf_counter() - start)


def _has_signal(trees: Sequence[Tree]) -> bool:
    return any(bool(level.any()) for tree in trees for level in tree.advantages or ())


def _one_pass(
    trees: Sequence[Tree],
    adapter: Adapter,
    optimizer: torch.optim.Optimizer,
    settings: UpdateSettings,
    tally: Tally,
    iteration: int,
) -> None:
    parameters = adapter.parameters()
    optimizer.zero_grad(set_to_none=True)
    shares = Shares.of(trees)
    first = not tally.grad_norms and not tally.skipped
    for tree in trees:

        def work(denoise: Denoiser, tree: Tree = tree) -> None:
            for level, advantage in zip(tree.growth.levels, tree.advantages or (), strict=True):
                _accumulate(denoise, tree, level, advantage, adapter, settings, tally, shares)

        tree.policy.use(work, train=True)
        if first and tree.iteration == iteration:
            _check_replay(tally)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(shares.scale)
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm))
    if math.isfinite(norm):
        tally.grad_norms.append(norm)
        follow_device(optimizer)
        optimizer.step()
    else:
        tally.skipped += 1
    optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Shares:
    """What one edge's loss and one parent's KL weigh in the mean, and the scale of the gradient on its way back.

    ``scale`` is a power of two that brings the gradient at the denoiser's output near 1: log-probabilities and loss are
    means, over latent dimensions and over edges, so it would be below what half precision can hold. It is divided out
    again in the adapter's float32 and changes nothing else.
    """

    edge: float
    parent: float
    scale: float

    @classmethod
    def of(cls, trees: Sequence[Tree]) -> Shares:
        levels = [level for tree in trees for level in tree.growth.levels]
        edges = sum(level.log_prob.numel() for level in levels)
        parents = sum(level.parents.shape[0] * level.parents.shape[1] for level in levels)
        return cls(1 / edges, 1 / parents, 2.0 ** round(math.log2(edges * trees[0].leaves[0, 0].numel())))


def follow_device(optimizer: torch.optim.Optimizer) -> None:
    """Move the optimizer's moments to where the host has put the adapter since."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if key != "step" and isinstance(value, Tensor) and value.device != parameter.device:
                state[key] = value.to(parameter.device)


def _accumulate(
    denoise: Denoiser,
    tree: Tree,
    level: Level,
    advantage: Tensor,
    adapter: Adapter,
    settings: UpdateSettings,
    tally: Tally,
    shares: Shares,
) -> None:
    """Add the gradient of one level, micro-batch by micro-batch."""
    k, sigma, sigma_next = level.branching, tree.sigmas[level.step], tree.sigmas[level.step + 1]
    first = 0
    for parents in split_nodes(level.parents, settings.max_batch):
        nodes, prompts = parents.shape[:2]
        edges = slice(first * k, (first + nodes) * k)
        first += nodes
        children = level.children[edges].flatten(0, 1)
        log_prob_old = level.log_prob[edges].flatten()
        a = advantage[edges].flatten().to(log_prob_old.device).clamp(-settings.advantage_clip, settings.advantage_clip)

        denoised = denoise(parents.flatten(0, 1), sigma)
        scored = step(
            tree.kernel,
            parents.repeat_interleave(k, 0).flatten(0, 1),
            denoised.unflatten(0, (nodes, prompts)).repeat_interleave(k, 0).flatten(0, 1),
            sigma,
            sigma_next,
            eta=tree.eta,
            child=children,
        )
        surrogate = clipped_surrogate(scored.log_prob, log_prob_old, a, settings.clip).sum()
        loss = surrogate * shares.edge
        if settings.kl > 0:
            with torch.no_grad(), adapter.disabled():
                reference = denoise(parents.flatten(0, 1), sigma)
            divergence = _divergence(tree, level, parents.flatten(0, 1), denoised, reference).sum()
            loss = loss + settings.kl * divergence * shares.parent
            tally.kl += float(divergence.detach())
        (loss * shares.scale).backward(inputs=adapter.parameters())

        log_ratio = (scored.log_prob - log_prob_old).detach()
        tally.edges += len(log_ratio)
        tally.parents += nodes * prompts
        tally.forwards += nodes * prompts
        tally.loss += float(surrogate.detach())
        tally.ratio += float(log_ratio.exp().sum())
        tally.clipped += int((log_ratio.expm1().abs() > settings.clip).sum())
        largest = float(log_ratio.abs().max())
        tally.max_log_ratio = max(tally.max_log_ratio, largest) if math.isfinite(largest) else math.inf


def _divergence(tree: Tree, level: Level, x: Tensor, denoised: Tensor, reference: Tensor) -> Tensor:
    """KL of the policy's transition to the adapter-free model's, (N,) for N parent rows."""
    sigma, sigma_next = tree.sigmas[level.step], tree.sigmas[level.step + 1]
    mean, std = moments(tree.kernel, x, denoised, sigma, sigma_next, eta=tree.eta)
    mean_ref, _ = moments(tree.kernel, x, reference, sigma, sigma_next, eta=tree.eta)
    return gaussian_kl(mean, mean_ref, std)


def _check_replay(tally: Tally) -> None:
    if tally.max_log_ratio > REPLAY_TOLERANCE and math.isfinite(tally.max_log_ratio):
        raise RuntimeError(
            f"replaying a fresh tree gives log-ratios up to {tally.max_log_ratio:.2e}, far from 0: the update "
            "does not see "
            "the model, guidance or conditioning that grew the tree. Queue again so that TreeSampler grows a new "
            "tree, and give "
            "TreeSampler the guider that is built on TreeGRPOPolicy's model output."
        )


def _metrics(trees: Sequence[Tree], adapter: Adapter, tally: Tally, iteration: int, seconds: float) -> Metrics:
    rewards = [tree.rewards for tree in trees if tree.rewards is not None]
    total = [reward.total for reward in rewards]
    stages: dict[str, float] = {"update": seconds}
    for tree in trees:
        for stage, spent in tree.seconds.items():
            stages[stage] = stages.get(stage, 0.0) + spent
    edges = max(tally.edges, 1)
    return Metrics(
        iteration=iteration,
        reward_mean=float(torch.cat([values.flatten() for values in total]).mean()),
        reward_std=float(torch.cat([values.std(0, correction=0) for values in total]).mean()),
        rewards={
            name: float(torch.stack([reward.values[index].mean() for reward in rewards]).mean())
            for index, name in enumerate(rewards[0].names)
        },
        loss=tally.loss / edges,
        ratio_mean=tally.ratio / edges if tally.edges else 1.0,
        log_ratio_max=tally.max_log_ratio,
        clip_fraction=tally.clipped / edges,
        kl=tally.kl / max(tally.parents, 1),
        grad_norm=sum(tally.grad_norms) / max(len(tally.grad_norms), 1),
        adapter_norm=adapter.norm(),
        skipped=tally.skipped,
        nfe_sample=sum(tree.growth.forwards * len(tree.prompts) for tree in trees),
        nfe_train=tally.forwards,
        seconds=sum(stages.values()),
        stages=stages,
        window=list(trees[0].plan.stochastic_steps),
    )
