"""LoRA files of other programs that TreeGRPO Policy starts from."""

from __future__ import annotations

import json

import pytest
import torch
from graphs import ordinary_image, training
from random_graphs import random_training
from safetensors.torch import load_file, save_file

from tools.client import ExecutionError, Graph
from treegrpo_core.architectures import architecture_named

STEM = "transformer_blocks.0.attn.to_out.0"
"""A layer of the bundled model in diffusers' names."""


def pair(name, inputs, outputs, rank=2):
    generator = torch.Generator().manual_seed(3)
    return {
        f"{name}.lora_A.weight": torch.randn(rank, inputs, generator=generator),
        f"{name}.lora_B.weight": torch.randn(outputs, rank, generator=generator),
    }


def started_with(comfy, run_name, layer):
    """What the run's adapter adds to a layer's weights at its start; the run's rank is its alpha."""
    state = load_file(comfy.output / "treegrpo" / run_name / "state.safetensors")
    return state[f"adapter.{layer}.lora_B.weight"] @ state[f"adapter.{layer}.lora_A.weight"]


def test_a_folder_of_pefts_with_its_own_scale(comfy, graph, run_name):
    tensors = pair(f"base_model.model.{STEM}", 192, 192)
    folder = comfy.base / "models" / "loras" / run_name
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6}))
    nodes = training(graph, run_name).set("policy", start_from=f"{run_name}/adapter_model.safetensors")
    del graph[nodes.update.id]
    ordinary_image(graph, nodes.model, nodes.policy[1])
    comfy.run(graph)
    a, b = tensors.values()
    torch.testing.assert_close(started_with(comfy, run_name, "joint_blocks.0.x_block.attn.proj"), 3 * b @ a)


def test_text_encoders_and_embeddings_are_left_out_and_said(comfy, graph, run_name):
    more = pair("lora_te1_text_model_encoder_layers_0_mlp_fc1", 8, 8) | {"bundle_emb.cat.clip_l": torch.ones(1, 8)}
    tensors = pair(f"transformer.{STEM}", 192, 192)
    save_file(tensors | more, comfy.base / "models" / "loras" / f"{run_name}.safetensors")
    nodes = training(graph, run_name).set("policy", start_from=f"{run_name}.safetensors")
    del graph[nodes.update.id]
    ordinary_image(graph, nodes.model, nodes.policy[1])
    said = len(comfy.log())
    comfy.run(graph)
    log = comfy.log()[said:]
    assert "2 keys for text encoders are left out (for example lora_te1" in log
    assert "embeddings (cat) are left out" in log
    a, b = tensors.values()
    torch.testing.assert_close(started_with(comfy, run_name, "joint_blocks.0.x_block.attn.proj"), b @ a)


def test_the_model_tells_the_family_of_a_file_that_could_be_of_two(comfy, run_name):
    """Attention of Flux and of Flux 2 has the same names and shapes."""
    name = "double_blocks.0.img_attn.qkv"
    tensors = pair(f"lora_unet_{name.replace('.', '_')}", 64, 192)
    save_file(tensors, comfy.base / "models" / "loras" / f"{run_name}.safetensors")
    for family in ("Flux", "Flux 2"):
        graph = Graph()
        nodes = random_training(graph, f"{run_name} {family}", architecture_named(family))
        graph.inputs(nodes.policy)["start_from"] = f"{run_name}.safetensors"
        comfy.run(graph)
        start = load_file(comfy.output / "treegrpo" / f"{run_name} {family}" / "state.safetensors")
        assert start[f"adapter.{name}.lora_A.weight"].any()


@pytest.mark.parametrize(
    ("ending", "kind"),
    [("oft_blocks", "OFT or BOFT"), ("diff_b", r"changes of biases \(diff_b\)"), ("a1.weight", "GLoRA")],
)
def test_kinds_that_cannot_be_started_from_are_named(comfy, graph, run_name, ending, kind):
    name = "diffusion_model.joint_blocks.0.x_block.attn.proj"
    save_file({f"{name}.{ending}": torch.ones(2, 2, 2)}, comfy.base / "models" / "loras" / f"{run_name}.safetensors")
    training(graph, run_name).set("policy", start_from=f"{run_name}.safetensors")
    with pytest.raises(ExecutionError, match=f"They are {kind}") as caught:
        comfy.run(graph)
    assert caught.value.node_type == "TreeGRPOPolicy"
