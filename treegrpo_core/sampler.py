"""Grow a tree: shared prefix, branching window, deterministic suffix. The plan alone says which step is which."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .batches import Limits, MicroBatches
from .plan import Plan, derive_seed
from .policy import Denoiser
from .transition import KERNELS, Prediction, extrapolated, ode_step, step
from .tree import Growth, Level, taken

Score = Callable[[Tensor], Tensor]
"""Denoised predictions (N, P, *latent) -> (N, P), higher is better within each prompt's column."""
ROUNDING = 1e-3
"""What a schedule may lie above a model's highest noise level: it was written down in a few digits."""


def node_path(node: int, branching: Sequence[int]) -> tuple[int, ...]:
    """(root, child, grandchild, ...) of node ``node`` of the level after stochastic steps with these ``branching``."""
    digits: list[int] = []
    for k in reversed(branching):
        node, digit = divmod(node, k)
        digits.insert(0, digit)
    return (node, *digits)


def edge_noise(shape: Sequence[int], seed: int, prompt: int, path: Sequence[int]) -> Tensor:
    """Standard normal float32 noise of one edge: a function of (seed, prompt, path) and of nothing else.

    Results therefore do not depend on micro-batch size, device count or order, and any leaf can be grown again alone.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, prompt, *path))
    return torch.randn(tuple(shape), generator=generator)


def level_noise(
    latent: Sequence[int], seed: int, prompts: Sequence[int], branching: Sequence[int], edges: Iterable[int]
) -> Tensor:
    """The noises of these edges into a level: (E, P, *latent) float32 on the CPU."""
    rows = [
        torch.stack([edge_noise(latent, seed, prompt, node_path(edge, branching)) for prompt in prompts])
        for edge in edges
    ]
    return torch.stack(rows)


@dataclass
class History:
    """The predictions of the last step, (N, P, *latent), and its noise level; None: there was none yet."""

    denoised: Tensor
    prediction: Prediction
    sigma: float | None = None

    def better(self, denoised: Tensor, nodes: slice, sigma: float, sigma_next: float) -> Tensor:
        """The prediction that makes the step from these nodes one of second order, from the second step on."""
        if self.sigma is None:
            return denoised
        before = self.denoised[nodes].to(denoised.device)
        return extrapolated(denoised, before, self.sigma, sigma, sigma_next, self.prediction)


@dataclass(frozen=True)
class _Sampling:
    """What all steps of one growth share."""

    denoise: Denoiser
    kernel: str
    eta: float
    seed: int
    prompts: Sequence[int]
    batches: MicroBatches
    device: torch.device

    def predict(self, x: Tensor, sigma: float) -> Tensor:
        """The denoised predictions of all nodes (N, P, *latent)."""
        denoised = torch.empty_like(x)

        def work(nodes: slice) -> None:
            denoised[nodes] = self._denoised(x[nodes].to(self.device), sigma)

        self.batches.run(len(x), x.shape[1], work)
        return denoised

    def _denoised(self, part: Tensor, sigma: float) -> Tensor:
        return self.denoise(part.flatten(0, 1), sigma).view_as(part)

    def ode(
        self,
        x: Tensor,
        sigma: float,
        sigma_next: float,
        out: Tensor,
        *,
        history: History | None = None,
        known: Tensor | None = None,
    ) -> None:
        """One deterministic step of all nodes (N, P, *latent) into ``out``, which may be x itself.

        With a ``history`` of predictions the step is one of DPM-Solver++ 2M, which adds to it; else of Euler.
        ``known``: the predictions of x, if there are some already.
        """

        def work(nodes: slice) -> None:
            part = x[nodes].to(self.device)
            denoised = self._denoised(part, sigma) if known is None else known[nodes].to(self.device)
            after = ode_step(
                part, history.better(denoised, nodes, sigma, sigma_next) if history else denoised, sigma, sigma_next
            )
            out[nodes] = after
            if history:
                history.denoised[nodes] = denoised

        self.batches.run(len(x), x.shape[1], work)
        if history:
            history.sigma = sigma

    def branch(
        self, x: Tensor, sigma: float, sigma_next: float, branching: Sequence[int], known: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One stochastic step of all nodes (N, P, *latent); ``branching`` leads to the new level, its k comes last.

        Returns the children (N * k, P, *latent) and their log-probabilities (N * k, P). ``known`` as in :meth:`ode`.
        """
        k = branching[-1]
        children = x.new_empty((len(x) * k, *x.shape[1:]))
        log_prob = torch.empty((len(x) * k, x.shape[1]), device=x.device)

        def work(nodes: slice) -> None:
            edges = slice(nodes.start * k, nodes.stop * k)
            part = x[nodes].to(self.device)
            denoised = self._denoised(part, sigma) if known is None else known[nodes].to(self.device)
            noise = level_noise(x.shape[2:], self.seed, self.prompts, branching, range(edges.start, edges.stop))
            drawn = step(
                self.kernel,
                part.repeat_interleave(k, 0).flatten(0, 1),
                denoised.repeat_interleave(k, 0).flatten(0, 1),
                sigma,
                sigma_next,
                eta=self.eta,
                noise=noise.to(self.device).flatten(0, 1),
            )
            children[edges] = drawn.child.view_as(children[edges])
            log_prob[edges] = drawn.log_prob.view_as(log_prob[edges])

        self.batches.run(len(x), x.shape[1], work)
        return children, log_prob


def grow(
    denoise: Denoiser,
    roots: Tensor,
    sigmas: Sequence[float],
    plan: Plan,
    *,
    kernel: str,
    eta: float,
    seed: int,
    prompts: Sequence[int] | None = None,
    max_batch: int = 64,
    store: torch.device | None = None,
    second_order: bool = False,
    score: Score | None = None,
    limits: Limits | None = None,
) -> Growth:
    """Sample the trees of all prompts as one frontier.

    roots: (R, P, *latent), noised latents at ``sigmas[0]`` in storage dtype; sigmas: T + 1 decreasing noise levels,
    the last 0; prompts: P keys of the prompts in the noise's seed (default 0 .. P - 1). The result is the same for
    every ``max_batch``: bitwise where the model computes each row of a batch alike, else within the model's own float
    tolerance. Only the window's states and the leaves are kept, and kept on ``store`` (default: where the roots are,
    which is where the denoiser computes). ``second_order``: the steps after the window are those of DPM-Solver++ 2M.

    With ``plan.beam``, ``score`` chooses which nodes go on, in the order they stood in; their predictions are made
    once and used for both, and a node's seed is that of its place among those that went on.

    ``limits`` remembers how many rows fit into the device's memory.
    """
    check_sigmas(sigmas, KERNELS[kernel].prediction)
    if len(sigmas) != len(plan.steps) + 1:
        raise ValueError(f"the plan '{plan}' has {len(plan.steps)} steps, but the sigmas have {len(sigmas) - 1}")
    if (score is None) != (plan.beam == 0):
        raise ValueError(f"beam is {plan.beam}; a plan with a beam, and only such a one, needs a score")
    if roots.shape[0] != plan.roots:
        raise ValueError(f"the plan has {plan.roots} roots, got noise for {roots.shape[0]}")
    keys = range(roots.shape[1]) if prompts is None else prompts
    purpose = ("rollout", *roots.shape[2:])
    batches = MicroBatches(max_batch, roots.shape[1], limits=limits, purpose=purpose)
    sampling = _Sampling(denoise, kernel, eta, seed, keys, batches, roots.device)
    x, forwards = roots.to(store or roots.device), 0
    kept = True  # x belongs to the caller or to a level and must not be written over
    history: History | None = None
    levels: list[Level] = []
    for index, k in enumerate(plan.steps):
        sigma, sigma_next = sigmas[index], sigmas[index + 1]
        forwards += len(x)
        known: Tensor | None = None
        if score and plan.narrows(index):
            known = sampling.predict(x, sigma)
            best = best_nodes(score(known), plan.beam)
            x, known, kept = taken(x, best), taken(known, best), False
        if k == 0:
            after = torch.empty_like(x) if kept else x
            if second_order and index == plan.stochastic_steps[-1] + 1:
                history = History(torch.empty_like(x), KERNELS[kernel].prediction)
            sampling.ode(x, sigma, sigma_next, after, history=history, known=known)
            x, kept = after, False
            continue
        children, log_prob = sampling.branch(x, sigma, sigma_next, plan.branching[: len(levels) + 1], known)
        levels.append(Level(index, k, x, children, log_prob))
        x, kept = children, True
    return Growth(levels, x, forwards)


def best_nodes(scores: Tensor, count: int) -> Tensor:
    """(N, P) -> (count, P): the nodes of each prompt with the highest scores, in the order they stand in."""
    return scores.argsort(stable=True, dim=0, descending=True)[:count].sort(0).values


def sample(denoise: Denoiser, roots: Tensor, sigmas: Sequence[float], *, max_batch: int = 64) -> Tensor:
    """Deterministic Euler sampling of (N, P, *latent), noised at ``sigmas[0]``: as the model is used after training."""
    batches = MicroBatches(max_batch, roots.shape[1])
    sampling = _Sampling(denoise, "", 0.0, 0, (), batches, roots.device)
    x = roots.clone()
    for sigma, sigma_next in pairwise(sigmas):
        sampling.ode(x, sigma, sigma_next, x)
    return x


def check_sigmas(sigmas: Sequence[float], prediction: Prediction) -> None:
    """ValueError unless sigmas are finite and fall strictly, to exactly 0, and from a level that such a model can have.

    In a rectified flow the levels end at 1, where nothing of the picture is left. An eps- or v-prediction model can be
    asked at any level: above its highest it sees almost pure noise, as at its highest.
    """
    if len(sigmas) < 2:
        raise ValueError("sigmas: the schedule has fewer than 1 step; give the scheduler more steps and denoise 1")
    for index, sigma in enumerate(sigmas):
        if not math.isfinite(sigma):
            raise ValueError(f"sigmas: sigma {index} is {sigma}; every noise level must be a finite number")
    if sigmas[-1] != 0:
        raise ValueError(
            f"sigmas: the last sigma is {sigmas[-1]}; the schedule must end at 0 (use the whole schedule, denoise 1)"
        )
    for index, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
        if not sigma > sigma_next:
            raise ValueError(f"sigmas: sigma {index} is {sigma} and the next {sigma_next}; sigmas must fall")
    if prediction == "flow" and sigmas[0] > 1 + ROUNDING:
        raise ValueError(
            f"sigmas: the highest is {sigmas[0]:g}, but this model is a rectified flow, whose noise levels end at 1; "
            "use a scheduler that takes the model, such as BasicScheduler or TreeGRPO Schedule"
        )
