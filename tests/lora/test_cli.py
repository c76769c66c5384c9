"""The two commands, as a user calls them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tools.host import ROOT
from treegrpo_core.architectures import architecture_named
from treegrpo_core.cli import main
from treegrpo_core.lora import LoraFile, parts, read_lora, write


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    layers = {
        f"joint_blocks.0.x_block.{name}": {parts.A: torch.randn(2, 6), parts.B: torch.randn(rows, 2)}
        for name, rows in {"attn.qkv": 18, "mlp.fc1": 24}.items()
    }
    header = {"treegrpo.run": "my run", "treegrpo.iteration": "7", "treegrpo.last_update": '[{"reward": 0.5}]'}
    write(tmp_path / "lora.safetensors", LoraFile(layers, header, architecture_named("SD3")), "comfyui")
    return tmp_path / "lora.safetensors"


def test_export_converts(lora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, back = lora.with_name("there.safetensors"), lora.with_name("back.safetensors")
    assert main(["export", str(lora), "--to", "kohya", "--output", str(there)]) == 0
    assert "SD3, 2 layers, in the format kohya" in capsys.readouterr().out
    assert main(["export", str(there), "--to", "comfyui", "--output", str(back)]) == 0
    first, last = read_lora(lora), read_lora(back)
    assert all(torch.equal(last.layers[name][parts.A], layer[parts.A]) for name, layer in first.layers.items())
    assert last.metadata["treegrpo.run"] == "my run"


def test_inspect_says_what_it_is(lora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(lora)]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    said = {name.strip(): text.strip() for name, text in lines.items()}
    assert said["architecture"] == "SD3" and said["format"] == "comfyui" and said["kind"] == "LoRA"
    assert said["rank"] == "2" and said["targets"] == "1 attention, 1 MLP of 2 layers"
    assert said["run"] == "my run" and said["iteration"] == "7" and said["last update"] == "reward 0.5"
    assert said["loads in"] == "ComfyUI (and SwarmUI), Forge"
    assert said["as kohya also in"] == "A1111" and said["as diffusers also in"] == "diffusers"


@pytest.mark.parametrize("prefix", ["lycoris_", "lora_transformer_", "base_model.model.", ""])
def test_names_of_another_trainer_promise_no_program(
    tmp_path: Path, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Programs differ in which of them they know, ComfyUI by family; in a usual form more load it."""
    name = "transformer_blocks.0.ff.net.2"
    stem = prefix + (name.replace(".", "_") if prefix.endswith("_") else name)
    matrices = {f"{stem}.lora_A.weight": torch.ones(2, 6144), f"{stem}.lora_B.weight": torch.ones(1536, 2)}
    save_file(matrices, tmp_path / "x.safetensors")
    assert main(["inspect", str(tmp_path / "x.safetensors")]) == 0
    lines = capsys.readouterr().out.splitlines()
    (loads,) = (line for line in lines if line.startswith("loads in"))
    assert loads.endswith("not known; its names are another trainer's")
    assert any(line.startswith("as kohya also in") and "ComfyUI" in line and "A1111" in line for line in lines)


def test_errors_are_one_line_and_leave_no_file(lora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(lora.with_name("new.safetensors"))
    broken = lora.with_name("broken.safetensors")
    broken.write_bytes(lora.read_bytes()[:-1])
    for arguments, message in (
        (["inspect", "nowhere.safetensors"], "nowhere.safetensors"),
        (["inspect", str(broken)], "not a complete safetensors file"),
        (["export", str(broken), "--to", "kohya", "--output", output], "not a complete safetensors file"),
        (["export", str(lora), "--to", "kohya", "--output", str(lora)], "nothing is overwritten"),
        (["export", str(lora), "--to", "kohya", "--output", "x.pt"], "must end in .safetensors"),
        (["inspect", str(lora), "--architecture", "Wan"], "Wan has no layers joint_blocks"),
    ):
        status = main(arguments)
        said = capsys.readouterr()
        assert (status, said.out, said.err.count("\n")) == (2, "", 1), arguments
        assert message in said.err
    assert not Path(output).exists() and not list(lora.parent.glob(".*"))


def test_text_encoders_are_left_out_only_on_purpose(lora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixed, output = lora.with_name("mixed.safetensors"), lora.with_name("new.safetensors")
    encoder = {f"lora_te1_x.{half}.weight": torch.ones(2, 2) for half in ("lora_down", "lora_up")}
    save_file({**load_file(lora), **encoder}, mixed)
    command = ["export", str(mixed), "--to", "kohya", "--output", str(output)]
    assert main(command) == 2 and "lora_te1_x" in capsys.readouterr().err and not output.exists()
    assert main(["inspect", str(mixed)]) == 0 and "text encoders" in capsys.readouterr().out
    assert main([*command, "--without-text-encoder"]) == 0
    assert not any("lora_te" in key for key in load_file(output))


def test_as_a_module(lora: Path) -> None:
    command = [sys.executable, "-m", "treegrpo_core.cli", "inspect", str(lora)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "SD3" in done.stdout, done.stderr
