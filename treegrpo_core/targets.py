"""Which layers of a model get an adapter."""

from __future__ import annotations

import difflib
import re
from typing import Any

from torch import nn

from .architectures import OTHER, Architecture
from .quantized import is_linear, is_packed

TARGETS = ("attention", "attention+mlp", "all linear")
"""Presets of layers to adapt; what they mean for a family is in its entry in :mod:`.architectures`."""

_OPAQUE = ("nunchaku", "svdq")
"""In the names of layers that compute by kernels without a derivative."""


def target_pattern(targets: str, architecture: Architecture = OTHER) -> str:
    """The regular expression over layer names that a preset stands for; any other text is a pattern itself."""
    presets = {
        "attention": architecture.attention,
        "attention+mlp": f"{architecture.attention}|{architecture.mlp}",
        "all linear": ".*",
    }
    return presets.get(targets, targets)


def target_layers(module: nn.Module, targets: str, architecture: Architecture = OTHER) -> dict[str, Any]:
    """The linear layers of ``module`` whose full name matches the preset or regular expression ``targets``.

    Raises ValueError with the nearest layer names if none does, and for models whose layers keep their weights packed
    in a form that no adapter can be put on.
    """
    linear = {name: layer for name, layer in module.named_modules() if is_linear(layer)}
    for name, layer in module.named_modules():
        if any(word in _kind(thing).lower() for thing in (layer, getattr(layer, "weight", None)) for word in _OPAQUE):
            raise _packed(name, layer)
    try:
        pattern = re.compile(target_pattern(targets, architecture))
    except re.error as error:
        raise ValueError(f"targets {targets!r} is no preset ({', '.join(TARGETS)}) and no pattern: {error}") from None
    chosen = {name: layer for name, layer in linear.items() if pattern.fullmatch(name)}
    if not chosen:
        near = difflib.get_close_matches(targets, linear, n=5, cutoff=0.0)
        raise ValueError(f"targets {targets!r} match none of the model's {len(linear)} linear layers; near: {near}")
    for name, layer in chosen.items():
        if is_packed(layer):
            raise _packed(name, layer)
    return chosen


def _kind(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__name__}"


def _packed(name: str, layer: nn.Module) -> ValueError:
    weight = getattr(layer, "weight", None)
    shape = "" if weight is None else f" with a {_kind(weight)} of shape {tuple(weight.shape)}"
    return ValueError(
        f"model: layer {name or '(root)'} is a {_kind(layer)}{shape}, whose packed weights give no gradient or are not "
        "known (nunchaku, bitsandbytes, GPTQ and the like); load the model as a safetensors checkpoint (bf16, fp16, "
        "fp8, nvfp4, int8) or as GGUF instead"
    )
