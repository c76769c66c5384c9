"""Tree search in the server: any model, no policy, the best pictures first, and the model as it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from graphs import PROMPTS, ordinary_image, training
from random_graphs import random_guider, random_model

from tools.client import ExecutionError, Graph, Node
from treegrpo_core.architectures import architecture_named
from treegrpo_core.plan import tree_plan
from treegrpo_core.rewards import load_reward

SETTINGS: dict[str, Any] = {
    "branching": 3,
    "depth": 2,
    "start": 1,
    "beam": 2,
    "roots": 1,
    "kernel": "auto",
    "eta": 0.0,
    "tail_steps": 0,
    "max_batch": 64,
    "count": 1,
}


@dataclass
class Searching:
    """The nodes of a graph that searches, to change their inputs or to wire more to them."""

    graph: Graph
    model: Node
    sigmas: Node
    latent: Node
    reward: Node
    search: Node
    pictures: Node
    rewards: Node

    def set(self, node: str, **inputs: Any) -> Searching:
        """Change inputs of a node named by its field."""
        self.graph.inputs(getattr(self, node)).update(inputs)
        return self


def searching(graph: Graph, *, tiny: Node | None = None, model: Any = None, **inputs: Any) -> Searching:
    """Two prompts on the included model or on ``model``, searched for the JPEG reward; shows pictures and rewards."""
    tiny = tiny or graph.add("TreeGRPOTinyModel")
    model = model or tiny[0]
    listed = graph.add("TreeGRPOPrompts", text="\n".join(PROMPTS), prompts_per_step=2, seed=0)
    encode = graph.add("TreeGRPOEncode", clip=tiny[1], prompts=listed[0])
    guider = graph.add("BasicGuider", model=model, conditioning=encode[0])
    sigmas = graph.add("BasicScheduler", model=model, scheduler="simple", steps=6, denoise=1.0)
    latent = graph.add("EmptySD3LatentImage", width=64, height=64, batch_size=1)
    reward = graph.add("TreeGRPORewardModel", name="jpeg", weight=1.0)
    search = graph.add(
        "TreeGRPOSearch",
        guider=guider[0],
        sigmas=sigmas[0],
        noise=graph.add("RandomNoise", noise_seed=3)[0],
        latent=latent[0],
        prompts=encode[1],
        vae=tiny[2],
        reward=reward[0],
        **SETTINGS | inputs,
    )
    decoded = graph.add("VAEDecode", samples=search[0], vae=tiny[2])
    pictures = graph.add("PreviewImage", images=decoded[0])
    rewards = graph.add("PreviewAny", source=search[1])
    return Searching(graph, tiny, sigmas, latent, reward, search, pictures, rewards)


def found(comfy, nodes):
    """Pictures (N, H, W, 3) and rewards (N,)."""
    outputs = comfy.run(nodes.graph)
    return comfy.images(outputs[nodes.pictures]), np.array([float(text) for text in outputs[nodes.rewards]["text"]])


def test_the_best_pictures_come_out_with_their_rewards(comfy, graph):
    nodes = searching(graph, roots=2, beam=3, count=3).set("reward", name="colour", source="#ff0000")
    pictures, rewards = found(comfy, nodes)
    assert pictures.shape == (6, 64, 64, 3)
    assert (np.diff(rewards.reshape(2, 3)) <= 0).all()
    order = [prompt for prompt in PROMPTS for _ in range(3)]
    again = load_reward("colour", source="#ff0000").score(torch.from_numpy(pictures) / 255, order)
    assert np.allclose(again, rewards, atol=0.01)  # shown in 8 bits


def test_the_model_is_as_it_was_after_a_search(comfy, graph):
    nodes = searching(graph)
    first, then = (graph.add("TestInspect", model=nodes.model[0]) for _ in range(2))
    graph.inputs(then)["after"] = nodes.search[0]
    before, after = (ordinary_image(graph, nodes.model, one[0]) for one in (first, then))
    outputs = comfy.run(graph)
    assert np.array_equal(comfy.images(outputs[before]), comfy.images(outputs[after]))
    assert outputs[first] == outputs[then]


def test_a_beam_finds_more_than_as_many_forwards_without(comfy):
    beam = {"branching": 3, "depth": 2, "start": 3, "roots": 4, "beam": 2}
    plain = {"branching": 2, "depth": 1, "start": 4, "roots": 6, "beam": 0}
    assert tree_plan(6, **beam).nfe_sample <= tree_plan(6, **plain).nfe_sample
    assert found(comfy, searching(Graph(), **beam))[1].mean() > found(comfy, searching(Graph(), **plain))[1].mean()


def test_without_a_beam_it_is_the_best_leaf_of_the_tree(comfy, graph, run_name):
    """One sampler: the tree of a run's first update, searched on the run's own model."""
    nodes = training(graph, run_name)
    best = graph.add("TreeGRPOBestLeaf", tree=nodes.scorer[0], count=2)
    values = graph.add("TestValues", latent=best[0])
    search = graph.add(
        "TreeGRPOSearch",
        **{name: graph.inputs(nodes.sampler)[name] for name in ("guider", "sigmas", "noise", "latent", "prompts")},
        **{name: graph.inputs(nodes.sampler)[name] for name in ("branching", "depth", "start", "kernel", "eta")},
        vae=nodes.model[2],
        reward=nodes.reward[0],
        beam=0,
        roots=1,
        tail_steps=0,
        max_batch=64,
        count=2,
    )
    searched = graph.add("TestValues", latent=search[0])
    del graph[nodes.update.id]
    outputs = comfy.run(graph)
    assert outputs[searched]["values"] == outputs[values]["values"]


@pytest.mark.parametrize("trained", [False, True])
def test_rewards_may_take_the_model_off_the_device_amid_the_search(comfy, graph, run_name, trained):
    """With a run's adapter too: it goes out and comes back with the model."""
    tiny, model = None, None
    if trained:
        nodes = training(graph, run_name).set("policy", learning_rate=1e-2)
        comfy.run(graph)
        graph, inputs = Graph(), graph.inputs(nodes.policy)
        tiny = graph.add("TreeGRPOTinyModel")
        model = graph.add("TreeGRPOPolicy", **{**inputs, "model": tiny[0], "if_run_exists": "continue"})[1]
    nodes = searching(graph, tiny=tiny, model=model)
    expected, rewards = found(comfy, nodes)
    greedy = graph.add("TestGreedyVAE", vae=nodes.model[2])
    pictures, again = found(comfy, nodes.set("search", vae=greedy[0]))
    assert np.array_equal(pictures, expected)
    assert np.array_equal(again, rewards)
    if trained:
        base, _ = found(comfy, searching(Graph()))
        assert not np.array_equal(base, expected), "or the adapter could have been lost unseen"


@pytest.mark.parametrize("family", ["Wan", "SD1.5"])
def test_films_and_eps_models_with_a_controlnet_are_searched_too(comfy, family):
    """And the ControlNet comes back on the device with the model."""
    found = []
    for greedy in (False, True):
        graph, entry = Graph(), architecture_named(family)
        model = random_model(graph, entry)
        positive, negative, vae = model[1], model[2], graph.add("TestFilmVAE")
        if family == "SD1.5":
            image = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0x3060C0)
            net = graph.add("TestControlNet", seed=7)
            strength = {"strength": 1.0, "start_percent": 0.0, "end_percent": 1.0}
            both = {"positive": positive, "negative": negative, "control_net": net[0], "image": image[0]}
            applied = graph.add("ControlNetApplyAdvanced", **both, **strength)
            positive, negative = applied[0], applied[1]
        search = graph.add(
            "TreeGRPOSearch",
            guider=random_guider(graph, entry, model[0], positive, negative)[0],
            sigmas=graph.add("BasicScheduler", model=model[0], scheduler="simple", steps=4, denoise=1.0)[0],
            noise=graph.add("RandomNoise", noise_seed=3)[0],
            latent=model[3],
            prompts="one\ntwo",
            vae=graph.add("TestGreedyVAE", vae=vae[0])[0] if greedy else vae[0],
            reward=graph.add("TreeGRPORewardModel", name="colour", weight=1.0, source="#ff0000")[0],
            **SETTINGS,
        )
        values = graph.add("TestValues", latent=search[0])
        found.append(comfy.run(graph)[values]["values"])
    assert found[0] == found[1]


def test_progress_counts_the_forwards_of_the_plan(comfy, graph):
    nodes, seen = searching(graph, tail_steps=2), []

    def watch(kind, data):
        if kind == "progress" and data["node"] == nodes.search.id:
            seen.append((data["value"], data["max"]))

    comfy.run(graph, on_event=watch)
    total = 2 * (1 + 1 + 3 + 6 + 2)  # two prompts; of three and of six that are judged, two go on
    assert seen[-1] == (total, total)


CASES = {
    "window that reaches the last step": ("search", {"start": 4}, "start is 4"),
    "window longer than the schedule": ("search", {"depth": 6}, "depth is 6"),
    "nothing to choose from": ("search", {"branching": 1}, "1 leaf per prompt"),
    "more pictures than leaves": ("search", {"count": 3}, "count is 3, but each prompt has only 2 leaves"),
    "kernel that does not fit": ("search", {"kernel": "ancestral"}, "'ancestral' does not fit this model"),
    "batch smaller than the prompts": ("search", {"max_batch": 1}, "max_batch is 1, but 2 prompts"),
    "prompts of another number": ("search", {"prompts": "a\nb\nc"}, "3 lines, but .* 2 rows"),
    "empty schedule": ("sigmas", {"denoise": 0.0}, "sigmas: the schedule has fewer"),
    "latent batch": ("latent", {"batch_size": 3}, "batch size is 3, but there are 2 prompts"),
    "weightless rewards": ("reward", {"weight": 0.0}, "reward: all weights are 0"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_named_on_the_node(comfy, graph, case):
    field, change, message = CASES[case]
    with pytest.raises(ExecutionError, match=message) as caught:
        comfy.run(searching(graph).set(field, **change).graph)
    assert caught.value.node_type == "TreeGRPOSearch"


def test_a_schedule_must_end_at_0(comfy, graph):
    nodes = searching(graph)
    split = graph.add("SplitSigmas", sigmas=nodes.sigmas[0], step=5)
    with pytest.raises(ExecutionError, match="the schedule must end at 0"):
        comfy.run(nodes.set("search", sigmas=split[0]).graph)


def test_a_reward_without_weight_is_not_even_asked(comfy, graph):
    """Nobody listens at this address; a search that asked would fail."""
    nodes = searching(graph)
    silent = graph.add("TreeGRPORewardModel", name="remote", weight=0.0, source="http://127.0.0.1:9/score")
    nodes.set("reward", previous=silent[0])
    pictures, _ = found(comfy, nodes)
    assert len(pictures) == 2
