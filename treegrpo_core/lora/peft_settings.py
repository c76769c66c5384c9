"""PEFT's settings of an adapter, without which its matrices do not say how strong they are.

PEFT writes them beside the matrices (``adapter_config.json``), diffusers into the header (``lora_adapter_metadata``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..architectures import Architecture, architecture_named
from . import parts

WEIGHTS = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
"""What PEFT and diffusers call the file in a folder of an adapter."""
CONFIG = "adapter_config.json"
HEADER = "lora_adapter_metadata"

_KINDS = {"LORA": ("LoRA", "DoRA"), "LOHA": ("LoHa",), "LOKR": ("LoKr",)}
"""PEFT's kinds of adapters that can be read, and the kinds of their layers."""
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Starts that change the base weights too (``init_lora_weights``): the matrices alone are not the adapter's effect."""
_OTHER_EFFECT = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "target_parameters",
    "use_bdlora",
    "use_qalora",
)
"""Settings that give the matrices another effect than B A."""
_CLASSES = {
    "SD3Transformer2DModel": "SD3",
    "FluxTransformer2DModel": "Flux",
    "Flux2Transformer2DModel": "Flux 2",
    "QwenImageTransformer2DModel": "Qwen-Image",
    "ZImageTransformer2DModel": "Z-Image",
    "Lumina2Transformer2DModel": "Lumina 2",
    "WanTransformer3DModel": "Wan",
}
"""Diffusers' classes of models that belong to one family."""


@dataclass(frozen=True)
class Settings:
    """What of them counts for a file's effect."""

    source: str
    kind: str = "LORA"
    rank: int | None = None
    """None: not told."""
    alpha: float = 8.0
    """PEFT's own default where none is told."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Layers of another rank: by patterns of their names."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    by_root: bool = False
    """Whether alpha is divided by the root of the rank (rslora)."""
    dora: bool | None = None
    family: Architecture | None = None

    def apply(self, layers: dict[str, dict[str, Tensor]]) -> None:
        """Give every layer the alpha that makes alpha / rank its scale.

        Raises ValueError, naming the layer, where settings and matrices are not of one adapter.
        """
        for name, layer in layers.items():
            kind = parts.kind(layer)
            if kind not in _KINDS[self.kind]:
                raise ValueError(f"{self.source} says peft_type {self.kind}, but layer {name} is {kind}")
            if self.dora is not None and self.dora != (kind == "DoRA") and self.kind == "LORA":
                held = "has" if kind == "DoRA" else "lacks"
                raise ValueError(
                    f"{self.source} says use_dora {self.dora}, but layer {name} {held} a magnitude; they are not of "
                    "one training, so put the settings and the file of one folder together"
                )
            self._scale(name, layer)

    def _scale(self, name: str, layer: dict[str, Tensor]) -> None:
        rank, told = parts.rank(layer), _matching(self.ranks, name, self.rank)
        if rank and told and rank != told:
            raise ValueError(
                f"{self.source} says rank {told} for layer {name}, but its matrices have rank {rank}; they are not of "
                "one training, so put the settings and the file of one folder together"
            )
        rank, alpha = rank or told or 8, _matching(self.alphas, name, self.alpha)
        alpha = alpha * math.sqrt(rank) if self.by_root else alpha
        if parts.ALPHA in layer and not math.isclose(float(layer[parts.ALPHA]), alpha, rel_tol=1e-3):
            raise ValueError(
                f"{self.source} gives layer {name} alpha {alpha:g}, the file {float(layer[parts.ALPHA]):g}; "
                "which is right cannot be known: take one of the two away"
            )
        layer[parts.ALPHA] = torch.tensor(alpha)
        if self.kind == "LOKR":  # readers differ in how they scale it, so the scale goes into a matrix
            first = next(suffix for suffix in ("lokr_w1", "lokr_w1_a") if suffix in layer)
            layer[first] = (layer[first].float() * (alpha / rank)).to(layer[first].dtype)
            del layer[parts.ALPHA]


def located(path: Path) -> tuple[Path, Path | None]:
    """The file of an adapter given as file or folder, and PEFT's settings beside it if there are any.

    Raises ValueError for a folder in which there is no such file.
    """
    if path.is_dir():
        names = [name for name in WEIGHTS if (path / name).is_file()]
        if not names:
            raise ValueError(_no_weights(path))
        if len(names) > 1:
            raise ValueError(f"{path} holds {' and '.join(names)}; give one of the two files")
        path = path / names[0]
    config = path.with_name(CONFIG)
    return path, config if path.name == WEIGHTS[0] and config.is_file() else None


def _no_weights(folder: Path) -> str:
    deeper = sorted(str(found.parent) for name in WEIGHTS for found in folder.glob(f"*/{name}"))
    if deeper:
        return f"{folder} holds no {' or '.join(WEIGHTS)}, but {', '.join(deeper[:3])} does; give that folder"
    if (folder / "adapter_model.bin").exists():
        return (
            f"{folder} holds adapter_model.bin, a pickle, which is never opened because it can run any program; save "
            "the adapter as safetensors (PEFT's save_pretrained does)"
        )
    return f"{folder} holds no {' or '.join(WEIGHTS)}; give a LoRA file, or the folder that PEFT saved an adapter in"


def from_config(path: Path) -> Settings:
    """The settings in ``adapter_config.json``. Raises ValueError, naming the file, if they are not PEFT's."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON in UTF-8 ({error}); copy it again from where the LoRA is from") from None
    return _settings(content, str(path))


def from_header(header: Mapping[str, str]) -> Settings | None:
    """The settings that diffusers put into the header of a file; None if it has none for a diffusion model."""
    if HEADER not in header:
        return None
    try:
        content = json.loads(header[HEADER])
    except ValueError as error:
        raise ValueError(f"the header's {HEADER}, which says how strong the LoRA is, is no JSON ({error})") from None
    if not isinstance(content, dict):
        return _settings(content, f"the header's {HEADER}")
    own = {key.split(".", 1)[1]: value for key, value in content.items() if key.startswith(("unet.", "transformer."))}
    # A pipeline names the part of each setting, a model that saves its own adapter has no need to.
    own = own or {key: value for key, value in content.items() if "." not in key}
    return _settings(own, f"the header's {HEADER}") if own else None


def _settings(content: Any, source: str) -> Settings:
    if not isinstance(content, dict):
        raise ValueError(f"{source} holds {type(content).__name__} in place of settings by name")
    kind = str(content.get("peft_type") or "LORA").upper()
    if kind not in _KINDS:
        raise ValueError(f"{source} says peft_type {kind}; only {', '.join(_KINDS)} can be read")
    start = content.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OTHER_BASE):
        raise ValueError(
            f"{source} says init_lora_weights {start!r}, which changes the base weights too; save the adapter with "
            "PEFT's path_initial_model_for_weight_conversion, which makes a plain LoRA of it"
        )
    if odd := [name for name in _OTHER_EFFECT if content.get(name)]:
        raise ValueError(f"{source} has {odd[0]}, with which the matrices are no plain LoRA; this cannot be read")
    rank = content.get("r")
    return Settings(
        source=source,
        kind=kind,
        rank=None if rank is None else _rank(rank, source, "r"),
        alpha=_number(content.get("lora_alpha" if kind == "LORA" else "alpha", 8), source, "alpha"),
        ranks={key: _rank(value, source, key) for key, value in _patterns(content, "rank_pattern", source).items()},
        alphas={key: _number(value, source, key) for key, value in _patterns(content, "alpha_pattern", source).items()},
        by_root=bool(content.get("use_rslora")),
        dora=bool(content["use_dora"]) if "use_dora" in content else None,
        family=_family(content.get("auto_mapping")),
    )


def _family(mapping: Any) -> Architecture | None:
    """The family of the class of models that the adapter was made for, if PEFT wrote it down."""
    name = _CLASSES.get(str(mapping.get("base_model_class"))) if isinstance(mapping, dict) else None
    return architecture_named(name) if name else None


def _patterns(content: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    patterns = content.get(name) or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{source}: {name} is {patterns!r}; it must be a dictionary by layer names")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{source}: {name} has {pattern!r}, which is no pattern ({error})") from None
    return patterns


def _number(value: Any, source: str, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{source}: {name} is {value!r}; it must be a number")
    return float(value)


def _rank(value: Any, source: str, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{source}: the rank {name} is {value!r}; it must be a whole number above 0")
    return value


def _matching(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Peft's rule: a pattern is a whole name or what follows a dot in it."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)
