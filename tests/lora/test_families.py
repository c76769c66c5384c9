"""Families whose layers have the same names: told apart where names, shapes or the header decide, else asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from probed import FAMILIES
from safetensors.torch import save_file
from torch import Tensor

from treegrpo_core.architectures import ARCHITECTURES, OTHER, Architecture, architecture_named
from treegrpo_core.cli import main
from treegrpo_core.lora import Format, LoraFile, parts, read_lora, to_tensors
from treegrpo_core.lora.header import named_architecture

Shapes = dict[str, tuple[int, int]]
"""Inputs and outputs by layer."""


def stored(path: Path, shapes: Shapes, prefix: str = "diffusion_model.", header: dict[str, str] | None = None) -> Path:
    tensors: dict[str, Tensor] = {}
    for name, (inputs, outputs) in shapes.items():
        tensors[f"{prefix}{name}.lora_A.weight"] = torch.ones(1, inputs)
        tensors[f"{prefix}{name}.lora_B.weight"] = torch.ones(outputs, 1)
    save_file(tensors, path, header)
    return path


XL_ATTENTION = "input_blocks.4.1.transformer_blocks.0.attn1.to_q"
TOLD: dict[str, tuple[str, str, Shapes]] = {
    "Flux by linear2": ("Flux", "diffusion_model.", {"single_blocks.3.linear2": (15360, 3072)}),
    "Flux 2 by linear2": ("Flux 2", "diffusion_model.", {"single_blocks.3.linear2": (12288, 3072)}),
    "Flux by linear1": ("Flux", "diffusion_model.", {"single_blocks.3.linear1": (3072, 21504)}),
    "Flux 2 by linear1": ("Flux 2", "diffusion_model.", {"single_blocks.3.linear1": (3072, 27648)}),
    "Flux by the way back of the MLP": ("Flux", "diffusion_model.", {"double_blocks.0.txt_mlp.2": (12288, 3072)}),
    "Flux 2 by the way back of the MLP": ("Flux 2", "diffusion_model.", {"double_blocks.0.txt_mlp.2": (9216, 3072)}),
    "Flux 2 of another size, by linear2": ("Flux 2", "diffusion_model.", {"single_blocks.3.linear2": (320, 80)}),
    "Flux 2 by its width": ("Flux 2", "diffusion_model.", {"double_blocks.0.img_attn.qkv": (6144, 18432)}),
    "Flux by its blocks": ("Flux", "diffusion_model.", {"double_blocks.11.img_attn.qkv": (3072, 9216)}),
    "Flux by a block that the Flux 2 of this width lacks": (
        "Flux",
        "diffusion_model.",
        {"double_blocks.6.img_attn.qkv": (3072, 9216)},
    ),
    "Flux in diffusers' names": (
        "Flux",
        "transformer.",
        {"transformer_blocks.0.attn.to_q": (3072, 3072), "single_transformer_blocks.0.attn.to_q": (3072, 3072)},
    ),
    "SD3 in diffusers' names": ("SD3", "transformer.", {"transformer_blocks.0.attn.to_q": (1536, 1536)}),
    "SD3.5 Large by its width": ("SD3", "transformer.", {"transformer_blocks.0.attn.to_out.0": (2432, 2432)}),
    "Qwen-Image by its blocks": ("Qwen-Image", "transformer.", {"transformer_blocks.40.attn.to_q": (3072, 3072)}),
    "SD1.5 by the text": ("SD1.5", "lora_unet_", {XL_ATTENTION.replace("attn1.to_q", "attn2.to_k"): (768, 640)}),
    "SD2 by the text": ("SD2", "diffusion_model.", {XL_ATTENTION.replace("attn1.to_q", "attn2.to_v"): (1024, 640)}),
    "SDXL by the text": ("SDXL", "diffusion_model.", {XL_ATTENTION.replace("attn1.to_q", "attn2.to_v"): (2048, 640)}),
    "SDXL by its channels": (
        "SDXL",
        "unet.",
        {"up_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q": (640, 640)},
    ),
    "SDXL by its second block": ("SDXL", "unet.", {XL_ATTENTION.replace(".0.attn", ".1.attn"): (640, 640)}),
    "SDXL by kohya's way of names": ("SDXL", "lora_unet_", {XL_ATTENTION.replace(".", "_"): (640, 640)}),
    "Z-Image by its rows": ("Z-Image", "diffusion_model.", {"layers.0.attention.qkv": (96, 288)}),
    "Lumina 2 by its rows": ("Lumina 2", "diffusion_model.", {"layers.0.attention.qkv": (96, 160)}),
    "Z-Image by its width": ("Z-Image", "diffusion_model.", {"layers.0.attention.out": (3840, 3840)}),
    "Lumina 2 by its width": ("Lumina 2", "diffusion_model.", {"layers.0.attention.out": (2304, 2304)}),
    "Lumina 2 by its MLP": ("Lumina 2", "lora_unet_", {"layers_0_feed_forward_w1": (96, 384)}),
}


@pytest.mark.parametrize("case", TOLD)
def test_the_family_is_told(tmp_path: Path, case: str) -> None:
    family, prefix, shapes = TOLD[case]
    shapes = {name.replace(".", "_") if prefix.endswith("_") else name: shape for name, shape in shapes.items()}
    assert read_lora(stored(tmp_path / "x", shapes, prefix)).architecture.name == family


ASKED: dict[str, tuple[str, str, Shapes]] = {
    "attention of Flux": (
        "Flux or Flux 2",
        "diffusion_model.",
        {"double_blocks.0.img_attn.qkv": (3072, 9216), "double_blocks.4.txt_attn.proj": (3072, 3072)},
    ),
    "attention of Flux in kohya's names": (
        "Flux or Flux 2",
        "lora_unet_",
        {"double_blocks_0_img_attn_qkv": (3072, 9216)},
    ),
    "attention of Flux in another size": (
        "Flux or Flux 2",
        "diffusion_model.",
        {"double_blocks.0.img_attn.qkv": (64, 192)},
    ),
    "attention of SD1.5": (
        "SD1.5 or SD2",
        "unet.",
        {"down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q": (320, 320)},
    ),
    "attention that SDXL has too": ("SD1.5 or SD2 or SDXL", "diffusion_model.", {XL_ATTENTION: (640, 640)}),
    "text of no known width": (
        "SD1.5 or SD2",
        "unet.",
        {"down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k": (48, 32)},
    ),
    "attention of Lumina 2 in another size": (
        "Z-Image or Lumina 2",
        "diffusion_model.",
        {"layers.0.attention.out": (96, 96)},
    ),
}


@pytest.mark.parametrize("case", ASKED)
def test_a_family_that_could_be_another_is_asked_for(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    families, prefix, shapes = ASKED[case]
    path, out = stored(tmp_path / "x.safetensors", shapes, prefix), tmp_path / "out.safetensors"
    for command in (["inspect", str(path)], ["export", str(path), "--to", "kohya", "--output", str(out)]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert f"x.safetensors: its layers could be those of {families}, and" in said and "--architecture" in said
    assert not out.exists()
    for family in families.split(" or "):
        assert read_lora(path, architecture=architecture_named(family)).architecture.name == family
        assert main(["inspect", str(path), "--architecture", family]) == 0
        assert f"architecture  {family}\n" in re_spaced(capsys.readouterr().out)


def re_spaced(text: str) -> str:
    return "\n".join("  ".join(part.strip() for part in line.split("  ") if part) for line in text.splitlines()) + "\n"


@pytest.mark.parametrize("to", ["comfyui", "kohya", "diffusers"])
def test_what_was_told_once_stays_known(tmp_path: Path, to: Format) -> None:
    path = stored(tmp_path / "x", {"double_blocks.0.img_attn.qkv": (3072, 9216)})
    tensors, header = to_tensors(read_lora(path, architecture=architecture_named("Flux 2")), to)
    save_file(tensors, tmp_path / "y", header)
    assert read_lora(tmp_path / "y").architecture.name == "Flux 2"


@pytest.mark.parametrize("family", ["Flux", "Flux 2"])
def test_linear1_of_the_right_family_is_split_rightly(family: str, tmp_path: Path) -> None:
    """One layer of Flux 2 in diffusers, four of Flux."""
    rows = {"Flux": 7, "Flux 2": 9}[family] * 3072
    path = stored(tmp_path / "x", {"single_blocks.0.linear1": (3072, rows)})
    found = read_lora(path)
    names = {key.split(".lora")[0].split("blocks.0.")[1] for key in to_tensors(found, "diffusers")[0]}
    assert names == (
        {"attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"} if family == "Flux" else {"attn.to_qkv_mlp_proj"}
    )


@pytest.mark.parametrize(
    ("key", "said", "family"),
    [
        ("modelspec.architecture", "flux-2-klein-4b/lora", "Flux 2"),
        ("modelspec.architecture", "Flux.1-dev/lora", "Flux"),
        ("modelspec.architecture", "flux-1-schnell/lora", "Flux"),
        ("ss_base_model_version", "flux2", "Flux 2"),
        ("ss_base_model_version", "flux1", "Flux"),
        ("treegrpo.architecture", "Flux 2", "Flux 2"),
    ],
)
def test_the_header_decides(tmp_path: Path, key: str, said: str, family: str) -> None:
    path = stored(tmp_path / "x", {"double_blocks.0.img_attn.qkv": (3072, 9216)}, header={key: said})
    assert read_lora(path).architecture.name == family


@pytest.mark.parametrize("entry", ARCHITECTURES, ids=FAMILIES)
def test_every_family_is_known_by_the_names_that_are_written(entry: Architecture) -> None:
    assert named_architecture({"modelspec.architecture": entry.modelspec}) == entry
    assert named_architecture({"ss_base_model_version": entry.base_version}) == entry


CHROMA: Shapes = {"double_blocks.0.img_attn.qkv": (3072, 9216), "single_blocks.0.linear1": (3072, 21504)}
"""All layers of these are also Flux'."""


def test_a_family_without_an_entry_is_none_with_one(tmp_path: Path) -> None:
    named = read_lora(stored(tmp_path / "x", CHROMA, header={"modelspec.architecture": "chroma/lora"}))
    layers = CHROMA | {"distilled_guidance_layer.in_proj": (64, 5120)}
    by_its_own_layers = read_lora(stored(tmp_path / "y", layers))
    told = read_lora(stored(tmp_path / "z", CHROMA), architecture=OTHER)
    for file in (named, by_its_own_layers, told):
        assert file.architecture == OTHER
        assert "ss_base_model_version" not in to_tensors(file, "kohya")[1]
        assert "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight" in to_tensors(file, "kohya")[0]


def test_more_blocks_than_a_family_has_are_of_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """HunyuanVideo has Flux' names and sizes, and a block more of each kind."""
    shapes = {name.replace(".0.", ".19."): shape for name, shape in CHROMA.items()}
    assert read_lora(stored(tmp_path / "x", shapes)).architecture == OTHER
    flat = {name.replace(".", "_"): shape for name, shape in shapes.items()}
    with pytest.raises(ValueError, match="Flux has no layers double_blocks_19_img_attn_qkv"):
        read_lora(stored(tmp_path / "y", flat, "lora_unet_"))


def test_sizes_that_nobody_has_published_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for inputs, said in ((2304, False), (2520, True)):
        path = stored(tmp_path / "x", {"layers.0.attn.to_q": (inputs, inputs)}, "transformer.")
        assert main(["inspect", str(path)]) == 0
        assert ("no published model of the family Lumina 2" in capsys.readouterr().out) == said


def test_other_in_other_programs_names_needs_families_that_agree(tmp_path: Path) -> None:
    flat = {name.replace(".", "_"): shape for name, shape in CHROMA.items()}
    file = read_lora(stored(tmp_path / "x", flat, "lora_unet_"), architecture=OTHER)
    assert file.architecture == OTHER and file.layers.keys() == CHROMA.keys()
    unclear = stored(tmp_path / "y", {"transformer_blocks.0.attn.to_q": (64, 64)}, "transformer.")
    with pytest.raises(ValueError, match="layer transformer_blocks.0.attn.to_q has a name of another program"):
        read_lora(unclear, architecture=OTHER)


def test_names_of_the_model_itself_read_files_of_any_family(tmp_path: Path) -> None:
    """As start_from does, for models that have no entry."""
    own = ["blocks.0.self_attention.to_q", "blocks.0.some_mlp.0"]
    for prefix, separator in (
        ("lora_unet_", "_"),
        ("lycoris_", "_"),
        ("transformer.", "."),
        ("", "."),
        ("base_model.model.", "."),
    ):
        shapes = {name.replace(".", separator): (8, 8) for name in own}
        path = stored(tmp_path / "x", shapes, prefix)
        assert list(read_lora(path, architecture=OTHER, model_layers=own).layers) == own
        with pytest.raises(ValueError, match="has a name of another program"):
            read_lora(path, architecture=OTHER, model_layers=own[:1])


def test_a_given_family_is_taken_at_its_word(tmp_path: Path) -> None:
    """Also against the shapes: they may be of a size that nobody has published."""
    path = stored(tmp_path / "x", {"single_blocks.3.linear2": (12288, 3072)})
    assert read_lora(path, architecture=architecture_named("Flux")).architecture.name == "Flux"
    header = LoraFile({}, {"treegrpo.architecture": "Flux"}, OTHER).metadata
    assert read_lora(stored(tmp_path / "y", {"single_blocks.3.linear2": (12288, 3072)}, header=header)).layers
    with pytest.raises(ValueError, match="Wan has no layers single_blocks.3.linear2"):
        read_lora(path, architecture=architecture_named("Wan"))
    assert parts.A in next(iter(read_lora(path).layers.values()))
