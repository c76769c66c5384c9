"""A plan is a row of integers: what each step of a denoising schedule does.

0 is a deterministic step, ``k >= 1`` a stochastic step with k children per node. TreeGRPO and every flat rival are
plans, so one sampler and one update run them all. The last step ends at sigma 0, where no noise is left: it is
always 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch


@dataclass(frozen=True)
class Plan:
    """``steps[i]`` is the branching of step i; ``roots`` is the number of independent initial noises per prompt.

    ``beam``: how many nodes of a prompt go on after each stochastic step, the best by an early reward; 0: all. Such a
    tree is for search: nothing can be trained on it, because advantages compare all siblings.
    """

    steps: tuple[int, ...]
    roots: int = 1
    beam: int = 0

    def __post_init__(self) -> None:
        if len(self.steps) < 2:
            raise ValueError(f"a plan needs at least 2 steps, this one has {len(self.steps)}: {self}")
        for index, branching in enumerate(self.steps):
            if not isinstance(branching, int) or branching < 0:
                raise ValueError(f"step {index} of the plan is {branching!r}; it must be an integer >= 0: {self}")
        if self.steps[-1] != 0:
            raise ValueError(
                f"the last step of the plan is {self.steps[-1]}; it ends at sigma 0, where no noise is left, "
                f"so it must be 0: {self}"
            )
        if not isinstance(self.roots, int) or self.roots < 1:
            raise ValueError(f"roots is {self.roots!r}; a plan needs at least one root")
        if not isinstance(self.beam, int) or self.beam < 0:
            raise ValueError(f"beam is {self.beam!r}; it must be an integer >= 0 (0: every node goes on)")
        if not any(self.steps):
            raise ValueError(f"the plan has no stochastic step, so there is nothing to train on: {self}")
        if max(self.nodes(step) for step in range(len(self.steps) + 1)) < 2:
            raise ValueError(
                f"the plan has {self.leaves} leaf per prompt; advantages compare leaves, so a group needs at least 2 "
                f"(raise the branching or the roots): {self}"
            )

    def __str__(self) -> str:
        return " ".join(str(branching) for branching in self.steps)

    @classmethod
    def parse(cls, text: str, roots: int = 1) -> Plan:
        """``Plan.parse("0 3 3 3 0 0 0 0 0 0")``. Commas count as spaces. Raises ValueError on anything but integers."""
        steps = []
        for index, word in enumerate(text.replace(",", " ").split()):
            try:
                steps.append(int(word))
            except ValueError:
                raise ValueError(f"step {index} of the plan is {word!r}; it must be an integer >= 0") from None
        return cls(tuple(steps), roots)

    @property
    def stochastic_steps(self) -> tuple[int, ...]:
        """Indices of the steps that branch, in order."""
        return tuple(index for index, branching in enumerate(self.steps) if branching > 0)

    @property
    def branching(self) -> tuple[int, ...]:
        """Children per node of each stochastic step, in order."""
        return tuple(branching for branching in self.steps if branching > 0)

    def nodes(self, step: int) -> int:
        """Nodes of all roots of one prompt before step ``step``, which it denoises (``step = len(steps)``: leaves)."""
        count = self.roots
        for index, branching in enumerate(self.steps[:step]):
            count = self._going_on(index, count) * (branching or 1)
        return count

    def narrows(self, step: int) -> bool:
        """Whether step ``step`` denoises more nodes than it takes on: only the best ``beam`` of each prompt."""
        return self._going_on(step, self.nodes(step)) < self.nodes(step)

    def _going_on(self, step: int, count: int) -> int:
        return min(count, self.beam) if self.beam and step and self.steps[step - 1] else count

    @property
    def leaves(self) -> int:
        """Images per prompt."""
        return self.nodes(len(self.steps))

    @property
    def stored(self) -> int:
        """Latents the trees of one prompt keep: parents and children of the stochastic steps, and the leaves."""
        kept = self.leaves
        for step in self.stochastic_steps:
            kept += self.nodes(step + 1)
            if step == 0 or not self.steps[step - 1] or self.narrows(step):  # else they are the last step's children
                kept += self._going_on(step, self.nodes(step))
        return kept

    @property
    def nfe_sample(self) -> int:
        """Model forwards that grow the trees of one prompt; guidance passes are not counted."""
        return sum(self.nodes(step) for step in range(len(self.steps)))

    @property
    def nfe_train(self) -> int:
        """Forwards (each with a backward) of one pass of the update over one prompt: one per parent node."""
        return sum(self.nodes(step) for step in self.stochastic_steps)


def tree_plan(
    num_steps: int, branching: int = 3, depth: int = 3, start: int = 0, *, roots: int = 1, beam: int = 0
) -> Plan:
    """TreeGRPO: ``depth`` branching steps from step ``start``, deterministic before and after.

    Raises ValueError, naming the number, if branching < 1, depth < 1 or the window reaches the last step.
    """
    if branching < 1:
        raise ValueError(f"branching is {branching}; it must be at least 1")
    _check_window(num_steps, depth, start)
    return Plan((0,) * start + (branching,) * depth + (0,) * (num_steps - start - depth), roots, beam)


def _check_window(num_steps: int, depth: int, start: int) -> None:
    if depth < 1:
        raise ValueError(f"depth is {depth}; the window must hold at least 1 step")
    if depth > num_steps - 1:
        raise ValueError(
            f"depth is {depth}, but a schedule of {num_steps} steps allows at most {num_steps - 1}: "
            "the last step is deterministic (use fewer branching steps or more sampling steps)"
        )
    if not 0 <= start <= num_steps - 1 - depth:
        raise ValueError(
            f"start is {start}: a window of {depth} steps in a schedule of {num_steps} must start between 0 and "
            f"{num_steps - 1 - depth}, or it reaches the last step"
        )


def with_tail(plan: Plan, sigmas: Sequence[float], steps: int) -> tuple[Plan, tuple[float, ...]]:
    """The plan and schedule with only ``steps`` steps after the window, spread over those there were; 0: all."""
    first = plan.stochastic_steps[-1] + 1
    left = len(plan.steps) - first
    if not 0 < steps < left:
        return plan, tuple(sigmas)
    places = [*range(first), *(first + round(step * left / steps) for step in range(steps + 1))]
    return replace(plan, steps=plan.steps[:first] + (0,) * steps), tuple(sigmas[place] for place in places)


def window_start(
    num_steps: int, depth: int, r: float, generator: torch.Generator, step_spread: Mapping[int, float] | None = None
) -> int:
    """Draw the window's first step from ``Pr[i] = (1 - r) r^i / (1 - r^(T - w))``, i = 0 .. T - w - 1 (TreeGRPO).

    ``r`` in (0, 1): 0.5 is balanced, smaller values train early (layout), larger ones late steps (detail) more often.
    ``step_spread``: the variance of the reward that steps have brought about; each start then counts as much more as
    the steps of its window promise, unseen ones as much as the best, and none less than a tenth of it.
    """
    if not 0 < r < 1:
        raise ValueError(f"r is {r}; it must lie between 0 and 1, both excluded")
    _check_window(num_steps, depth, 0)
    weights = r ** torch.arange(num_steps - depth, dtype=torch.float64)
    if step_spread:
        steps = range(num_steps - 1)
        unseen = max((step_spread[step] for step in steps if step in step_spread), default=0.0)
        signal = torch.tensor([step_spread.get(step, unseen) for step in steps], dtype=torch.float64)
        weights = weights * signal.clamp(min=0.1 * unseen or 1.0).unfold(0, depth, 1).sum(1)
    return int(torch.multinomial(weights, 1, generator=generator))


@dataclass(frozen=True)
class Window:
    """Where TreeGRPO's window lies in each update.

    ``random`` draws its start with :func:`window_start`, ``adaptive`` too, but more often where the run's rewards were
    seen to spread; ``fixed`` keeps ``start``, ``shifting`` moves it by ``stride`` every ``period`` updates and begins
    anew at 0 after the last possible start.
    """

    policy: Literal["random", "adaptive", "fixed", "shifting"] = "random"
    branching: int = 3
    depth: int = 3
    r: float = 0.5
    start: int = 0
    stride: int = 1
    period: int = 1

    def plan(self, num_steps: int, iteration: int, seed: int, step_spread: Mapping[int, float] | None = None) -> Plan:
        """The plan of update ``iteration`` (0, 1, ...): a function of its arguments alone, so a run can be resumed.

        ``step_spread``: for ``adaptive``, the variance of the reward that steps of the schedule brought about so far.
        """
        start = self._start(num_steps, iteration, seed, step_spread)
        return tree_plan(num_steps, self.branching, self.depth, start)

    def _start(self, num_steps: int, iteration: int, seed: int, step_spread: Mapping[int, float] | None) -> int:
        if self.policy == "fixed":
            return self.start
        if self.policy in ("random", "adaptive"):
            generator = torch.Generator().manual_seed(derive_seed(seed, "window", iteration))
            known = step_spread if self.policy == "adaptive" else None
            return window_start(num_steps, self.depth, self.r, generator, known)
        if self.policy == "shifting":
            if self.period < 1 or self.stride < 1:
                raise ValueError(f"stride is {self.stride} and period {self.period}; both must be at least 1")
            _check_window(num_steps, self.depth, self.start)
            return (self.start + iteration // self.period * self.stride) % (num_steps - self.depth)
        raise ValueError(f"window policy {self.policy!r} is unknown; use random, adaptive, fixed or shifting")


def plan_for(
    source: Plan | Window, num_steps: int, iteration: int, seed: int, step_spread: Mapping[int, float] | None = None
) -> Plan:
    """The plan of one update from a fixed plan or a window policy; ValueError if a fixed plan has another length."""
    if isinstance(source, Window):
        return source.plan(num_steps, iteration, seed, step_spread)
    if len(source.steps) != num_steps:
        raise ValueError(
            f"the plan '{source}' has {len(source.steps)} steps, but the sigmas have {num_steps}: "
            "give one integer per sampling step, or a preset as many steps"
        )
    return source


def flow_grpo_plan(num_steps: int, group: int) -> Plan:
    """Flow-GRPO (arXiv 2505.05470): ``group`` independent noises, every step but the last stochastic."""
    return Plan((1,) * (num_steps - 1) + (0,), roots=group)


def dance_grpo_plan(num_steps: int, group: int) -> Plan:
    """DanceGRPO (arXiv 2505.07818): ``group`` trajectories that share one initial noise."""
    return Plan((group,) + (1,) * (num_steps - 2) + (0,))


def mix_grpo_plan(num_steps: int, group: int, window: int = 4, start: int = 0) -> Plan:
    """MixGRPO (arXiv 2507.21802): stochastic only inside a window of ``window`` steps."""
    _check_window(num_steps, window, start)
    return Plan((0,) * start + (1,) * window + (0,) * (num_steps - start - window), roots=group)


def branch_grpo_plan(num_steps: int, splits: tuple[int, ...] = (0, 3, 6), branching: int = 2) -> Plan:
    """BranchGRPO (arXiv 2509.06040): stochastic throughout, splitting in ``branching`` at the steps ``splits``."""
    for split in splits:
        if not 0 <= split <= num_steps - 2:
            raise ValueError(
                f"split {split} is outside the stochastic steps 0 .. {num_steps - 2}; use at least {split + 2} steps"
            )
    return Plan(tuple(branching if step in splits else 1 for step in range(num_steps - 1)) + (0,))


def flow_grpo_fast_plan(num_steps: int, group: int, start: int = 2, window: int = 2) -> Plan:
    """Flow-GRPO-Fast: one trajectory that splits into ``group`` at ``start`` and is stochastic for ``window`` steps."""
    _check_window(num_steps, window, start)
    return Plan((0,) * start + (group,) + (1,) * (window - 1) + (0,) * (num_steps - start - window))


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a function of ``parts`` alone: the same on every machine, rank and Python version."""
    digest = hashlib.blake2b("/".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
