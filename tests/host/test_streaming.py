"""Weights that only pass through, and code that works in place: the gradient is that of a model that does neither."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from graphs import training
from random_graphs import random_training
from safetensors.numpy import load_file

from tools.client import Graph
from tools.host import ROOT
from treegrpo_core.architectures import ARCHITECTURES, architecture_named

KINDS = ("lora", "dora", "loha", "lokr")
SUMS_IN_ANOTHER_ORDER = ("Z-Image", "Lumina 2")
"""Their RMSNorms are sums of several uses of the input, which are added up before they reach the rest."""
FAMILIES = [
    pytest.param(entry, id=entry.name, marks=() if entry.name in ("SD1.5", "SD3", "Flux") else pytest.mark.slow)
    for entry in ARCHITECTURES
]


def trained(comfy, run_name, build):
    """State and first metrics, after one Queue, of the run whose graph ``build(graph, run_name)`` makes."""
    graph = Graph()
    build(graph, run_name)
    comfy.run(graph)
    folder = comfy.output / "treegrpo" / run_name
    return load_file(folder / "state.safetensors"), json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not np.array_equal(one[name], other[name])] == []


@pytest.mark.parametrize("entry", FAMILIES)
def test_a_streamed_model_trains_as_one_that_fits(comfy, run_name, entry):
    """The same weights, all of them, half of them and none of them passing through one buffer."""

    def streamed(share):
        def build(graph, name):
            nodes = random_training(graph, name, entry)
            model = graph.add("TestStreamed", model=nodes.before[0], share=share)
            nodes.set("policy", model=model[0]).set("update", passes=2, kl=0.1)

        return trained(comfy, f"{run_name} {share}", build)

    resident, metrics = streamed(0.0)
    assert metrics["grad_norm"] > 0
    for share in (0.5,) if entry.name != "SD3" else (0.5, 1.0):
        state, again = streamed(share)
        assert again["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-6)
        if entry.name not in SUMS_IN_ANOTHER_ORDER:
            assert_same(state, resident)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_kind_of_adapter_trains_on_streamed_weights(comfy, run_name, kind, checkpointing):
    def streamed(share):
        def build(graph, name):
            nodes = random_training(graph, name, architecture_named("SD3"))
            model = graph.add("TestStreamed", model=nodes.before[0], share=share)
            nodes.set("policy", model=model[0], adapter=kind).set("update", gradient_checkpointing=checkpointing)

        return trained(comfy, f"{run_name} {share}", build)

    assert_same(streamed(1.0)[0], streamed(0.0)[0])


@pytest.mark.parametrize("below", [0.0, 0.55, 0.9, 2.0])
def test_a_patch_that_works_in_place_at_some_steps_trains_as_one_that_never_does(comfy, run_name, below):
    """Found at the first backward, at a later one, or not at all: no parent is trained twice."""

    def patched(below):
        def build(graph, name):
            nodes = training(graph, name)
            model = graph.add("TestLateInPlace", model=nodes.policy[1], below=below)
            nodes.set("guider", model=model[0])

        return trained(comfy, f"{run_name} {below}", build)

    state, metrics = patched(below)
    plain, expected = patched(-1.0)
    assert metrics["nfe_train"] == expected["nfe_train"]
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert metrics["replay_noise"] == pytest.approx(expected["replay_noise"], abs=1e-7)
    for name in plain:
        np.testing.assert_allclose(state[name], plain[name], rtol=1e-4, atol=1e-7, err_msg=name)


def test_a_checkpoint_in_another_type_than_it_is_computed_in_keeps_no_copies(comfy, run_name):
    """fp8 weights are cast for each call: the estimate's activations must not hold them."""
    folder = comfy.base / "models" / "diffusion_models"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / "assets" / "denoiser.safetensors", folder / "tiny.safetensors")
    sizes = []
    for dtype in ("default", "fp8_e4m3fn"):
        said = len(comfy.log())

        def build(graph, name, dtype=dtype):
            nodes = training(graph, name)
            unet = graph.add("UNETLoader", unet_name="tiny.safetensors", weight_dtype=dtype)
            nodes.set("policy", model=unet[0])

        trained(comfy, f"{run_name} {dtype}", build)
        (line,) = [line for line in comfy.log()[said:].splitlines() if "memory: model" in line]
        sizes.append(float(line.split("per node in the update ")[1].split(" MB")[0]))
    plain, cast = sizes
    assert cast < 1.2 * plain
