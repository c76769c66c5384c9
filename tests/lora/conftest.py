"""ComfyUI's tiny models and our LoRA files for them, made once by a process of its own (see host_probe.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tools.host import comfyui_folder
from treegrpo_core.architectures import ARCHITECTURES
from treegrpo_core.lora import LoraFile, read_lora

FAMILIES = [entry.name for entry in ARCHITECTURES]


@dataclass(frozen=True)
class Probe:
    """What the process left."""

    folder: Path
    report: dict[str, Any]

    def path(self, family: str, to: str) -> Path:
        return self.folder / f"{family}.{to}.safetensors"

    def file(self, family: str) -> LoraFile:
        """The LoRA of every linear layer, by ComfyUI's names."""
        return read_lora(self.path(family, "comfyui"))

    def weights(self, family: str) -> dict[str, Tensor]:
        """The state dictionary of ComfyUI's model."""
        return load_file(self.folder / f"{family}.weights")

    def output(self, family: str) -> dict[str, Tensor]:
        """Inputs of ComfyUI's model, and what it makes of them with the LoRA."""
        return load_file(self.folder / f"{family}.output")


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    folder = tmp_path_factory.mktemp("lora")
    program = Path(__file__).with_name("host_probe.py")
    done = subprocess.run(
        [sys.executable, str(program), str(comfyui_folder()), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Probe(folder, json.loads((folder / "report.json").read_text(encoding="utf-8")))
