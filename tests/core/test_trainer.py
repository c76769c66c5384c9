"""One update: the ratio, the gradient, the counts, and when nothing may change."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from toy import SIGMAS, ToyPolicy, grow_toy, toy_run, with_rewards

from treegrpo_core.objective import clipped_surrogate, gaussian_kl, normalised_log_ratio
from treegrpo_core.plan import Plan, dance_grpo_plan, flow_grpo_plan, tree_plan
from treegrpo_core.sampler import grow
from treegrpo_core.trainer import NOISE_MARGIN, UpdateSettings, update
from treegrpo_core.transition import KERNELS, log_probability, moments, step
from treegrpo_core.tree import Rewards

FLOW_KERNELS = [name for name, kernel in KERNELS.items() if kernel.prediction == "flow"]
SETTINGS = UpdateSettings(clip=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", FLOW_KERNELS)
def test_replaying_a_fresh_tree_gives_ratio_one(tmp_path, kernel, dtype):
    run, policy = toy_run(tmp_path)
    tree = with_rewards(grow_toy(policy, kernel=kernel, eta=0.5, dtype=dtype))
    metrics = run.update([tree], SETTINGS)
    assert metrics.log_ratio_max < 1e-5
    assert metrics.ratio_mean == pytest.approx(1, abs=1e-5)
    assert metrics.clip_fraction == 0


def shaky(model):
    """A denoiser whose rounding depends on the batch, as half precision's does on a GPU."""

    def denoise(x, sigma):
        return model(x, sigma) + 1e-3 * torch.sin(1e3 * x) * len(x)

    return denoise


def test_replay_noise_is_measured_and_never_moves_a_first_ratio(tmp_path):
    run, policy = toy_run(tmp_path)
    policy.denoiser = shaky(policy.model)
    metrics = run.update([with_rewards(grow_toy(policy, max_batch=64))], UpdateSettings(clip=1e-9, max_batch=2))
    assert 1e-6 < metrics.replay_noise < metrics.log_ratio_max < 1e-2
    assert metrics.clip_fraction == 0
    assert metrics.ratio_mean == 1


@pytest.mark.parametrize("stale", [False, True])
def test_a_clip_range_within_the_replay_noise_is_raised(tmp_path, stale):
    run, policy = toy_run(tmp_path)
    policy.denoiser = shaky(policy.model)
    old = with_rewards(grow_toy(policy, seed=7))
    fine = run.update([with_rewards(grow_toy(policy))], UpdateSettings(clip=0.1, max_batch=2))
    assert fine.clip == 0.1
    tree = old if stale else with_rewards(grow_toy(policy))
    metrics = run.update([tree], UpdateSettings(clip=1e-9, max_batch=2, passes=1 if stale else 2))
    expected = fine.replay_noise if stale else metrics.replay_noise
    assert metrics.clip == pytest.approx(NOISE_MARGIN * expected)


def test_forward_counts_are_reported_and_equal_the_formula(tmp_path):
    run, policy = toy_run(tmp_path)
    plan = tree_plan(10, 3, 3, 2)
    tree = with_rewards(grow_toy(policy, plan))
    sampled = policy.rows
    metrics = run.update([tree], UpdateSettings(passes=2))
    assert (metrics.nfe_sample, sampled) == (plan.nfe_sample * 2, plan.nfe_sample * 2)
    assert metrics.nfe_train == 2 * plan.nfe_train * 2
    assert policy.rows - sampled == metrics.nfe_train


def test_an_update_changes_the_adapter_and_the_second_pass_shows_it(tmp_path):
    run, policy = toy_run(tmp_path)
    before = run.adapter.state_dict()
    metrics = run.update([with_rewards(grow_toy(policy))], UpdateSettings(clip=1e-3, passes=2))
    after = run.adapter.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert metrics.log_ratio_max > 0
    assert metrics.grad_norm > 0
    assert metrics.adapter_norm > 0


@pytest.mark.parametrize("previous_updates", [0, 2])
def test_equal_rewards_change_no_weight(tmp_path, previous_updates):
    """Not even by weight decay or by momentum of earlier updates."""
    run, policy = toy_run(tmp_path)
    for _ in range(previous_updates):
        run.update([with_rewards(grow_toy(policy))], SETTINGS)
    before = run.adapter.state_dict()
    metrics = run.update([with_rewards(grow_toy(policy), torch.full((27, 2), 0.1))], SETTINGS)
    after = run.adapter.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (metrics.grad_norm, metrics.nfe_train, metrics.ratio_mean) == (0, 0, 1)


def test_kl_pulls_back_even_without_any_advantage(tmp_path):
    run, policy = toy_run(tmp_path)
    run.update([with_rewards(grow_toy(policy))], SETTINGS)
    flat = with_rewards(grow_toy(policy), torch.zeros(27, 2))
    metrics = run.update([flat], UpdateSettings(kl=1.0))
    assert metrics.kl > 0
    assert metrics.grad_norm > 0


def test_kl_of_the_untrained_adapter_is_zero(tmp_path):
    run, policy = toy_run(tmp_path)
    metrics = run.update([with_rewards(grow_toy(policy))], UpdateSettings(kl=1.0))
    assert metrics.kl == 0


def test_kl_is_the_analytic_gaussian_divergence():
    mean, reference, std = torch.randn(5, 4, 2, 2), torch.randn(5, 4, 2, 2), 0.3
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(mean, std), normal(reference, std)).flatten(1).mean(1)
    assert torch.allclose(gaussian_kl(mean, reference, std), expected, atol=1e-5)


@pytest.mark.parametrize("plan", [flow_grpo_plan(10, 6), dance_grpo_plan(10, 6)], ids=["Flow-GRPO", "DanceGRPO"])
def test_flat_plans_reproduce_plain_grpo(tmp_path, plan):
    run, policy = toy_run(tmp_path)
    tree = grow_toy(policy, plan, prompts=("a",))
    rewards = torch.randn(6)
    scored = with_rewards(tree, rewards[:, None])
    # Move the policy away from the one that sampled, so that ratios and clipping matter.
    with torch.no_grad():
        for parameter in run.adapter.parameters():
            parameter.add_(0.05)
    expected = plain_grpo_loss(policy, tree, rewards, 1e-3)
    metrics = update([scored], run.adapter, run.optimizer, SETTINGS, iteration=99)
    assert metrics.clip_fraction > 0
    assert metrics.loss == pytest.approx(expected, rel=1e-4)


def plain_grpo_loss(policy, tree, rewards, clip):
    """Flow-GRPO written down directly, one trajectory and one step at a time."""
    advantage = (rewards - rewards.mean()) / rewards.std(correction=0)
    losses = []
    for level in tree.growth.levels:
        sigma, sigma_next = SIGMAS[level.step], SIGMAS[level.step + 1]
        for edge, child in enumerate(level.children):
            parent = level.parents[edge // level.branching]
            denoised = policy.use(lambda denoise, x=parent, s=sigma: denoise(x, s), train=False)
            new = step("flow_sde", parent, denoised, sigma, sigma_next, eta=0.7, child=child).log_prob
            ratio, a = torch.exp(new - level.log_prob[edge]), advantage[edge]
            losses.append(-torch.min(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a))
    return float(torch.cat(losses).mean())


def test_micro_batches_give_the_same_gradient(tmp_path):
    states = []
    for index, max_batch in enumerate((2, 8, 4096)):
        run, policy = toy_run(tmp_path, f"run {index}")
        run.update([with_rewards(grow_toy(policy))], UpdateSettings(max_batch=max_batch))
        states.append(run.adapter.state_dict())
    for other in states[1:]:
        assert all(torch.allclose(states[0][name], other[name], atol=2e-5) for name in other)


def test_two_trees_train_as_one_forest(tmp_path):
    """Prompts in one batch or as a list of trees: the same update."""
    plan = tree_plan(10, 3, 2, 1)
    together_run, together = toy_run(tmp_path, "together")
    together_run.update([with_rewards(grow_toy(together, plan))], SETTINGS)
    list_run, policy = toy_run(tmp_path, "list")
    trees = []
    for prompt in range(2):

        def work(denoise, prompt=prompt):
            from toy import roots_for

            roots = roots_for(plan, 2, 1)[:, prompt : prompt + 1]
            return grow(denoise, roots, SIGMAS, plan, kernel="flow_sde", eta=0.7, seed=1, prompts=[prompt])

        whole = grow_toy(policy, plan, prompts=("a",))
        growth = policy.use(work, train=False)
        trees.append(with_rewards(whole.__class__(**{**whole.__dict__, "growth": growth})))
    list_run.update(trees, SETTINGS)
    a, b = together_run.adapter.state_dict(), list_run.adapter.state_dict()
    assert all(torch.allclose(a[name], b[name], atol=2e-5) for name in a)


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path):
    run, policy = toy_run(tmp_path)
    tree = with_rewards(grow_toy(policy))
    before = run.adapter.state_dict()
    poisoned = tree.growth.levels[0].children
    poisoned[0, 0] = math.inf
    metrics = run.update([tree], SETTINGS)
    assert metrics.skipped == 1
    assert all(torch.equal(before[name], value) for name, value in run.adapter.state_dict().items())


def test_gradients_are_clipped_to_the_norm(tmp_path):
    run, policy = toy_run(tmp_path)
    tree = with_rewards(grow_toy(policy))
    free = update([tree], run.adapter, torch.optim.SGD(run.adapter.parameters(), lr=0), UpdateSettings())
    before = run.adapter.state_dict()
    limit = free.grad_norm / 10
    update([tree], run.adapter, torch.optim.SGD(run.adapter.parameters(), lr=1.0), UpdateSettings(max_grad_norm=limit))
    moved = math.sqrt(sum(float((run.adapter.state_dict()[n] - v).square().sum()) for n, v in before.items()))
    assert moved == pytest.approx(limit, rel=1e-3)


def test_a_replay_of_another_model_stops_with_an_explanation(tmp_path):
    run, policy = toy_run(tmp_path)
    tree = with_rewards(grow_toy(policy))
    before = run.adapter.state_dict()
    with torch.no_grad():
        policy.model.head.weight.mul_(3)
    with pytest.raises(RuntimeError, match="does not see"):
        run.update([tree], SETTINGS)
    assert all(torch.equal(before[name], value) for name, value in run.adapter.state_dict().items())
    assert run.iteration == 0


def test_updates_raise_the_reward(tmp_path):
    """The mean of the leaves is a reward with a plain direction; held-out noise must show it."""
    run, policy = toy_run(tmp_path, learning_rate=5e-3)
    plan = Plan.parse("0 3 3 0 0 0 0 0 0 0")

    def held_out() -> float:
        return sum(float(grow_toy(policy, plan, seed=900 + seed).leaves.mean()) for seed in range(8)) / 8

    base = held_out()
    for iteration in range(40):
        run.update([with_rewards(grow_toy(policy, plan, seed=iteration))], SETTINGS)
    assert held_out() > base + 0.01


def test_surrogate_by_hand():
    log_ratio = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5]))
    loss = clipped_surrogate(log_ratio, torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.2)
    assert torch.allclose(loss, torch.tensor([-1.2, 1.5, -0.5, 0.8]))


def test_another_upper_limit_concerns_good_edges_alone():
    log_ratio = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5]))
    loss = clipped_surrogate(log_ratio, torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.2, 0.4)
    assert torch.allclose(loss, torch.tensor([-1.4, 1.5, -0.5, 0.8]))


@pytest.mark.parametrize("std", [0.05, 0.4])
def test_normalised_ratios_have_mean_one_and_one_spread_whatever_the_noise(std):
    """Children are the old policy's, the new one's means lie beside: plain ratios are lower and spread with 1 / std."""
    mean_old = torch.zeros(20000, 4, 2, 2)
    mean, child = mean_old + 0.01, std * torch.randn(mean_old.shape, generator=torch.Generator().manual_seed(0))
    plain = log_probability(child, mean, std) - log_probability(child, mean_old, std)
    log_ratio = normalised_log_ratio(plain, mean, mean_old, std)
    error = float(plain.std()) / math.sqrt(len(plain))
    assert float(plain.mean()) == pytest.approx(-(0.01**2) / (2 * std**2), abs=4 * error)
    assert float(log_ratio.mean()) == pytest.approx(0, abs=5e-5)
    assert float(log_ratio.std()) == pytest.approx(0.01 / math.sqrt(16), rel=0.05)


def test_ratio_norm_weighs_steps_by_their_noise_and_length_in_the_first_pass(tmp_path):
    """Where old and new policy are one, its gradient is the plain one times std / |dt|; here: of a single step."""
    gradients = []
    for ratio_norm in (False, True):
        run, policy = toy_run(tmp_path, f"{ratio_norm}")
        tree = with_rewards(grow_toy(policy, tree_plan(10, 3, 1, 4)))
        still = torch.optim.SGD(run.adapter.parameters(), lr=0)
        free = UpdateSettings(max_grad_norm=1e9, ratio_norm=ratio_norm)
        gradients.append(update([tree], run.adapter, still, free).grad_norm)
    sigma, sigma_next = SIGMAS[4], SIGMAS[5]
    _, std = moments("flow_sde", torch.zeros(1, 1), torch.zeros(1, 1), sigma, sigma_next, eta=0.7)
    assert gradients[1] == pytest.approx(gradients[0] * std / (sigma - sigma_next), rel=1e-4)


def test_ratio_norm_remembers_the_means_over_passes_and_needs_a_fresh_tree(tmp_path):
    run, policy = toy_run(tmp_path)
    old = with_rewards(grow_toy(policy, seed=3))
    metrics = run.update([with_rewards(grow_toy(policy))], UpdateSettings(ratio_norm=True, passes=3, max_batch=2))
    assert metrics.log_ratio_max > 0
    assert metrics.ratio_mean == pytest.approx(1, abs=1e-3)
    with pytest.raises(ValueError, match="ratio_norm.*turn ratio_norm off"):
        run.update([old], UpdateSettings(ratio_norm=True))
    policy.prediction = "eps"
    with pytest.raises(ValueError, match="ratio_norm: GRPO-Guard is made for rectified flows"):
        run.update([old], UpdateSettings(ratio_norm=True))


def test_kl_to_the_average_is_zero_where_the_run_stands_still(tmp_path):
    run, policy = toy_run(tmp_path)
    run.update([with_rewards(grow_toy(policy))], SETTINGS)
    to_average = UpdateSettings(kl=1.0, kl_reference="average")
    run.average = run.adapter.state_dict()
    before = run.adapter.state_dict()
    still = update(
        [with_rewards(grow_toy(policy))], run.adapter, run.optimizer, to_average, iteration=1, average=run.average
    )
    assert still.kl == 0
    assert any(not torch.equal(before[name], value) for name, value in run.adapter.state_dict().items())
    moved = update([with_rewards(grow_toy(policy))], run.adapter, run.optimizer, to_average, average=before)
    assert moved.kl > 0


def test_pruning_trains_what_it_keeps_as_a_tree_of_its_own(tmp_path):
    """Steps and parents left out cost nothing, and the others' gradient is that of their edges alone."""
    run, policy = toy_run(tmp_path)
    tree = grow_toy(policy, tree_plan(10, 3, 3, 1))
    rewards = torch.randn(27, 2, generator=torch.Generator().manual_seed(1))
    scored = with_rewards(tree, rewards)
    pruned = scored.with_advantages(train_steps=2, train_share=1 / 3)
    assert [len(chosen) for chosen in pruned.trained] == [0, 1, 3]
    still = torch.optim.SGD(run.adapter.parameters(), lr=0)
    metrics = update([pruned], run.adapter, still, UpdateSettings())
    assert metrics.nfe_train == (1 + 3) * 2

    def by_hand():
        for level, advantage, chosen in zip(tree.growth.levels, pruned.advantages, pruned.trained, strict=True):
            for parent, prompt in ((int(row[prompt]), prompt) for row in chosen for prompt in range(2)):
                x, edges = level.parents[parent, prompt][None], slice(parent * 3, parent * 3 + 3)
                yield level, x, level.children[edges, prompt], advantage[edges, prompt]

    def work(denoise):
        losses = []
        for level, x, children, advantage in by_hand():
            sigma, sigma_next = SIGMAS[level.step], SIGMAS[level.step + 1]
            same, denoised = x.repeat(3, 1, 1, 1), denoise(x, sigma).repeat(3, 1, 1, 1)
            log_prob = step("flow_sde", same, denoised, sigma, sigma_next, eta=0.7, child=children).log_prob
            losses.append(-(torch.exp(log_prob - log_prob.detach()) * advantage))
        return torch.autograd.grad(torch.cat(losses).mean(), run.adapter.parameters())

    gradients = policy.use(work, train=True)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    "bad",
    [
        {"clip": 0},
        {"clip_high": 0},
        {"kl_reference": "none"},
        {"kl": -1},
        {"passes": 0},
        {"max_batch": 0},
        {"clipping": 1e-4},
    ],
    ids=lambda bad: next(iter(bad)),
)
def test_bad_settings_are_refused_by_name(bad):
    with pytest.raises(ValidationError, match=next(iter(bad))):
        UpdateSettings(**bad)


def test_a_tree_must_be_ready(tmp_path):
    run, policy = toy_run(tmp_path)
    tree = grow_toy(policy)
    with pytest.raises(ValueError, match="no advantages yet"):
        run.update([tree], SETTINGS)
    with pytest.raises(ValueError, match="no tree"):
        run.update([], SETTINGS)
    ready = with_rewards(tree)
    tree.growth.free()
    with pytest.raises(ValueError, match="freed"):
        run.update([ready], SETTINGS)


def test_the_scale_of_a_reward_plays_no_part_beside_another(tmp_path):
    """Two rewards, then the same with one of them in another unit, a thousand times smaller: the same weights."""
    states = []
    for name, factor in (("plain", 1.0), ("scaled", 1000.0)):
        run, policy = toy_run(tmp_path, name)
        tree = grow_toy(policy)
        mean = tree.leaves.flatten(2).mean(2)
        rewards = Rewards(("mean", "largest"), (1.0, 0.5), torch.stack([mean * factor, tree.leaves.flatten(2).amax(2)]))
        run.update([tree.scored(rewards).with_advantages()], SETTINGS)
        states.append(run.adapter.state_dict())
    assert all(torch.allclose(states[0][key], states[1][key], rtol=1e-4) for key in states[0])


def test_a_session_that_is_begun_again_leaves_nothing_of_the_first(tmp_path):
    """A host finds only at a later level that it must compute in another way, and calls the work again."""

    class Repeating(ToyPolicy):
        def use(self, work, *, train, checkpointing=False):
            if not train:
                return super().use(work, train=train)
            counted = self.rows + 9

            def fails(x, sigma):
                if self.rows > counted:
                    raise RuntimeError("changed in place")
                return self.model(x, sigma)

            self.denoiser = fails
            with pytest.raises(RuntimeError, match="changed in place"):
                super().use(work, train=True)
            self.denoiser = None
            return super().use(work, train=True)

    results = []
    for kind in (ToyPolicy, Repeating):
        run, policy = toy_run(tmp_path, kind.__name__)
        tree = with_rewards(grow_toy(kind(run, policy.model)))
        metrics = run.update([tree], UpdateSettings(kl=0.1, ratio_norm=True, passes=2))
        results.append((metrics.model_copy(update={"seconds": 0.0, "stages": {}}), run.adapter.state_dict()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())
