"""Adapters whose scale stands in PEFT's settings, beside the file or in its header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from treegrpo_core.architectures import architecture_named
from treegrpo_core.cli import main
from treegrpo_core.lora import LoraFile, parts, read_lora, write
from treegrpo_core.lora.file import read_any

SD3 = architecture_named("SD3")
LAYERS = {"attn.to_out.0": "x_block.attn.proj", "ff.net.2": "x_block.mlp.fc2"}
"""Layers of diffusers' first block of SD3, and of ComfyUI's."""


class Block(nn.Module):
    """A few layers under the names that diffusers' SD3 has for them."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Module()
        inner.attn, inner.ff = nn.Module(), nn.Module()
        inner.attn.to_out = nn.ModuleList([nn.Linear(24, 16)])
        inner.ff.net = nn.ModuleList([nn.Identity(), nn.Identity(), nn.Linear(32, 16)])
        self.transformer_blocks = nn.ModuleList([inner])

    def forward(self, x: Tensor) -> Tensor:
        return self.transformer_blocks[0].attn.to_out[0](x)


def saved(folder: Path, config: peft.PeftConfig) -> dict[str, Tensor]:
    """An adapter as PEFT saves it; returns what it adds to the weights, by ComfyUI's names."""
    torch.manual_seed(0)
    model = peft.get_peft_model(Block(), config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    block = model.base_model.model.transformer_blocks[0]
    return {
        f"joint_blocks.0.{mine}": block.get_submodule(theirs).get_delta_weight("default").detach()
        for theirs, mine in LAYERS.items()
    }


def effect(layer: dict[str, Tensor]) -> Tensor:
    """What ComfyUI adds to the weights."""
    if "hada_w1_a" in layer:
        whole = (layer["hada_w1_a"] @ layer["hada_w1_b"]) * (layer["hada_w2_a"] @ layer["hada_w2_b"])
        return whole * float(layer["alpha"]) / layer["hada_w1_b"].shape[0]
    if "lokr_w1" in layer:
        assert "alpha" not in layer
        second = layer["lokr_w2"] if "lokr_w2" in layer else layer["lokr_w2_a"] @ layer["lokr_w2_b"]
        return torch.kron(layer["lokr_w1"], second)
    return parts.scale(layer) * layer[parts.B] @ layer[parts.A]


TARGETS = {"target_modules": ["to_out.0", "net.2"]}
CONFIGS = {
    "alpha": peft.LoraConfig(r=4, lora_alpha=8, **TARGETS),
    "rslora": peft.LoraConfig(r=4, lora_alpha=4, use_rslora=True, **TARGETS),
    "patterns": peft.LoraConfig(
        r=4, lora_alpha=8, rank_pattern={"net.2": 2}, alpha_pattern={r"transformer_blocks\.0\.ff\..*": 3}, **TARGETS
    ),
    "rslora with patterns": peft.LoraConfig(r=4, lora_alpha=8, rank_pattern={"net.2": 2}, use_rslora=True, **TARGETS),
    "loha": peft.LoHaConfig(r=4, alpha=8, **TARGETS),
    "lokr": peft.LoKrConfig(r=4, alpha=8, alpha_pattern={"net.2": 3}, **TARGETS),
    "lokr of whole matrices": peft.LoKrConfig(r=64, alpha=8, **TARGETS),
}


@pytest.mark.parametrize("as_folder", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_effect_is_pefts(tmp_path: Path, name: str, as_folder: bool) -> None:
    wanted = saved(tmp_path, CONFIGS[name])
    path = tmp_path if as_folder else tmp_path / "adapter_model.safetensors"
    found = read_lora(path, architecture=SD3).layers
    assert found.keys() == wanted.keys()
    for layer, value in wanted.items():
        torch.testing.assert_close(effect(found[layer]), value)


def test_dora_keeps_alpha_and_magnitudes(tmp_path: Path) -> None:
    saved(tmp_path, peft.LoraConfig(r=4, lora_alpha=8, use_dora=True, **TARGETS))
    layer = read_lora(tmp_path, architecture=SD3).layers["joint_blocks.0.x_block.attn.proj"]
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    (magnitudes,) = (value for key, value in tensors.items() if "to_out" in key and "magnitude" in key)
    assert float(layer["alpha"]) == 8 and torch.equal(layer[parts.DORA], magnitudes[:, None])


def test_the_model_class_in_the_settings_tells_the_family(tmp_path: Path) -> None:
    """Attention of these names and this width is also in Flux 2 and in Qwen-Image."""
    stem = "base_model.model.transformer_blocks.0.attn.to_out.0"
    matrices = {f"{stem}.lora_A.weight": torch.ones(2, 3072), f"{stem}.lora_B.weight": torch.ones(3072, 2)}
    save_file(matrices, tmp_path / "adapter_model.safetensors")
    settings = {"r": 2, "lora_alpha": 2, "auto_mapping": {"base_model_class": "FluxTransformer2DModel"}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    assert read_lora(tmp_path).architecture.name == "Flux"


def sd3_file(folder: Path, settings: Any, more: dict[str, Tensor] | None = None) -> Path:
    """A rank-2 adapter beside these settings."""
    stem = "base_model.model.transformer_blocks.0.ff.net.2"
    matrices = {f"{stem}.lora_A.weight": torch.ones(2, 6144), f"{stem}.lora_B.weight": torch.ones(1536, 2)}
    save_file(matrices | (more or {}), folder / "adapter_model.safetensors")
    text = settings if isinstance(settings, str) else json.dumps(settings)
    (folder / "adapter_config.json").write_text(text)
    return folder


STEM = "base_model.model.transformer_blocks.0.ff.net.2"
WRONG: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "adapter_config.json is no JSON"),
    "no dictionary": ([1], "adapter_config.json holds list"),
    "alpha of letters": ({"r": 2, "lora_alpha": "8"}, "alpha is '8'; it must be a number"),
    "alpha that is none": ('{"r": 2, "lora_alpha": NaN}', "alpha is nan; it must be a number"),
    "rank 0": ({"r": 0, "lora_alpha": 8}, "rank r is 0; it must be a whole number above 0"),
    "another rank": ({"r": 8, "lora_alpha": 8}, "says rank 8 for layer transformer_blocks.0.ff.net.2.* rank 2"),
    "another rank by pattern": (
        {"r": 2, "lora_alpha": 8, "rank_pattern": {"net.2": 3}},
        "says rank 3 for layer transformer_blocks.0.ff.net.2",
    ),
    "patterns as a list": ({"r": 2, "lora_alpha": 8, "alpha_pattern": [1]}, r"alpha_pattern is \[1\]"),
    "no pattern": (
        {"r": 2, "lora_alpha": 8, "alpha_pattern": {"(": 1}},
        r"alpha_pattern has '\(', which is no pattern",
    ),
    "DoRA without magnitudes": ({"r": 2, "lora_alpha": 8, "use_dora": True}, "use_dora True, but layer .* lacks a"),
    "another kind": ({"peft_type": "LOHA", "r": 2, "alpha": 8}, "says peft_type LOHA, but layer .* is LoRA"),
    "a kind that is not read": ({"peft_type": "BOFT"}, "says peft_type BOFT; only LORA, LOHA, LOKR can be read"),
    "another base": ({"r": 2, "lora_alpha": 8, "init_lora_weights": "pissa_niter_16"}, "changes the base weights too"),
    "another effect": ({"r": 2, "lora_alpha": 8, "use_qalora": True}, "has use_qalora"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, case: str) -> None:
    settings, message = WRONG[case]
    with pytest.raises(ValueError, match=message) as raised:
        read_lora(sd3_file(tmp_path, settings))
    assert "adapter_config.json" in str(raised.value)


def test_magnitudes_that_the_settings_deny_are_refused(tmp_path: Path) -> None:
    magnitudes = {f"{STEM}.lora_magnitude_vector": torch.ones(1536)}
    with pytest.raises(ValueError, match="use_dora False, but layer .* has a magnitude"):
        read_lora(sd3_file(tmp_path, {"r": 2, "lora_alpha": 8, "use_dora": False}, magnitudes))


def test_an_alpha_of_the_file_must_be_that_of_the_settings(tmp_path: Path) -> None:
    settings = {"r": 2, "lora_alpha": 8}
    (layer,) = read_lora(sd3_file(tmp_path, settings, {f"{STEM}.alpha": torch.tensor(8.0)})).layers.values()
    assert float(layer["alpha"]) == 8
    with pytest.raises(ValueError, match="gives layer .* alpha 8, the file 2; which is right cannot be known"):
        read_lora(sd3_file(tmp_path, settings, {f"{STEM}.alpha": torch.tensor(2.0)}))


def test_settings_without_alpha_have_pefts_default(tmp_path: Path) -> None:
    (layer,) = read_lora(sd3_file(tmp_path, {"r": 2})).layers.values()
    assert parts.scale(layer) == peft.LoraConfig().lora_alpha / 2


def test_settings_belong_to_pefts_own_file_alone(tmp_path: Path) -> None:
    """Another LoRA in the same folder has nothing to do with them."""
    folder = sd3_file(tmp_path, {"r": 2, "lora_alpha": 8})
    other = {"joint_blocks.0.x_block.attn.proj": {parts.A: torch.ones(4, 6), parts.B: torch.ones(6, 4)}}
    write(folder / "other.safetensors", LoraFile(other, {}, SD3), "diffusers")
    (layer,) = read_lora(folder / "other.safetensors").layers.values()
    assert parts.scale(layer) == 1


def test_a_lost_scale_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sd3_file(tmp_path, {"r": 2, "lora_alpha": 8})
    assert main(["inspect", str(folder)]) == 0
    lines = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in capsys.readouterr().out.splitlines()}
    assert lines["alpha / rank"] == "4" and "note" not in lines
    # ComfyUI takes these names too, but not the settings, and would apply a quarter of it.
    assert lines["loads in"] == "PEFT" and "ComfyUI" in lines["as diffusers also in"]
    (folder / "adapter_config.json").unlink()
    assert main(["inspect", str(folder)]) == 0 and "with scale 1" in capsys.readouterr().out
    command = ["export", str(folder), "--to", "kohya", "--output", str(tmp_path / "x.safetensors")]
    assert main(command) == 0 and "note: the names are PEFT's" in capsys.readouterr().out


def test_settings_in_the_header_are_for_diffusers_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stem = "transformer.transformer_blocks.0.ff.net.2"
    matrices = {f"{stem}.lora_A.weight": torch.ones(2, 6144), f"{stem}.lora_B.weight": torch.ones(1536, 2)}
    for alpha, programs in ((2, "ComfyUI (and SwarmUI), diffusers"), (6, "diffusers")):
        header = json.dumps({"transformer.r": 2, "transformer.lora_alpha": alpha})
        save_file(matrices, tmp_path / "x.safetensors", {"lora_adapter_metadata": header})
        assert main(["inspect", str(tmp_path / "x.safetensors")]) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("loads in"))
        assert line.removeprefix("loads in").strip() == programs


def test_folders_without_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no adapter_model.safetensors or pytorch_lora_weights.safetensors"):
        read_lora(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"PK")
    with pytest.raises(ValueError, match="a pickle, which is never opened"):
        read_lora(tmp_path)
    (tmp_path / "lora").mkdir()
    sd3_file(tmp_path / "lora", {"r": 2, "lora_alpha": 8})
    with pytest.raises(ValueError, match="but .*lora does; give that folder"):
        read_lora(tmp_path)
    for name in ("adapter_model", "pytorch_lora_weights"):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match="holds adapter_model.safetensors and pytorch_lora_weights.safetensors"):
        read_lora(tmp_path)


def test_diffusers_folder(tmp_path: Path) -> None:
    layers = {"joint_blocks.0.x_block.attn.proj": {parts.A: torch.randn(2, 6), parts.B: torch.randn(6, 2)}}
    write(tmp_path / "pytorch_lora_weights.safetensors", LoraFile(layers, {}, SD3), "diffusers")
    found = read_any(tmp_path)
    assert found.path.name == "pytorch_lora_weights.safetensors"
    assert torch.equal(
        found.file.layers["joint_blocks.0.x_block.attn.proj"][parts.B], next(iter(layers.values()))[parts.B]
    )


@pytest.mark.parametrize(("alpha", "agrees"), [(8, True), (4, False)])
def test_settings_in_the_header_and_beside_the_file_must_agree(tmp_path: Path, alpha: int, agrees: bool) -> None:
    folder = sd3_file(tmp_path, {"r": 2, "lora_alpha": 8})
    header = json.dumps({"transformer.r": 2, "transformer.lora_alpha": alpha})
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(tensors, folder / "adapter_model.safetensors", {"lora_adapter_metadata": header})
    if agrees:
        (layer,) = read_lora(folder).layers.values()
        assert parts.scale(layer) == 4
    else:
        with pytest.raises(ValueError, match="header's lora_adapter_metadata gives layer .* alpha 4, the file 8"):
            read_lora(folder)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_settings_in_the_header(tmp_path: Path, prefix: str) -> None:
    """A pipeline writes them with the part's name, a model that saves its own adapter without."""
    stem = f"{prefix}transformer_blocks.0.ff.net.2"
    matrices = {f"{stem}.lora_A.weight": torch.ones(2, 6144), f"{stem}.lora_B.weight": torch.ones(1536, 2)}
    for settings, scale in (
        ({"r": 2, "lora_alpha": 6}, 3.0),
        ({"r": 2, "lora_alpha": 6, "use_rslora": True}, 6 / 2**0.5),
        ({"r": 4, "lora_alpha": 6, "rank_pattern": {"net.2": 2}, "alpha_pattern": {"net.2": 1}}, 0.5),
        ({"r": 2}, 4.0),
    ):
        header = json.dumps({f"{prefix}{key}": value for key, value in settings.items()})
        save_file(matrices, tmp_path / "x.safetensors", {"lora_adapter_metadata": header})
        (layer,) = read_lora(tmp_path / "x.safetensors").layers.values()
        assert parts.scale(layer) == pytest.approx(scale)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("{", "lora_adapter_metadata, which says how strong the LoRA is, is no JSON"),
        ("[]", "lora_adapter_metadata holds list"),
        ('{"transformer.lora_alpha": null}', "alpha is None"),
        ('{"transformer.r": 3, "transformer.lora_alpha": 3}', "says rank 3 .* matrices have rank 2"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, header: str, message: str) -> None:
    stem = "transformer.transformer_blocks.0.ff.net.2"
    matrices = {f"{stem}.lora_A.weight": torch.ones(2, 6144), f"{stem}.lora_B.weight": torch.ones(1536, 2)}
    save_file(matrices, tmp_path / "x.safetensors", {"lora_adapter_metadata": header})
    with pytest.raises(ValueError, match=message) as raised:
        read_lora(tmp_path / "x.safetensors")
    assert "x.safetensors: the header's" in str(raised.value)
