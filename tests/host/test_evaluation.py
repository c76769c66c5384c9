"""Held-out evaluation inside the loop, and rewards of other nodes beside our own."""

from __future__ import annotations

import json
import socket
import threading
import time

import numpy as np
import pytest
from graphs import training
from safetensors.numpy import load_file

from tools.client import ExecutionError, Graph, InterruptedRunError

HELD_OUT = ["tiger on red", "small pear on pink", "penguin on green"]


def evaluated(graph, run_name):
    """A loop of updates, evaluated after every second one: the nodes and the evaluation."""
    nodes = training(graph, run_name, iterations=4)
    prompts = graph.add("TreeGRPOPrompts", text="\n".join(HELD_OUT), prompts_per_step=3, seed=0)
    encode = graph.add("TreeGRPOEncode", clip=nodes.model[1], prompts=prompts[0])
    guider = graph.add("BasicGuider", model=nodes.policy[1], conditioning=encode[0])
    inputs = {"sigmas": nodes.sigmas[0], "noise": nodes.noise[0], "latent": nodes.latent[0], "vae": nodes.model[2]}
    more = graph.add("TreeGRPORewardModel", name="background_match", weight=0.0, previous=nodes.reward[0])
    evaluate = graph.add(
        "TreeGRPOEvaluate",
        policy=nodes.update[0],
        guider=guider[0],
        prompts=encode[1],
        reward=more[0],
        every=2,
        **inputs,
    )
    graph.add("PreviewImage", images=evaluate[0])
    return nodes, evaluate


def curve_of(comfy, run_name):
    path = comfy.output / "treegrpo" / run_name / "evaluation.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_curve_begins_with_the_base_model_and_grows_with_the_run(comfy, graph, run_name):
    nodes, _ = evaluated(graph, run_name)
    nodes.set("policy", learning_rate=5e-3)
    comfy.run(graph)
    curve = curve_of(comfy, run_name)
    assert [entry["iteration"] for entry in curve] == [0, 2, 4]
    assert all(len(entry["scores"][name]) == 3 for entry in curve for name in ("jpeg", "background_match"))
    assert curve[0]["scores"]["jpeg"] != curve[1]["scores"]["jpeg"] != curve[2]["scores"]["jpeg"]
    comfy.run(graph)
    again = curve_of(comfy, run_name)
    assert again[:3] == curve
    assert [entry["iteration"] for entry in again] == [0, 2, 4, 6, 8]


def test_other_prompts_make_a_curve_of_their_own(comfy, graph, run_name):
    nodes, evaluate = evaluated(graph, run_name)
    comfy.run(graph)
    encode = graph.add("TreeGRPOEncode", clip=nodes.model[1], prompts="pear on blue")
    guider = graph.add("BasicGuider", model=nodes.policy[1], conditioning=encode[0])
    graph.inputs(evaluate).update(guider=guider[0], prompts=encode[1])
    comfy.run(graph)
    curve = curve_of(comfy, run_name)
    places = {count: [entry["iteration"] for entry in curve if len(entry["prompts"]) == count] for count in (3, 1)}
    assert places == {3: [0, 2, 4], 1: [0, 6, 8]}


def test_evaluating_changes_nothing_in_the_training(comfy, graph, run_name):
    bare = Graph()
    evaluated(graph, f"{run_name} with")
    training(bare, f"{run_name} without", iterations=4)
    for one in (graph, bare):
        comfy.run(one)
    folder = comfy.output / "treegrpo"
    seen, unseen = (load_file(folder / f"{run_name} {name}" / "state.safetensors") for name in ("with", "without"))
    assert all(np.array_equal(seen[key], unseen[key]) for key in seen)


def test_the_base_models_pictures_are_those_of_another_run(comfy, run_name):
    """Same prompts, same noise, no adapter: the first point of every curve is one and the same."""
    for name in (f"{run_name} one", f"{run_name} two"):
        graph = Graph()
        nodes, _ = evaluated(graph, name)
        nodes.set("policy", seed=len(name))
        comfy.run(graph)
    one, two = (curve_of(comfy, f"{run_name} {name}")[0] for name in ("one", "two"))
    assert one == two


def test_a_guider_on_the_bare_model_is_refused(comfy, graph, run_name):
    nodes, evaluate = evaluated(graph, run_name)
    bare = graph.add("BasicGuider", model=nodes.model[0], conditioning=nodes.encode[0])
    graph.inputs(evaluate)["guider"] = bare[0]
    with pytest.raises(ExecutionError, match="guider: it is not built on this run's model"):
        comfy.run(graph)


def test_numbers_of_other_nodes_stand_beside_our_rewards(comfy, graph, run_name):
    nodes = training(graph, run_name)
    numbers = graph.add("TestRewards", count=8)
    given = graph.add(
        "TreeGRPORewardFromFloats",
        tree=nodes.scorer[0],
        rewards=numbers[0],
        name="mine",
        weight=0.0,
        keep_others=True,
    )
    nodes.set("advantage", tree=given[0])
    comfy.run(graph)
    (line,) = (comfy.output / "treegrpo" / run_name / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert set(metrics["rewards"]) == set(metrics["reward_spread"]) == {"jpeg", "mine"}
    assert metrics["reward_mean"] == pytest.approx(metrics["rewards"]["jpeg"])
    assert set(metrics["correlation"]) == {"jpeg, mine"}
    assert 0 < metrics["diversity"] < 1


def test_cancel_ends_the_waiting_for_another_computer(comfy, graph, run_name):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        training(graph, run_name).set("reward", name="remote", source=address)
        begun = time.monotonic()
        threading.Timer(6.0, lambda: comfy.request("/interrupt", {})).start()
        with pytest.raises(InterruptedRunError):
            comfy.run(graph)
        assert time.monotonic() - begun < 20
    assert not (comfy.output / "treegrpo" / run_name / "metrics.jsonl").exists()
