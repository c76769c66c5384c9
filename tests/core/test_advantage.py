"""Advantages: checked against trees computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from treegrpo_core.advantage import (
    against_siblings,
    back_up,
    leaf_advantages,
    normalise_per_depth,
    standardise,
    worth_training,
)


def test_two_by_two_tree_by_hand():
    """Leaves 4 -2 | 1 3 under two parents; the first pair has unequal log-probs, weights 3/4 and 1/4."""
    leaf = torch.tensor([4.0, -2.0, 1.0, 3.0])
    log_probs = [torch.tensor([-1.0, -1.5]), torch.tensor([math.log(3.0), 0.0, -7.0, -7.0])]
    first, second = back_up(leaf, log_probs, (2, 2))
    assert torch.equal(second, leaf)
    assert torch.allclose(first, torch.tensor([0.75 * 4 + 0.25 * -2, 2.0]))


def test_three_levels_by_hand():
    leaf = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    w = torch.softmax(torch.tensor([0.0, 1.0]), 0)
    log_probs = [torch.zeros(2), torch.tensor([0.0, 1.0] * 2), torch.tensor([0.0, 1.0] * 4)]
    first, second, third = back_up(leaf, log_probs, (2, 2, 2))
    expected_second = torch.stack([w[0] * a + w[1] * b for a, b in [(1, 2), (3, 4), (5, 6), (7, 8)]])
    assert torch.allclose(second, expected_second)
    assert torch.allclose(first[0], w[0] * expected_second[0] + w[1] * expected_second[1])
    assert torch.equal(third, leaf)


def test_one_child_is_the_identity_and_uniform_is_the_mean():
    leaf = torch.randn(6)
    chain = back_up(leaf, [torch.randn(6) for _ in range(3)], (6, 1, 1))
    assert all(torch.allclose(level, leaf) for level in chain)
    first, _ = back_up(leaf, [torch.randn(2), torch.randn(6)], (2, 3), estimator="uniform")
    assert torch.allclose(first, leaf.view(2, 3).mean(1))


def test_prompts_are_groups_of_their_own():
    leaf, log_probs = torch.randn(9, 2), [torch.randn(3, 2), torch.randn(9, 2)]
    together = back_up(leaf, log_probs, (3, 3))
    for prompt in range(2):
        alone = back_up(leaf[:, prompt], [level[:, prompt] for level in log_probs], (3, 3))
        assert all(torch.allclose(a[:, prompt], b) for a, b in zip(together, alone, strict=True))


def test_equal_rewards_give_exactly_zero():
    """0.1 is no binary fraction: the mean of many is off by rounding, and dividing by that would train on noise."""
    rewards = torch.full((1, 27), 0.1)
    assert torch.equal(leaf_advantages(rewards, [1.0]), torch.zeros(27))
    mixed = torch.stack([torch.full((4,), 0.1), torch.tensor([1.0, 2.0, 3.0, 4.0])], dim=1)[None]
    assert torch.equal(leaf_advantages(mixed, [1.0])[:, 0], torch.zeros(4))
    assert leaf_advantages(mixed, [1.0])[:, 1].abs().min() > 0


def test_advantages_are_summed_not_rewards():
    """The scale and offset of a reward are irrelevant; the weights decide."""
    rewards = torch.randn(2, 27)
    scaled = torch.stack([rewards[0] * 1000 + 5, rewards[1]])
    assert torch.allclose(leaf_advantages(rewards, [0.8, 0.2]), leaf_advantages(scaled, [0.8, 0.2]), atol=1e-5)
    expected = 0.8 * standardise(rewards[0]) + 0.2 * standardise(rewards[1])
    assert torch.allclose(leaf_advantages(rewards, [0.8, 0.2]), expected)
    assert torch.equal(leaf_advantages(rewards, [1.0, 0.0]), leaf_advantages(rewards[:1], [1.0]))


def test_standardised_values_have_mean_zero_and_std_one():
    values = standardise(torch.randn(27, 5) * 7 + 3)
    assert values.mean(0).abs().max() < 1e-6
    assert torch.allclose(values.std(0, correction=0), torch.ones(5), atol=1e-5)
    assert all(
        torch.allclose(level.std(0, correction=0), torch.ones(5), atol=1e-5)
        for level in normalise_per_depth([values * 3])
    )


@pytest.mark.parametrize(
    ("rewards", "weights", "names"),
    [
        (torch.randn(1, 1), [1.0], "at least 2 leaves"),
        (torch.tensor([[1.0, float("nan")]]), [1.0], "1 of 2 rewards are NaN"),
        (torch.tensor([[1.0, float("inf")]]), [1.0], "NaN or infinite"),
        (torch.randn(2, 4), [1.0], "2 rewards need as many weights, got 1"),
    ],
)
def test_bad_rewards_are_refused(rewards, weights, names):
    with pytest.raises(ValueError, match=names):
        leaf_advantages(rewards, weights)


def test_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="'median' is unknown"):
        back_up(torch.zeros(2), [torch.zeros(2)], (2,), estimator="median")  # type: ignore[arg-type]


def test_against_siblings_leaves_what_an_edge_adds_itself():
    first, second = against_siblings([torch.tensor([1.0, 3.0]), torch.tensor([2.0, 0.0, 3.0, 3.0])], (2, 2))
    assert torch.equal(first, torch.tensor([-1.0, 1.0]))
    assert torch.equal(second, torch.tensor([1.0, -1.0, 0.0, 0.0]))
    only_children = torch.randn(4)
    assert torch.equal(against_siblings([only_children], (1,))[0], only_children)


def kept(*arguments):
    """Parents by level, as lists; None: all."""
    return [chosen if chosen is None else chosen.tolist() for chosen in worth_training(*arguments)]


def test_the_parents_whose_children_lie_furthest_apart_are_worth_training():
    """Two levels of two prompts; the second prompt's children differ elsewhere."""
    first = torch.tensor([[0.1, 0.2], [-0.1, 0.0]])
    second = torch.tensor([[1.0, 9.0], [-1.0, 9.0], [0.5, 3.0], [0.5, -2.0]])
    assert kept([first, second], (2, 2), 1, 0.5) == [[], [[0, 1]]]
    assert kept([first, second], (2, 2), 2, 1.0) == [None, None]


def test_the_step_that_made_the_difference_is_worth_training_though_later_edges_inherit_it():
    first = torch.tensor([[1.0], [-1.0]])
    second = torch.tensor([[1.1], [0.9], [-1.1], [-0.9]])
    assert kept([first, second], (2, 2), 1, 1.0) == [None, []]


def test_a_share_is_not_rounded_up_by_its_last_digit():
    assert len(kept([torch.randn(100, 1)], (1,), 1, 0.07)[0]) == 7


def test_of_equal_steps_the_first_are_trained():
    flat = [torch.tensor([[1.0], [-1.0]])] * 3
    assert kept(flat, (1, 1, 1), 2, 1.0) == [None, None, []]
