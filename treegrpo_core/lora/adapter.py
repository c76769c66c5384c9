"""A run's adapter as a LoRA file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..adapter import Adapter
from .endings import Format
from .file import LoraFile
from .writing import tensors_only, write


def file_of(
    adapter: Adapter, header: Mapping[str, str], to: Format = "comfyui", state: dict[str, Tensor] | None = None
) -> LoraFile:
    """The adapter's weights (``state``: others in their place), to be written in the format ``to``."""
    layers = adapter.factors(state, for_comfyui=to == "comfyui")
    return LoraFile(layers, dict(header), adapter.architecture)


def lora_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """The adapter as a LoRA state dictionary in ComfyUI's format: what core's LORA_MODEL type carries."""
    return tensors_only(file_of(adapter, {}), "comfyui")


def metadata(title: str, iteration: int, extra: Mapping[str, Any]) -> dict[str, str]:
    """Strings for the file's header: its title, and the training history under ``treegrpo.*``."""
    return {
        "modelspec.title": title,
        "ss_output_name": title,
        "treegrpo.iteration": str(iteration),
        **{f"treegrpo.{key}": str(value) for key, value in extra.items()},
    }


def write_lora(
    path: Path,
    adapter: Adapter,
    header: dict[str, str],
    to: Format = "comfyui",
    state: dict[str, Tensor] | None = None,
) -> None:
    """Write the adapter, or other weights of it, in one atomic step."""
    write(path, file_of(adapter, header, to, state), to)
