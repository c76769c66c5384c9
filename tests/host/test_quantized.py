"""Quantized checkpoints, in every form that ComfyUI reads: their gradient is that of the numbers they stand for."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import quantized
from graphs import training
from quantized import FORMS
from runs import NEWER
from safetensors.numpy import load_file

from tools.client import ExecutionError, Graph
from tools.host import comfyui_folder

VERSION = (comfyui_folder() / "comfyui_version.py").read_text()
HERE = [name for name, form in FORMS.items() if any(f'"{host}' in VERSION for host in form.hosts)]
IN_FEW_BITS = [name for name in HERE if FORMS[name].likeness_in_few_bits is not None]
A_FEW = [name for name in HERE if name in ("scaled fp8", "comfy_quant fp8 in the header", "nvfp4", "int8")]
LAYERS = 21
"""Attention and MLP of the included model."""


def rest_slow(names, ordinary=A_FEW):
    """Parameters of which only the ordinary ones run without ``-m slow``: every one takes seconds."""
    return [pytest.param(name, marks=() if name in ordinary else pytest.mark.slow) for name in names]


class Trained:
    """One update of a new run on a checkpoint, on rewards out of the air, and what it left on disk."""

    def __init__(self, comfy, run_name, checkpoint, form=None, loader="UNETLoader", **settings):
        graph, dtype, said = Graph(), FORMS[form].weight_dtype if form else "default", len(comfy.log())
        nodes = training(graph, run_name)
        model = graph.add(loader, unet_name=checkpoint, weight_dtype=dtype)
        before = graph.add("TestInspect", model=model[0])
        nodes.set("policy", model=before[0], **settings)
        numbers = graph.add("TestRewards", count=8)
        rewarded = graph.add("TreeGRPORewardFromFloats", tree=nodes.sampler[0], rewards=numbers[0])
        nodes.set("advantage", tree=rewarded[0])
        after = graph.add("TestInspect", model=model[0], after=nodes.update[0])
        shown = comfy.run(graph)
        assert shown[before]["hash"] == shown[after]["hash"], "base weights were changed"
        folder = comfy.output / "treegrpo" / run_name
        self.state = load_file(folder / "state.safetensors")
        self.metrics = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        self.said = comfy.log()[said:]
        assert self.metrics["log_ratio_max"] < 1e-6, "the update does not see what the rollout saw"

    def gradient(self):
        """All of it, of the parts that are zero at the start: the others' is zero."""
        return np.concatenate(
            [value.ravel().astype(np.float64) for name, value in sorted(self.state.items()) if name.endswith("exp_avg")]
        )

    def moved(self):
        return [
            name for name in self.state if name.startswith("adapter.") and "lora_B" in name and self.state[name].any()
        ]


def cosine(one, other):
    return one @ other / np.sqrt((one @ one) * (other @ other))


def likeness(one, other):
    return cosine(one.gradient(), other.gradient())


def checkpoint(comfy, form):
    return quantized.write(comfy.base / "models" / "diffusion_models", form)


@pytest.mark.parametrize("form", rest_slow(HERE))
def test_the_gradient_is_that_of_the_numbers(comfy, run_name, form):
    packed, plain = checkpoint(comfy, form)
    trained = Trained(comfy, run_name, packed, form)
    expected = Trained(comfy, f"{run_name} plain", plain)
    assert len(trained.moved()) == LAYERS
    assert likeness(trained, expected) > FORMS[form].likeness
    megabytes = (comfy.base / "models" / "diffusion_models" / packed).stat().st_size / 1e6
    assert float(re.search(r"memory: model ([\d.]+) MB", trained.said)[1]) == pytest.approx(megabytes, rel=0.03)


@pytest.mark.parametrize("form", rest_slow(IN_FEW_BITS))
def test_the_gradient_is_that_of_the_numbers_where_hardware_multiplies_them(comfy, run_name, form):
    """Core rounds the inputs of layers to few bits then: of what the policy is, not of how its gradient is taken."""
    packed, plain = checkpoint(comfy, form)
    trained = Trained(comfy, run_name, packed, form, "TestFewBits")
    expected = Trained(comfy, f"{run_name} plain", plain)
    assert len(trained.moved()) == LAYERS
    assert likeness(trained, expected) > FORMS[form].likeness_in_few_bits


@pytest.mark.parametrize("form", rest_slow(A_FEW, ("scaled fp8", "nvfp4")))
@pytest.mark.parametrize("kind", ["rslora", "loha", "lokr"])
def test_every_kind_of_adapter_trains(comfy, run_name, form, kind):
    packed, plain = checkpoint(comfy, form)
    trained, expected = (
        Trained(comfy, f"{run_name} {name}", name, *more, adapter=kind)
        for name, more in ((packed, (form,)), (plain, ()))
    )
    assert likeness(trained, expected) > FORMS[form].likeness


@pytest.mark.parametrize("form", A_FEW)
def test_dora_is_refused(comfy, run_name, form):
    packed, _ = checkpoint(comfy, form)
    with pytest.raises(
        ExecutionError, match="dora works with the size of the weights, and those of layer .* quantized"
    ):
        Trained(comfy, run_name, packed, form, adapter="dora")


@pytest.mark.parametrize("form", rest_slow(quantized.GGUF, ("Q8_0",)))
@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_gguf_as_comfyui_gguf_keeps_it_trains(comfy, run_name, form, kind):
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    packed, plain = quantized.write_gguf(comfy.base / "models" / "diffusion_models", form)
    trained = Trained(comfy, run_name, packed, loader="TestGGUF", adapter=kind)
    expected = Trained(comfy, f"{run_name} plain", plain, adapter=kind)
    assert likeness(trained, expected) > 0.99999
    with pytest.raises(ExecutionError, match="dora works with the size of the weights"):
        Trained(comfy, f"{run_name} dora", packed, loader="TestGGUF", adapter="dora")


@pytest.mark.parametrize("form", rest_slow(HERE))
def test_a_run_goes_on_and_its_file_loads(comfy, run_name, form):
    """The file read anew is the same model to the run, and core's loader finds all quantized layers.

    Core rounds weights again when it adds a LoRA to them: with four bits, little of the effect is left. Newer cores
    have a loader that adds it to the layers' outputs instead.
    """
    packed, _ = checkpoint(comfy, form)
    Trained(comfy, run_name, packed, form, learning_rate=1e-2)
    shutil.copy(
        comfy.base / "models" / "diffusion_models" / packed, comfy.base / "models/diffusion_models/again.safetensors"
    )
    graph = Graph()
    nodes = training(graph, run_name)
    model = graph.add("UNETLoader", unet_name="again.safetensors", weight_dtype=FORMS[form].weight_dtype)
    nodes.set("policy", model=model[0], if_run_exists="continue")
    graph.add("TreeGRPOExport", policy=nodes.policy[0], file_name=run_name)
    del graph[nodes.update.id]
    comfy.run(graph)

    said, graph = len(comfy.log()), Graph()
    nodes = training(graph, run_name)
    model = graph.add("UNETLoader", unet_name=packed, weight_dtype=FORMS[form].weight_dtype)
    lora = graph.add("LoraLoaderModelOnly", model=model[0], lora_name=f"{run_name}.safetensors", strength_model=1.0)
    patched = graph.add("TestInspect", model=lora[0])
    nodes.set("policy", model=model[0], if_run_exists="continue")
    bypass = "LoraLoaderBypassModelOnly" if NEWER in VERSION else "LoraLoaderModelOnly"
    beside = graph.add(bypass, model=model[0], lora_name=f"{run_name}.safetensors", strength_model=1.0)
    shows = [latent(graph, nodes, link) for link in (nodes.policy[1], lora[0], beside[0], model[0])]
    del graph[nodes.update.id]
    shown = comfy.run(graph)
    assert shown[patched]["patched"] == [LAYERS]
    assert "lora key not loaded" not in comfy.log()[said:]
    live, merged, added, base = (np.array(shown[node]["values"]) for node in shows)
    assert cosine(live - base, merged - base) > FORMS[form].file_likeness
    if NEWER in VERSION:
        assert cosine(live - base, added - base) > 0.9999


def latent(graph, nodes, model):
    """Shows the values of an ordinary latent of ``model`` (a MODEL link)."""
    text = graph.add("CLIPTextEncode", clip=nodes.model[1], text="fox on blue")
    samples = graph.add(
        "KSampler",
        model=model,
        seed=5,
        steps=3,
        cfg=1.0,
        sampler_name="euler",
        scheduler="simple",
        positive=text[0],
        negative=text[0],
        latent_image=nodes.latent[0],
        denoise=1.0,
    )
    return graph.add("TestValues", latent=samples[0])
