"""The adapter as a LoRA file in ComfyUI's own key format, and back.

Keys are ``diffusion_model.<layer>.lora_A.weight`` (rank, in), ``.lora_B.weight`` (out, rank) and ``.alpha`` (a scalar).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .adapter import Adapter

PREFIX = "diffusion_model."


def lora_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """The adapter as a LoRA state dictionary: what core's LORA_MODEL type carries."""
    return {
        f"{PREFIX}{layer}.{part}": value.contiguous()
        for layer, parts in adapter.factors().items()
        for part, value in parts.items()
    }


def metadata(adapter: Adapter, title: str, iteration: int, extra: Mapping[str, Any]) -> dict[str, str]:
    """Strings for the file's header: training history under ``treegrpo.*`` and the keys that LoRA managers show."""
    return {
        "modelspec.title": title,
        "modelspec.implementation": "https://github.com/treegrpo/ComfyUI-TreeGRPO",
        "ss_output_name": title,
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(adapter.rank),
        "ss_network_alpha": str(adapter.alpha),
        "treegrpo.iteration": str(iteration),
        **{f"treegrpo.{key}": str(value) for key, value in extra.items()},
    }


def write_lora(path: Path, adapter: Adapter, header: dict[str, str]) -> None:
    """Write the file in one atomic step."""
    from safetensors.torch import save_file

    from .run import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: save_file(lora_tensors(adapter), temporary, header))


def read_header(path: Path) -> dict[str, str]:
    """Metadata of a safetensors file; ValueError if it is damaged or none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({error}); move it away or restore a copy"
        ) from None


def read_layers(path: Path) -> dict[str, dict[str, Tensor]]:
    """The layers of a file in this format, as :meth:`Adapter.load_factors` takes them.

    Raises ValueError for a file that is no LoRA of this format.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path.name} is not a complete safetensors file ({error}); export or download it again"
        ) from None
    layers: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        for part in ("lora_A.weight", "lora_B.weight", "alpha"):
            if name.startswith(PREFIX) and name.endswith(f".{part}"):
                layers.setdefault(name[len(PREFIX) : -len(part) - 1], {})[part] = value
    if not layers:
        raise ValueError(
            f"{path.name} holds no '{PREFIX}<layer>.lora_A.weight' keys; only LoRA files in ComfyUI's own key format "
            f"can be started from (first keys: {sorted(tensors)[:3]})"
        )
    return layers
