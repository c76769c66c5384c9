"""Conversion keeps every layer's effect, and the header's history, between all formats and back."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from probed import FAMILIES
from safetensors.torch import load_file, save_file
from torch import Tensor

from treegrpo_core.architectures import OTHER, architecture_named
from treegrpo_core.lora import FORMATS, Format, LoraFile, parts, read_header, read_lora, to_tensors, write
from treegrpo_core.lora.keys import flat, key_map, kohya_name

Layers = dict[str, dict[str, Tensor]]


def effect(layer: dict[str, Tensor]) -> Tensor:
    return parts.scale(layer) * layer[parts.B].flatten(1) @ layer[parts.A].flatten(1)


def assert_same_effect(found: Layers, wanted: Layers) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(effect(found[name]), effect(wanted[name]), atol=1e-5, rtol=1e-5)


def random_layers(family: str, rank: int = 2) -> Layers:
    """A LoRA of layers of every kind, in the first block and the last; sizes as the family's shares need."""
    rules = key_map(architecture_named(family)).by_native
    kinds: dict[str, list[str]] = {}
    for name in rules:
        kinds.setdefault(re.sub(r"(blocks|layers|refiner)\.\d+", "", name), []).append(name)
    layers: Layers = {}
    for name in (name for names in kinds.values() for name in {names[0]: 0, names[-1]: 0}):
        rows = 12 if rules[name].swap else 4 * sum(rules[name].shares or (1,) * len(rules[name].diffusers))
        layers[name] = {parts.A: torch.randn(rank, 6), parts.B: torch.randn(rows, rank)}
        if len(layers) % 3:
            layers[name][parts.ALPHA] = torch.tensor(float(len(layers) % 5 + 1))
    return layers


def stored(tmp_path: Path, file: LoraFile, to: Format) -> Path:
    path = tmp_path / f"{to}.safetensors"
    write(path, file, to)
    return path


@pytest.mark.parametrize(("first", "second"), list(itertools.product(FORMATS, FORMATS)))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_there_and_back(tmp_path: Path, family: str, first: Format, second: Format) -> None:
    file = LoraFile(
        random_layers(family), {"treegrpo.run": "mine", "modelspec.title": "A title"}, architecture_named(family)
    )
    once = read_lora(stored(tmp_path, file, first))
    twice = read_lora(stored(tmp_path, once, second))
    assert twice.architecture == file.architecture
    assert (twice.metadata["treegrpo.run"], twice.metadata["modelspec.title"]) == ("mine", "A title")
    assert_same_effect(twice.layers, file.layers)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_family_is_found_without_a_header(tmp_path: Path, family: str, to: Format) -> None:
    """By names and widths alone, as in files of other programs."""
    width = max(architecture_named(family).widths)
    rule = next(rule for name, rule in key_map(architecture_named(family)).by_native.items() if _telling(name))
    # Flux 2's smaller models are as wide as Flux, but their MLPs are gated.
    rows = {"Flux 2": 6 * width, "Flux": 4 * width, "Lumina 2": width // 3 * 5}.get(family, 3 * width)
    layers = {rule.native: {parts.A: torch.randn(1, width), parts.B: torch.randn(rows, 1)}}
    tensors, _ = to_tensors(LoraFile(layers, {}, architecture_named(family)), to)
    save_file(tensors, tmp_path / "bare.safetensors")
    assert read_lora(tmp_path / "bare.safetensors").architecture.name == family


def _telling(name: str) -> bool:
    endings = ("attn2.to_k", "joint_blocks.0.x_block.mlp.fc1", "double_blocks.0.img_mlp.0", "img_mlp.net.2")
    return name.endswith((*endings, "layers.0.attention.qkv", "blocks.0.ffn.0")) and "middle" not in name


def test_names_of_several_families_are_no_guess(tmp_path: Path) -> None:
    """Attention of the first blocks, in diffusers' names: Flux and Qwen-Image have the same names and width."""
    stem = "transformer.transformer_blocks.3.attn.to_q"
    save_file(
        {f"{stem}.lora_A.weight": torch.ones(1, 3072), f"{stem}.lora_B.weight": torch.ones(3072, 1)}, tmp_path / "x"
    )
    with pytest.raises(ValueError, match="x: its layers could be those of Flux or Qwen-Image"):
        read_lora(tmp_path / "x")
    file = read_lora(tmp_path / "x", architecture=architecture_named("Qwen-Image"))
    assert list(file.layers) == ["transformer_blocks.3.attn.to_q"]


def test_flux_2_of_fluxs_width_is_flux_2(tmp_path: Path) -> None:
    layers = {"double_blocks.0.img_mlp.0": {parts.A: torch.randn(1, 3072), parts.B: torch.randn(6 * 3072, 1)}}
    tensors, _ = to_tensors(LoraFile(layers, {}, architecture_named("Flux 2")), "comfyui")
    save_file(tensors, tmp_path / "bare.safetensors")
    assert read_lora(tmp_path / "bare.safetensors").architecture.name == "Flux 2"


@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_layers_have_one_name(family: str) -> None:
    architecture = architecture_named(family)
    keys = key_map(architecture)
    assert len({kohya_name(architecture, layer) for layer in keys.by_native}) == len(keys.by_native)
    for layer, rule in keys.by_native.items():
        place = keys.find(layer)
        assert place is not None and place.rule.native == layer
        for number, name in enumerate(rule.diffusers):
            place = keys.find(flat(name))
            assert place is not None and place.rule.native == layer and place.part in (number, None)


def test_diffusers_layers_with_a_of_their_own_become_blocks(tmp_path: Path) -> None:
    """to_q (rank 2) and to_v (rank 3), no to_k: a fused layer of rank 5 whose keys' rows are zero."""
    name = "transformer.transformer_blocks.0.attn"
    q, v = (torch.randn(4, 2), torch.randn(2, 6)), (torch.randn(4, 3), torch.randn(3, 6))
    tensors = {f"{name}.to_q.lora_B.weight": q[0], f"{name}.to_q.lora_A.weight": q[1]}
    tensors |= {f"{name}.to_v.lora_B.weight": v[0], f"{name}.to_v.lora_A.weight": v[1]}
    save_file(
        {**tensors, f"{name}.to_q.alpha": torch.tensor(8.0)},
        tmp_path / "x.safetensors",
        {"ss_base_model_version": "sd3"},
    )
    file = read_lora(tmp_path / "x.safetensors")
    layer = file.layers["joint_blocks.0.x_block.attn.qkv"]
    assert layer[parts.A].shape == (5, 6) and list(file.layers) == ["joint_blocks.0.x_block.attn.qkv"]
    wanted = torch.cat([4 * q[0] @ q[1], torch.zeros(4, 6), v[0] @ v[1]])
    torch.testing.assert_close(effect(layer), wanted)
    back = to_tensors(file, "diffusers")[0]
    assert back[f"{name}.to_q.lora_A.weight"].shape == (2, 6) and back[f"{name}.to_v.lora_A.weight"].shape == (3, 6)


OLD_NAMES = {
    "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.processor.to_out_lora.{}.weight": "attn1.to_out.0",
    "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.lora.{}.weight": "attn2.to_k",
    "unet.down_blocks.1.attentions.0.transformer_blocks.0.ff.net.2.lora_linear_layer.{}.weight": "ff.net.2",
    "base_model.model.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_v.lora_{}.default.weight": "attn1.to_v",
    "lycoris_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q.lora_{}.weight": "attn1.to_q",
}


@pytest.mark.parametrize("key", OLD_NAMES)
def test_names_of_other_trainers_are_read(tmp_path: Path, key: str) -> None:
    down, up = ("A", "B") if "default" in key else ("down", "up")
    tensors = {key.format(down): torch.ones(2, 768), key.format(up): torch.ones(8, 2)}
    save_file(tensors, tmp_path / "x.safetensors", {"ss_base_model_version": "sd_v1"})
    file = read_lora(tmp_path / "x.safetensors")
    assert list(file.layers) == [f"input_blocks.4.1.transformer_blocks.0.{OLD_NAMES[key]}"]


def test_layers_with_the_same_a_keep_their_rank(tmp_path: Path) -> None:
    layers = {"double_blocks.0.img_attn.qkv": {parts.A: torch.randn(3, 8), parts.B: torch.randn(24, 3)}}
    path = stored(tmp_path, LoraFile(layers, {}, architecture_named("Flux")), "diffusers")
    assert read_lora(path).layers["double_blocks.0.img_attn.qkv"][parts.A].shape == (3, 8)


def test_alpha_in_the_header_of_a_diffusers_file_counts(tmp_path: Path) -> None:
    stem = "transformer.transformer_blocks.0.attn.to_out.0"
    tensors = {f"{stem}.lora_A.weight": torch.ones(2, 4), f"{stem}.lora_B.weight": torch.ones(4, 2)}
    for settings, alpha in (
        ({"lora_alpha": 6}, 6.0),
        ({"lora_alpha": 6, "alpha_pattern": {"to_out.0": 1}}, 1.0),
        ({"lora_alpha": 6, "use_rslora": True}, 6.0 * 2**0.5),
    ):
        header = {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in settings.items()})}
        save_file(tensors, tmp_path / "x.safetensors", {**header, "ss_base_model_version": "sd3"})
        (layer,) = read_lora(tmp_path / "x.safetensors").layers.values()
        assert float(layer["alpha"]) == pytest.approx(alpha)


@pytest.mark.parametrize("to", FORMATS)
def test_convolutions_survive(tmp_path: Path, to: Format) -> None:
    layers = {"input_blocks.1.0.in_layers.2": {parts.A: torch.randn(2, 4, 3, 3), parts.B: torch.randn(8, 2, 1, 1)}}
    read = read_lora(stored(tmp_path, LoraFile(layers, {}, architecture_named("SD1.5")), to))
    assert_same_effect(read.layers, layers)


@pytest.mark.parametrize("to", FORMATS)
def test_dora_is_split_and_stacked_with_its_magnitudes(tmp_path: Path, to: Format) -> None:
    content = {parts.A: torch.randn(2, 8), parts.B: torch.randn(24, 2), parts.DORA: torch.rand(24, 1)}
    layers = {"joint_blocks.0.x_block.attn.qkv": content}
    read = read_lora(stored(tmp_path, LoraFile(layers, {}, architecture_named("SD3")), to)).layers
    assert_same_effect(read, layers)
    assert torch.equal(read["joint_blocks.0.x_block.attn.qkv"][parts.DORA], content[parts.DORA])


HADA = {f"hada_w{side}_{half}": torch.randn((8, 2) if half == "a" else (2, 8)) for side in "12" for half in "ab"}
LOKR = {"lokr_w1": torch.randn(2, 2), "lokr_w2_a": torch.randn(4, 2), "lokr_w2_b": torch.randn(2, 4)}


@pytest.mark.parametrize(("content", "kind"), [(HADA, "LoHa"), (LOKR, "LoKr")])
def test_loha_and_lokr_keep_their_tensors_and_are_refused_for_diffusers(
    tmp_path: Path, content: dict[str, Tensor], kind: str
) -> None:
    layers = {"joint_blocks.0.x_block.attn.proj": {**content, "alpha": torch.tensor(1.0)}}
    file = LoraFile(layers, {}, architecture_named("SD3"))
    for to in ("comfyui", "kohya"):
        (read,) = read_lora(stored(tmp_path, file, to)).layers.values()
        assert all(torch.equal(read[name], value) for name, value in content.items())
    with pytest.raises(ValueError, match=f"proj is {kind}, and only LoRA and DoRA"):
        write(tmp_path / "no.safetensors", file, "diffusers")
    assert not (tmp_path / "no.safetensors").exists()


def test_unknown_families_stay_in_comfyuis_format(tmp_path: Path) -> None:
    layers = {"attn.proj": {parts.A: torch.randn(2, 4), parts.B: torch.randn(4, 2)}}
    file = LoraFile(layers, {}, OTHER)
    assert_same_effect(read_lora(stored(tmp_path, file, "comfyui")).layers, layers)
    with pytest.raises(ValueError, match=r"no name for 1 layers of this model family \(attn.proj\)"):
        to_tensors(file, "diffusers")


def test_kohyas_key_rules(tmp_path: Path) -> None:
    """What A1111, Forge and InvokeAI ask of every key, and InvokeAI of the whole file."""
    for family in FAMILIES:
        path = stored(tmp_path, LoraFile(random_layers(family), {}, architecture_named(family)), "kohya")
        stems = {tuple(key.split(".", 1)) for key in load_file(path)}
        assert all(stem.startswith("lora_unet_") for stem, _ in stems)
        assert {ending for _, ending in stems} == {"lora_down.weight", "lora_up.weight", "alpha"}
        header = read_header(path)
        assert header["ss_network_module"] == "networks.lora" and header["ss_network_dim"] == "2"
        assert header["modelspec.sai_model_spec"] == "1.0.1"
        assert header["modelspec.architecture"] == architecture_named(family).modelspec
        assert header["ss_base_model_version"] == architecture_named(family).base_version
    assert any(
        "input_blocks_4_1_" in stem
        for stem, _ in {
            tuple(key.split(".", 1))
            for key in to_tensors(
                LoraFile(
                    {
                        "input_blocks.4.1.transformer_blocks.1.ff.net.2": {
                            parts.A: torch.ones(1, 2),
                            parts.B: torch.ones(2, 1),
                        }
                    },
                    {},
                    architecture_named("SDXL"),
                ),
                "kohya",
            )[0]
        }
    )
