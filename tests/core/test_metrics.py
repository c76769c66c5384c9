"""What an update reports is valid JSON, and a run's curve has a finite number for every update, also after bad ones."""

from __future__ import annotations

import json
import math

import pytest
from toy import grow_toy, toy_run, with_rewards

from treegrpo_core.metrics import Tally, curve, next_loss, summary
from treegrpo_core.trainer import UpdateSettings


def strictly(text):
    """JSON as other programs read it, in which NaN does not exist."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def train(run, policy, poison=None):
    tree = with_rewards(grow_toy(policy, seed=run.iteration))
    if poison is not None:
        tree.growth.levels[0].children[0, 0] = poison
    return run.update([tree], UpdateSettings(clip=1e-3, passes=2, kl=0.1))


def test_what_a_skipped_step_had_is_no_part_of_the_means(tmp_path):
    _, policy = toy_run(tmp_path)
    taken = Tally(edges=4, loss=2.0, ratio=4.0, clipped=1, kl=1.0, parents=2, grad_norm=3.0)
    skipped = Tally(edges=4, loss=math.nan, ratio=math.nan, kl=math.nan, parents=2, grad_norm=math.inf)
    tree = with_rewards(grow_toy(policy))
    metrics = summary([tree], [taken, skipped], adapter_norm=0.0, iteration=0, clip=1e-3, seconds=0.0)
    assert (metrics.loss, metrics.ratio_mean, metrics.clip_fraction) == (0.5, 1.0, 0.25)
    assert (metrics.kl, metrics.grad_norm, metrics.skipped, metrics.nfe_train) == (0.5, 3.0, 1, 4)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_the_log_is_json_and_the_curve_finite_after_an_update_without_any_step(tmp_path, poison):
    run, policy = toy_run(tmp_path)
    values = [train(run, policy, bad).loss for bad in (poison, None, poison, None)]
    assert [math.isnan(value) for value in values] == [True, False, True, False]
    entries = [strictly(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry["loss"] for entry in entries] == [None, values[1], None, values[3]]
    assert [entry["skipped"] for entry in entries] == [2, 0, 2, 0]
    assert run.losses == [0.0, values[1], values[1], values[3]], "the curve stays where it was"
    again, _ = toy_run(tmp_path)
    assert again.losses == run.losses
    assert run.replay_noise == again.replay_noise == 0.0, "what was not finite is not kept for later trees"


def test_an_update_without_signal_has_a_loss_of_0(tmp_path):
    _, policy = toy_run(tmp_path)
    metrics = summary([with_rewards(grow_toy(policy))], [], adapter_norm=0.0, iteration=0, clip=1e-3, seconds=0.0)
    assert (metrics.loss, metrics.ratio_mean, metrics.clip_fraction, metrics.kl) == (0.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize("nothing", [None, math.nan, math.inf, -math.inf])
def test_a_curve_goes_on_where_it_was(nothing):
    """Lines of older versions have null for a loss that was not finite."""
    assert next_loss([], nothing) == 0.0
    assert next_loss([0.5, -0.25], nothing) == -0.25
    assert next_loss([0.5], 0.0) == 0.0


@pytest.mark.parametrize("losses", [[0.0], [0.25], [-1e6, -1e6], [1e12] * 3, [0.1, 0.3]])
def test_a_curve_always_has_a_range(losses):
    drawn = curve(losses)
    flat = len(set(losses)) == 1
    assert (drawn[: len(losses)], len(drawn)) == (losses, len(losses) + flat)
    assert max((value - min(drawn)) / (max(drawn) - min(drawn)) for value in drawn) == 1.0


def test_a_run_that_has_not_begun_has_a_curve_at_0():
    assert curve([]) == pytest.approx([0.0, 0.0])
    assert len(set(curve([]))) == 2
