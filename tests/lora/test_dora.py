"""DoRA in files: a magnitude per output row or per input column, and programs that compute it differently."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from probed import FAMILIES
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from treegrpo_core.architectures import architecture_named
from treegrpo_core.cli import main
from treegrpo_core.lora import LoraFile, parts, read_lora, to_tensors, write
from treegrpo_core.lora.keys import key_map
from treegrpo_core.lora.programs import PROGRAMS, loaded_by

SD3 = architecture_named("SD3")
PROJ, FUSED = "joint_blocks.0.x_block.attn.proj", "joint_blocks.0.x_block.attn.qkv"


def stored(path: Path, rows: int, columns: int, magnitudes: Tensor, layer: str = PROJ) -> Path:
    """A kohya file of one DoRA layer."""
    stem = f"lora_unet_{layer.replace('.', '_')}"
    matrices = {
        f"{stem}.lora_down.weight": torch.randn(2, columns),
        f"{stem}.lora_up.weight": torch.randn(rows, 2),
        f"{stem}.alpha": torch.tensor(2.0),
    }
    save_file(matrices | {f"{stem}.dora_scale": magnitudes}, path)
    return path


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((6, 1), "DoRA"),
        ((6,), "DoRA"),
        ((1, 4), parts.PER_COLUMN),
        ((4,), parts.PER_COLUMN),
    ],
)
def test_the_shape_says_whose_magnitudes_they_are(tmp_path: Path, shape: tuple[int, ...], kind: str) -> None:
    (layer,) = read_lora(stored(tmp_path / "x", 6, 4, torch.ones(shape))).layers.values()
    assert parts.kind(layer) == kind
    assert layer[parts.DORA].shape == ((6, 1) if kind == "DoRA" else (1, 4))


@pytest.mark.parametrize(("shape", "kind"), [((6, 1), "DoRA"), ((6,), "DoRA"), ((1, 6), parts.PER_COLUMN)])
def test_in_square_layers_the_orientation_says_it(tmp_path: Path, shape: tuple[int, ...], kind: str) -> None:
    (layer,) = read_lora(stored(tmp_path / "x", 6, 6, torch.ones(shape))).layers.values()
    assert parts.kind(layer) == kind


@pytest.mark.parametrize("shape", [(5,), (5, 1), (1, 6), (4, 1), (6, 4)])
def test_magnitudes_that_fit_nothing_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"x: layer .*{re.escape(str(shape))}, but 6 outputs and 4 inputs"):
        read_lora(stored(tmp_path / "x", 6, 4, torch.ones(shape)))


def test_pefts_magnitudes_are_per_row_whatever_their_shape(tmp_path: Path) -> None:
    """A convolution has them as (1, outputs, 1, 1), which per column would be inputs."""
    stem = "unet.down_blocks.0.resnets.0.conv1"
    matrices = {f"{stem}.lora_A.weight": torch.ones(2, 8, 3, 3), f"{stem}.lora_B.weight": torch.ones(8, 2, 1, 1)}
    values = torch.rand(1, 8, 1, 1)
    save_file(matrices | {f"{stem}.lora_magnitude_vector": values}, tmp_path / "x", {"ss_base_model_version": "sd_v1"})
    (layer,) = read_lora(tmp_path / "x").layers.values()
    assert parts.kind(layer) == "DoRA" and torch.equal(layer[parts.DORA].flatten(), values.flatten())
    assert layer[parts.DORA].shape == (8, 1, 1, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_per_column_is_kept_or_refused_by_name(tmp_path: Path, family: str) -> None:
    architecture = architecture_named(family)
    for number, (layer, rule) in enumerate(list(key_map(architecture).by_native.items())[:60]):
        rows = 12 * sum(rule.shares or (1,) * len(rule.diffusers))
        columns = rows if number % 2 else 10  # square layers too
        content = {parts.A: torch.randn(2, columns), parts.B: torch.randn(rows, 2), parts.DORA: torch.rand(1, columns)}
        file = LoraFile({layer: content}, {}, architecture)
        for to in ("comfyui", "kohya"):
            path = tmp_path / f"{number}.{to}.safetensors"
            write(path, file, to)
            assert torch.equal(read_lora(path).layers[layer][parts.DORA], content[parts.DORA])
        with pytest.raises(ValueError, match=rf"layer {re.escape(layer)} is DoRA with a magnitude per input column"):
            to_tensors(file, "diffusers")


def test_parts_of_a_layer_with_magnitudes_per_column_cannot_become_one(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for letter in "qkv":
        stem = f"transformer.transformer_blocks.0.attn.to_{letter}"
        tensors |= {f"{stem}.lora_A.weight": torch.randn(2, 6), f"{stem}.lora_B.weight": torch.randn(6, 2)}
        tensors[f"{stem}.dora_scale"] = torch.rand(1, 6)
    save_file(tensors, tmp_path / "x", {"ss_base_model_version": "sd3"})
    with pytest.raises(ValueError, match=r"to_[qkv] is DoRA per column, which cannot become a part of .*qkv"):
        read_lora(tmp_path / "x")


def test_some_layers_of_dora_are_refused_for_diffusers(tmp_path: Path) -> None:
    """PEFT would make all of them DoRA, the others with the base weights' magnitudes."""
    names = (PROJ, PROJ.replace(".0.", ".1."))
    layers = {name: {parts.A: torch.randn(2, 4), parts.B: torch.randn(6, 2)} for name in names}
    layers[names[1]][parts.DORA] = torch.rand(6, 1)
    file = LoraFile(layers, {}, SD3)
    with pytest.raises(ValueError, match="layer joint_blocks.1.* is DoRA and joint_blocks.0.* is not"):
        to_tensors(file, "diffusers")
    write(tmp_path / "x.safetensors", file, "kohya")
    read = read_lora(tmp_path / "x.safetensors").layers
    assert [parts.kind(read[name]) for name in names] == ["LoRA", "DoRA"]


def test_programs_that_mean_something_else_are_not_named() -> None:
    """A1111 and InvokeAI take every dora_scale as one per column, PEFT knows one per row alone."""
    for entry in map(architecture_named, FAMILIES):
        for to in ("comfyui", "kohya", "diffusers"):
            for kind, never in (("DoRA", {"A1111", "InvokeAI"}), (parts.PER_COLUMN, {"diffusers"})):
                named = set(loaded_by(entry, to, {kind}))
                assert not named & never and named <= set(loaded_by(entry, to, {"LoRA"}))
    sdxl = architecture_named("SDXL")
    assert loaded_by(sdxl, "kohya", {parts.PER_COLUMN}) == [name for name in PROGRAMS if name != "diffusers"]
    assert loaded_by(sdxl, "kohya", {"DoRA"}) == ["ComfyUI (and SwarmUI)", "Forge"]


def test_the_command_refuses_magnitudes_that_would_mean_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between ComfyUI's, for the norms of the base weights, and PEFT's, for those of the changed ones."""
    kohya, peft, out = (tmp_path / f"{name}.safetensors" for name in ("kohya", "peft", "out"))
    stored(kohya, 6, 4, torch.rand(6, 1))
    write(peft, read_lora(kohya), "diffusers")
    for path, to, norms in ((kohya, "diffusers", "base"), (peft, "kohya", "changed"), (peft, "comfyui", "changed")):
        assert main(["export", str(path), "--to", to, "--output", str(out)]) == 2
        assert f"{PROJ} is DoRA, its magnitudes are for the norms of the {norms} weights" in capsys.readouterr().err
        assert not out.exists()
    assert main(["export", str(kohya), "--to", "comfyui", "--output", str(out)]) == 0
    for path, kind in ((kohya, "DoRA"), (stored(tmp_path / "column", 6, 4, torch.rand(1, 4)), parts.PER_COLUMN)):
        capsys.readouterr()
        assert main(["inspect", str(path)]) == 0
        said = capsys.readouterr().out
        assert re.search(rf"kind +{kind}\n", said) and "as diffusers" not in said


@pytest.mark.parametrize("convolution", [False, True])
def test_peft_loads_the_file_and_computes_dora(tmp_path: Path, convolution: bool) -> None:
    torch.manual_seed(0)
    layer: nn.Module = nn.Conv2d(4, 8, 3, padding=1) if convolution else nn.Linear(4, 8)
    weight = layer.weight.detach().clone().flatten(1)
    size = ((3, 3), (1, 1)) if convolution else ((), ())
    a, b, magnitudes = torch.randn(2, 4, *size[0]), torch.randn(8, 2, *size[1]), torch.rand(8, 1) + 0.5
    name = "input_blocks.1.0.in_layers.2" if convolution else "input_blocks.4.1.transformer_blocks.0.attn1.to_q"
    content = {parts.A: a, parts.B: b, parts.DORA: magnitudes.view(8, 1, *size[1]), parts.ALPHA: torch.tensor(3.0)}
    write(tmp_path / "x.safetensors", LoraFile({name: content}, {}, architecture_named("SD1.5")), "diffusers")

    model = nn.Module()
    model.layer = layer
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=2, use_dora=True, target_modules=["layer"]), model)
    tensors = load_file(tmp_path / "x.safetensors")
    found = {re.sub(r".*\.(conv1|to_q)\.", "layer.", key): value for key, value in tensors.items()}
    assert {key: value.shape for key, value in found.items()} == {
        key: value.shape for key, value in get_peft_model_state_dict(model).items()
    }
    assert not set_peft_model_state_dict(model, found).unexpected_keys
    changed = weight + 1.5 * b.flatten(1) @ a.flatten(1)
    wanted = magnitudes * changed / changed.norm(dim=1, keepdim=True)
    x = torch.randn(1, 4, 5, 5) if convolution else torch.randn(3, 4)
    with torch.no_grad():
        got = model.layer(x)
        layer = model.layer.base_layer
        layer.weight.copy_(wanted.view_as(layer.weight))
        torch.testing.assert_close(got, layer(x))
