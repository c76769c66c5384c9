"""Settings that save memory change nothing else, and base weights stay as small as they were loaded."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from graphs import ordinary_image, training
from safetensors.numpy import load_file

from tools.client import Graph
from tools.host import ROOT


def state_of(comfy, run_name):
    return load_file(comfy.output / "treegrpo" / run_name / "state.safetensors")


@pytest.mark.parametrize(("node", "setting"), [("update", "gradient_checkpointing"), ("sampler", "store_on_cpu")])
def test_saving_memory_gives_the_same_adapter(comfy, run_name, node, setting):
    states = []
    for on in (False, True):
        graph, name = Graph(), f"{run_name} {on}"
        training(graph, name, iterations=2).set(node, **{setting: on})
        comfy.run(graph)
        states.append(state_of(comfy, name))
    plain, saving = states
    assert plain.keys() == saving.keys()
    assert all(np.array_equal(plain[key], saving[key]) for key in plain)


def test_a_run_begins_with_an_estimate_of_its_memory(comfy, graph, run_name):
    training(graph, run_name)
    comfy.run(graph)
    comfy.run(graph)
    lines = [line for line in comfy.log().splitlines() if f"TreeGRPO: run {run_name}, memory: model 15." in line]
    assert len(lines) == 1, "once, before the first update"
    assert "leaves room for" in lines[0]


def test_only_runs_that_are_used_are_kept(comfy, run_name):
    """The last one of a loaded model; after /free, which drops the model, none."""
    for number in range(3):
        graph = Graph()
        nodes = training(graph, f"{run_name} {number}")
        count = graph.add("TestCount", classes="Run Adapter AdamW", after=nodes.update[3])
        assert comfy.run(graph)[count]["alive"] == [1, 1, 1]
    comfy.free()
    graph = Graph()
    count = graph.add("TestCount", classes="Run Adapter AdamW OpenAISignatureMMDITWrapper")
    assert comfy.run(graph)[count]["alive"] == [0, 0, 0, 0]


def test_a_run_is_one_for_all_nodes_of_a_graph(comfy, graph, run_name):
    nodes = training(graph, run_name)
    again = graph.add("TreeGRPOPolicy", **{**graph.inputs(nodes.policy), "model": nodes.model[0], "seed": 0})
    nodes.set("update", policy=again[0])
    count = graph.add("TestCount", classes="Run", after=nodes.update[3])
    assert comfy.run(graph)[count]["alive"] == [1]


def test_a_node_after_another_update_renders_as_before(comfy, graph, run_name):
    """The update takes VAE and text encoder off the device; they come back by themselves."""
    nodes = training(graph, run_name)
    shown = ordinary_image(graph, nodes.model, nodes.model[0])
    before = comfy.images(comfy.run(graph)[shown])
    again = Graph()
    nodes = training(again, run_name)
    shown = ordinary_image(again, nodes.model, nodes.model[0])
    assert np.array_equal(comfy.images(comfy.run(again)[shown]), before)


def fp8_model(comfy, graph):
    """The bundled model's denoiser, loaded by core's own loader with its weights in fp8."""
    folder = comfy.base / "models" / "diffusion_models"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / "assets" / "denoiser.safetensors", folder / "tiny.safetensors")
    return graph.add("UNETLoader", unet_name="tiny.safetensors", weight_dtype="fp8_e4m3fn")


def test_weights_in_fp8_are_trained_upon_and_stay_as_they_were(comfy, graph, run_name):
    nodes = training(graph, run_name, iterations=2)
    model = fp8_model(comfy, graph)
    nodes.set("policy", model=model[0], learning_rate=5e-3)
    base = ordinary_image(graph, nodes.model, model[0])
    before = comfy.images(comfy.run(graph)[base])
    state = state_of(comfy, run_name)
    assert all(value.any() for key, value in state.items() if key.startswith("adapter."))

    comfy.free()
    looking = Graph()
    tiny, model = looking.add("TreeGRPOTinyModel"), fp8_model(comfy, looking)
    policy = looking.add("TreeGRPOPolicy", **{**graph.inputs(nodes.policy), "model": model[0]})
    base, live = (ordinary_image(looking, tiny, one) for one in (model[0], policy[1]))
    outputs = comfy.run(looking)
    assert np.array_equal(comfy.images(outputs[base]), before)
    assert not np.array_equal(comfy.images(outputs[live]), before)
