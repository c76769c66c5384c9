"""A run's adapter as a LoRA file, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..architectures import Architecture, architecture_from_layers
from ..policy import Adapter
from . import parts
from .detect import family_of
from .file import Format, LoraFile, read_lora, tensors_only, write


def file_of(adapter: Adapter, header: Mapping[str, str], architecture: Architecture | None = None) -> LoraFile:
    """The adapter's current weights as a file of its model's family, by default the one its layers look like."""
    layers: dict[str, dict[str, Tensor]] = {
        name: {parts.ALPHA: torch.tensor(float(adapter.alpha))} for name in adapter.layers
    }
    for key, value in adapter.state_dict().items():
        name, matrix, weight = key.rsplit(".", 2)
        layers[name][f"{matrix}.{weight}"] = value
    if architecture is None:
        inputs = {name: layer[parts.A].shape[1] for name, layer in layers.items()}
        architecture = family_of(layers, header, None, of_diffusers=False) or architecture_from_layers(inputs)
    return LoraFile(layers, dict(header), architecture)


def lora_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """The adapter as a LoRA state dictionary in ComfyUI's format: what core's LORA_MODEL type carries."""
    return tensors_only(file_of(adapter, {}), "comfyui")


def metadata(adapter: Adapter, title: str, iteration: int, extra: Mapping[str, Any]) -> dict[str, str]:
    """Strings for the file's header: its title, and the training history under ``treegrpo.*``."""
    return {
        "modelspec.title": title,
        "ss_output_name": title,
        "treegrpo.iteration": str(iteration),
        **{f"treegrpo.{key}": str(value) for key, value in extra.items()},
    }


def write_lora(path: Path, adapter: Adapter, header: dict[str, str], to: Format = "comfyui") -> None:
    """Write the file in one atomic step."""
    architecture = getattr(adapter, "architecture", None)
    write(path, file_of(adapter, header, architecture), to)


def read_adapter(path: Path, scale: float) -> dict[str, Tensor]:
    """Adapter weights (as :meth:`Adapter.load_state_dict` takes them) of a LoRA file in any format.

    ``scale`` is alpha / rank of the adapter they are for; a file with another one is converted, its effect stays.
    Raises ValueError for a file that is no LoRA, or LoRA of a kind that cannot be trained on.
    """
    weights = {}
    for name, layer in read_lora(path).layers.items():
        if parts.kind(layer) != "LoRA":
            raise ValueError(f"{path.name} is {parts.kind(layer)}; only plain LoRA can be started from")
        weights[f"{name}.{parts.A}"] = layer[parts.A].float()
        weights[f"{name}.{parts.B}"] = layer[parts.B].float() * (parts.scale(layer) / scale)
    return weights
