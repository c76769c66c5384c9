"""Every model family of the table trains: core's own model class, reduced and random, through the real executor."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from random_graphs import PLAN, ordinary_latent, random_model, random_training, run_policy
from runs import families
from safetensors.numpy import load_file

from tools.client import Graph
from treegrpo_core.architectures import architecture_named
from treegrpo_core.rewards.jpeg import JpegReward
from treegrpo_core.transition import choose_kernel

WITHOUT_EFFECT = {"Qwen-Image": r"transformer_blocks\.1\.(attn\.(add_q_proj|to_add_out)|txt_mlp\..*)"}
"""Layers that feed only the text's last state, which the family's picture does not depend on: no gradient can come."""

HALF_PRECISION = [(entry, dtype) for dtype in ("bfloat16", "float16") for entry in families(dtype)]

MODEL_TYPES = {
    "SD1.5": "EPS",
    "SD2": "V_PREDICTION",
    "SDXL": "EPS",
    "SD3": "FLOW",
    "Flux": "FLUX",
    "Flux 2": "FLUX",
    "Qwen-Image": "FLUX",
    "Z-Image": "FLOW",
    "Lumina 2": "FLOW",
    "Wan": "FLOW",
}

every_family = pytest.mark.parametrize("entry", families("float32"), ids=lambda entry: entry.name)


def moved_layers(comfy, run_name):
    """Adapted layer -> whether its B has moved from zero, from the run's state on disk."""
    state = load_file(comfy.output / "treegrpo" / run_name / "state.safetensors")
    names = {name: re.fullmatch(r"adapter\.(.*)\.lora_B\.weight", name) for name in state}
    return {match[1]: bool(state[name].any()) for name, match in names.items() if match}


@every_family
def test_an_update_reaches_every_layer_of_the_family_and_its_file_loads(comfy, graph, run_name, entry):
    nodes = random_training(graph, run_name, entry)
    after = graph.add("TestInspect", model=nodes.model[0], after=nodes.update[0])
    graph.add("TreeGRPOExport", policy=nodes.update[0], file_name=run_name)
    shown = comfy.run(graph)

    (metrics,) = (comfy.output / "treegrpo" / run_name / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(metrics)
    assert metrics["log_ratio_max"] < 1e-4
    assert metrics["grad_norm"] > 0
    assert metrics["nfe_sample"] == 2 * PLAN.nfe_sample == 2 * (1 + 1 + 2 + 4)
    assert metrics["nfe_train"] == 2 * PLAN.nfe_train == 2 * (1 + 2)
    assert shown[after]["hash"] == shown[nodes.before]["hash"], "base weights were changed"

    moved = moved_layers(comfy, run_name)
    layers = [name for name in shown[nodes.model]["linear"] if re.fullmatch(f"{entry.attention}|{entry.mlp}", name)]
    assert sorted(moved) == sorted(layers), "the default targets are the family's attention and MLP"
    unmoved = sorted(name for name, yes in moved.items() if not yes)
    assert unmoved == [name for name in sorted(layers) if re.fullmatch(WITHOUT_EFFECT.get(entry.name, ""), name)]

    assert_file_equals_live_adapter(comfy, run_name, entry, layers)


def assert_file_equals_live_adapter(comfy, run_name, entry, layers):
    """In core's own LoRA loader, in a graph of its own."""
    said = len(comfy.log())
    graph = Graph()
    model = random_model(graph, entry)
    live = run_policy(graph, run_name, model[0])
    loaded = graph.add("LoraLoaderModelOnly", model=model[0], lora_name=f"{run_name}.safetensors", strength_model=1.0)
    patched = graph.add("TestInspect", model=loaded[0])
    shows = [ordinary_latent(graph, entry, link, model) for link in (live[1], loaded[0], model[0])]
    shown = comfy.run(graph)
    assert "lora key not loaded" not in comfy.log()[said:]
    assert shown[patched]["patched"] == [len(layers)]
    with_live, with_file, without = (np.array(shown[node]["values"]) for node in shows)
    scale = np.abs(with_live).max()
    assert np.abs(with_live - with_file).max() < 1e-4 * scale
    assert np.abs(with_live - without).max() > 1e-3 * scale, "the LoRA has no effect"


@every_family
def test_checkpointed_blocks_give_the_same_gradient(comfy, run_name, entry):
    states = []
    for on in (False, True):
        graph, name = Graph(), f"{run_name} {on}"
        random_training(graph, name, entry).set("update", gradient_checkpointing=on)
        comfy.run(graph)
        states.append(load_file(comfy.output / "treegrpo" / name / "state.safetensors"))
    gradients = [name for name in states[0] if name.endswith("exp_avg")]
    largest = max(np.abs(states[0][name]).max() for name in gradients)
    assert all(np.allclose(states[0][name], states[1][name], rtol=1e-3, atol=1e-5 * largest) for name in gradients)


@pytest.mark.parametrize(("entry", "dtype"), HALF_PRECISION, ids=lambda value: getattr(value, "name", value))
def test_half_precision_models_train_and_their_noise_is_measured(comfy, graph, run_name, entry, dtype):
    random_training(graph, run_name, entry).set("model", dtype=dtype).set("update", clip=1e-7, passes=2)
    comfy.run(graph)
    state = load_file(comfy.output / "treegrpo" / run_name / "state.safetensors")
    assert all(value.dtype == np.float32 for value in state.values())
    assert all(moved_layers(comfy, run_name).values())
    (line,) = (comfy.output / "treegrpo" / run_name / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["skipped"] == 0
    assert metrics["replay_noise"] < 1e-2
    assert metrics["clip"] == pytest.approx(max(1e-7, 3 * metrics["replay_noise"]))


@every_family
def test_the_table_names_the_sampling_that_core_has(comfy, graph, entry):
    """Core's type of model, also where it reads that in the weights (SD2), and so the kernel 'auto' stands for."""
    model = random_model(graph, entry)
    (kind,) = comfy.run(graph)[model]["model_type"]
    assert kind == MODEL_TYPES[entry.name]
    assert entry.kernel == choose_kernel("auto", "flow" if kind in ("FLOW", "FLUX") else "eps")


@every_family
def test_the_table_names_layers_that_core_has(comfy, graph, entry):
    model = random_model(graph, entry)
    shown = comfy.run(graph)[model]
    assert shown["classes"][0] in entry.host_classes
    attention = {name for name in shown["linear"] if re.fullmatch(entry.attention, name)}
    mlp = {name for name in shown["linear"] if re.fullmatch(entry.mlp, name)}
    assert attention
    assert mlp
    assert not attention & mlp
    assert any(re.fullmatch(entry.signature, name) for name in attention | mlp)


def test_a_film_is_scored_by_the_mean_of_its_frames(comfy, graph, run_name):
    nodes = random_training(graph, run_name, architecture_named("Wan"))
    vae, reward = graph.add("TestFilmVAE"), graph.add("TreeGRPORewardModel", name="jpeg", weight=1.0)
    scorer = graph.add("RewardScorer", tree=graph.inputs(nodes.leaves)["tree"], vae=vae[0], reward=reward[0])
    advantage = graph.add("TreeAdvantage", tree=scorer[0], estimator="softmax", normalisation="none")
    nodes.set("update", tree=advantage[0])
    preview = graph.add("TreeGRPOPreview", tree=advantage[0], prompt=1)
    pictures = graph.add("PreviewImage", images=scorer[1])
    shown = comfy.run(graph)
    frames = comfy.images(shown[pictures])
    assert len(frames) == 2 * PLAN.leaves * 3
    sizes = JpegReward().score(torch.from_numpy(frames).float() / 255, [""] * len(frames))
    (line,) = (comfy.output / "treegrpo" / run_name / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["rewards"]["jpeg"] == pytest.approx(float(sizes.mean()), rel=0.02)
    assert comfy.images(shown[preview]).std() > 0
