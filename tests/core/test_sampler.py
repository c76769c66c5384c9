"""Growing trees: shapes, seeds, counts, and independence of how the work is cut."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from toy import LATENT, SIGMAS, ToyModel, grow_toy, roots_for, toy_run, with_rewards

from treegrpo_core.plan import Plan, flow_grpo_plan, tree_plan
from treegrpo_core.sampler import edge_noise, grow, node_path, sample
from treegrpo_core.tree import by_leaf, by_prompt

PLANS = [
    tree_plan(10, 3, 3, 0),
    tree_plan(10, 2, 2, 4),
    flow_grpo_plan(10, 5),
    Plan.parse("2 1 1 2 1 1 2 1 1 0", roots=2),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_levels_have_the_shapes_of_the_plan(tmp_path, plan):
    _, policy = toy_run(tmp_path)
    tree = grow_toy(policy, plan)
    assert tree.leaves.shape == (plan.leaves, 2, *LATENT)
    for level, step in zip(tree.growth.levels, plan.stochastic_steps, strict=True):
        assert level.step == step
        assert level.parents.shape == (plan.nodes(step), 2, *LATENT)
        assert level.children.shape == (plan.nodes(step) * level.branching, 2, *LATENT)
        assert level.log_prob.shape == level.children.shape[:2]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_forwards_are_exactly_the_formula(tmp_path, plan):
    _, policy = toy_run(tmp_path)
    tree = grow_toy(policy, plan)
    assert policy.rows == plan.nfe_sample * 2
    assert tree.growth.forwards == plan.nfe_sample


def test_leaves_of_a_tree_are_pairwise_distinct(tmp_path):
    _, policy = toy_run(tmp_path)
    leaves = by_prompt(grow_toy(policy, tree_plan(10, 3, 3, 0), prompts=("same", "same")).leaves)
    for a, b in itertools.combinations(leaves, 2):
        assert (a - b).abs().max() > 1e-3


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_result_does_not_depend_on_the_micro_batch(tmp_path, plan):
    """Within float tolerance: a matrix product may sum in another order for another batch size."""
    _, policy = toy_run(tmp_path)
    whole = grow_toy(policy, plan, max_batch=4096)
    for max_batch in (2, 7, 16):
        cut = grow_toy(policy, plan, max_batch=max_batch)
        assert torch.allclose(cut.leaves, whole.leaves, atol=1e-5)
        for a, b in zip(cut.growth.levels, whole.growth.levels, strict=True):
            assert torch.allclose(a.log_prob, b.log_prob, atol=1e-5)


def test_with_a_batch_invariant_model_micro_batches_are_bitwise_alike():
    plan = tree_plan(10, 3, 2, 1)

    def denoise(x, sigma):
        return torch.tanh(x) * (1 - sigma)

    grown = [
        grow(denoise, roots_for(plan, 2), SIGMAS, plan, kernel="flow_sde", eta=0.7, seed=3, max_batch=size)
        for size in (2, 6, 1000)
    ]
    assert torch.equal(grown[0].leaves, grown[1].leaves)
    assert torch.equal(grown[0].leaves, grown[2].leaves)


def test_a_prompt_grows_the_same_tree_alone_and_in_company(tmp_path):
    _, policy = toy_run(tmp_path)
    plan = tree_plan(10, 3, 2, 0)
    together = grow_toy(policy, plan, prompts=("a", "b", "c")).leaves

    def work(denoise):
        roots = roots_for(plan, 3, 1)[:, 1:2]
        return grow(denoise, roots, SIGMAS, plan, kernel="flow_sde", eta=0.7, seed=1, prompts=[1])

    alone = policy.use(work, train=False).leaves
    assert torch.allclose(together[:, 1:2], alone, atol=1e-5)


def test_noise_belongs_to_its_edge():
    shape = (2, 3)
    assert torch.equal(edge_noise(shape, 1, 0, (0, 2)), edge_noise(shape, 1, 0, (0, 2)))
    keys = [(1, 0, (0, 2)), (2, 0, (0, 2)), (1, 1, (0, 2)), (1, 0, (0, 1)), (1, 0, (0, 2, 0)), (1, 0, (2, 0))]
    noises = [edge_noise(shape, *key) for key in keys]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(noises, 2))


def test_node_paths_name_the_children_of_the_parent():
    assert node_path(0, (3, 3)) == (0, 0, 0)
    assert [node_path(node, (3, 2)) for node in range(6, 12)] == [(1, a, b) for a in range(3) for b in range(2)]
    for node in range(27):
        assert node_path(node, (3, 3, 3))[:-1] == node_path(node // 3, (3, 3))


def test_the_model_itself_is_untouched_by_sampling(tmp_path):
    _, policy = toy_run(tmp_path)
    before = {name: value.clone() for name, value in ToyModel().state_dict().items()}
    grow_toy(policy)
    assert policy.model.state_dict().keys() == before.keys()
    assert all(torch.equal(policy.model.state_dict()[name], value) for name, value in before.items())


def test_user_order_and_tree_order_are_inverse():
    values = torch.randn(6, 2, 3)
    assert torch.equal(by_leaf(by_prompt(values), 2), values)
    assert torch.equal(by_prompt(values)[:6], values[:, 0])


@pytest.mark.parametrize(
    ("sigmas", "names"),
    [
        ((1.0, 0.5, 0.0), "10 steps, but the sigmas have 2"),
        ((*SIGMAS[:-1], 0.05), "must end at 0"),
        ((*SIGMAS[:3], SIGMAS[2], *SIGMAS[4:]), "sigmas: sigma 2 is"),
        ((1.2, *SIGMAS[1:]), "sigmas: the highest is 1.2, .* a rectified flow, whose noise levels end at 1; use"),
        ((*SIGMAS[:4], math.nan, *SIGMAS[5:]), "sigmas: sigma 4 is nan"),
        ((math.inf, *SIGMAS[1:]), "sigmas: sigma 0 is inf"),
        ((*SIGMAS[:-1], math.nan), "sigmas: sigma 10 is nan"),
        ((), "sigmas: the schedule has fewer than 1 step"),
        ((0.0,), "sigmas: the schedule has fewer than 1 step"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(sigmas, names):
    plan = tree_plan(10)
    with pytest.raises(ValueError, match=names):
        grow(lambda x, sigma: x, roots_for(plan, 1), sigmas, plan, kernel="flow_sde", eta=0.7, seed=0)


@pytest.mark.parametrize(("kernel", "highest"), [("flow_sde", 1.0005), ("ancestral", 14.614642), ("ancestral", 80.0)])
def test_a_rounding_above_the_highest_level_is_allowed_and_models_without_one_take_any(kernel, highest):
    plan = tree_plan(10, 2, 2, 1)
    sigmas = (highest, *SIGMAS[1:])
    grown = grow(lambda x, sigma: 0 * x, roots_for(plan, 1), sigmas, plan, kernel=kernel, eta=0.7, seed=0)
    assert grown.leaves.isfinite().all()


def test_too_small_a_batch_says_what_to_do(tmp_path):
    _, policy = toy_run(tmp_path)
    with pytest.raises(ValueError, match="max_batch is 1, but 2 prompts"):
        grow_toy(policy, max_batch=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rewards_that_are_no_numbers_are_refused(tmp_path, value):
    _, policy = toy_run(tmp_path)
    tree = grow_toy(policy)
    rewards = torch.zeros(27, 2)
    rewards[5, 1] = value
    with pytest.raises(ValueError, match="toy of leaf 5 of prompt 1 is"):
        with_rewards(tree, rewards)


def gaussian(prediction):
    """The exact denoiser of latents from N(0, 1/4), and the exact end of its ODE from x at a noise level."""

    def power(sigma):
        signal = 1 - sigma if prediction == "flow" else 1.0
        return signal, (signal / 2) ** 2 + sigma**2

    def denoise(x, sigma):
        signal, total = power(sigma)
        return x * signal / 4 / total

    return denoise, lambda x, sigma: x / 2 / power(sigma)[1] ** 0.5


@pytest.mark.parametrize(
    ("kernel", "sigmas"), [("flow_sde", (1.0, 0.9, 0.7, 0.45, 0.2, 0.0)), ("ancestral", (9.0, 4.0, 1.5, 0.6, 0.2, 0.0))]
)
def test_the_tail_of_second_order_ends_nearer_to_the_exact_solution(kernel, sigmas):
    denoise, exact = gaussian("flow" if kernel == "flow_sde" else "eps")
    plan = Plan.parse("2 0 0 0 0")
    roots = torch.randn(1, 3, *LATENT, generator=torch.Generator().manual_seed(0)) * sigmas[0]
    errors = []
    for second_order in (False, True):
        growth = grow(denoise, roots, sigmas, plan, kernel=kernel, eta=0.5, seed=0, second_order=second_order)
        errors.append(float((growth.leaves - exact(growth.levels[0].children, sigmas[1])).square().mean()))
    assert errors[1] < 0.5 * errors[0]


def test_deterministic_sampling_is_the_tail_of_a_tree():
    denoise, _ = gaussian("flow")
    growth = grow(
        denoise, torch.randn(1, 3, *LATENT), SIGMAS, Plan.parse("2 0 0 0 0 0 0 0 0 0"), kernel="cps", eta=0.5, seed=0
    )
    again = sample(denoise, growth.levels[0].children, SIGMAS[1:])
    assert torch.equal(again, growth.leaves)
