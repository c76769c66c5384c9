"""What host_probe.py leaves: ComfyUI's tiny models, and our LoRA files for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

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
        """Inputs of ComfyUI's model, and what it makes of them without (``before``) and with the LoRA (``output``)."""
        return load_file(self.folder / f"{family}.output")
