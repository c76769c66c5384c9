"""A model that core's MultiGPU CFG Split has spread over devices is refused by name, before anything is sampled."""

from __future__ import annotations

import pytest
from graphs import ordinary_image, training

from tools.client import ExecutionError

REFUSED = "MultiGPU CFG Split has spread it over several devices"


@pytest.fixture
def nodes(graph, run_name):
    return training(graph, run_name)


def spread(nodes, model):
    return nodes.graph.add("TestMultiGPU", model=model)[0]


def assert_refused(comfy, nodes, node_type):
    with pytest.raises(ExecutionError, match=REFUSED) as caught:
        comfy.run(nodes.graph)
    assert caught.value.node_type == node_type


@pytest.mark.parametrize("link", ["model", "guider"])
def test_by_the_tree_sampler(comfy, nodes, run_name, link):
    if link == "model":
        nodes.set("policy", model=spread(nodes, nodes.model[0]))
    else:
        nodes.set("guider", model=spread(nodes, nodes.policy[1]))
    assert_refused(comfy, nodes, "TreeSampler")
    assert not (comfy.output / "treegrpo" / run_name / "metrics.jsonl").exists()


def test_by_the_update(comfy, nodes, run_name):
    tree = nodes.graph.add("TestMultiGPUTree", tree=nodes.advantage[0])
    nodes.set("update", tree=tree[0])
    assert_refused(comfy, nodes, "LoRAUpdate")
    assert not (comfy.output / "treegrpo" / run_name / "metrics.jsonl").exists()


def shared_inputs(nodes, model):
    """Of the nodes that take a guider, on ``model``."""
    guider = nodes.graph.add("BasicGuider", model=model, conditioning=nodes.encode[0])
    links = {"sigmas": nodes.sigmas, "noise": nodes.noise, "latent": nodes.latent, "reward": nodes.reward}
    named = {name: node[0] for name, node in links.items()}
    return {**named, "guider": guider[0], "prompts": nodes.encode[1], "vae": nodes.model[2]}


def test_by_the_evaluation(comfy, nodes, run_name):
    inputs = shared_inputs(nodes, spread(nodes, nodes.policy[1]))
    nodes.graph.add("TreeGRPOEvaluate", policy=nodes.policy[0], every=1, **inputs)
    assert_refused(comfy, nodes, "TreeGRPOEvaluate")
    assert not (comfy.output / "treegrpo" / run_name / "evaluation.jsonl").exists()


def test_by_the_search_of_any_model(comfy, nodes):
    window = {"branching": 2, "depth": 1, "start": 1, "beam": 0, "roots": 1, "tail_steps": 0}
    inputs = shared_inputs(nodes, spread(nodes, nodes.model[0]))
    search = nodes.graph.add("TreeGRPOSearch", kernel="auto", eta=0.0, max_batch=8, count=1, **window, **inputs)
    nodes.graph.add("PreviewImage", images=nodes.graph.add("VAEDecode", samples=search[0], vae=nodes.model[2])[0])
    assert_refused(comfy, nodes, "TreeGRPOSearch")


def test_by_an_ordinary_sampler_too_if_the_model_carries_a_run(comfy, nodes):
    ordinary_image(nodes.graph, nodes.model, spread(nodes, nodes.policy[1]))
    assert_refused(comfy, nodes, "KSampler")
