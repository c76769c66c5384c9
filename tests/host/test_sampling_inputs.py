"""Sigmas and latents that a model cannot do, in every node that takes them: a sentence, and nothing sampled."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from graphs import training
from random_graphs import PLAN, ordinary_latent, random_training
from test_evaluation import evaluated
from test_search import searching

from tools.client import ExecutionError, Graph
from tools.host import ROOT
from treegrpo_core.architectures import ARCHITECTURES, architecture_named


def sampled_by(node_type, graph, run_name):
    """A graph with this node, and the node."""
    if node_type == "TreeGRPOSearch":
        return searching(graph).search
    return evaluated(graph, run_name)[1] if node_type == "TreeGRPOEvaluate" else training(graph, run_name).sampler


every_node = pytest.mark.parametrize("node_type", ["TreeSampler", "TreeGRPOSearch", "TreeGRPOEvaluate"])

FOREIGN = {"steps": 6, "sigma_max": 14.614642, "sigma_min": 0.0291675, "rho": 7.0}
"""KarrasScheduler's own defaults: the noise levels of SD1.5."""


@every_node
def test_noise_levels_of_another_family(comfy, graph, run_name, node_type):
    node = sampled_by(node_type, graph, run_name)
    graph.inputs(node)["sigmas"] = graph.add("KarrasScheduler", **FOREIGN)[0]
    with pytest.raises(
        ExecutionError, match="sigmas: the highest is 14.6146, .* whose noise levels end at 1; use"
    ) as caught:
        comfy.run(graph)
    assert (caught.value.node_type, caught.value.kind) == (node_type, "ValueError")


@pytest.mark.parametrize("kernel", ["auto", "flow_sde", "dance_sde", "cps"])
def test_no_kernel_of_a_flow_takes_them(comfy, graph, run_name, kernel):
    nodes = training(graph, run_name).set("sampler", kernel=kernel)
    higher = graph.add("SetFirstSigma", sigmas=nodes.sigmas[0], sigma=1.5)
    with pytest.raises(ExecutionError, match="sigmas: the highest is 1.5,"):
        comfy.run(nodes.set("sampler", sigmas=higher[0]).graph)


@every_node
def test_a_part_of_a_schedule(comfy, graph, run_name, node_type):
    node = sampled_by(node_type, graph, run_name)
    halves = graph.add("SplitSigmas", sigmas=graph.inputs(node)["sigmas"], step=3)
    graph.inputs(node)["sigmas"] = halves[0]
    with pytest.raises(ExecutionError, match=r"sigmas: the last sigma is 0\.\d+; the schedule must end at 0"):
        comfy.run(graph)


@pytest.mark.parametrize(("highest", "warned"), [(14.614642, False), (80.0, True)])
def test_an_eps_model_takes_more_than_its_highest_level_with_a_warning(comfy, run_name, highest, warned):
    graph, said = Graph(), len(comfy.log())
    nodes = random_training(graph, run_name, architecture_named("SD1.5"))
    sigmas = graph.add("KarrasScheduler", **{**FOREIGN, "steps": 4, "sigma_max": highest})
    graph.inputs(graph.find("TreeSampler"))["sigmas"] = sigmas[0]
    comfy.run(nodes.graph)
    assert ("the sigmas begin at 80, but this model was made for levels up to 14.61" in comfy.log()[said:]) == warned


@every_node
def test_a_latent_larger_than_the_models_places(comfy, graph, run_name, node_type):
    node = sampled_by(node_type, graph, run_name)
    graph.inputs(node)["latent"] = graph.add("EmptySD3LatentImage", width=512, height=64, batch_size=1)[0]
    with pytest.raises(
        ExecutionError, match="latent: its size is 64 x 8, .* up to 16 x 16: pictures of 128 x 128"
    ) as caught:
        comfy.run(graph)
    assert (caught.value.node_type, caught.value.kind) == (node_type, "ValueError")


@pytest.mark.parametrize("size", [(128, 128), (16, 128), (16, 16)])
def test_a_latent_as_large_as_its_places_and_a_narrow_one(comfy, graph, run_name, size):
    nodes = training(graph, run_name)
    latent = graph.add("EmptySD3LatentImage", width=size[0], height=size[1], batch_size=1)
    comfy.run(nodes.set("sampler", latent=latent[0]).graph)


@pytest.mark.parametrize("entry", ARCHITECTURES, ids=lambda entry: entry.name)
def test_every_family_trains_on_odd_sizes_and_fits_a_foreign_empty_latent_as_core_does(comfy, graph, run_name, entry):
    nodes = random_training(graph, run_name, entry)
    shown = ordinary_latent(graph, entry, nodes.policy[1], nodes.model)
    latent = graph.add("EmptyLatentImage", width=72, height=56, batch_size=1)
    graph.inputs(graph.find("TreeSampler"))["latent"] = latent[0]
    graph.inputs(graph.find("KSampler"))["latent_image"] = latent[0]
    outputs = comfy.run(graph)
    assert len(outputs[nodes.leaves]["values"]) == 2 * PLAN.leaves * len(outputs[shown]["values"])
    (line,) = (comfy.output / "treegrpo" / run_name / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["grad_norm"] > 0


PROBE = """
import json, math, torch
from benchmarks.session import Session
session = Session(["fox on blue"])
fix = session.parts["nodes.latents"].fix_latent
def said(samples):
    try:
        return list(fix(session.patcher, {"samples": samples}, 2).shape)
    except ValueError as error:
        return str(error)
broken = torch.zeros(1, 16, 8, 8)
broken[0, 3, 2, 1] = math.nan
print(json.dumps({
    "no width": said(torch.zeros(1, 16, 8, 0)),
    "no height": said(torch.zeros(1, 4, 0, 8)),
    "no frames": said(torch.zeros(1, 16, 0, 8, 8)),
    "no batch": said(torch.zeros(0, 16, 8, 8)),
    "sound": said(torch.zeros(1, 16, 8)),
    "NaN": said(broken),
    "too long": said(torch.zeros(1, 16, 8, 17)),
    "odd": said(torch.zeros(1, 16, 7, 15)),
    "one pixel": said(torch.zeros(1, 16, 1, 1)),
    "of another family": said(torch.zeros(2, 4, 8, 8)),
}))
"""


@pytest.fixture(scope="module")
def probed():
    """What becomes of latents that no node of core makes: their shape for two prompts, or what is said of them."""
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_latents_without_anything_in_them_are_refused(probed):
    assert probed["no width"].startswith("latent: its size is 0 x 8; use an empty latent node")
    assert probed["no height"].startswith("latent: its size is 8 x 0; ")
    assert probed["no frames"].startswith("latent: its size is 8 x 8 x 0; ")
    assert probed["no batch"].startswith("latent: its batch size is 0, but there are 2 prompts")


def test_other_latents_that_do_not_fit_are_refused(probed):
    assert probed["sound"].startswith("latent: it has 1 dimensions")
    assert probed["NaN"].startswith("latent: it contains NaN")
    assert probed["too long"].startswith("latent: its size is 17 x 8, but this model goes up to 16 x 16")


def test_odd_small_and_empty_latents_of_another_family_are_taken(probed):
    assert probed["odd"] == [2, 16, 7, 15]
    assert probed["one pixel"] == [2, 16, 1, 1]
    assert probed["of another family"] == [2, 16, 8, 8]
