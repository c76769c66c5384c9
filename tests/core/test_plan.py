"""Plans: rows of integers, and the errors that name the wrong one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treegrpo_core.plan import (
    Plan,
    Window,
    branch_grpo_plan,
    dance_grpo_plan,
    flow_grpo_fast_plan,
    flow_grpo_plan,
    mix_grpo_plan,
    plan_for,
    tree_plan,
    window_start,
    with_tail,
)


@pytest.mark.parametrize(
    ("plan", "row", "roots", "leaves"),
    [
        (tree_plan(10, 3, 3, 1), "0 3 3 3 0 0 0 0 0 0", 1, 27),
        (flow_grpo_plan(10, 12), "1 1 1 1 1 1 1 1 1 0", 12, 12),
        (dance_grpo_plan(10, 12), "12 1 1 1 1 1 1 1 1 0", 1, 12),
        (mix_grpo_plan(10, 12, 4, 2), "0 0 1 1 1 1 0 0 0 0", 12, 12),
        (flow_grpo_fast_plan(10, 12), "0 0 12 1 0 0 0 0 0 0", 1, 12),
        (branch_grpo_plan(10), "2 1 1 2 1 1 2 1 1 0", 1, 8),
    ],
)
def test_every_method_is_a_row_of_integers(plan, row, roots, leaves):
    assert (str(plan), plan.roots, plan.leaves) == (row, roots, leaves)
    assert Plan.parse(row, roots) == plan


def test_forward_counts_of_the_paper():
    tree, flat = tree_plan(10, 3, 3, 0), flow_grpo_plan(10, 27)
    assert (tree.nfe_sample, tree.nfe_train) == (202, 13)
    assert flat.nfe_sample == 270
    assert flat.nfe_train == 27 * 9


@given(steps=st.integers(4, 30), k=st.integers(2, 5), w=st.integers(1, 3), data=st.data())
def test_forward_counts_equal_the_formula(steps, k, w, data):
    start = data.draw(st.integers(0, steps - 1 - w))
    plan = tree_plan(steps, k, w, start)
    window = sum(k**j for j in range(w))
    assert plan.nfe_sample == start + window + k**w * (steps - start - w)
    assert plan.nfe_train == window


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: tree_plan(10, branching=0), "branching is 0"),
        (lambda: tree_plan(10, branching=1), "1 leaf"),
        (lambda: tree_plan(10, depth=0), "depth is 0"),
        (lambda: tree_plan(10, depth=10), "depth is 10"),
        (lambda: tree_plan(10, start=7), "start is 7"),
        (lambda: tree_plan(10, start=-1), "start is -1"),
        (lambda: Plan((3, 3, 3)), "last step of the plan is 3"),
        (lambda: Plan((3, -1, 0)), "step 1 of the plan is -1"),
        (lambda: Plan((0, 0, 0)), "no stochastic step"),
        (lambda: Plan((1, 1, 0)), "1 leaf"),
        (lambda: Plan((3, 0), roots=0), "roots is 0"),
        (lambda: Plan((0,)), "at least 2 steps"),
        (lambda: Plan.parse("0 3 x 0"), "step 2 of the plan is 'x'"),
        (lambda: mix_grpo_plan(10, 12, window=4, start=6), "start is 6"),
        (lambda: branch_grpo_plan(10, (0, 9)), "split 9"),
        (lambda: plan_for(Plan((3, 0)), 10, 0, 0), "has 2 steps, but the sigmas have 10"),
        (lambda: Window("sideways").plan(10, 0, 0), "sideways"),  # type: ignore[arg-type]
        (lambda: Window("shifting", period=0).plan(10, 0, 0), "period 0"),
        (lambda: Window(r=1.0).plan(10, 0, 0), "r is 1.0"),
    ],
)
def test_an_impossible_plan_names_the_wrong_number(make, names):
    with pytest.raises(ValueError, match=names):
        make()


@pytest.mark.parametrize("r", [0.3, 0.5, 0.7])
def test_random_window_follows_the_truncated_geometric_law(r):
    generator = torch.Generator().manual_seed(0)
    draws = torch.tensor([window_start(10, 3, r, generator) for _ in range(6000)])
    expected = torch.tensor([(1 - r) * r**i / (1 - r**7) for i in range(7)])
    found = torch.bincount(draws, minlength=7) / len(draws)
    assert len(found) == 7
    assert torch.allclose(found, expected, atol=0.03)


def test_a_window_is_a_function_of_seed_and_iteration():
    window = Window("random")
    starts = [window.plan(10, iteration, 5).stochastic_steps[0] for iteration in range(40)]
    assert starts == [window.plan(10, iteration, 5).stochastic_steps[0] for iteration in range(40)]
    assert len(set(starts)) > 2
    assert starts != [window.plan(10, iteration, 6).stochastic_steps[0] for iteration in range(40)]


def test_an_adaptive_window_goes_where_rewards_spread_and_else_follows_the_law():
    def share(policy, spread):
        plans = [Window(policy).plan(10, iteration, 5, spread) for iteration in range(2000)]
        return sum(plan.stochastic_steps[0] == 2 for plan in plans) / 2000

    assert share("adaptive", None) == share("random", None)
    assert share("random", {2: 1.0}) == share("random", None)
    assert share("adaptive", dict.fromkeys(range(9), 0.0)) == share("random", None)
    # All others promise a tenth: starts 0, 1, 2 have one good step in three, later ones none.
    spread = {step: 1.0 if step == 2 else 0.0 for step in range(9)}
    weights = [0.5**start * (1.2 if start <= 2 else 0.3) for start in range(7)]
    assert share("adaptive", spread) == pytest.approx(weights[2] / sum(weights), abs=0.02)
    assert share("adaptive", {0: 0.0, 1: 1.0}) > share("random", None)  # what was not seen may be as good as the best
    assert share("adaptive", spread | {17: 99.0}) == share("adaptive", spread)  # a step of another schedule


def test_fixed_and_shifting_windows():
    assert {Window("fixed", start=2).plan(10, i, 0).stochastic_steps for i in range(5)} == {(2, 3, 4)}
    shifting = Window("shifting", stride=2, period=3)
    starts = [shifting.plan(10, i, 0).stochastic_steps[0] for i in range(12)]
    assert starts == [0, 0, 0, 2, 2, 2, 4, 4, 4, 6, 6, 6]
    assert shifting.plan(10, 12, 0).stochastic_steps[0] == 1


@pytest.mark.parametrize(
    ("row", "steps", "shorter", "places"),
    [
        ("0 3 3 0 0 0 0 0 0 0", 3, "0 3 3 0 0 0", [0, 1, 2, 3, 5, 8, 10]),
        ("3 0 0 0 0", 1, "3 0", [0, 1, 5]),
        ("3 0 0 0 0", 0, "3 0 0 0 0", [0, 1, 2, 3, 4, 5]),
        ("3 0 0 0 0", 9, "3 0 0 0 0", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_a_shorter_tail_keeps_the_window_and_the_ends(row, steps, shorter, places):
    plan, sigmas = Plan.parse(row, roots=2), [1 - place / 100 for place in range(len(row.split()) + 1)]
    assert with_tail(plan, sigmas, steps) == (Plan.parse(shorter, roots=2), tuple(sigmas[place] for place in places))
