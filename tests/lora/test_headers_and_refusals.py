"""The header that other programs read, and files that are not taken."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from treegrpo_core.architectures import architecture_named
from treegrpo_core.lora import LoraFile, parts, read_header, read_lora, write

NAME = "diffusion_model.joint_blocks.0.x_block.attn.proj"
PAIR = {f"{NAME}.lora_A.weight": torch.ones(2, 4), f"{NAME}.lora_B.weight": torch.ones(4, 2)}


def sdxl(rows: int = 300_000) -> LoraFile:
    """More than a megabyte, because kohya's older hash looks only behind the first."""
    content = {
        parts.A: torch.ones(2, 4),
        parts.B: torch.arange(rows * 2.0).view(rows, 2),
        parts.ALPHA: torch.tensor(1.0),
    }
    return LoraFile(
        {"input_blocks.4.1.proj_in": content}, {"treegrpo.run": "r", "ss_steps": "7"}, architecture_named("SDXL")
    )


def test_kohyas_header_and_hashes(tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    write(path, sdxl(), "kohya")
    header, data = read_header(path), path.read_bytes()
    assert (
        header
        | {
            "ss_v2": "False",
            "ss_base_model_version": "sdxl_base_v1-0",
            "ss_network_module": "networks.lora",
            "ss_network_dim": "2",
            "ss_network_alpha": "1.0",
            "ss_network_args": "{}",
            "ss_output_name": "mine",
            "ss_steps": "7",
            "modelspec.sai_model_spec": "1.0.1",
            "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
            "modelspec.title": "mine",
            "modelspec.resolution": "1024x1024",
            "treegrpo.run": "r",
        }
        == header
    )
    assert "modelspec.date" in header and "modelspec.implementation" in header
    start = 8 + int.from_bytes(data[:8], "little")
    assert header["sshs_model_hash"] == hashlib.sha256(data[start:]).hexdigest()
    # The older one is of the file with kohya's own keys alone in its header.
    from safetensors.torch import load_file

    own = {key: value for key, value in header.items() if key.startswith("ss_")}
    save_file(load_file(path), tmp_path / "plain.safetensors", own)
    plain = (tmp_path / "plain.safetensors").read_bytes()
    assert header["sshs_legacy_hash"] == hashlib.sha256(plain[0x100000:0x110000]).hexdigest()[:8]


def test_diffusers_header(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", sdxl(8), "diffusers")
    header = read_header(tmp_path / "x.safetensors")
    settings = json.loads(header["lora_adapter_metadata"])
    assert settings["unet.r"] == settings["unet.lora_alpha"] == 2
    assert settings["unet.target_modules"] == ["down_blocks.1.attentions.0.proj_in"]
    write(tmp_path / "y.safetensors", read_lora(tmp_path / "x.safetensors"), "kohya")
    assert "lora_adapter_metadata" not in read_header(tmp_path / "y.safetensors")


def test_layers_of_different_rank_are_dynamic(tmp_path: Path) -> None:
    other = {parts.A: torch.ones(3, 4), parts.B: torch.ones(4, 3)}
    layers = {**sdxl(8).layers, "input_blocks.4.1.proj_out": other}
    write(tmp_path / "x.safetensors", LoraFile(layers, {}, architecture_named("SDXL")), "kohya")
    assert read_header(tmp_path / "x.safetensors")["ss_network_dim"] == "Dynamic"


def bad_files() -> dict[str, tuple[dict[str, torch.Tensor], str]]:
    a, b = f"{NAME}.lora_A.weight", f"{NAME}.lora_B.weight"
    return {
        "no lora": ({"model.weight": torch.ones(2)}, r"holds no LoRA keys \(first keys: \['model.weight'\]\)"),
        "nan": ({**PAIR, a: torch.full((2, 4), float("nan"))}, f"{NAME}.lora_A.weight holds NaN or infinity"),
        "inf": ({**PAIR, b: torch.full((4, 2), float("inf"))}, "lora_B.weight holds NaN or infinity"),
        "rank 0": ({a: torch.ones(0, 4), b: torch.ones(4, 0)}, r"shapes .*\(0, 4\).*\(4, 0\).*, which are no LoRA"),
        "ranks differ": ({**PAIR, b: torch.ones(4, 3)}, r"shapes .*\(2, 4\).*\(4, 3\).*, which are no LoRA"),
        "half": ({a: torch.ones(2, 4)}, "has lora_A.weight, but LoRA needs lora_A.weight, lora_B.weight"),
        "diff": ({**PAIR, f"{NAME}.diff_b": torch.ones(4)}, r"1 of 3 keys that belong to no LoRA, .*\.diff_b"),
        "half of LoHa": ({f"{NAME}.hada_w1_a": torch.ones(2, 2)}, "but LoHa needs hada_w1_a, hada_w1_b, hada_w2_a"),
        "half of LoKr": (
            {f"{NAME}.lokr_w1": torch.ones(2, 2)},
            "but LoKr needs lokr_w1, lokr_w2 or lokr_w1, lokr_w2_a",
        ),
        "twice": (
            {**PAIR, **{key.replace("diffusion_model", "transformer"): value.clone() for key, value in PAIR.items()}},
            "occurs a second time, under another prefix",
        ),
        "text alone": ({"lora_te1_x.alpha": torch.tensor(1.0)}, "has adapters for text encoders alone"),
        "text": (
            {**PAIR, "lora_te1_x.alpha": torch.tensor(1.0)},
            "for text encoders .*lora_te1_x.alpha.*would be lost",
        ),
        "layer": (
            {
                "lora_unet_joint_blocks_0_x_block_attn_proj.lora_down.weight": torch.ones(2, 4),
                "lora_unet_joint_blocks_0_x_block_attn_proj.lora_up.weight": torch.ones(4, 2),
                "lora_unet_joint_blocks_0_other.lora_down.weight": torch.ones(2, 4),
                "lora_unet_joint_blocks_0_other.lora_up.weight": torch.ones(4, 2),
            },
            "SD3 has no layers joint_blocks_0_other",
        ),
        "family": (
            {"lora_unet_x.lora_down.weight": torch.ones(2, 4), "lora_unet_x.lora_up.weight": torch.ones(4, 2)},
            "no known model family has no layers x|no known model family has layers? x",
        ),
    }


@pytest.mark.parametrize("case", bad_files())
def test_bad_files_are_refused(tmp_path: Path, case: str) -> None:
    tensors, message = bad_files()[case]
    save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match=message) as raised:
        read_lora(tmp_path / "bad.safetensors")
    assert "bad.safetensors" in str(raised.value)


def test_text_encoders_may_be_left_out(tmp_path: Path) -> None:
    save_file({**PAIR, "lora_te1_x.alpha": torch.tensor(1.0)}, tmp_path / "x.safetensors")
    assert len(read_lora(tmp_path / "x.safetensors", without_text_encoder=True).layers) == 1


def test_half_written_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(PAIR, path)
    whole = path.read_bytes()
    for length in (0, 4, 8, 50, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="x.safetensors is not a complete safetensors file"):
            read_lora(path)


class Trap:
    """Unpickling this would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_never_opened(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "x.safetensors"
    torch.save({**PAIR, "trap": Trap(tmp_path / "sprung")}, path, _use_new_zipfile_serialization=zipped)
    for read in (read_lora, read_header):
        with pytest.raises(ValueError, match="is a pickle"):
            read(path)
    assert not (tmp_path / "sprung").exists()
