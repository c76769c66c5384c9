"""Runs on disk: resume bit for bit, refuse what does not fit, lose nothing."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from toy import ToyModel, grow_toy, toy_run, with_rewards

from treegrpo_core.files import append_line, check_name, read_lines
from treegrpo_core.run import Run, RunSettings, known_runs, stored_base
from treegrpo_core.trainer import UpdateSettings

SETTINGS = UpdateSettings(clip=1e-3)


def train(run, policy, updates):
    for _ in range(updates):
        run.update([with_rewards(grow_toy(policy, seed=run.iteration))], SETTINGS)


def test_resuming_is_bit_for_bit_the_same(tmp_path):
    whole, policy = toy_run(tmp_path, "whole")
    train(whole, policy, 5)
    first, policy = toy_run(tmp_path, "resumed")
    train(first, policy, 2)
    second, policy = toy_run(tmp_path, "resumed")
    assert second is not first
    assert second.iteration == 2
    train(second, policy, 3)
    a, b = whole.adapter.state_dict(), second.adapter.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [entry["iteration"] for entry in second.log()] == [0, 1, 2, 3, 4]
    assert second.history.losses == whole.history.losses
    assert second.history.replay_noise == whole.history.replay_noise
    assert second.history.ends() == second.log()
    assert all(torch.equal(whole.average[name], second.average[name]) for name in a)


def test_the_average_lags_behind_the_weights(tmp_path):
    run, policy = toy_run(tmp_path)
    start = run.adapter.state_dict()
    train(run, policy, 1)
    first = run.adapter.state_dict()
    expected = {name: 0.1 * start[name] + 0.9 * first[name] for name in start}
    assert all(torch.allclose(expected[name], run.average[name], atol=1e-6) for name in start)
    train(run, policy, 1)
    last = run.adapter.state_dict()
    assert any(not torch.allclose(run.average[name], last[name]) for name in last)


def test_a_fresh_run_is_the_base_model(tmp_path):
    _, policy = toy_run(tmp_path)
    x = torch.randn(3, 4, 2, 2)
    adapted = policy.use(lambda denoise: denoise(x, 0.5), train=False)
    assert torch.equal(adapted, ToyModel()(x, 0.5).detach())


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ({"rank": 8}, "rank 4, not 8"),
        ({"alpha": 1.0}, "alpha 4.0, not 1.0"),
        ({"targets": "all linear"}, "targets 'attention[+]mlp', not 'all linear'"),
        ({"seed": 5}, "seed 0, not 5"),
        ({"base": "another"}, "another base model"),
        ({"kind": "dora"}, "kind 'lora', not 'dora'"),
    ],
)
def test_a_run_with_other_settings_is_refused_and_left_alone(tmp_path, other, names):
    run, policy = toy_run(tmp_path)
    train(run, policy, 1)
    before = {path.name: path.read_bytes() for path in run.folder.iterdir()}
    with pytest.raises(ValueError, match=names):
        toy_run(tmp_path, **other)
    with pytest.raises(ValueError, match=names):
        run.require(run.settings.model_copy(update=other))
    assert {path.name: path.read_bytes() for path in run.folder.iterdir()} == before


def test_the_learning_rate_may_change(tmp_path):
    toy_run(tmp_path)
    run, _ = toy_run(tmp_path, learning_rate=5e-4)
    assert run.optimizer.param_groups[0]["lr"] == 5e-4


def test_a_run_stored_under_an_earlier_fingerprint_of_its_model_is_stored_anew_at_the_next_save(tmp_path):
    run, policy = toy_run(tmp_path, base="0" * 32)
    train(run, policy, 1)
    with pytest.raises(ValueError, match="another base model .or by TreeGRPO 0.1.0 under another version of ComfyUI"):
        toy_run(tmp_path, base="2-new")
    known, policy = toy_run(tmp_path, base="2-new", earlier_base="0" * 32)
    assert known.iteration == 1
    assert stored_base(known.folder) == "0" * 32
    train(known, policy, 1)
    assert stored_base(known.folder) == "2-new"
    assert toy_run(tmp_path, base="2-new")[0].iteration == 2
    with pytest.raises(ValueError, match="another base model[.]"):
        toy_run(tmp_path, base="2-third", earlier_base="1" * 32)


def test_unknown_and_existing_names(tmp_path):
    run, _ = toy_run(tmp_path, "first")
    with pytest.raises(ValueError, match="'second' is not known .* known runs: first"):
        Run.open(tmp_path, "second", run.settings, ToyModel())
    with pytest.raises(ValueError, match="'first' exists already"):
        Run.create(tmp_path, "first", run.settings, ToyModel())
    assert known_runs(tmp_path) == ["first"]


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "a/../b",
        "../x",
        "a/b",
        "a\\b",
        "",
        " x",
        "x ",
        "x.",
        ".hidden",
        "C:x",
        "a\0b",
        "x" * 101,
        "CON",
        "nul.txt",
        "Com1",
    ],
)
def test_names_stay_inside_their_folder(name):
    with pytest.raises(ValueError, match="is not allowed"):
        check_name(name)


def test_an_update_that_fails_leaves_the_last_state(tmp_path, monkeypatch):
    run, policy = toy_run(tmp_path)
    train(run, policy, 1)
    before, state = run.adapter.state_dict(), (run.folder / "state.safetensors").read_bytes()

    def fail(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        train(run, policy, 1)
    assert run.iteration == 1
    assert all(torch.equal(before[name], value) for name, value in run.adapter.state_dict().items())
    assert (run.folder / "state.safetensors").read_bytes() == state
    assert sorted(path.name for path in run.folder.iterdir()) == ["metrics.jsonl", "state.safetensors"]


def test_a_crash_between_state_and_log_is_mended(tmp_path):
    run, policy = toy_run(tmp_path)
    train(run, policy, 2)
    log = run.folder / "metrics.jsonl"
    lines = log.read_text().splitlines()
    log.write_text(lines[0] + "\n")
    again, _ = toy_run(tmp_path)
    assert [json.dumps(entry) for entry in again.log()] == [json.dumps(json.loads(line)) for line in lines]


def test_half_a_line_at_the_end_of_the_log_is_mended(tmp_path):
    run, policy = toy_run(tmp_path)
    train(run, policy, 2)
    log = run.folder / "metrics.jsonl"
    whole = log.read_text()
    log.write_text(whole[: len(whole) - 40])
    again, policy = toy_run(tmp_path)
    train(again, policy, 1)
    assert log.read_text().startswith(whole)
    assert [entry["iteration"] for entry in again.log()] == [0, 1, 2]


def test_a_damaged_state_names_the_file(tmp_path):
    run, _ = toy_run(tmp_path)
    state = run.folder / "state.safetensors"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(ValueError, match="state.safetensors is not a complete safetensors file"):
        toy_run(tmp_path)


def test_settings_are_checked():
    for bad in ({"rank": 0}, {"alpha": 0}, {"learning_rate": 0}, {"optimizer": "magic"}, {"ranks": 4}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            RunSettings(**{"base": "x", **bad})


def test_another_state_file_of_the_same_count_is_noticed(tmp_path):
    run, policy = toy_run(tmp_path, "one")
    other, other_policy = toy_run(tmp_path, "two", learning_rate=1e-3)
    train(run, policy, 2)
    train(other, other_policy, 2)
    state = other.adapter.state_dict()
    (other.folder / "state.safetensors").replace(run.folder / "state.safetensors")
    run.follow_disk()
    assert all(torch.equal(state[name], value) for name, value in run.adapter.state_dict().items())
    train(run, policy, 1)
    run.follow_disk()
    assert run.iteration == 3


def test_a_run_whose_folder_is_gone_says_so_and_trains_nothing(tmp_path):
    run, policy = toy_run(tmp_path)
    train(run, policy, 1)
    before = run.adapter.state_dict()
    shutil.rmtree(run.folder)
    with pytest.raises(ValueError, match="'toy': its folder .* is gone"):
        train(run, policy, 1)
    assert all(torch.equal(before[name], value) for name, value in run.adapter.state_dict().items())
    assert not run.folder.exists()


@pytest.mark.parametrize("half", ["", '{"iteration": 2, "rew'])
def test_lines_of_a_log_stay_apart_whatever_lies_between(tmp_path, caplog, half):
    path = tmp_path / "log.jsonl"
    path.write_text(f'["a\u2028b"]\n\nodd\n{half}', encoding="utf-8")
    append_line(path, '["c"]')
    assert read_lines(path, json.loads) == [["a\u2028b"], ["c"]]
    assert f"{path}, line 3 is left out" in caplog.text
