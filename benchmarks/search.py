"""Reward per model forward: tree search against the best of n separate pictures, on the included model.

``python -m benchmarks.search`` prints the table.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import comb
from typing import Any

from .session import PACK, STEPS, Session

PROMPTS, POOL, SEEDS = 48, 96, (0, 1, 2)
CHECK = "background_match"


@dataclass(frozen=True)
class Found:
    """What one way of sampling found.

    ``reward``, ``check``: (P,) tensors, of the best picture of each prompt, means over seeds; forwards: of one prompt.
    """

    reward: Any
    check: Any
    forwards: float
    seconds: float


@dataclass(frozen=True)
class Way:
    """One way to search; a row of the table."""

    branching: int
    depth: int
    start: int
    beam: int = 0
    roots: int = 1
    eta: float = 0.0
    tail_steps: int = 0
    kernel: str = "auto"

    def __str__(self) -> str:
        words = [f"k {self.branching}, d {self.depth}, start {self.start}, beam {self.beam}, roots {self.roots}"]
        words += [f"{self.kernel}"] if self.kernel != "auto" else []
        words += [f"eta {self.eta}"] if self.eta else []
        words += [f"tail {self.tail_steps}"] if self.tail_steps else []
        return ", ".join(words)


def held_out(session: Session) -> list[str]:
    captions = session.parts["treegrpo_core.bundled.captions"]
    return list(dict.fromkeys(map(str, captions.random_captions(200, seed=99))))[:PROMPTS]


def tree(session: Session, way: Way, seed: int) -> Any:
    """The scored tree of this way, as the node TreeGRPOSearch grows it."""
    import torch
    from comfy_extras.nodes_custom_sampler import Noise_RandomNoise

    plans, sampling = session.parts["treegrpo_core.plan"], session.parts["nodes.sampling"]
    plan = plans.tree_plan(STEPS, way.branching, way.depth, way.start, roots=way.roots, beam=way.beam)
    plan, sigmas = plans.with_tail(plan, [float(sigma) for sigma in session.sigmas], way.tail_steps)
    with torch.inference_mode():
        policy = session._policy(session.guider, len(session.prompts))
        bare = sampling.bare_tree(plan, sigmas, way.kernel, way.eta, tuple(session.prompts), policy)
        search = importlib.import_module(f"{PACK}.nodes.search").searched
        return search(
            bare, Noise_RandomNoise(seed), session.vae, session.scorers, 192, way.tail_steps > 0, None
        )


def search(session: Session, way: Way, seeds: Sequence[int]) -> Found:
    """The best leaf of each prompt."""
    import torch

    rewards, checks, start = [], [], time.perf_counter()
    for seed in seeds:
        grown = tree(session, way, seed)
        best = grown.rewards.best(1)
        values = grown.rewards.values.gather(1, best[None].expand(len(grown.rewards.names), -1, -1))
        rewards.append(values[0, 0])
        checks.append(values[1, 0])
    seconds = (time.perf_counter() - start) / len(seeds)
    return Found(torch.stack(rewards).mean(0), torch.stack(checks).mean(0), grown.growth.forwards, seconds)
