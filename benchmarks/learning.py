"""What a method learns in how many seconds and forwards, on the included model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tools.host import ROOT
from treegrpo_core.files import append_line, read_lines

from .session import FLAT, LEAVES, Method, Session

RUNS = ROOT / "benchmarks" / "learning.jsonl"
"""One line per run, so that a long comparison can be stopped and goes on where it was."""
BUDGET = 60.0
"""Seconds of updates; the flat plan gets twice as many, since its end is what the others are measured by."""
PROMPTS_PER_UPDATE, HELD_OUT, EVERY = 6, 64, 10.0
SEEDS = (0, 1, 2)
WATCHED = ("text_image", "jpeg", "background_match")
TAIL = 2


def _tree(name: str, *, tail: int = TAIL, **window: Any) -> Method:
    return Method(name, tail_steps=tail, window=window)


def _variant(name: str, **settings: Any) -> Method:
    return Method(name, tail_steps=TAIL, **settings)


EVERY_STEP, _, TAIL_2, TAIL_1 = TREES = (
    _tree("k 3, d 3, every step", tail=0),
    _tree("k 3, d 3, tail 3", tail=3),
    _tree("k 3, d 3, tail 2"),
    _tree("k 3, d 3, tail 1", tail=1),
)
FLAT_PLAN = Method("DanceGRPO, 6 of 9 steps trained", FLAT, roots=LEAVES, trained=6)
PARETO = (
    *TREES,
    _tree("k 2, d 3, tail 2", branching=2),
    _tree("k 2, d 4, tail 2", branching=2, depth=4),
    _tree("k 4, d 3, tail 2", branching=4),
    _tree("k 5, d 2, tail 2", branching=5, depth=2),
    _tree("k 9, d 1, tail 2", branching=9, depth=1),
    _tree("k 3, d 3, tail 2, r 0.3", r=0.3),
    _tree("k 3, d 3, tail 2, r 0.7", r=0.7),
)
ABLATION = (
    TAIL_2,
    _tree("window always at 0", policy="fixed"),
    _tree("adaptive window", policy="adaptive"),
    _variant("uniform average", advantage={"estimator": "uniform"}),
    _variant("normalised per depth", advantage={"normalisation": "per depth"}),
    _variant("against siblings", advantage={"normalisation": "siblings"}),
    _variant("one step trained", advantage={"train_steps": 1}),
    _variant("a third of the parents trained", advantage={"train_share": 1 / 3}),
    _variant("GRPO-Guard's ratio", update={"ratio_norm": True}),
    _variant("two passes", update={"passes": 2}),
    _variant("two passes, clip_high five times clip", update={"passes": 2, "clip_high": 5e-4}),
    _variant("KL 1 to the base", update={"kl": 1.0}),
    _variant("KL 1 to the average", update={"kl": 1.0, "kl_reference": "average"}),
)
GROUPS: dict[str, tuple[Sequence[Method], Sequence[str]]] = {
    "rivals": ((EVERY_STEP, TAIL_2, TAIL_1, FLAT_PLAN), ("text_image", "jpeg")),
    "pareto": (PARETO, ("text_image",)),
    "ablation": (ABLATION, ("text_image",)),
}
"""Name of a comparison -> its methods and the rewards that are trained on. A run they share is made once."""


@dataclass(frozen=True)
class Point:
    """Held-out means after so many updates, their seconds, and forwards of one picture (a backward counts as two)."""

    updates: int
    seconds: float
    forwards: int
    rewards: dict[str, float]


def learn(method: Method, reward: str, seed: int, seconds: float) -> list[Point]:
    """Train for ``seconds`` of updates, evaluated every :data:`EVERY` of them; that takes no time in the curve."""
    rewards = (reward, *(name for name in WATCHED if name != reward))
    session = Session(["fox on blue"], learning_rate=1e-3, seed=seed, rewards=rewards)
    captions = session.parts["treegrpo_core.bundled.captions"]
    training = [str(caption) for caption in captions.random_captions(240, seed=7)]
    known = set(training)
    held_out = [text for text in map(str, captions.random_captions(200, seed=99)) if text not in known][:HELD_OUT]
    draw = session.parts["nodes.prompts"].draw_prompts
    points, spent, forwards = [Point(0, 0.0, 0, session.evaluate(held_out))], 0.0, 0
    for update in itertools.count(1):
        session.use_prompts(draw(training, PROMPTS_PER_UPDATE, seed, update - 1))
        metrics = session.step(method)
        spent += metrics.seconds
        forwards += metrics.nfe_sample + 3 * metrics.nfe_train
        if spent - points[-1].seconds >= EVERY or spent >= seconds:
            points.append(Point(update, spent, forwards, session.evaluate(held_out)))
        if spent >= seconds:
            return points
    raise AssertionError


def run(groups: Iterable[str], budget: float = BUDGET) -> None:
    """Add every run of these groups that is not in :data:`RUNS` yet; seeds outside, so that methods interleave."""
    for seed, group in itertools.product(SEEDS, groups):
        methods, rewards = GROUPS[group]
        for reward, method in itertools.product(rewards, methods):
            seconds = 2 * budget if method is FLAT_PLAN else budget
            key = {"method": method.name, "reward": reward, "seed": seed, "budget": seconds}
            if any(key.items() <= entry.items() for entry in runs()):
                continue
            points = [asdict(point) for point in learn(method, reward, seed, seconds)]
            append_line(RUNS, json.dumps({**key, "points": points}))
            print(*key.values(), points[0]["rewards"][reward], points[-1]["rewards"][reward], flush=True)


def runs() -> list[dict[str, Any]]:
    """All runs so far."""
    return read_lines(RUNS, json.loads)


def of(method: str, reward: str) -> dict[int, list[dict[str, Any]]]:
    """Seed -> the points of this method's run."""
    return {run["seed"]: run["points"] for run in runs() if (run["method"], run["reward"]) == (method, reward)}


def seconds_to_reach(points: Sequence[dict[str, Any]], reward: str, level: float) -> float | None:
    """Seconds until the held-out reward is at ``level``, between two evaluations by a straight line; None: never."""
    for before, after in itertools.pairwise(points):
        low, high = before["rewards"][reward], after["rewards"][reward]
        if high >= level:
            share = 0.0 if low >= level else (level - low) / (high - low)
            return float(before["seconds"] + share * (after["seconds"] - before["seconds"]))
    return None


def shares_of_flat(method: str, reward: str) -> list[float | None]:
    """By seed, the time to where the flat plan ends, divided by the flat plan's; None: never there."""
    mine, shares = of(method, reward), []
    for seed, flat in of(FLAT_PLAN.name, reward).items():
        if seed in mine:
            reached = seconds_to_reach(mine[seed], reward, flat[-1]["rewards"][reward])
            shares.append(None if reached is None else reached / flat[-1]["seconds"])
    return shares
