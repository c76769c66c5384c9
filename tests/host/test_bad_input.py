"""Every bad input gives a message that names it and the fix, on the node, and leaves the run on disk as it was."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from graphs import training
from random_graphs import random_training
from safetensors.torch import save_file

from tools.client import ExecutionError, Graph
from treegrpo_core.architectures import architecture_named


def folder_bytes(comfy, run_name):
    folder = comfy.output / "treegrpo" / run_name
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


@pytest.fixture
def nodes(comfy, graph, run_name):
    """A graph whose run has one update behind it."""
    nodes = training(graph, run_name)
    comfy.run(graph)
    return nodes


CASES = {
    "branching below 1": ("sampler", {"branching": 0}, "TreeSampler", "branching is 0"),
    "one leaf per group": ("sampler", {"branching": 1}, "TreeSampler", "1 leaf per prompt"),
    "depth longer than the schedule": ("sampler", {"depth": 6}, "TreeSampler", "depth is 6"),
    "window that reaches the last step": ("sampler", {"start": 4}, "TreeSampler", "start is 4"),
    "kernel that does not fit": (
        "sampler",
        {"kernel": "ancestral"},
        "TreeSampler",
        "'ancestral' does not fit this model",
    ),
    "schedule that does not end at 0": ("sigmas", {"denoise": 0.0}, "TreeSampler", "sigmas: the schedule has fewer"),
    "cps with more noise than there is": (
        "sampler",
        {"kernel": "cps", "eta": 1.5},
        "TreeSampler",
        "eta: it is 1.5; .*at most 1",
    ),
    "batch smaller than the prompts": ("sampler", {"max_batch": 1}, "TreeSampler", "max_batch is 1, but 2 prompts"),
    "prompts of another number": ("sampler", {"prompts": "a\nb\nc"}, "TreeSampler", "3 lines, but .* 2 rows"),
    "latent batch": ("latent", {"batch_size": 3}, "TreeSampler", "batch size is 3, but there are 2 prompts"),
    "more prompts than there are": ("prompts", {"prompts_per_step": 9}, "TreeGRPOPrompts", "prompts_per_step is 9"),
    "no prompts": ("prompts", {"text": "# none\n"}, "TreeGRPOPrompts", "no prompt"),
    "prompt file outside the input folder": ("prompts", {"file": "../x.txt"}, "TreeGRPOPrompts", "outside"),
    "prompt file that is missing": ("prompts", {"file": "none.txt"}, "TreeGRPOPrompts", "no 'none.txt'"),
    "run name with folders": ("policy", {"run_name": "../evil"}, "TreeGRPOPolicy", "'../evil' is not allowed"),
    "unknown run name": (
        "policy",
        {"run_name": "never heard of", "if_run_exists": "continue"},
        "TreeGRPOPolicy",
        "'never heard of' is not known",
    ),
    "run that exists": ("policy", {"if_run_exists": "create"}, "TreeGRPOPolicy", "exists already"),
    "another rank": ("policy", {"rank": 8}, "TreeGRPOPolicy", "rank 4, not 8"),
    "another kind of adapter": ("policy", {"adapter": "dora"}, "TreeGRPOPolicy", "kind 'lora', not 'dora'"),
    "targets that match nothing": (
        "policy",
        {"run_name": "no such layers", "target_pattern": "joint_blocks.0.x_block.attn.qvk"},
        "TreeGRPOPolicy",
        "match none of the model's .* near: .*joint_blocks.0.x_block.attn.qkv",
    ),
    "a pattern that is none": (
        "policy",
        {"run_name": "no such layers", "target_pattern": "*attn"},
        "TreeGRPOPolicy",
        "no preset .* and no pattern",
    ),
    "other targets": ("policy", {"targets": "all linear"}, "TreeGRPOPolicy", "targets 'attention[+]mlp'"),
    "more steps to train than there are": ("advantage", {"train_steps": 3}, "TreeAdvantage", "train_steps is 3"),
    "weightless rewards": ("reward", {"weight": 0.0}, "TreeAdvantage", "all weights are 0"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_named_on_its_node(comfy, nodes, run_name, case):
    field, change, node_type, message = CASES[case]
    before = folder_bytes(comfy, run_name)
    with pytest.raises(ExecutionError, match=message) as caught:
        comfy.run(nodes.set(field, **change).graph)
    assert caught.value.node_type == node_type
    assert folder_bytes(comfy, run_name) == before


def test_a_reward_list_of_the_wrong_length(comfy, nodes, run_name):
    given = nodes.graph.add("TreeGRPORewardFromFloats", tree=nodes.sampler[0], rewards=0.5)
    nodes.set("advantage", tree=given[0])
    before = folder_bytes(comfy, run_name)
    with pytest.raises(ExecutionError, match="1 numbers for 8 leaves"):
        comfy.run(nodes.graph)
    assert folder_bytes(comfy, run_name) == before


def test_a_run_of_another_base_model(comfy, nodes, run_name):
    """The base model merged with something else is another base model."""
    merged = nodes.graph.add("ModelMergeSimple", model1=nodes.model[0], model2=nodes.model[0], ratio=0.5)
    before = folder_bytes(comfy, run_name)
    with pytest.raises(ExecutionError, match="another base model"):
        comfy.run(nodes.set("policy", model=merged[0]).graph)
    assert folder_bytes(comfy, run_name) == before


def test_a_guider_on_the_base_model(comfy, nodes):
    with pytest.raises(ExecutionError, match="guider: it is not built on this run's model"):
        comfy.run(nodes.set("guider", model=nodes.model[0]).graph)


def test_two_policies_on_top_of_each_other(comfy, nodes, run_name):
    inputs = {**nodes.graph.inputs(nodes.policy), "model": nodes.policy[1], "run_name": f"{run_name} 2"}
    second = nodes.graph.add("TreeGRPOPolicy", **inputs)
    with pytest.raises(ExecutionError, match="already carries the adapter"):
        comfy.run(nodes.set("guider", model=second[1]).graph)


def test_a_tree_of_another_run(comfy, nodes, run_name):
    inputs = {**nodes.graph.inputs(nodes.policy), "run_name": f"{run_name} 2"}
    other = nodes.graph.add("TreeGRPOPolicy", **inputs)
    with pytest.raises(ExecutionError, match="it was grown by run"):
        comfy.run(nodes.set("update", policy=other[0]).graph)


def test_steps_in_the_wrong_order(comfy, nodes):
    with pytest.raises(ExecutionError, match="no advantages yet"):
        comfy.run(nodes.set("update", tree=nodes.scorer[0]).graph)
    with pytest.raises(ExecutionError, match="no rewards yet"):
        comfy.run(nodes.set("update", tree=nodes.advantage[0]).set("advantage", tree=nodes.sampler[0]).graph)


def test_latents_of_another_model_family(comfy, nodes):
    """An empty latent is fitted to the model, as everywhere in ComfyUI; a filled one of another family is refused."""
    empty = nodes.graph.add("EmptyLatentImage", width=64, height=64, batch_size=1)
    comfy.run(nodes.set("sampler", latent=empty[0]).graph)
    filled = nodes.graph.add(
        "AddNoise", model=nodes.model[0], noise=nodes.noise[0], sigmas=nodes.sigmas[0], latent_image=empty[0]
    )
    with pytest.raises(ExecutionError, match="latent: it has 4 channels, this model works with 16"):
        comfy.run(nodes.set("sampler", latent=filled[0]).graph)


@pytest.mark.parametrize("name", ["../evil", "a/b", ""])
def test_export_names_stay_in_the_loras_folder(comfy, nodes, name):
    nodes.graph.add("TreeGRPOExport", policy=nodes.policy[0], file_name=name)
    before = sorted(comfy.base.rglob("*.safetensors"))
    with pytest.raises(ExecutionError, match="is not allowed"):
        comfy.run(nodes.graph)
    assert not list(comfy.base.glob("**/evil*"))
    assert len(sorted(comfy.base.rglob("*.safetensors"))) == len(before)


def test_a_loop_that_trains_nothing(comfy, graph, run_name):
    nodes = training(graph, run_name, iterations=2)
    nodes.set("end", policy=nodes.start[1], tree=nodes.advantage[0])
    del graph[nodes.update.id]
    with pytest.raises(ExecutionError, match="there is no LoRAUpdate between"):
        comfy.run(graph)


def lora_of_sd15(rank=4):
    """A LoRA file's tensors, of another family than the bundled model's."""
    name = "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k"
    return {f"{name}.lora_A.weight": torch.ones(rank, 768), f"{name}.lora_B.weight": torch.ones(320, rank)}


def lora_of_the_model(value=1.0, rank=4):
    name = "diffusion_model.joint_blocks.0.x_block.attn.proj"
    return {
        f"{name}.lora_A.weight": torch.full((rank, 192), value),
        f"{name}.lora_B.weight": torch.full((192, rank), value),
    }


def broken(path):
    save_file(lora_of_the_model(), path)
    path.write_bytes(path.read_bytes()[:-100])


def convolution():
    name = "diffusion_model.x_embedder.proj"
    return {f"{name}.lora_A.weight": torch.ones(4, 16, 2, 2), f"{name}.lora_B.weight": torch.ones(192, 4, 1, 1)}


FILES = {
    "convolutions": (lambda path: save_file(convolution(), path), "adapts 1 convolutions.*in front of TreeGRPOPolicy"),
    "numbers that are no weights": (
        lambda path: save_file({key: value.int() for key, value in lora_of_the_model().items()}, path),
        "no weights of an adapter",
    ),
    "a LoRA of another family": (
        lambda path: save_file(lora_of_sd15(), path),
        "not among the targets, such as input_blocks",
    ),
    "a LoRA of a higher rank": (lambda path: save_file(lora_of_the_model(rank=8), path), "set rank to 8"),
    "rank 0": (lambda path: save_file(lora_of_the_model(rank=0), path), "are no LoRA"),
    "NaN": (lambda path: save_file(lora_of_the_model(math.nan), path), "joint_blocks.0.x_block.attn.proj.*NaN"),
    "a half-written file": (broken, "not a complete safetensors file"),
    "a pickle in disguise": (lambda path: torch.save(lora_of_the_model(), path), "pickle"),
    "no LoRA at all": (lambda path: save_file({"weight": torch.ones(3)}, path), "no LoRA keys"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_lora_file_that_cannot_be_started_from(comfy, graph, run_name, case):
    make, message = FILES[case]
    name = f"{run_name}.safetensors"
    make(comfy.base / "models" / "loras" / name)
    nodes = training(graph, run_name).set("policy", start_from=name)
    with pytest.raises(ExecutionError, match=message) as caught:
        comfy.run(graph)
    assert caught.value.node_type == "TreeGRPOPolicy"
    assert not (comfy.output / "treegrpo" / run_name).exists(), "nothing was written"
    comfy.run(nodes.set("policy", start_from="none").graph)


def test_guidance_on_a_distilled_model_is_warned_of(comfy, run_name):
    entry = architecture_named("Flux")
    for cfg, warned in ((1.0, False), (3.0, True)):
        graph, said = Graph(), len(comfy.log())
        nodes = random_training(graph, f"{run_name} {cfg}", entry)
        guider = graph.add(
            "CFGGuider", model=nodes.policy[1], positive=nodes.model[1], negative=nodes.model[2], cfg=cfg
        )
        graph.inputs(graph.find("TreeSampler"))["guider"] = guider[0]
        comfy.run(graph)
        assert ("guidance is distilled into this model" in comfy.log()[said:]) == warned


def test_a_film_for_a_model_of_pictures(comfy, nodes):
    film = nodes.graph.add("EmptyHunyuanLatentVideo", width=64, height=64, length=9, batch_size=1)
    nodes.set("sampler", latent=film[0])
    with pytest.raises(ExecutionError, match="latent: it has 3 dimensions .* this model makes pictures of 2"):
        comfy.run(nodes.graph)


def test_dora_on_patched_weights(comfy, graph, run_name):
    nodes = training(graph, run_name).set("policy", adapter="dora")
    path = comfy.base / "models" / "loras" / f"{run_name}.safetensors"
    save_file(lora_of_the_model(0.01), path)
    loaded = graph.add("LoraLoaderModelOnly", model=nodes.model[0], lora_name=path.name, strength_model=1.0)
    nodes.set("policy", model=loaded[0])
    with pytest.raises(ExecutionError, match="adapter: dora works with the size of the weights"):
        comfy.run(graph)
    assert not (comfy.output / "treegrpo" / run_name).exists()


@pytest.mark.parametrize("line", ["garbage", "", "[]", '{"rewards": null}'])
def test_an_odd_line_in_the_log_is_left_out(comfy, nodes, run_name, line):
    path = comfy.output / "treegrpo" / run_name / "metrics.jsonl"
    path.write_text(path.read_text() + line + "\n")
    comfy.run(nodes.graph)
    assert len(path.read_text().splitlines()) == 3


def test_a_state_file_of_other_settings_is_refused_until_it_is_put_right(comfy, nodes, run_name):
    other = f"{run_name} other"
    comfy.run(training(Graph(), other).set("policy", alpha=40.0).graph)
    folder = comfy.output / "treegrpo"
    mine = (folder / run_name / "state.safetensors").read_bytes()
    shutil.copyfile(folder / other / "state.safetensors", folder / run_name / "state.safetensors")
    for _ in range(2):
        with pytest.raises(ExecutionError, match="started with alpha 40.0, not 4.0"):
            comfy.run(nodes.graph)
    (folder / run_name / "state.safetensors").write_bytes(mine[:-100])
    for _ in range(2):
        with pytest.raises(ExecutionError, match="not a complete safetensors file"):
            comfy.run(nodes.graph)
    (folder / run_name / "state.safetensors").write_bytes(mine)
    comfy.run(nodes.graph)
