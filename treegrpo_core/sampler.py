"""Grow a tree: shared prefix, branching window, deterministic suffix. The plan alone says which step is which."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .batches import MicroBatches
from .plan import Plan, derive_seed
from .policy import Denoiser
from .transition import ode_step, step
from .tree import Growth, Level


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
    latent: Sequence[int], seed: int, prompts: Sequence[int], branching: Sequence[int], nodes: int
) -> Tensor:
    """The noises of all edges into a level of ``nodes`` nodes: (nodes, P, *latent) float32 on the CPU."""
    rows = [
        torch.stack([edge_noise(latent, seed, prompt, node_path(node, branching)) for prompt in prompts])
        for node in range(nodes)
    ]
    return torch.stack(rows)


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
) -> Growth:
    """Sample the trees of all prompts as one frontier.

    roots: (R, P, *latent), noised latents at ``sigmas[0]`` in storage dtype; sigmas: T + 1 decreasing noise levels,
    the last 0; prompts: P keys of the prompts in the noise's seed (default 0 .. P - 1). The result is the same for
    every ``max_batch``: bitwise where the model computes each row of a batch alike, else within the model's own float
    tolerance. Only the window's states and the leaves are kept, on ``store`` (default: where they were computed).
    """
    check_schedule(sigmas, plan)
    if roots.shape[0] != plan.roots:
        raise ValueError(f"the plan has {plan.roots} roots, got noise for {roots.shape[0]}")
    keys = range(roots.shape[1]) if prompts is None else prompts
    batches = MicroBatches(max_batch, roots.shape[1])
    x, forwards = roots, 0
    stored: Tensor | None = None  # x where it is kept; children are the parents of the next level and are kept once
    levels: list[Level] = []
    for index, k in enumerate(plan.steps):
        sigma, sigma_next = sigmas[index], sigmas[index + 1]
        denoised = batches.map(lambda rows, sigma=sigma: denoise(rows, sigma), x)  # type: ignore[misc]
        forwards += len(x)
        if k == 0:
            x, stored = ode_step(x, denoised, sigma, sigma_next), None
            continue
        branching = plan.branching[: len(levels) + 1]
        noise = level_noise(x.shape[2:], seed, keys, branching, len(x) * k).to(x.device)
        drawn = step(
            kernel,
            x.repeat_interleave(k, 0).flatten(0, 1),
            denoised.repeat_interleave(k, 0).flatten(0, 1),
            sigma,
            sigma_next,
            eta=eta,
            noise=noise.flatten(0, 1),
        )
        shape = (len(x) * k, x.shape[1])
        parents = x.to(store or x.device) if stored is None else stored
        x = drawn.child.unflatten(0, shape)
        stored = x.to(store or x.device)
        levels.append(Level(index, k, parents, stored, drawn.log_prob.unflatten(0, shape).to(store or x.device)))
    return Growth(levels, x.to(store or x.device), forwards)


def check_schedule(sigmas: Sequence[float], plan: Plan) -> None:
    """ValueError unless sigmas fall strictly from above 0 to exactly 0 in as many steps as the plan has."""
    if len(sigmas) != len(plan.steps) + 1:
        raise ValueError(f"the plan '{plan}' has {len(plan.steps)} steps, but the sigmas have {len(sigmas) - 1}")
    if sigmas[-1] != 0:
        raise ValueError(
            f"the last sigma is {sigmas[-1]}; the schedule must end at 0 (use the whole schedule, denoise 1)"
        )
    for index in range(len(sigmas) - 1):
        if not sigmas[index] > sigmas[index + 1]:
            raise ValueError(f"sigma {index} is {sigmas[index]} and the next {sigmas[index + 1]}; sigmas must fall")
