"""Many updates in one Queue: each exactly once, none dearer than the first, whatever core keeps and runs beside."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from itertools import pairwise
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest
from graphs import training
from PIL import Image
from safetensors.numpy import load_file

from benchmarks import loops
from tools.client import ExecutionError, Graph, InvalidGraphError
from tools.host import Server

PACK = Path(__file__).parent / "random_models"


def log_of(comfy, run_name):
    path = comfy.output / "treegrpo" / run_name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def state_of(comfy, run_name):
    return load_file(comfy.output / "treegrpo" / run_name / "state.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def run_counting(comfy, graph):
    """What the run showed, and how often each node of the graph was run."""
    counts = Counter()

    def watch(kind, data):
        if kind == "executing" and data["node"] is not None:
            counts[data["display_node"]] += 1
            assert data["display_node"] in graph, "no node that the user has not seen"

    return comfy.run(graph, on_event=watch), counts


def in_a_row(graph, run_name):
    """Two loops of one run, of 3 and 2 updates; the second takes what it can straight from the first."""
    first = training(graph, run_name, iterations=3)
    second = graph.add("TreeGRPOLoopStart", policy=first.end[0], iterations=2, max_minutes=0.0)

    def again(name, **inputs):
        return graph.add(graph[getattr(first, name).id]["class_type"], **graph.inputs(getattr(first, name)) | inputs)

    prompts = again("prompts", policy=second[1])
    encode = again("encode", prompts=prompts[0])
    guider = again("guider", conditioning=encode[0])
    sampler = again("sampler", policy=first.end[0], guider=guider[0], prompts=encode[1])
    scorer = again("scorer", tree=sampler[0])
    advantage = again("advantage", tree=scorer[0])
    update = again("update", policy=second[1], tree=advantage[0])
    again("end", loop=second[0], policy=update[0], tree=advantage[0])
    return first


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="default"),
        pytest.param(["--cache-none"], id="none"),
        pytest.param(["--cache-lru", "1"], id="lru 1"),
        pytest.param(["--cache-classic"], id="classic", marks=pytest.mark.slow),
        pytest.param(["--cache-lru", "100"], id="lru 100", marks=pytest.mark.slow),
        pytest.param(["--cache-ram", "1e6"], id="ram", marks=pytest.mark.slow),  # core collects garbage all the time
    ],
)
def test_every_update_runs_once_whatever_core_keeps(comfy, tmp_path, run_name, arguments):
    """With 1e6 GB to be kept free, core throws away all that it may."""
    queued, graph = Graph(), Graph()
    training(queued, run_name)
    for _ in range(5):
        comfy.run(queued)
    nodes = in_a_row(graph, run_name)
    alive = graph.add("TestCount", classes="OpenAISignatureMMDITWrapper Run", after=nodes.end[3])
    with Server(others=[PACK], arguments=["--cpu", *arguments]) as server:
        outputs, counts = run_counting(server, graph)
        assert [entry["iteration"] for entry in log_of(server, run_name)] == list(range(5))
        assert same(state_of(server, run_name), state_of(comfy, run_name))
        outside = (nodes.model, nodes.policy, nodes.sigmas, nodes.noise, nodes.latent, nodes.reward, nodes.start)
        assert all(counts[node.id] == 1 for node in outside)
        assert counts[nodes.update.id] == 3
        assert outputs[alive]["alive"] == [1, 1], "one copy of the base model"


def test_messages_stay_as_they_are(comfy):
    """The short form of the soak test: only memory and time, which vary by themselves, are left to that one."""
    watch = loops.watched(comfy, 60)
    for name in ("messages", "bytes"):  # newer cores leave out some of a progress bar's, as time goes
        added = watch.per_update(name)
        assert statistics.mean(added[-20:]) == pytest.approx(statistics.mean(added[5:25]), rel=0.1)


@pytest.mark.slow
def test_thousands_of_updates_cost_each_what_the_first_did():
    found = loops.measure(loops.UPDATES)
    first, last = found["first"], found["last"]
    # Other programs disturb the clock, and the system counts computing in hundredths of a second.
    assert min(last[name] / first[name] for name in ("seconds", "computing")) < 1.1
    assert last["memory"] < 1.02 * first["memory"]
    assert last["messages"] == pytest.approx(first["messages"], rel=0.02)
    assert last["bytes"] == pytest.approx(first["bytes"], rel=0.02)


def test_a_preview_in_the_loop_is_drawn_in_its_node_for_every_update(comfy, graph, run_name):
    nodes = training(graph, run_name, iterations=3)
    preview = graph.add("TreeGRPOPreview", tree=nodes.advantage[0], prompt=1)
    last = graph.add("TreeGRPOPreview", tree=nodes.end[1], prompt=0)
    drawn = []

    def watch(kind, data):
        if kind == "executed" and data["display_node"] == preview.id:
            drawn.append(data["output"]["images"][0])

    outputs = comfy.run(graph, on_event=watch)
    assert len({comfy.view(image) for image in drawn}) == 3, "three pictures of three trees"
    assert comfy.images(outputs[last]).std() > 10


def test_progress_says_which_update_of_how_many(comfy, graph, run_name):
    nodes, told = training(graph, run_name, iterations=4), []
    comfy.run(graph, on_event=lambda kind, data: told.append(data) if kind == "progress" else None)
    assert [(one["value"], one["max"]) for one in told if one["node"] == nodes.end.id] == [(n, 4) for n in (1, 2, 3, 4)]


def test_pictures_saved_in_the_loop_carry_the_workflow_every_time(comfy, graph, run_name):
    nodes = training(graph, run_name, iterations=3)
    graph.add("SaveImage", images=nodes.scorer[1], filename_prefix=f"{run_name}/leaf")
    comfy.run(graph)
    files = sorted((comfy.output / run_name).glob("*.png"))
    assert len(files) == 3 * 8
    assert all("LoRAUpdate" in Image.open(file).info["prompt"] for file in files)


def test_an_error_is_shown_at_the_node_that_raised_it(comfy, graph, run_name):
    nodes = training(graph, run_name, iterations=5)
    preview = graph.add("TreeGRPOPreview", tree=nodes.advantage[0], prompt=nodes.start[2])
    with pytest.raises(ExecutionError, match="prompt is 2, but this tree has 2 prompts") as raised:
        comfy.run(graph)
    assert (raised.value.node_id, raised.value.node_type) == (preview.id, "TreeGRPOPreview")
    assert [entry["iteration"] for entry in log_of(comfy, run_name)] in ([0, 1], [0, 1, 2])


def test_a_tree_from_outside_is_trained_on_in_every_round(comfy, graph, run_name):
    """It is not freed with the others."""
    nodes = training(graph, run_name, iterations=3)
    nodes.set("prompts", policy=nodes.policy[0]).set("sampler", policy=nodes.policy[0])
    comfy.run(graph)
    assert len({entry["reward_mean"] for entry in log_of(comfy, run_name)}) == 1


def test_loops_side_by_side(comfy, graph, run_name):
    """Two runs in one graph, in which nodes of one wait while the other goes on: both as if alone."""
    names = [f"{run_name} {number}" for number in range(2)]
    for seed, name in enumerate(names):
        nodes = training(graph, name, iterations=3).set("policy", seed=seed)
        waiting = graph.add("TestWaiting", value=nodes.scorer[0], seconds=0.05)
        nodes.set("advantage", tree=waiting[0])
    comfy.run(graph)
    for seed, name in enumerate(names):
        alone = Graph()
        training(alone, f"{name} alone", iterations=3).set("policy", seed=seed)
        comfy.run(alone)
        assert same(state_of(comfy, name), state_of(comfy, f"{name} alone"))


@pytest.mark.parametrize("kind", ["TestWaiting", "TreeAdvantage"])
def test_what_is_shown_is_drawn_before_its_trees_are_freed(comfy, graph, run_name, kind):
    """A long way from the tree to what reads it, with or without waiting on it, and with waiting beside it."""
    nodes = training(graph, run_name, iterations=3)
    tree = nodes.advantage[0]
    for _ in range(6):
        again = {**graph.inputs(nodes.advantage), "tree": tree}
        tree = graph.add(kind, **again if kind == "TreeAdvantage" else {"value": tree, "seconds": 0.2})[0]
    graph.add("TestLeaves", tree=tree)
    graph.add("TestNativeLoop", value=graph.add("TestWaiting", value=1, seconds=0.5)[0], times=2)
    _, counts = run_counting(comfy, graph)
    assert counts[nodes.update.id] == len(log_of(comfy, run_name)) == 3


@pytest.mark.parametrize("place", ["inside", "beside", "before", "after"])
def test_loops_of_other_kinds(comfy, graph, run_name, place):
    nodes = training(graph, run_name, iterations=3)
    source = {"inside": nodes.scorer[0], "beside": 1, "before": nodes.model[0], "after": nodes.end[1]}[place]
    other = graph.add("TestNativeLoop", value=source, times=4)
    if place == "inside":
        nodes.set("advantage", tree=other[0])
    if place == "before":
        nodes.set("policy", model=other[0])
    outputs = comfy.run(graph)
    assert len(log_of(comfy, run_name)) == 3
    assert any(shown.get("rounds") == ["done"] for shown in outputs.ui.values())


def test_a_loop_that_another_node_brings(comfy, run_name):
    """Core's server has not seen it in the Queue."""
    graph, inner = Graph(), Graph()
    nodes = training(inner, run_name, iterations=3)
    inner.add("TreeGRPOPreview", tree=nodes.advantage[0], prompt=0)
    outer = graph.add("TestGraph", graph=json.dumps(inner), result=nodes.end.id)
    graph.add("TreeGRPOExport", policy=outer[0], file_name=run_name)
    comfy.run(graph)
    assert len(log_of(comfy, run_name)) == 3
    assert len(list(comfy.base.rglob(f"{run_name}.safetensors"))) == 1


def test_two_ends_of_one_loop(comfy, graph, run_name):
    nodes = training(graph, run_name, iterations=2)
    graph.add("TreeGRPOLoopEnd", loop=nodes.start[0], policy=nodes.update[0], tree=nodes.advantage[0])
    with pytest.raises(ExecutionError, match="two TreeGRPO Loop Ends have the same Loop Start"):
        comfy.run(graph)


@pytest.mark.parametrize("fault", ["open", "unknown", "dangling"])
def test_a_wrong_graph_with_a_loop_is_refused_by_core_as_ever(comfy, graph, run_name, fault):
    nodes, said = training(graph, run_name, iterations=2), len(comfy.log())
    if fault == "open":
        del graph.inputs(nodes.end)["tree"]
    if fault == "unknown":
        graph[nodes.scorer.id]["class_type"] = "NoSuchNode"
    if fault == "dangling":
        del graph[nodes.start.id]
    with pytest.raises((InvalidGraphError, HTTPError)):
        comfy.run(graph)
    assert "on_prompt_handler" not in comfy.log()[said:]


def test_a_queued_graph_read_from_a_picture_is_queued_again(comfy, graph, run_name):
    """The picture holds the graph as it was queued, with all that the loop holds on to."""
    nodes = training(graph, run_name, iterations=2)
    graph.add("SaveImage", images=nodes.scorer[1], filename_prefix=f"{run_name}/leaf")
    comfy.run(graph)
    file = min((comfy.output / run_name).glob("*.png"))
    stored = Graph(json.loads(Image.open(file).info["prompt"]))
    stored.inputs(nodes.sigmas)["steps"] = 7
    del stored[nodes.noise.id]
    other = stored.add("RandomNoise", noise_seed=4)
    stored.inputs(nodes.sampler)["noise"] = other[0]
    comfy.run(stored)
    assert len(log_of(comfy, run_name)) == 4


def test_trees_of_a_list(comfy, graph, run_name):
    """Two trees of a list make one update, in every round."""
    nodes = training(graph, run_name, iterations=2)
    texts = graph.add("TestTexts", value=nodes.start[2])
    single = graph.add("CLIPTextEncode", clip=nodes.model[1], text=texts[0])
    nodes.set("guider", conditioning=single[0]).set("sampler", prompts=texts[0])
    comfy.run(graph)
    entries = log_of(comfy, run_name)
    assert [entry["nfe_train"] for entry in entries] == [2 * (1 + 2)] * 2
    assert all(later["reward_mean"] != earlier["reward_mean"] for earlier, later in pairwise(entries))
