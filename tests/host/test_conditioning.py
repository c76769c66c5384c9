"""Whatever a user puts on conditioning or model takes part in rollout and update alike."""

from __future__ import annotations

import json

import numpy as np
import pytest
from random_graphs import random_training

from treegrpo_core.architectures import architecture_named

INGREDIENTS = {}


def ingredient(*families):
    """Register a function that adds one ingredient to a training graph of each of these families."""

    def register(add):
        INGREDIENTS.update({(add.__name__, family): add for family in families})
        return add

    return register


def another_prompt(nodes):
    """CONDITIONING of two other prompts."""
    model = {**nodes.graph.inputs(nodes.model), "seed": 10}
    return nodes.graph.add("TestRandomModel", **model)[1]


@ingredient("SD1.5", "SD3")
def a_negative_prompt(nodes):
    nodes.set("guider", negative=another_prompt(nodes))


@ingredient("SD1.5")
def a_controlnet(nodes):
    image = nodes.graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0x3060C0)
    applied = nodes.graph.add(
        "ControlNetApplyAdvanced",
        positive=nodes.model[1],
        negative=nodes.model[2],
        control_net=nodes.graph.add("TestControlNet", seed=7)[0],
        image=image[0],
        strength=1.0,
        start_percent=0.0,
        end_percent=1.0,
    )
    nodes.set("guider", positive=applied[0], negative=applied[1])


@ingredient("SD1.5", "SD3")
def an_area_prompt(nodes):
    right = nodes.graph.add(
        "ConditioningSetArea", conditioning=another_prompt(nodes), width=64, height=64, x=32, y=0, strength=1.0
    )
    both = nodes.graph.add("ConditioningCombine", conditioning_1=nodes.model[1], conditioning_2=right[0])
    nodes.set("guider", positive=both[0])


@ingredient("SD3", "Lumina 2")
def a_shift_before_the_policy(nodes):
    shifted = nodes.graph.add("ModelSamplingSD3", model=nodes.before[0], shift=9.0)
    nodes.set("policy", model=shifted[0])


@ingredient("SD3", "Wan")
def a_shift_after_the_policy(nodes):
    shifted = nodes.graph.add("ModelSamplingSD3", model=nodes.policy[1], shift=9.0)
    nodes.set("guider", model=shifted[0]).set("sigmas", model=shifted[0])


@ingredient("SD1.5", "SDXL")
def rescaled_guidance(nodes):
    nodes.set("guider", model=nodes.graph.add("RescaleCFG", model=nodes.policy[1], multiplier=0.7)[0])


@ingredient("SD1.5", "SDXL")
def an_attention_patch(nodes):
    nodes.set("guider", model=nodes.graph.add("TestAttentionPatch", model=nodes.policy[1])[0])


@ingredient("SD1.5", "Flux")
def a_lora_before_the_policy(nodes):
    nodes.set("policy", model=nodes.graph.add("TestLora", model=nodes.before[0])[0])


@ingredient("SD1.5", "Flux")
def a_lora_after_the_policy(nodes):
    nodes.set("guider", model=nodes.graph.add("TestLora", model=nodes.policy[1])[0])


@ingredient("SD3")
def a_guider_of_another_kind(nodes):
    dual = {"cond1": nodes.model[1], "cond2": another_prompt(nodes), "negative": nodes.model[2]}
    scales = {"cfg_conds": 2.0, "cfg_cond2_negative": 3.0, "style": "nested"}
    nodes.graph[nodes.guider.id] = {
        "class_type": "DualCFGGuider",
        "inputs": {"model": nodes.policy[1], **dual, **scales},
    }


def with_guider(nodes, kind, second_name):
    """A guider with a second model of other weights and other prompts."""
    other = nodes.graph.add("TestRandomModel", **{**nodes.graph.inputs(nodes.model), "seed": 10})
    inputs = {"model": nodes.policy[1], second_name: other[0], "positive": nodes.model[1], "negative": other[2]}
    nodes.graph[nodes.guider.id] = {"class_type": kind, "inputs": {**inputs, "cfg": 5.0}}


@ingredient("SD3", "SDXL")
def a_guider_with_a_second_model(nodes):
    with_guider(nodes, "TestSecondModelGuider", "second")


@ingredient("SD3", "SDXL")
def a_model_for_the_negative_prompt(nodes):
    with_guider(nodes, "DualModelGuider", "model_negative")


NEWER = {"a_model_for_the_negative_prompt": "DualModelGuider"}
"""Ingredients that need a node of newer cores."""


@ingredient("Flux", "Flux 2", "Qwen-Image")
def a_reference_latent(nodes):
    guider, latent = nodes.graph.inputs(nodes.guider), nodes.model[3]
    if "negative" in guider:  # Qwen-Image; its VAE encodes a picture as a film of one frame
        latent = nodes.graph.add("EmptyHunyuanLatentVideo", width=64, height=64, length=1, batch_size=1)[0]
    key = "positive" if "negative" in guider else "conditioning"
    referenced = nodes.graph.add("ReferenceLatent", conditioning=guider[key], latent=latent)
    nodes.set("guider", **{key: referenced[0]})


@pytest.mark.parametrize(("name", "family"), INGREDIENTS)
def test_it_takes_part_in_rollout_and_update(comfy, graph, run_name, name, family):
    if NEWER.get(name, "KSampler") not in comfy.object_info():
        pytest.skip(f"this ComfyUI has no {NEWER[name]}")
    nodes = random_training(graph, f"{run_name} without", architecture_named(family))
    without = comfy.run(graph.upstream(nodes.leaves))[nodes.leaves]["values"]
    INGREDIENTS[name, family](nodes.set("policy", run_name=run_name))
    values = comfy.run(graph)[nodes.leaves]["values"]
    assert len(values) == len(without)
    assert np.abs(np.subtract(values, without)).max() > 1e-2 * np.abs(without).max(), "the leaves do not depend on it"

    (metrics,) = (comfy.output / "treegrpo" / run_name / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(metrics)
    assert metrics["log_ratio_max"] < 1e-4
    assert metrics["grad_norm"] > 0
