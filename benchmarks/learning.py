"""What a method learns in how many seconds and forwards, on the included model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .iteration import FLAT, LEAVES, Method, grown
from .session import Session

PROMPTS_PER_UPDATE, HELD_OUT, EVERY = 6, 64, 20.0
TREE = "random"
METHODS = (
    Method("TreeGRPO", TREE),
    Method("TreeGRPO, tail of 3 steps", TREE, tail_steps=3),
    Method("DanceGRPO, 6 of 9 steps trained", FLAT, roots=LEAVES, trained=6),
)


@dataclass(frozen=True)
class Point:
    """Held-out means after so many updates, their seconds, and forwards of one picture (a backward counts as two)."""

    updates: int
    seconds: float
    forwards: int
    rewards: dict[str, float]


def learn(method: Method, reward: str, seed: int, seconds: float) -> list[Point]:
    """Train for ``seconds`` of updates, evaluated about every twenty of them; that takes no time in the curve."""
    session = Session(["fox on blue"], seed=seed, rewards=(reward, *({"text_image", "background_match"} - {reward})))
    captions = session.parts["treegrpo_core.bundled.captions"]
    training = [str(caption) for caption in captions.random_captions(240, seed=7)]
    known = set(training)
    held_out = [text for text in map(str, captions.random_captions(200, seed=99)) if text not in known][:HELD_OUT]
    draw, window = session.parts["nodes.prompts"].draw_prompts, session.parts["treegrpo_core.plan"].Window()
    points, spent, forwards, update = [Point(0, 0.0, 0, session.evaluate(held_out))], 0.0, 0, 0
    while spent < seconds:
        session.use_prompts(draw(training, PROMPTS_PER_UPDATE, seed, update))
        plan = str(window.plan(10, update, seed)) if method.plan == TREE else method.plan
        metrics = session.update(
            grown(session, Method(method.name, plan, method.roots, method.trained, method.tail_steps))
        )
        update, spent = update + 1, spent + metrics.seconds
        forwards += metrics.nfe_sample + 3 * metrics.nfe_train
        if spent - points[-1].seconds >= EVERY or spent >= seconds:
            points.append(Point(update, spent, forwards, session.evaluate(held_out)))
    return points


def seconds_to_reach(points: Sequence[Point], reward: str, level: float) -> float | None:
    """Seconds until the held-out reward is at ``level``, between two evaluations by a straight line; None: never."""
    for before, after in itertools.pairwise(points):
        low, high = before.rewards[reward], after.rewards[reward]
        if high >= level:
            share = 0.0 if low >= level else (level - low) / (high - low)
            return before.seconds + share * (after.seconds - before.seconds)
    return None


def compare(reward: str, seeds: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Every method's curves for the seeds, interleaved, and how soon each is where the flat plan ends."""
    curves: dict[str, list[list[Point]]] = {method.name: [] for method in METHODS}
    for seed in seeds:
        for method in METHODS:
            curves[method.name].append(learn(method, reward, seed, seconds))
    flat = [curve[-1].rewards[reward] for curve in curves[METHODS[-1].name]]
    rows = []
    for name, found in curves.items():
        reached = [seconds_to_reach(curve, reward, level) for curve, level in zip(found, flat, strict=True)]
        rows.append(
            {
                "method": name,
                "reward": reward,
                "updates": [curve[-1].updates for curve in found],
                "forwards": [curve[-1].forwards for curve in found],
                "before": [curve[0].rewards for curve in found],
                "after": [curve[-1].rewards for curve in found],
                "seconds": seconds,
                "reached_flat": reached,
                "curves": [[vars(point) for point in curve] for curve in found],
            }
        )
    return rows
