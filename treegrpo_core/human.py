"""Rewards by people: what is asked, what is answered, and the scores that follow. Answers are plain data."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, tensor, zeros

Mode = Literal["stars", "pairs", "rank"]
MODES: tuple[Mode, ...] = get_args(Mode)
STARS = 5


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Stars(_Answer):
    """One leaf gets stars; a later answer for the same leaf replaces this one."""

    kind: Literal["stars"] = "stars"
    leaf: int = Field(ge=0)
    stars: int = Field(ge=1, le=STARS)


class Choice(_Answer):
    """The better of two leaves."""

    kind: Literal["choice"] = "choice"
    better: int = Field(ge=0)
    worse: int = Field(ge=0)


class Ranking(_Answer):
    """All leaves, best first."""

    kind: Literal["ranking"] = "ranking"
    order: tuple[int, ...] = Field(strict=False)


class Skip(_Answer):
    """No opinion on these leaves: the leaf in mode stars, the pair in mode pairs, all in mode rank."""

    kind: Literal["skip"] = "skip"
    leaves: tuple[int, ...] = Field(strict=False)


class Next(_Answer):
    """Done with this prompt; what was not judged stays without an opinion."""

    kind: Literal["next"] = "next"


class Undo(_Answer):
    """Takes the answer before it back, also over the border between two prompts."""

    kind: Literal["undo"] = "undo"


Answer = Annotated[Stars | Choice | Ranking | Skip | Next | Undo, Field(discriminator="kind")]
_KINDS: dict[Mode, tuple[type[_Answer], ...]] = {
    "stars": (Stars, Skip, Next),
    "pairs": (Choice, Skip, Next),
    "rank": (Ranking, Skip, Next),
}


class Judging:
    """One person's judging of an update's leaves: prompt by prompt, with undo.

    ``comparisons``: pairs asked per prompt in mode pairs, 0 for two per leaf. ``seed`` shuffles the pairs.
    """

    def __init__(self, mode: Mode, prompts: int, leaves: int, *, comparisons: int = 0, seed: int = 0) -> None:
        self.mode, self.prompts, self.leaves = mode, prompts, leaves
        self.given: list[list[Answer]] = [[] for _ in range(prompts)]
        self.pairs = [pairs_to_ask(leaves, comparisons or 2 * leaves, f"{seed} {index}") for index in range(prompts)]

    @property
    def prompt(self) -> int | None:
        """The prompt to judge now; None when all are done."""
        return next((index for index in range(self.prompts) if not self._is_done(index)), None)

    @property
    def done(self) -> int:
        """Answers that count, over all prompts."""
        return sum(map(len, self.given))

    @property
    def pair(self) -> tuple[int, int] | None:
        """The pair to compare now, in mode pairs."""
        if self.mode != "pairs" or self.prompt is None:
            return None
        return self.pairs[self.prompt][len(self.given[self.prompt])]

    @property
    def stars(self) -> list[int | None]:
        """The stars of every leaf of the prompt to judge now."""
        return ratings(self.given[self.prompt], self.leaves) if self.prompt is not None else []

    def _is_done(self, index: int) -> bool:
        given = self.given[index]
        if any(isinstance(answer, Next | Ranking) for answer in given):
            return True
        return bool(given) if self.mode == "rank" else self.mode == "pairs" and len(given) >= len(self.pairs[index])

    def place(self, answer: Answer) -> int:
        """The prompt that an answer belongs to. ValueError says why it does not fit."""
        if isinstance(answer, Undo):
            index = next((index for index in reversed(range(self.prompts)) if self.given[index]), None)
            if index is None:
                raise ValueError("undo: there is no answer to take back")
            return index
        index = self.prompt
        if index is None:
            raise ValueError("answer: all prompts are judged already")
        self._check(answer)
        return index

    def add(self, answer: Answer) -> None:
        """Take an answer. ValueError says why it does not fit; nothing changes then."""
        index = self.place(answer)
        if isinstance(answer, Undo):
            self.given[index].pop()
        else:
            self.given[index].append(answer)

    def _check(self, answer: Answer) -> None:
        if not isinstance(answer, _KINDS[self.mode]):
            raise ValueError(f"answer: {answer.kind!r} does not belong to mode {self.mode!r}")
        named = leaves_of(answer)
        outside = [leaf for leaf in named if not 0 <= leaf < self.leaves]
        if outside:
            raise ValueError(f"leaf {outside[0]} does not exist; the leaves are 0 to {self.leaves - 1}")
        if isinstance(answer, Ranking) and sorted(named) != list(range(self.leaves)):
            raise ValueError(f"order: it must name each of the {self.leaves} leaves once, got {list(named)}")
        if self.pair and named and set(named) != set(self.pair):
            raise ValueError(f"leaves {sorted(named)} were not asked; the pair is {sorted(self.pair)}")

    def scores(self) -> Tensor:
        """(L, P) float32, higher is better; a leaf without an opinion has the mean of its prompt's leaves."""
        rows = [scores(self.mode, given, self.leaves) for given in self.given]
        return tensor(rows).T.contiguous() if rows else zeros(self.leaves, 0)


def leaves_of(answer: Answer) -> tuple[int, ...]:
    """The leaves that an answer names."""
    if isinstance(answer, Stars):
        return (answer.leaf,)
    if isinstance(answer, Choice):
        return answer.better, answer.worse
    if isinstance(answer, Ranking):
        return answer.order
    return answer.leaves if isinstance(answer, Skip) else ()


def pairs_to_ask(leaves: int, count: int, seed: str) -> list[tuple[int, int]]:
    """At most ``count`` different pairs, of which the first ``leaves`` connect all leaves.

    The leaves stand in a shuffled circle; first every leaf meets its neighbour, then the second next, and so on.
    """
    shuffled = random.Random(seed)  # text as seed: the same on every machine
    circle = list(range(leaves))
    shuffled.shuffle(circle)
    pairs: list[tuple[int, int]] = []
    for distance in range(1, leaves // 2 + 1):
        # Opposite leaves would meet twice.
        starts = range(leaves // 2 if 2 * distance == leaves else leaves)
        pairs += [(circle[start], circle[(start + distance) % leaves]) for start in starts]
    return [pair if shuffled.random() < 0.5 else pair[::-1] for pair in pairs[:count]]


def scores(mode: Mode, given: Sequence[Answer], leaves: int) -> list[float]:
    """One number per leaf of one prompt from its answers, higher is better; all equal if there is no opinion."""
    if mode == "stars":
        rated = ratings(given, leaves)
        known = [stars for stars in rated if stars is not None]
        mean = sum(known) / len(known) if known else 0.0
        return [mean if stars is None else float(stars) for stars in rated]
    if mode == "pairs":
        return bradley_terry([(one.better, one.worse) for one in given if isinstance(one, Choice)], leaves)
    order = next((one.order for one in given if isinstance(one, Ranking)), None)
    if order is None:
        return [0.0] * leaves
    return [1 - order.index(leaf) / max(1, leaves - 1) for leaf in range(leaves)]


def ratings(given: Sequence[Answer], leaves: int) -> list[int | None]:
    """The last stars of every leaf; None where there are none or the leaf was skipped."""
    found: list[int | None] = [None] * leaves
    for answer in given:
        if isinstance(answer, Stars):
            found[answer.leaf] = answer.stars
        elif isinstance(answer, Skip):
            for leaf in answer.leaves:
                found[leaf] = None
    return found


def bradley_terry(wins: Sequence[tuple[int, int]], leaves: int, *, spread: float = 2.0) -> list[float]:
    """Scores s under which leaf i beats j with probability 1 / (1 + exp(s_j - s_i)) (Bradley & Terry, 1952).

    wins: (winner, loser) per comparison. The scores are the most probable ones under independent normal priors of mean
    0 and standard deviation ``spread``. The prior keeps them finite where a leaf wins always and equal for leaves that
    nothing tells apart; with it the problem is strictly convex and has one solution.
    """
    import numpy as np
    from scipy.optimize import minimize

    if not wins:
        return [0.0] * leaves
    sign = np.zeros((len(wins), leaves))
    for row, (winner, loser) in enumerate(wins):
        sign[row, winner], sign[row, loser] = 1.0, -1.0

    def loss(score: Any) -> tuple[float, Any]:
        margin = sign @ score
        slope = -1 / (1 + np.exp(margin))
        return np.logaddexp(0, -margin).sum() + score @ score / (2 * spread**2), sign.T @ slope + score / spread**2

    def curvature(score: Any) -> Any:
        margin = sign @ score
        weight = 1 / (2 + np.exp(margin) + np.exp(-margin))
        return sign.T @ (weight[:, None] * sign) + np.eye(leaves) / spread**2

    found = minimize(loss, np.zeros(leaves), jac=True, hess=curvature, method="trust-exact", options={"gtol": 1e-9})
    # Rounded, so that leaves that are equal but for the optimiser's last digits count as equal.
    return [float(value) for value in np.round(found.x, 5) + 0.0]
