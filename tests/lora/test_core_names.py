"""Every name that ComfyUI's own loader takes is read here as the same layer (names_probe.py asks the loader)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_in_comfyui
from probed import FAMILIES, Probe
from safetensors.torch import save_file
from torch import Tensor

from treegrpo_core.architectures import architecture_named
from treegrpo_core.cli import main
from treegrpo_core.lora import parts, read_lora
from treegrpo_core.lora.endings import TEXT_ENCODERS, kind_of_other, take_apart
from treegrpo_core.lora.file import read_any
from treegrpo_core.lora.keys import key_map


@pytest.fixture(scope="module")
def names(probe: Probe, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("names")
    run_in_comfyui("names_probe.py", folder)
    return json.loads((folder / "names.json").read_text(encoding="utf-8"))


# Names that no model has, for which ComfyUI takes rows as in Flux and Z-Image, where these families have others.
OTHER_ROWS = {
    "Flux 2": ("proj_mlp",),
    "Lumina 2": ("attention.to_k", "attention.to_v", "attention_to_k", "attention_to_v"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_name_means_the_same_layer_and_rows(names: dict[str, Any], family: str) -> None:
    assert len(names["layers"][family]) > 50
    for name, (layer, first, rows) in names["layers"][family].items():
        pieces = take_apart(f"{name}.lora_A.weight")
        assert pieces is not None
        place = key_map(architecture_named(family)).find(pieces.name)
        assert place is not None and place.rule.native == layer, name
        if first is None:
            assert place.part is None or len(place.rule.diffusers) == 1, name
        elif not name.endswith(OTHER_ROWS.get(family, ("nothing",))):
            assert place.part is not None, name
            shares = place.rule.shares or (1,) * len(place.rule.diffusers)
            assert first * shares[place.part] == rows * sum(shares[: place.part]), name


def test_every_ending_is_read_or_named(names: dict[str, Any]) -> None:
    assert set(names["endings"]) >= {"lora", "loha", "lokr", "glora", "oft", "boft", "any"}
    for ending in names["endings"]["any"]:
        pieces, kind = take_apart(f"layer{ending}"), kind_of_other(f"layer{ending}")
        assert (pieces is None) != (kind is None), ending
        assert pieces is None or pieces.name == "layer"
    for adapter in ("lora", "loha", "lokr"):
        assert all(take_apart(f"layer{ending}") for ending in names["endings"][adapter])
    for adapter, kind in (("glora", "GLoRA"), ("oft", "OFT or BOFT"), ("boft", "OFT or BOFT")):
        assert {kind_of_other(f"layer{ending}") for ending in names["endings"][adapter]} == {kind}


def test_every_name_of_a_text_encoder_is_one(names: dict[str, Any]) -> None:
    assert len(names["text_encoders"]) >= 10
    assert all(name.startswith(TEXT_ENCODERS) for name in names["text_encoders"])


LAYER = "joint_blocks.0.x_block.attn.proj"
PAIRS = {
    "kohya": ("{}.lora_down.weight", "{}.lora_up.weight"),
    "peft": ("{}.lora_A.weight", "{}.lora_B.weight"),
    "peft with the adapter's name": ("{}.lora_A.default.weight", "{}.lora_B.default.weight"),
    "peft with a number": ("{}.lora_A.default_0.weight", "{}.lora_B.default_0.weight"),
    "mochi": ("{}.lora_A", "{}.lora_B"),
    "diffusers of old": ("{}_lora.down.weight", "{}_lora.up.weight"),
    "diffusers later": ("{}.lora.down.weight", "{}.lora.up.weight"),
    "diffusers for linear layers": ("{}.lora_linear_layer.down.weight", "{}.lora_linear_layer.up.weight"),
}


@pytest.mark.parametrize("way", PAIRS)
@pytest.mark.parametrize(
    "name",
    [
        "diffusion_model." + LAYER,
        "transformer.transformer_blocks.0.attn.to_out.0",
        "lora_unet_" + LAYER.replace(".", "_"),
    ],
)
def test_the_halves_are_told_apart(tmp_path: Path, way: str, name: str) -> None:
    down, up = PAIRS[way]
    a, b = torch.randn(2, 1536), torch.randn(1536, 2)
    tensors = {down.format(name): a, up.format(name): b, f"{name}.alpha": torch.tensor(4.0)}
    save_file(tensors, tmp_path / "x")
    layer = read_lora(tmp_path / "x").layers[LAYER]
    assert torch.equal(layer[parts.A], a) and torch.equal(layer[parts.B], b) and parts.scale(layer) == 2


def pair(name: str, inputs: int, outputs: int) -> dict[str, Tensor]:
    return {f"{name}.lora_A.weight": torch.randn(2, inputs), f"{name}.lora_B.weight": torch.randn(outputs, 2)}


@pytest.mark.parametrize(("family", "times"), [("Flux", 7), ("Flux 2", 9)])
def test_names_of_the_first_rows_of_a_layer(tmp_path: Path, family: str, times: int) -> None:
    tensors = pair("diffusion_model.single_blocks.0.linear1_qkv", 8, 24)
    save_file(tensors, tmp_path / "x")
    layer = read_lora(tmp_path / "x", architecture=architecture_named(family)).layers["single_blocks.0.linear1"]
    whole = parts.scale(layer) * layer[parts.B] @ layer[parts.A]
    a, b = tensors.values()
    assert whole.shape == (8 * times, 8) and torch.equal(whole[24:], torch.zeros(8 * times - 24, 8))
    torch.testing.assert_close(whole[:24], b @ a)
    save_file(tensors | pair("diffusion_model.single_blocks.0.linear1", 8, 8 * times), tmp_path / "y")
    with pytest.raises(ValueError, match="y: layer single_blocks.0.linear1 occurs twice"):
        read_lora(tmp_path / "y", architecture=architecture_named(family))


def test_attention_processors_of_flux(tmp_path: Path) -> None:
    """As XLabs and USO save them; ComfyUI renames them so (comfy/lora_convert.py)."""
    names = {
        "double_blocks.0.processor.qkv_lora1": ("double_blocks.0.img_attn.qkv", 9216),
        "double_blocks.0.processor.qkv_lora2": ("double_blocks.0.txt_attn.qkv", 9216),
        "double_blocks.0.processor.proj_lora1": ("double_blocks.0.img_attn.proj", 3072),
        "double_blocks.0.processor.proj_lora2": ("double_blocks.0.txt_attn.proj", 3072),
        "single_blocks.37.processor.qkv_lora": ("single_blocks.37.linear1", 9216),
        "single_blocks.37.processor.proj_lora": ("single_blocks.37.linear2", 3072),
    }
    tensors = {}
    for name, (layer, outputs) in names.items():
        inputs = 15360 if layer.endswith("linear2") else 3072
        tensors |= {f"{name}.down.weight": torch.ones(1, inputs), f"{name}.up.weight": torch.ones(outputs, 1)}
    save_file(tensors, tmp_path / "x")
    file = read_lora(tmp_path / "x")
    assert file.architecture.name == "Flux" and file.layers.keys() == {layer for layer, _ in names.values()}


def test_wan_fun(tmp_path: Path) -> None:
    name = "lora_unet__blocks_0_cross_attn_k"
    tensors = {f"{name}.lora_down.weight": torch.ones(2, 1536), f"{name}.lora_up.weight": torch.ones(1536, 2)}
    save_file(tensors, tmp_path / "x")
    assert list(read_lora(tmp_path / "x").layers) == ["blocks.0.cross_attn.k"]


OTHERS = {
    "GLoRA": ["a1.weight", "a2.weight", "b1.weight", "b2.weight"],
    "OFT or BOFT": ["oft_blocks", "rescale"],
    "BOFT": ["boft_R", "boft_s"],
    r"whole changes of weights \(diff\)": ["diff"],
    r"changes of biases \(diff_b\)": ["diff_b"],
    r"changes of norm layers \(w_norm, b_norm\)": ["w_norm", "b_norm"],
    r"replaced weights \(set_weight\)": ["set_weight"],
    "biases of LoRA matrices": ["lora_B.bias"],
    "IA3": ["ia3_l", "on_input"],
    "VeRA": ["vera_lambda_b"],
    "AdaLoRA": ["lora_E"],
}


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_are_refused_by_name(tmp_path: Path, kind: str, beside: bool) -> None:
    tensors = {f"diffusion_model.{LAYER}.{ending}": torch.ones(2, 2, 2) for ending in OTHERS[kind]}
    count = len(tensors)
    tensors |= pair(f"diffusion_model.{LAYER}", 8, 8) if beside else {}
    save_file(tensors, tmp_path / "x")
    with pytest.raises(
        ValueError, match=rf"x has {count} of {len(tensors)} keys that belong to no .* They are {kind};"
    ):
        read_lora(tmp_path / "x")


def test_an_enlarged_layer_keeps_its_shape_and_is_no_plain_lora(tmp_path: Path) -> None:
    shape = torch.tensor([3072, 128])
    tensors = pair("diffusion_model.img_in", 128, 3072) | {"diffusion_model.img_in.reshape_weight": shape}
    save_file(tensors, tmp_path / "x")
    command = ["export", str(tmp_path / "x"), "--architecture", "Flux", "--output"]
    assert main([*command, str(tmp_path / "y.safetensors"), "--to", "kohya"]) == 0
    (layer,) = read_lora(tmp_path / "y.safetensors").layers.values()
    assert torch.equal(layer["reshape_weight"], shape) and parts.kind(layer) == "enlarging LoRA"
    assert main([*command, str(tmp_path / "z.safetensors"), "--to", "diffusers"]) == 2


def test_embeddings_beside_a_lora_are_left_out_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    more = {
        "bundle_emb.a cat.string_to_param.*": torch.ones(2, 768),
        "bundle_emb.a cat.string_to_token.*": torch.tensor(7),
    }
    save_file(pair(f"diffusion_model.{LAYER}", 1536, 1536) | more, tmp_path / "x")
    found = read_any(tmp_path / "x")
    assert list(found.file.layers) == [LAYER] and "embeddings (a cat) are left out" in found.notes[0]
    read_lora(tmp_path / "x")
    assert "x: embeddings (a cat) are left out" in caplog.text
    assert main(["inspect", str(tmp_path / "x")]) == 0 and "embeddings (a cat)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "key",
    ["lora_te_text_model_x", "lora_te3_encoder_x", "text_encoder_2.x", "text_encoders.t5xxl.x", "lora_prior_te_x"],
)
def test_text_encoders_are_left_out_with_a_word(tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture) -> None:
    save_file(pair(f"diffusion_model.{LAYER}", 1536, 1536) | pair(key, 8, 8), tmp_path / "x")
    file = read_lora(tmp_path / "x", without_text_encoder=True)
    assert list(file.layers) == [LAYER]
    assert f"x: 2 keys for text encoders are left out (for example {key}.lora_A.weight)" in caplog.text
