"""Figures of the training signal, and warnings that come when they should and not before."""

from __future__ import annotations

import pytest
import torch

from treegrpo_core.plan import Plan, flow_grpo_plan, tree_plan
from treegrpo_core.signals import (
    WINDOW,
    StepSpread,
    correlation,
    diversity,
    effective_leaves,
    spread,
    variance_components,
    warnings,
    zero_spread,
)
from treegrpo_core.tree import Rewards


def rewards(*values):
    """Rewards a, b, ... of (L, P) lists, the first one trained on."""
    names = tuple("abc"[: len(values)])
    return Rewards(names, tuple(1.0 if name == "a" else 0.0 for name in names), torch.tensor(values))


TREE = rewards([[1.0, 5.0], [3.0, 5.0]], [[2.0, 0.0], [0.0, 4.0]])


def test_spread_is_within_prompts():
    assert spread([TREE]) == {"a": 0.5, "b": 1.5}
    assert spread([TREE, TREE]) == spread([TREE])


def test_zero_spread_counts_prompts_that_teach_nothing():
    assert zero_spread([TREE]) == 0.5
    assert zero_spread([TREE, rewards([[1.0], [2.0]], [[0.0], [0.0]])]) == pytest.approx(1 / 3)


def test_correlation_is_relative_to_the_prompt():
    """Prompts of different difficulty do not make two rewards look alike."""
    one = torch.tensor([[0.0, 100.0], [1.0, 101.0]])
    opposed = Rewards(("a", "b"), (1.0, 1.0), torch.stack([one, -one + torch.tensor([0.0, 900.0])]))
    assert correlation([opposed]) == {"a, b": pytest.approx(-1)}
    flat = Rewards(("a", "b"), (1.0, 1.0), torch.stack([one, torch.ones_like(one)]))
    assert correlation([flat]) == {}


def test_diversity_is_the_mean_distance_of_leaves():
    black, white = torch.zeros(1, 1, 4, 4, 3, dtype=torch.uint8), torch.full((1, 1, 4, 4, 3), 255, dtype=torch.uint8)
    assert diversity([torch.cat([black, black])]) == 0
    assert diversity([torch.cat([black, white])]) == pytest.approx(1)
    assert diversity([torch.cat([black, white, white])]) == pytest.approx(2 / 3)
    assert diversity([torch.cat([black, white]), None]) is None


def log(updates=2 * WINDOW, **curves):
    """Lines of a log whose figures move from the first to the second value of each curve; the rest stays."""

    def at(name, default, place):
        start, end = curves.get(name, (default, default))
        wobble = 0.01 * (-1) ** place
        return start + (end - start) * place / (updates - 1) + wobble

    return [
        {
            "rewards": {"good": at("good", 1.0, place), "held": at("held", 1.0, place)},
            "reward_std": at("reward_std", 1.0, place),
            "zero_spread": at("zero_spread", 0.05, place),
            "diversity": at("diversity", 0.3, place),
        }
        for place in range(updates)
    ]


WEIGHTS = {"good": 1.0, "held": 0.0}


@pytest.mark.parametrize(
    ("curves", "says"),
    [
        ({"good": (1, 2), "held": (1, 0)}, "good rises while held falls"),
        ({"reward_std": (1, -0.5)}, "spread has shrunk"),
        ({"zero_spread": (0, 1)}, "all score alike"),
        ({"diversity": (0.4, 0.0)}, "have become alike"),
    ],
)
def test_each_sign_is_warned_of_once_there_is_enough_to_compare(curves, says):
    (found,) = warnings(log(**curves), WEIGHTS)
    assert says in found
    assert warnings(log(updates=2 * WINDOW - 1, **curves), WEIGHTS) == []


@pytest.mark.parametrize(
    "curves",
    [{}, {"good": (1, 2)}, {"held": (1, 0)}, {"good": (1, 2), "held": (1, 1.5)}, {"good": (1, 0), "held": (1, 0)}],
)
def test_an_honest_run_is_left_in_peace(curves):
    assert warnings(log(**curves), WEIGHTS) == []


def test_a_reward_that_is_trained_down_rises_by_falling():
    (found,) = warnings(log(good=(2, 1), held=(1, 0)), {"good": -1.0, "held": 0.0})
    assert "good rises while held falls" in found


def drawn(plan: Plan, deviations: list[float], prompts: int = 400) -> torch.Tensor:
    """Rewards (L, P) to which the roots and each stochastic step add normal terms of these deviations."""
    generator = torch.Generator().manual_seed(0)
    totals = torch.zeros(1, prompts)
    for k, deviation in zip((plan.roots, *plan.branching), deviations, strict=True):
        totals = totals.repeat_interleave(k, 0)
        totals = totals + deviation * torch.randn(totals.shape, generator=generator)
    return totals


def test_variance_is_told_apart_by_the_step_that_brought_it():
    plan, deviations = Plan.parse("0 3 3 0 2 0", roots=4), [1.0, 2.0, 0.0, 0.5]
    components = variance_components([drawn(plan, deviations)], plan)
    assert components == pytest.approx([1.0, 4.0, 0.0, 0.25], abs=0.3)
    leaves = drawn(plan, deviations)
    mean_error = float((leaves.mean(0)).var())
    assert effective_leaves(components, plan) == pytest.approx(float(leaves.var()) / mean_error, rel=0.2)


def test_leaves_that_share_nothing_all_count_and_leaves_alike_count_once():
    flat = flow_grpo_plan(5, 6)
    assert effective_leaves(variance_components([drawn(flat, [1.0, 0, 0, 0, 0])], flat), flat) == pytest.approx(6)
    tree = tree_plan(5, 3, 2)
    early = variance_components([drawn(tree, [0, 1.0, 0])], tree)
    assert effective_leaves(early, tree) == pytest.approx(3, abs=0.1)
    assert effective_leaves(variance_components([torch.ones(9, 2)], tree), tree) == 0


def test_the_spread_of_a_step_is_averaged_over_the_updates_that_branched_there():
    log = [{"window": [0, 1], "step_spread": [1.0, 2.0]}, {"window": [1, 2, 3], "step_spread": [4.0, 0.0, None]}]
    spread = StepSpread()
    for entry in [*log, {}, {"window": None, "step_spread": None}]:
        spread.add(entry)
    assert spread.means() == {0: 1.0, 1: 10.0, 2: 0.0}
