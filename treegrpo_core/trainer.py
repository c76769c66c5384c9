"""One update: replay every parent node of the trees with gradient, compare its children, step the adapter."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from .adapter import Adapter
from .batches import Limits, MicroBatches
from .metrics import Metrics, Tally, summary
from .objective import clipped_surrogate, gaussian_kl, normalised_log_ratio
from .policy import Denoiser
from .transition import Transition, moments, step
from .tree import Level, Tree, children_of, taken

log = logging.getLogger("treegrpo")

REPLAY_TOLERANCE = 0.01
"""Largest |log ratio| a fresh tree may show.

Rounding stays below 1e-3; more means rollout and update see different models.
"""

NOISE_MARGIN = 3.0
"""Where a ratio can differ from 1, the clip range is at least this many times the replay noise."""


class ReplayError(RuntimeError):
    """Replaying a fresh tree does not give its log-probabilities."""


class UpdateSettings(BaseModel):
    """Settings of one update. Unknown names and impossible values are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    clip: float = Field(default=1e-4, gt=0, lt=1)
    """Clip range of the ratio (dimensionless); tiny because log-probabilities are averaged over latent dimensions."""
    clip_high: float | None = Field(default=None, gt=0)
    """Another upper limit of the ratio, 1 + clip_high (DAPO); None: that of ``clip``."""
    ratio_norm: bool = False
    """GRPO-Guard, for rectified flows: see :func:`.objective.normalised_log_ratio`; losses are divided by |dt|."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference; 0 spends no forward on it."""
    kl_reference: Literal["base", "average"] = "base"
    """The model without the adapter, or with the moving average of the adapter's weights."""
    passes: int = Field(default=1, ge=1)
    """Optimizer steps over the same trees."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    advantage_clip: float = Field(default=5.0, gt=0)
    max_batch: int = Field(default=64, ge=1)
    """Rows per forward with gradient; halved as often as the device's memory asks for it."""
    gradient_checkpointing: bool = False
    """Compute the model's blocks again in the backward: about a third more time, a fraction of the memory."""


def update(
    trees: Sequence[Tree],
    adapter: Adapter,
    optimizer: torch.optim.Optimizer,
    settings: UpdateSettings,
    *,
    iteration: int = 0,
    noise: float = 0.0,
    average: dict[str, Tensor] | None = None,
    limits: Limits | None = None,
) -> Metrics:
    """Train ``adapter`` on the trees with ``settings.passes`` optimizer steps and return what happened.

    ``iteration`` is the number of this update in its run; trees grown at another one are stale and train off-policy.
    ``noise`` is the replay noise known from earlier updates, for stale trees, which cannot measure it. ``average`` has
    the adapter's weights that ``kl_reference`` "average" stands for. ``limits`` remembers how many rows fit into the
    device's memory.

    Every parent node costs one forward and one backward, whatever its number of children. Trees without any
    advantage (all rewards equal) carry no signal: without a KL term nothing is computed and no weight changes. The
    first pass over a fresh tree is on-policy by definition: its ratio is exactly 1, and what replay and rollout make
    different is measured as noise. A step whose gradient is not finite is left out and counted. Raises ReplayError if
    replaying a fresh tree does not reproduce its log-probabilities.
    """
    if not trees:
        raise ValueError("no tree to train on; connect at least one tree")
    for tree in trees:
        if tree.advantages is None:
            raise ValueError("a tree has no advantages yet; connect TreeAdvantage between the rewards and LoRAUpdate")
        if settings.ratio_norm and tree.policy.prediction != "flow":
            raise ValueError("ratio_norm: GRPO-Guard is made for rectified flows, and this model is none; turn it off")
        if settings.ratio_norm and tree.iteration != iteration:
            raise ValueError(
                f"ratio_norm: it compares with the policy that grew the tree, which is gone: the tree is of update "
                f"{tree.iteration}, the run is at {iteration}. Give TreeSampler the POLICY of TreeGRPO Loop Start, or "
                "turn ratio_norm off"
            )
        _ = tree.leaves  # says what to do if the tree was freed
    if settings.kl > 0 and settings.kl_reference == "average" and average is None:
        raise ValueError("kl_reference is 'average', but there is no average of the adapter's weights yet")
    start = time.perf_counter()
    one_pass = _Pass(trees, adapter, average or {}, settings, iteration, limits)
    tallies: list[Tally] = []
    for _ in range(settings.passes if settings.kl > 0 or _has_signal(trees) else 0):
        tally = one_pass.gradient(first=not tallies, noise=noise)
        noise = tally.replay_noise or noise
        tally.grad_norm = _step(adapter, optimizer, settings.max_grad_norm)
        tallies.append(tally)
    clip, seconds = tallies[-1].clip if tallies else settings.clip, time.perf_counter() - start
    if clip > settings.clip:
        log.info("TreeGRPO: clip %.1e lies within the replay noise (%.1e); %.1e is used", settings.clip, noise, clip)
    return summary(trees, tallies, adapter_norm=adapter.norm(), iteration=iteration, clip=clip, seconds=seconds)


def _has_signal(trees: Sequence[Tree]) -> bool:
    return any(bool(level.any()) for tree in trees for level in tree.advantages or ())


def _step(adapter: Adapter, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> float:
    """One optimizer step, unless the gradient is not finite. Returns the gradient's norm before clipping."""
    norm = float(torch.nn.utils.clip_grad_norm_(adapter.parameters(), max_grad_norm))
    if math.isfinite(norm):
        follow_device(optimizer)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def follow_device(optimizer: torch.optim.Optimizer) -> None:
    """Move the optimizer's moments to where the host has put the adapter since."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if key != "step" and isinstance(value, Tensor) and value.device != parameter.device:
                state[key] = value.to(parameter.device)


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
    def of(cls, trained: Iterable[Level]) -> Shares:
        levels = list(trained)
        edges = sum(level.log_prob.numel() for level in levels)
        parents = sum(level.parents.shape[0] * level.parents.shape[1] for level in levels)
        return cls(1 / edges, 1 / parents, 2.0 ** round(math.log2(edges * levels[0].parents[0, 0].numel())))


class _Edges:
    """What is to be trained of one level, and what the policy that drew its edges made of them."""

    def __init__(self, level: Level, advantage: Tensor, chosen: Tensor | None, keep_mean: bool) -> None:
        if chosen is not None:
            level, advantage = level.only(chosen), taken(advantage, children_of(chosen, level.branching))
        self.level, self.advantage = level, advantage
        self.log_prob = level.log_prob.clone()
        """(N * k, P), the rollout's; of fresh trees the first replay's, to which ratios are taken."""
        self.mean = torch.empty_like(level.parents, dtype=torch.float32) if keep_mean else None
        """(N, P, *latent) of the first replay, to which ``ratio_norm`` compares; None: it is off."""


def _to_train(tree: Tree) -> Iterator[tuple[Level, Tensor, Tensor | None]]:
    """Every level that is trained, with its advantages and its trained parents (None: all)."""
    chosen = tree.trained or (None,) * len(tree.growth.levels)
    for level, advantage, parents in zip(tree.growth.levels, tree.advantages or (), chosen, strict=True):
        if parents is None or len(parents):
            yield level, advantage, parents


@dataclass(frozen=True)
class _Session:
    """One use of the policy for one tree. All it finds is here, so that a policy may begin it again from nothing."""

    denoise: Denoiser
    tree: Tree
    fresh: bool
    noise: float
    gradients: list[Tensor]
    tally: Tally = field(default_factory=Tally)

    def add_gradient(self, loss: Tensor, parameters: list[nn.Parameter]) -> None:
        """All or nothing, unlike ``backward``: running out of memory midway must not leave half a gradient."""
        for total, gradient in zip(
            self.gradients, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
        ):
            if gradient is not None:
                total += gradient


class _Pass:
    """The gradient of the objective over all trees, as often as it is asked for."""

    def __init__(
        self,
        trees: Sequence[Tree],
        adapter: Adapter,
        average: dict[str, Tensor],
        settings: UpdateSettings,
        iteration: int,
        limits: Limits | None,
    ) -> None:
        self.trees, self.adapter, self.average = trees, adapter, average
        self.settings, self.iteration = settings, iteration
        self.parameters = adapter.parameters()
        self.edges = [[_Edges(*one, settings.ratio_norm) for one in _to_train(tree)] for tree in trees]
        self.shares = Shares.of(edges.level for levels in self.edges for edges in levels)
        purpose = ("update", settings.gradient_checkpointing, *trees[0].leaves.shape[2:])
        rows = max(len(tree.prompts) for tree in trees)
        self.batches = MicroBatches(settings.max_batch, rows, limits=limits, purpose=purpose)

    def gradient(self, *, first: bool, noise: float) -> Tally:
        """Leave the gradient in the adapter's parameters and return the pass's sums."""
        tally, total = Tally(), [torch.zeros_like(parameter) for parameter in self.parameters]
        for tree, levels in zip(self.trees, self.edges, strict=True):
            fresh = first and tree.iteration == self.iteration

            def work(
                denoise: Denoiser, tree: Tree = tree, levels: list[_Edges] = levels, fresh: bool = fresh
            ) -> _Session:
                if self.settings.kl > 0:  # once, not for every micro-batch; only here the adapter is on the device
                    device = self.parameters[0].device
                    self.average = {name: value.to(device) for name, value in self.average.items()}
                session = _Session(denoise, tree, fresh, noise, [torch.zeros_like(one) for one in self.parameters])
                for edges in levels:
                    self._level(session, edges)
                return session

            session = tree.policy.use(work, train=True, checkpointing=self.settings.gradient_checkpointing)
            tally.add(session.tally)
            total = [before.to(found) + found for before, found in zip(total, session.gradients, strict=True)]
            if fresh:
                _check_replay(tally)
        for parameter, gradient in zip(self.parameters, total, strict=True):
            parameter.grad = gradient.to(parameter.device) / self.shares.scale
        return tally

    def _level(self, session: _Session, edges: _Edges) -> None:
        """Add the gradient of one level, micro-batch by micro-batch; of a fresh tree, remember the replay."""
        level, k, device = edges.level, edges.level.branching, self.parameters[0].device
        denoise, tree, fresh, tally = session.denoise, session.tree, session.fresh, session.tally

        def work(nodes: slice) -> None:
            parents, children = level.parents[nodes].to(device), slice(nodes.start * k, nodes.stop * k)
            x = parents.flatten(0, 1)
            denoised = denoise(x, tree.sigmas[level.step])
            now = _scores(tree, level, parents, denoised, level.children[children].to(device))
            before = now.log_prob.detach() if fresh else edges.log_prob[children].flatten().to(device)
            if fresh and edges.mean is not None:
                edges.mean[nodes] = now.mean.detach().view(-1, *parents.shape[1:])[::k]
            surrogate, log_ratio, limits = self._surrogate(tree, edges, nodes, now, before, session.noise)
            loss, divergence = surrogate * self.shares.edge, 0.0
            if self.settings.kl > 0:
                kl = self._divergence(denoise, tree, level, x, denoised).sum()
                loss, divergence = loss + self.settings.kl * kl * self.shares.parent, float(kl.detach())
            session.add_gradient(loss * self.shares.scale, self.parameters)

            if fresh:
                tally.add_noise(before - level.log_prob[children].flatten().to(device))
                edges.log_prob[children] = before.view_as(edges.log_prob[children])
            tally.add_ratios(log_ratio.detach(), *limits)
            tally.parents += len(x)
            tally.loss += float(surrogate.detach())
            tally.kl += divergence

        self.batches.run(len(level.parents), len(tree.prompts), work)

    def _surrogate(
        self, tree: Tree, edges: _Edges, nodes: slice, now: Transition, before: Tensor, noise: float
    ) -> tuple[Tensor, Tensor, tuple[float, float]]:
        """The summed loss of these parents' edges, their log-ratios (E,), and the limits of the ratio around 1."""
        settings, k = self.settings, edges.level.branching
        log_ratio, weight = now.log_prob - before, 1.0
        if edges.mean is not None:
            old = _of_edges(edges.mean[nodes].to(now.mean.device), k)
            log_ratio = normalised_log_ratio(log_ratio, now.mean, old, now.std)
            weight = 1 / (tree.sigmas[edges.level.step] - tree.sigmas[edges.level.step + 1])
            noise *= now.std
        low = max(settings.clip, NOISE_MARGIN * noise)
        high = max(settings.clip_high or settings.clip, NOISE_MARGIN * noise)
        advantage = edges.advantage[nodes.start * k : nodes.stop * k].flatten().to(log_ratio.device)
        advantage = advantage.clamp(-settings.advantage_clip, settings.advantage_clip)
        loss = clipped_surrogate(log_ratio, torch.zeros_like(log_ratio), advantage, low, high).sum()
        return loss * weight, log_ratio, (low, high)

    def _reference(self) -> AbstractContextManager[None]:
        base = self.settings.kl_reference == "base"
        return self.adapter.disabled() if base else self.adapter.holding(self.average)

    def _divergence(self, denoise: Denoiser, tree: Tree, level: Level, x: Tensor, denoised: Tensor) -> Tensor:
        """KL of the policy's transition to the reference's, (N,) for N parent rows."""
        sigma, sigma_next = tree.sigmas[level.step], tree.sigmas[level.step + 1]
        with torch.no_grad(), self._reference():
            reference = denoise(x, sigma)
        mean, std = moments(tree.kernel, x, denoised, sigma, sigma_next, eta=tree.eta)
        mean_ref, _ = moments(tree.kernel, x, reference, sigma, sigma_next, eta=tree.eta)
        return gaussian_kl(mean, mean_ref, std)


def _scores(tree: Tree, level: Level, parents: Tensor, denoised: Tensor, children: Tensor) -> Transition:
    """The edges (n * k * P) from parents (n, P, *latent) to their children (n * k, P, *latent)."""
    k, shape = level.branching, parents.shape[:2]
    return step(
        tree.kernel,
        _of_edges(parents, k),
        _of_edges(denoised.unflatten(0, shape), k),
        tree.sigmas[level.step],
        tree.sigmas[level.step + 1],
        eta=tree.eta,
        child=children.flatten(0, 1),
    )


def _of_edges(values: Tensor, k: int) -> Tensor:
    """(n, P, ...) of parents -> (n * k * P, ...) of their edges."""
    return values.repeat_interleave(k, 0).flatten(0, 1)


def _check_replay(tally: Tally) -> None:
    if tally.max_noise > REPLAY_TOLERANCE and math.isfinite(tally.max_noise):
        raise ReplayError(
            f"replaying a fresh tree gives log-ratios up to {tally.max_noise:.2e}, far from 0: the update "
            "does not see "
            "the model, guidance or conditioning that grew the tree. Queue again so that TreeSampler grows a new "
            "tree, and give "
            "TreeSampler the guider that is built on TreeGRPOPolicy's model output."
        )
