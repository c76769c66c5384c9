"""TreeGRPO Human Reward in a real ComfyUI, answered over HTTP as a page does it."""

from __future__ import annotations

import io
import json
import time
import urllib.error

import numpy as np
import pytest
from graphs import PROMPTS, training
from PIL import Image
from random_graphs import random_training
from safetensors.numpy import load_file

from tools.client import ExecutionError, InterruptedRunError
from treegrpo_core.architectures import architecture_named
from treegrpo_core.human_log import read_dataset

ROUTE = "/treegrpo/human"
LEAVES = 4


def judged(graph, run_name, **inputs):
    """The training graph with a person instead of the scorer; returns its nodes and the judge."""
    nodes = training(graph, run_name)
    asked = {"mode": "stars", "minutes": 5.0, "fallback": "stop", "weight": 1.0, "comparisons": 0, **inputs}
    human = graph.add("TreeGRPOHumanReward", tree=nodes.sampler[0], vae=nodes.model[2], **asked)
    nodes.set("advantage", tree=human[0])
    return nodes, human


def opened(comfy, run):
    """The state of the judging that the run waits for."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = comfy.get(ROUTE)
        if found:
            assert len(found) == 1
            assert found[0]["prompt_id"] == run
            return found[0]
        assert comfy.finished(run) is None, "the run ended without asking"
        time.sleep(0.05)
    raise TimeoutError("no judging was opened")


def post(comfy, state, answer, **changed):
    """Answer as the page that shows ``state`` does; returns the new state."""
    body = {key: state[key] for key in ("run", "update", "prompt_id", "count")}
    return json.loads(comfy.request(f"{ROUTE}/{state['session']}", {**body, "answer": answer, **changed}))


def rate(comfy, state, stars):
    """Stars for all leaves of the prompt shown, and on to the next."""
    for leaf, count in enumerate(stars):
        state = post(comfy, state, {"kind": "stars", "leaf": leaf, "stars": count})
    return post(comfy, state, {"kind": "next"})


def refusal(call, *arguments, **named):
    """Status and message of a request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        call(*arguments, **named)
    return caught.value.code, json.loads(caught.value.read())["error"]


def folder_of(comfy, run_name):
    return comfy.output / "treegrpo" / run_name


def log_of(comfy, run_name):
    path = folder_of(comfy, run_name) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def state_of(comfy, run_name):
    return load_file(folder_of(comfy, run_name) / "state.safetensors")


GIVEN = [[1, 5, 2, 2], [3, 4, 3, 1]]


def test_the_update_uses_exactly_the_ratings(comfy, graph, run_name):
    """As Reward from Floats with the same numbers would."""
    judged(graph, run_name)
    run = comfy.submit(graph)
    state = opened(comfy, run)
    assert (state["run"], state["update"], state["leaves"], state["prompts"]) == (run_name, 0, LEAVES, 2)
    assert sorted(PROMPTS) == sorted({state["text"], rate(comfy, state, GIVEN[0])["text"]})
    rate(comfy, opened(comfy, run), GIVEN[1])
    comfy.wait(run)
    (entry,) = log_of(comfy, run_name)
    assert entry["rewards"] == {"human": pytest.approx(np.mean(GIVEN))}
    graph.clear()
    nodes = training(graph, f"{run_name} floats")
    floats = graph.add("TestFloats", values=json.dumps(np.ravel(GIVEN).tolist()))
    given = graph.add("TreeGRPORewardFromFloats", tree=nodes.sampler[0], rewards=floats[0])
    nodes.set("advantage", tree=given[0])
    comfy.run(graph)
    a, b = state_of(comfy, run_name), state_of(comfy, f"{run_name} floats")
    assert all(np.array_equal(a[name], b[name]) for name in a)


def test_the_log_is_a_dataset_with_the_pictures_that_were_shown(comfy, graph, run_name):
    _, human = judged(graph, run_name)
    shown = graph.add("PreviewImage", images=human[1])
    run = comfy.submit(graph)
    state = opened(comfy, run)
    files = [comfy.request(f"{ROUTE}/{state['session']}/0/{leaf}") for leaf in range(LEAVES)]
    state = rate(comfy, state, GIVEN[0])
    rate(comfy, state, GIVEN[1])
    leaves = comfy.images(comfy.wait(run)[shown]).astype(int)
    assert len(leaves) == 2 * LEAVES
    for leaf, file in enumerate(files):
        assert np.abs(np.asarray(Image.open(io.BytesIO(file))).astype(int) - leaves[leaf]).mean() < 3
    rows = read_dataset(folder_of(comfy, run_name))
    assert [row["scores"] for row in rows] == GIVEN
    assert [(folder_of(comfy, run_name) / name).read_bytes() for name in rows[0]["pictures"]] == files


@pytest.mark.parametrize("mode", ["pairs", "rank"])
def test_pairs_and_ranks_become_the_order_that_was_meant(comfy, graph, run_name, mode):
    """The best leaf is 2, then 0, 3, 1."""
    best = [2, 0, 3, 1]
    judged(graph, run_name, mode=mode)
    run = comfy.submit(graph)
    state = opened(comfy, run)
    while state["prompt"] is not None:
        if mode == "rank":
            state = post(comfy, state, {"kind": "ranking", "order": best})
        else:
            better, worse = sorted(state["pair"], key=best.index)
            state = post(comfy, state, {"kind": "choice", "better": better, "worse": worse})
    comfy.wait(run)
    for row in read_dataset(folder_of(comfy, run_name)):
        assert sorted(range(LEAVES), key=lambda leaf: -row["scores"][leaf]) == best
    assert log_of(comfy, run_name)[0]["grad_norm"] > 0


def test_a_page_that_loads_again_finds_the_judging_where_it_was(comfy, graph, run_name):
    judged(graph, run_name)
    run = comfy.submit(graph)
    state = opened(comfy, run)
    state = post(comfy, state, {"kind": "stars", "leaf": 2, "stars": 4})
    state = post(comfy, state, {"kind": "stars", "leaf": 3, "stars": 1})
    state = post(comfy, state, {"kind": "undo"})
    again = comfy.get(f"{ROUTE}/{state['session']}")
    assert again["stars"] == [None, None, 4, None]
    assert {**again, "seconds_left": 0} == {**state, "seconds_left": 0} == {**opened(comfy, run), "seconds_left": 0}
    comfy.interrupt(run)
    with pytest.raises(InterruptedRunError):
        comfy.wait(run)


def test_answers_that_do_not_fit_are_refused_and_change_nothing(comfy, graph, run_name):
    judged(graph, run_name)
    run = comfy.submit(graph)
    state = opened(comfy, run)
    star = {"kind": "stars", "leaf": 0, "stars": 5}
    cases = [
        (400, "leaf 4 does not exist", {**star, "leaf": 4}, {}),
        (400, "leaf", {**star, "leaf": -1}, {}),
        (400, "leaf", {**star, "leaf": "../0"}, {}),
        (400, "stars", {**star, "stars": 6}, {}),
        (400, "answer", {"kind": "delete"}, {}),
        (400, "mode", {"kind": "ranking", "order": [0, 1, 2, 3]}, {}),
        (400, "undo", {"kind": "undo"}, {}),
        (400, "folder", star, {"folder": "/"}),
        (409, "for update 1", star, {"update": 1}),
        (409, "run 'other'", star, {"run": "other"}),
        (409, "load the page again", star, {"prompt_id": "another queue"}),
        (409, "another page has answered", star, {"count": 7}),
    ]
    for status, message, answer, changed in cases:
        code, text = refusal(post, comfy, state, answer, **changed)
        assert (code, message in text) == (status, True), text
    session = f"{ROUTE}/{state['session']}"
    assert refusal(comfy.request, session, b"{half")[0] == 400
    assert refusal(post, comfy, {**state, "session": "unknown"}, star)[0] == 404
    for place in ("0/4", "2/0", "0/-1", "0/..%2f..%2fx", "0/0.jpg", "0/" + "9" * 5000):
        assert refusal(comfy.request, f"{session}/{place}")[0] == 404
    assert {**opened(comfy, run), "seconds_left": 0} == {**state, "seconds_left": 0}
    last = rate(comfy, rate(comfy, state, GIVEN[0]), GIVEN[1])
    comfy.wait(run)
    for closed in (state, last):
        code, text = refusal(post, comfy, closed, star)
        assert code == 409
        assert "is over" in text
    assert refusal(comfy.get, session)[0] == 409
    assert comfy.get(ROUTE) == []


@pytest.mark.parametrize("fallback", ["use the answers so far", "no opinion", "stop"])
def test_when_the_time_is_up_the_fallback_happens(comfy, graph, run_name, fallback):
    judged(graph, run_name, minutes=0.05, fallback=fallback)
    run = comfy.submit(graph)
    state = opened(comfy, run)
    post(comfy, state, {"kind": "stars", "leaf": 1, "stars": 5})
    state = comfy.get(f"{ROUTE}/{state['session']}")
    assert 0 < state["seconds_left"] <= 3
    post(comfy, state, {"kind": "stars", "leaf": 2, "stars": 1})
    if fallback == "stop":
        with pytest.raises(ExecutionError, match="minutes: nobody answered for 0.05 minutes"):
            comfy.wait(run)
        assert log_of(comfy, run_name) == []
        return
    comfy.wait(run)
    (entry,) = log_of(comfy, run_name)
    assert (entry["grad_norm"] > 0) == (entry["reward_std"] > 0) == (fallback != "no opinion")
    weights = [value for name, value in state_of(comfy, run_name).items() if "lora_B" in name and "adapter" in name]
    assert weights
    assert any(value.any() for value in weights) == (fallback != "no opinion")


def test_interrupt_while_waiting_ends_at_once_and_leaves_the_run_as_it_was(comfy, graph, run_name):
    judged(graph, run_name)
    run = comfy.submit(graph)
    state = opened(comfy, run)
    post(comfy, state, {"kind": "stars", "leaf": 1, "stars": 5})
    saved = (folder_of(comfy, run_name) / "state.safetensors").read_bytes()
    asked = time.monotonic()
    comfy.interrupt(run)
    with pytest.raises(InterruptedRunError):
        comfy.wait(run)
    assert time.monotonic() - asked < 10, "the node would have waited for minutes"
    assert (folder_of(comfy, run_name) / "state.safetensors").read_bytes() == saved
    assert log_of(comfy, run_name) == []
    assert comfy.get(ROUTE) == []
    assert refusal(post, comfy, state, {"kind": "next"})[0] == 409
    run = comfy.submit(graph)
    rate(comfy, rate(comfy, opened(comfy, run), GIVEN[0]), GIVEN[1])
    comfy.wait(run)
    assert len(log_of(comfy, run_name)) == 1


def test_earlier_rewards_stay_beside_the_human_one(comfy, graph, run_name):
    nodes, human = judged(graph, run_name, weight=0.5)
    graph.inputs(human)["tree"] = nodes.scorer[0]
    run = comfy.submit(graph)
    rate(comfy, rate(comfy, opened(comfy, run), GIVEN[0]), GIVEN[1])
    comfy.wait(run)
    (entry,) = log_of(comfy, run_name)
    assert entry["rewards"]["human"] == pytest.approx(np.mean(GIVEN))
    assert set(entry["rewards"]) == {"jpeg", "human"}
    second = graph.add("TreeGRPOHumanReward", **{**graph.inputs(human), "tree": human[0]})
    nodes.set("advantage", tree=second[0])
    run = comfy.submit(graph)
    rate(comfy, rate(comfy, opened(comfy, run), GIVEN[0]), GIVEN[1])
    with pytest.raises(ExecutionError, match="human reward already"):
        comfy.wait(run)


def test_a_loop_asks_for_every_update(comfy, graph, run_name):
    nodes = training(graph, run_name, iterations=2)
    asked = {"mode": "rank", "minutes": 5.0, "fallback": "stop", "weight": 1.0, "comparisons": 0}
    human = graph.add("TreeGRPOHumanReward", tree=nodes.sampler[0], vae=nodes.model[2], **asked)
    nodes.set("advantage", tree=human[0])
    run = comfy.submit(graph)
    updates = []
    for _ in range(2):
        state = opened(comfy, run)
        while updates and state["update"] == updates[-1]:
            state = opened(comfy, run)
        updates.append(state["update"])
        while state["prompt"] is not None:
            state = post(comfy, state, {"kind": "ranking", "order": [3, 1, 2, 0]})
    comfy.wait(run)
    assert updates == [0, 1]
    assert len(log_of(comfy, run_name)) == 2


def test_an_answer_that_cannot_be_written_does_not_count(comfy, graph, run_name):
    judged(graph, run_name)
    run = comfy.submit(graph)
    state = opened(comfy, run)
    (folder_of(comfy, run_name) / "human").write_text("a file where the folder should be")
    code, text = refusal(post, comfy, state, {"kind": "stars", "leaf": 0, "stars": 5})
    assert code == 500
    assert "cannot be written" in text
    assert opened(comfy, run)["stars"] == [None] * LEAVES
    comfy.interrupt(run)
    with pytest.raises(InterruptedRunError):
        comfy.wait(run)


def test_of_films_the_middle_frame_is_judged(comfy, graph, run_name):
    """As Reward Scorer's picture of the tree; all frames come out."""
    nodes = random_training(graph, run_name, architecture_named("Wan"))
    vae, tree = graph.add("TestFilmVAE"), graph.inputs(nodes.leaves)["tree"]
    asked = {"mode": "rank", "minutes": 5.0, "fallback": "stop", "weight": 1.0, "comparisons": 0}
    human = graph.add("TreeGRPOHumanReward", tree=tree, vae=vae[0], **asked)
    advantage = graph.add("TreeAdvantage", tree=human[0], estimator="softmax", normalisation="none")
    nodes.set("update", tree=advantage[0])
    shown = graph.add("PreviewImage", images=human[1])
    run = comfy.submit(graph)
    state = opened(comfy, run)
    file = comfy.request(f"{ROUTE}/{state['session']}/0/0")
    leaves = list(range(state["leaves"]))
    while state["prompt"] is not None:
        state = post(comfy, state, {"kind": "skip", "leaves": leaves})
    frames = comfy.images(comfy.wait(run)[shown]).astype(int)
    assert len(frames) == 2 * len(leaves) * 3
    seen = np.asarray(Image.open(io.BytesIO(file))).astype(int)
    assert [int(np.abs(seen - frame).mean()) < 4 for frame in frames[:3]] == [False, True, False]
