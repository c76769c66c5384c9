"""Training inside a real ComfyUI, through its real executor."""

from __future__ import annotations

import json
import shutil
import time

import numpy as np
import pytest
from graphs import PROMPTS, ordinary_image, training
from safetensors.numpy import load_file

from tools.client import Graph, InterruptedRunError


def log_of(comfy, run_name):
    path = comfy.output / "treegrpo" / run_name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def state_of(comfy, run_name):
    return load_file(comfy.output / "treegrpo" / run_name / "state.safetensors")


def base_images(comfy):
    """Ordinary pictures of the bundled model, computed anew, in a graph that knows nothing of training."""
    comfy.free()
    graph = Graph()
    tiny = graph.add("TreeGRPOTinyModel")
    shown = ordinary_image(graph, tiny, tiny[0])
    return comfy.images(comfy.run(graph)[shown])


def test_a_second_queue_trains_the_next_step(comfy, graph, run_name):
    training(graph, run_name)
    for done in (1, 2, 3):
        comfy.run(graph)
        assert [entry["iteration"] for entry in log_of(comfy, run_name)] == list(range(done))


def test_every_update_counts_its_forwards_and_starts_at_ratio_one(comfy, graph, run_name):
    training(graph, run_name, iterations=2).set("sampler", depth=2, branching=3, start=1)
    comfy.run(graph)
    entries = log_of(comfy, run_name)
    assert len(entries) == 2
    for entry in entries:
        assert entry["nfe_sample"] == 2 * (1 + 1 + 3 + 9 * 3)
        assert entry["nfe_train"] == 2 * (1 + 3)
        assert entry["log_ratio_max"] < 1e-4
        assert entry["grad_norm"] > 0
        assert entry["reward_std"] > 0


def test_a_loop_runs_its_updates_in_one_queue_and_goes_on_in_the_next(comfy, graph, run_name):
    training(graph, run_name, iterations=3)
    comfy.run(graph)
    assert len(log_of(comfy, run_name)) == 3
    comfy.run(graph)
    assert [entry["iteration"] for entry in log_of(comfy, run_name)] == list(range(6))


def test_a_loop_equals_as_many_queues(comfy, run_name):
    looped, queued = f"{run_name} looped", f"{run_name} queued"
    graph = Graph()
    training(graph, looped, iterations=3)
    comfy.run(graph)
    graph = Graph()
    training(graph, queued)
    for _ in range(3):
        comfy.run(graph)
    a, b = state_of(comfy, looped), state_of(comfy, queued)
    assert a.keys() == b.keys()
    assert all(np.array_equal(a[name], b[name]) for name in a)


def test_a_run_survives_unloading_everything(comfy, run_name):
    """The same as without: the adapter moves to the model that is loaded anew."""
    kept, freed = f"{run_name} kept", f"{run_name} freed"
    for name, pause in ((kept, False), (freed, True)):
        graph = Graph()
        training(graph, name)
        comfy.run(graph)
        if pause:
            comfy.free()
        comfy.run(graph)
    a, b = state_of(comfy, kept), state_of(comfy, freed)
    assert all(np.array_equal(a[name], b[name]) for name in a)


def test_an_ordinary_picture_is_bit_identical_before_and_after_training(comfy, graph, run_name):
    before = base_images(comfy)
    nodes = training(graph, run_name, iterations=2)
    beside = ordinary_image(graph, nodes.model, nodes.model[0])
    live = ordinary_image(graph, nodes.model, nodes.policy[1])
    outputs = comfy.run(graph)
    assert np.array_equal(comfy.images(outputs[beside]), before), "another branch of the same graph sees the adapter"
    again = comfy.run(graph)
    assert not np.array_equal(comfy.images(again[live]), before), "the policy's own model shows what was learned"
    assert np.array_equal(base_images(comfy), before)


def test_base_weights_are_never_changed(comfy, graph, run_name):
    """Compared in full, as core's own Save Model writes them."""

    def weights(name):
        saving = Graph()
        tiny = saving.add("TreeGRPOTinyModel")
        saving.add("ModelSave", model=tiny[0], filename_prefix=name)
        comfy.run(saving)
        return load_file(max(comfy.output.glob(f"{name}*.safetensors")))

    before = weights("before")
    training(graph, run_name, iterations=2)
    comfy.run(graph)
    after = weights("after")
    assert before.keys() == after.keys()
    assert len(before) > 50
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_guidance_with_a_negative_prompt_trains_through_both_passes(comfy, graph, run_name):
    nodes = training(graph, run_name)
    negative = graph.add("CLIPTextEncode", clip=nodes.model[1], text="")
    graph[nodes.guider.id] = {
        "class_type": "CFGGuider",
        "inputs": {"model": nodes.policy[1], "positive": nodes.encode[0], "negative": negative[0], "cfg": 2.0},
    }
    comfy.run(graph)
    (entry,) = log_of(comfy, run_name)
    assert entry["log_ratio_max"] < 1e-4
    assert entry["grad_norm"] > 0


def test_kl_to_the_base_model_is_zero_at_first_and_then_positive(comfy, graph, run_name):
    training(graph, run_name, iterations=2).set("update", kl=0.1)
    comfy.run(graph)
    first, second = log_of(comfy, run_name)
    assert first["kl"] == 0
    assert second["kl"] > 0


def test_the_settings_of_the_update_reach_it(comfy, graph, run_name):
    """Two passes over one of two steps, a half of its parents; and the log knows what each step was worth."""
    nodes = training(graph, run_name, iterations=2).set("sampler", window="adaptive")
    nodes.set("advantage", normalisation="siblings", train_steps=1, train_share=0.5)
    nodes.set("update", passes=2, ratio_norm=True, clip_high=1e-3, kl=0.1, kl_reference="average")
    comfy.run(graph)
    log = comfy.output / "treegrpo" / run_name / "metrics.jsonl"
    first, second = (json.loads(line) for line in log.read_text().splitlines())
    assert first["nfe_train"] == second["nfe_train"] == 2 * 2
    assert len(first["step_spread"]) == len(first["window"]) == 2
    assert 1 <= first["effective_leaves"] <= 4
    assert second["kl"] > 0
    assert second["log_ratio_max"] > 0


def test_one_prompt_through_plain_text_encode(comfy, graph, run_name):
    nodes = training(graph, run_name)
    single = graph.add("CLIPTextEncode", clip=nodes.model[1], text="fox on blue")
    nodes.set("guider", conditioning=single[0]).set("sampler", prompts="fox on blue")
    comfy.run(graph)
    assert log_of(comfy, run_name)[0]["nfe_train"] == 1 + 2


def test_prompts_in_one_batch_equal_prompts_one_by_one(comfy, graph):
    tiny = graph.add("TreeGRPOTinyModel")
    encode = graph.add("TreeGRPOEncode", clip=tiny[1], prompts="\n".join(PROMPTS[:1]))
    together = graph.add("TreeGRPOPrompts", text="\n".join(PROMPTS), prompts_per_step=2, seed=0)
    graph.inputs(encode)["prompts"] = together[0]
    noise, latent = (
        graph.add("RandomNoise", noise_seed=1),
        graph.add("EmptySD3LatentImage", width=64, height=64, batch_size=2),
    )
    sampler = graph.add("KSamplerSelect", sampler_name="euler")
    sigmas = graph.add("BasicScheduler", model=tiny[0], scheduler="simple", steps=6, denoise=1.0)

    def shown(conditioning):
        guider = graph.add("BasicGuider", model=tiny[0], conditioning=conditioning)
        samples = graph.add(
            "SamplerCustomAdvanced",
            noise=noise[0],
            guider=guider[0],
            sampler=sampler[0],
            sigmas=sigmas[0],
            latent_image=latent[0],
        )
        images = graph.add("VAEDecode", samples=samples[0], vae=tiny[2])
        return graph.add("PreviewImage", images=images[0])

    batch = shown(encode[0])
    singles = {prompt: shown(graph.add("CLIPTextEncode", clip=tiny[1], text=prompt)[0]) for prompt in PROMPTS}
    outputs = comfy.run(graph)
    pictures = comfy.images(outputs[batch]).astype(int)
    alone = [comfy.images(outputs[singles[prompt]]).astype(int) for prompt in PROMPTS]
    order = [0, 1] if np.abs(pictures[0] - alone[0][0]).max() <= 1 else [1, 0]
    for row, prompt in enumerate(order):
        assert np.abs(pictures[row] - alone[prompt][row]).max() <= 1


def test_rewards_from_floats_train_like_the_reward_itself(comfy, run_name):
    direct, floats = f"{run_name} direct", f"{run_name} floats"
    graph = Graph()
    training(graph, direct)
    comfy.run(graph)
    graph = Graph()
    nodes = training(graph, floats)
    given = graph.add("TreeGRPORewardFromFloats", tree=nodes.sampler[0], rewards=nodes.scorer[2])
    nodes.set("advantage", tree=given[0])
    comfy.run(graph)
    a, b = state_of(comfy, direct), state_of(comfy, floats)
    assert all(np.allclose(a[name], b[name], atol=1e-6) for name in a)


def test_evaluation_rewards_are_logged_and_not_trained_on(comfy, run_name):
    alone, watched = f"{run_name} alone", f"{run_name} watched"
    graph = Graph()
    training(graph, alone)
    comfy.run(graph)
    graph = Graph()
    nodes = training(graph, watched)
    extra = graph.add("TreeGRPORewardModel", name="background_match", weight=0.0, previous=nodes.reward[0])
    nodes.set("scorer", reward=extra[0])
    comfy.run(graph)
    a, b = state_of(comfy, alone), state_of(comfy, watched)
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert set(log_of(comfy, watched)[0]["rewards"]) == {"jpeg", "background_match"}


@pytest.mark.parametrize("preset", ["Flow-GRPO", "DanceGRPO", "MixGRPO", "BranchGRPO", "Flow-GRPO-Fast", "row"])
def test_every_method_trains_through_the_same_nodes(comfy, graph, run_name, preset):
    nodes = training(graph, run_name)
    nodes.set("sigmas", steps=10)
    plan = graph.add(
        "TreeGRPOPlan", preset=preset, row="0 0 2 1 2 0 0 0 0 0", roots=2, steps=10, group=4, window=2, start=1
    )
    nodes.set("sampler", plan=plan[0])
    comfy.run(graph)
    (entry,) = log_of(comfy, run_name)
    assert entry["grad_norm"] > 0
    assert entry["log_ratio_max"] < 1e-4


def test_interrupt_stops_within_one_forward_and_leaves_all_as_it_was(comfy, graph, run_name):
    """1 row per forward makes the rollout thousands of forwards long; the stop must not wait for them."""
    before = base_images(comfy)
    nodes = training(graph, run_name, iterations=50)
    single = graph.add("CLIPTextEncode", clip=nodes.model[1], text="fox on blue")
    nodes.set("guider", conditioning=single[0])
    nodes.set("sampler", prompts="fox on blue", branching=6, depth=3, max_batch=1)
    nodes.set("sigmas", steps=12)
    started = time.monotonic()
    run = comfy.submit(graph)
    folder = comfy.output / "treegrpo" / run_name
    while not (folder / "state.safetensors").exists():
        assert time.monotonic() - started < 120
        time.sleep(0.05)
    time.sleep(2)
    state = (folder / "state.safetensors").read_bytes()
    comfy.interrupt(run)
    asked = time.monotonic()
    with pytest.raises(InterruptedRunError):
        comfy.wait(run)
    assert time.monotonic() - asked < 3, "about 1,800 forwards were still to come"
    assert (folder / "state.safetensors").read_bytes() == state
    assert np.array_equal(base_images(comfy), before)
    nodes.set("start", iterations=1).set("sampler", branching=2, max_batch=64)
    comfy.run(graph)
    assert len(log_of(comfy, run_name)) == 1


def test_a_loop_stops_after_its_minutes(comfy, graph, run_name):
    training(graph, run_name, iterations=1000).set("start", max_minutes=0.02)
    comfy.run(graph)
    assert 1 <= len(log_of(comfy, run_name)) < 1000


def test_a_deleted_folder_starts_over_under_the_same_name(comfy, graph, run_name):
    training(graph, run_name, iterations=2)
    comfy.run(graph)
    shutil.rmtree(comfy.output / "treegrpo" / run_name)
    comfy.run(graph)
    assert [entry["iteration"] for entry in log_of(comfy, run_name)] == [0, 1]


def test_rewards_read_prompts_without_weights(comfy, run_name):
    rewards = []
    for index, prompt in enumerate(("fox on blue", "(fox:1.0) on blue")):
        graph = Graph()
        nodes = training(graph, f"{run_name} {index}").set("reward", name="background_match")
        single = graph.add("CLIPTextEncode", clip=nodes.model[1], text=prompt)
        nodes.set("guider", conditioning=single[0]).set("sampler", prompts=prompt)
        comfy.run(graph)
        rewards.append(log_of(comfy, f"{run_name} {index}")[0]["reward_mean"])
    assert rewards[0] == rewards[1]
