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
PROMPTS_PER_UPDATE, HELD_OUT, EVERY = 6, 64, 10.0
SEEDS = (0, 1, 2)
WATCHED = ("text_image", "jpeg", "background_match")


TAIL = 2


def _tree(name: str, *, tail: int = TAIL, **window: Any) -> Method:
    return Method(name, tail_steps=tail, window=window)


RIVALS = (
    _tree("TreeGRPO", tail=0),
    _tree("TreeGRPO, tail of 3 steps", tail=3),
    Method("DanceGRPO, 6 of 9 steps trained", FLAT, roots=LEAVES, advantage={"train_steps": 6}),
)
PARETO = (
    _tree("k 3, d 3, every step", tail=0),
    _tree("k 3, d 3, tail 3", tail=3),
    _tree("k 3, d 3, tail 2"),
    _tree("k 3, d 3, tail 1", tail=1),
    _tree("k 2, d 3, tail 2", branching=2),
    _tree("k 2, d 4, tail 2", branching=2, depth=4),
    _tree("k 4, d 3, tail 2", branching=4),
    _tree("k 5, d 2, tail 2", branching=5, depth=2),
    _tree("k 9, d 1, tail 2", branching=9, depth=1),
    _tree("k 3, d 3, tail 2, r 0.3", r=0.3),
    _tree("k 3, d 3, tail 2, r 0.7", r=0.7),
)
ABLATION = (
    _tree("as it is"),
    _tree("window always at 0", policy="fixed"),
    _tree("adaptive window", policy="adaptive"),
    Method("uniform average", tail_steps=TAIL, advantage={"estimator": "uniform"}),
    Method("normalised per depth", tail_steps=TAIL, advantage={"normalisation": "per depth"}),
    Method("against siblings", tail_steps=TAIL, advantage={"normalisation": "siblings"}),
    Method("one step trained", tail_steps=TAIL, advantage={"train_steps": 1}),
    Method("a third of the parents trained", tail_steps=TAIL, advantage={"train_share": 1 / 3}),
    Method("GRPO-Guard's ratio", tail_steps=TAIL, update={"ratio_norm": True}),
    Method("two passes", tail_steps=TAIL, update={"passes": 2}),
    Method("two passes, clip_high five times clip", tail_steps=TAIL, update={"passes": 2, "clip_high": 5e-4}),
    Method("KL 1 to the base", tail_steps=TAIL, update={"kl": 1.0}),
    Method("KL 1 to the average", tail_steps=TAIL, update={"kl": 1.0, "kl_reference": "average"}),
)
GROUPS: dict[str, tuple[Sequence[Method], Sequence[str]]] = {
    "pareto": (PARETO, ("text_image",)),
    "ablation": (ABLATION, ("text_image",)),
    "rivals": (RIVALS, ("text_image", "jpeg")),
}
"""Name of a comparison -> its methods and the rewards that are trained on."""


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


def run(groups: Iterable[str], seconds: float) -> None:
    """Add every run of these groups that is not in :data:`RUNS` yet; seeds outside, so that methods interleave."""
    done = {(entry["method"], entry["reward"], entry["seed"], entry["budget"]) for entry in runs()}
    for group, seed in itertools.product(groups, SEEDS):
        methods, rewards = GROUPS[group]
        for reward, method in itertools.product(rewards, methods):
            if (method.name, reward, seed, seconds) in done:
                continue
            points = [asdict(point) for point in learn(method, reward, seed, seconds)]
            entry = {"method": method.name, "reward": reward, "seed": seed, "budget": seconds, "points": points}
            append_line(RUNS, json.dumps(entry))
            print(method.name, reward, seed, points[0]["rewards"][reward], points[-1]["rewards"][reward], flush=True)


def runs() -> list[dict[str, Any]]:
    """All runs so far."""
    return read_lines(RUNS, json.loads)


def seconds_to_reach(points: Sequence[dict[str, Any]], reward: str, level: float) -> float | None:
    """Seconds until the held-out reward is at ``level``, between two evaluations by a straight line; None: never."""
    for before, after in itertools.pairwise(points):
        low, high = before["rewards"][reward], after["rewards"][reward]
        if high >= level:
            share = 0.0 if low >= level else (level - low) / (high - low)
            return float(before["seconds"] + share * (after["seconds"] - before["seconds"]))
    return None
