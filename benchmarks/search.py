"""Reward per model forward: tree search against the best of n separate pictures, on the included model.

``python -m benchmarks.search [REWARD]`` measures and prints a table.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from .session import STEPS, Session

PROMPTS, POOL, NUMBERS, SEEDS = 48, 96, (1, 4, 8, 16, 27), (0,)
WATCHED = ("text_image", "jpeg", "size_match")
MAX_BATCH = 192


@dataclass(frozen=True)
class Search:
    """Settings of TreeGRPOSearch; with beam 0 every node goes on."""

    branching: int
    depth: int
    start: int
    beam: int
    roots: int
    eta: float = 0.0
    tail_steps: int = 0

    def __str__(self) -> str:
        text = f"k {self.branching}, d {self.depth}, start {self.start}, beam {self.beam}, roots {self.roots}"
        text += f", eta {self.eta:g}" if self.eta else ""
        return text + (f", tail {self.tail_steps}" if self.tail_steps else "")


SEARCHES = (
    Search(4, 5, 4, 1, 2),
    Search(3, 6, 3, 2, 1),
    Search(4, 5, 4, 3, 4),
    Search(4, 6, 3, 2, 4),
    Search(4, 7, 2, 4, 8),
    Search(5, 6, 3, 6, 12),
    # What each part is worth, near the forwards of the third:
    Search(1, 1, 4, 4, 11),
    Search(7, 1, 4, 0, 2),
    Search(4, 5, 0, 3, 4),
    Search(4, 5, 4, 3, 4, eta=0.35),
    Search(4, 5, 4, 3, 4, eta=1.0),
    Search(4, 3, 2, 3, 4, tail_steps=2),
)
"""Two for each of about 40 and 80 forwards, one for 160 and 270, then variants."""
STOCHASTIC = Search(1, STEPS - 1, 0, 0, 48)
"""Separate pictures with noise in every step but the last."""


def measure() -> dict[str, list[dict[str, Any]]]:
    """Reward that is searched for -> the rows of :func:`rows`; of the second reward without the variants."""
    return {"text_image": list(rows("text_image", SEARCHES, SEEDS)), "jpeg": list(rows("jpeg", SEARCHES[:6], SEEDS))}


def rows(reward: str, searches: Sequence[Search], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One row per way of sampling: forwards and seconds per prompt, and the best picture's rewards.

    ``gain`` is the paired difference to the best of as many separate pictures, by Euler, as take the same forwards.
    Errors are standard errors over the prompts.
    """
    session = Session(["fox on blue"], rewards=(reward, *(name for name in WATCHED if name != reward)))
    captions = session.parts["treegrpo_core.bundled.captions"].random_captions(200, seed=4321)
    session.use_prompts(list(dict.fromkeys(map(str, captions)))[:PROMPTS])
    start = time.perf_counter()
    pool = separate(session)
    seconds = (time.perf_counter() - start) / POOL
    for n in NUMBERS:
        yield _row(session, f"best of {n}", n * STEPS, n * seconds, best_of(pool, n), pool)
    start = time.perf_counter()
    noisy = searched(session, STOCHASTIC, 0)[0].rewards.values
    seconds = (time.perf_counter() - start) / STOCHASTIC.roots
    for n in NUMBERS:
        yield _row(session, f"best of {n}, stochastic steps", n * STEPS, n * seconds, best_of(noisy, n), pool)
    for search in searches:
        start = time.perf_counter()
        best, forwards = _best(session, search, seeds)
        seconds = (time.perf_counter() - start) / len(seeds)
        yield _row(session, str(search), forwards, seconds, best, pool)


def separate(session: Session) -> Any:
    """Rewards (R, POOL, P) of independent pictures of every prompt, by Euler."""
    import torch
    from comfy_extras.nodes_custom_sampler import Noise_RandomNoise

    start, prompts = session.parts["nodes.latents"], session.prompts
    policy, sigmas = session.policy(), [float(sigma) for sigma in session.sigmas]
    keys = session.parts["nodes.sampling"].prompt_keys(prompts)

    def work(denoise: Any, sampling: Any, latent: Any) -> Any:
        noises = start.root_noise(Noise_RandomNoise(0), policy.latent, POOL, -1, keys)
        roots = start.initial_states(sampling, sigmas[0], noises, latent)
        return session.parts["treegrpo_core.sampler"].sample(denoise, roots, sigmas, max_batch=MAX_BATCH)

    with torch.inference_mode():
        latents = session.parts["treegrpo_core.tree"].by_prompt(policy.open(work, train=False))
        images = session.parts["nodes.reward"].decode_latents(session.guider, latents, session.vae)
        return session.parts["nodes.reward"].rewards_of(session.scorers, images, prompts, POOL).values


def searched(session: Session, search: Search, seed: int) -> tuple[Any, int]:
    """The scored tree of every prompt, as TreeGRPOSearch grows it, and its forwards per prompt."""
    import torch
    from comfy_extras.nodes_custom_sampler import Noise_RandomNoise

    plans, policy = session.parts["treegrpo_core.plan"], session.policy()
    plan = plans.tree_plan(STEPS, search.branching, search.depth, search.start, roots=search.roots, beam=search.beam)
    plan, sigmas = plans.with_tail(plan, [float(sigma) for sigma in session.sigmas], search.tail_steps)
    with torch.inference_mode():
        bare = session.parts["nodes.sampling"].bare_tree(
            plan, sigmas, "auto", search.eta, tuple(session.prompts), policy
        )
        tree = session.parts["nodes.search"].searched(
            bare, Noise_RandomNoise(seed), session.vae, session.scorers, MAX_BATCH, search.tail_steps > 0, None
        )
    return tree, plan.nfe_sample


def _best(session: Session, search: Search, seeds: Sequence[int]) -> tuple[Any, int]:
    """Rewards (R, P) of every prompt's best leaf, the mean over seeds; forwards per prompt."""
    import torch

    found, forwards = [], 0
    for seed in seeds:
        tree, forwards = searched(session, search, seed)
        best = tree.rewards.best(1)
        found.append(torch.stack([values.gather(0, best)[0] for values in tree.rewards.values]))
    return torch.stack(found).mean(0), forwards


def best_of(pool: Any, number: float) -> Any:
    """Expected rewards (R, P) of the best by the first reward of ``number`` pictures drawn from the pool (R, N, P).

    Between two whole numbers by a straight line.
    """
    import torch

    size, whole = pool.shape[1], int(number)
    if number > whole:
        share = number - whole
        return (1 - share) * best_of(pool, whole) + share * best_of(pool, whole + 1)
    order = pool[0].argsort(0)
    ranked = pool.gather(1, order[None].expand_as(pool)).double()
    chances = [comb(rank, whole - 1) / comb(size, whole) for rank in range(size)]
    return torch.tensordot(torch.tensor(chances, dtype=torch.float64), ranked, dims=([0], [1]))


def _row(session: Session, way: str, forwards: int, seconds: float, best: Any, pool: Any) -> dict[str, Any]:
    gain = best[0] - best_of(pool, forwards / STEPS)[0]
    count = len(session.prompts)
    return {
        "way": way,
        "forwards": forwards,
        "seconds": seconds / count,
        **{name: float(values.mean()) for name, values in zip(session.rewards, best, strict=True)},
        "error": float(best[0].std() / count**0.5),
        "gain": float(gain.mean()),
        "gain error": float(gain.std() / count**0.5),
    }


def main() -> None:
    """Print the rows of one reward."""
    reward = sys.argv[1] if len(sys.argv) > 1 else "text_image"
    for row in rows(reward, SEARCHES, SEEDS):
        print(", ".join(f"{name} {value:.4g}" if name != "way" else value for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
