"""Which model a run trains, whatever ComfyUI calls its parameters and however it keeps them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FORM = "2-"
"""What a fingerprint begins with; those of version 0.1.0 were 32 digits (:func:`earlier_fingerprints`)."""

_PREFIX = "diffusion_model."
_UNUSED = "norm_final.weight"
"""Lumina 2's and Z-Image's weight that no forward reads: newer cores have no such parameter."""
_NOT_WEIGHTS = ("scale_input", "input_scale")
"""Of quantized layers: how their inputs are rounded where the hardware multiplies in fp8."""


def fingerprint(patcher: Any) -> str:
    """Identity of a model's weights and patches: shapes and 64 values of every tensor, hashed.

    Names and their order do not count, since newer cores rename parameters; nor does how a scaled fp8 weight is held,
    as two parameters or in a tensor class. ``patcher``: the MODEL, with or without an adapter live.
    """
    digests = []
    for name, owner, weight, patches in _weights(patcher):
        if name == _UNUSED or name.endswith(_NOT_WEIGHTS) or _beside_fp8(owner, name) or not weight.numel():
            continue
        data, *scales = _stored(weight)
        digests.append(_digest(_of_any_rank(data), *_of_patches(patches)))
        digests += [_digest(_of_any_rank(scale)) for scale in scales]
    return FORM + _digest(*sorted(digests)).hex()[:32]


def earlier_fingerprints(patcher: Any) -> frozenset[str]:
    """What version 0.1.0 called this model under any core, by the names that the parameters had there."""
    entries = [
        _Entry(name, tuple(weight.shape), _sample(weight), patches) for name, _, weight, patches in _weights(patcher)
    ]
    used = [entry for entry in entries if entry.name != _UNUSED]
    widths = [entry.shape[0] for entry in entries if entry.name == "x_embedder.weight"]
    # No training reaches it: it is as it was initialised, or in a checkpoint without it never set.
    unused = [
        _Entry(_UNUSED, (width,), _sample(torch.full((width,), one)), []) for width in widths for one in (1.0, 0.0)
    ]
    models = [entries, used, *([*used, entry] for entry in unused)]
    return frozenset(_named_digest(model, rename) for model, rename in product(models, _NAMES_OF_NORMS))


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    sample: bytes
    patches: list[Any]


_NAMES_OF_NORMS: tuple[Callable[[str], str], ...] = (
    lambda name: name,
    lambda name: re.sub(r"(query|key)_norm\.weight$", r"\1_norm.scale", name),
    lambda name: re.sub(r"(query|key)_norm\.scale$", r"\1_norm.weight", name),
)
"""What Flux's family calls the weights of its norms: ``scale`` in 0.3.75, ``weight`` in newer cores."""


def _named_digest(entries: list[_Entry], rename: Callable[[str], str]) -> str:
    parts: list[bytes] = []
    for name, entry in sorted((_PREFIX + rename(entry.name), entry) for entry in entries):
        parts += [f"{name} {entry.shape}".encode(), entry.sample, *_of_patches(entry.patches)]
    return _digest(*parts).hex()[:32]


def _weights(patcher: Any) -> Iterator[tuple[str, nn.Module, Tensor, list[Any]]]:
    """Name, owner, tensor and patches of each parameter and buffer of the diffusion model, as the checkpoint has it."""
    with patcher.use_ejected():
        parts = dict(patcher.model.diffusion_model.named_modules(remove_duplicate=False))
        for name in patcher.model.diffusion_model.state_dict():
            owner, _, own_name = name.rpartition(".")
            weight = getattr(parts.get(owner), own_name, None)
            if weight is None:
                continue  # a name under which a packed weight saves a part of itself
            key = _PREFIX + name
            if key in patcher.backup:
                weight = patcher.backup[key].weight
            if key in patcher.hook_backup:
                weight = patcher.hook_backup[key][0]
            yield name, parts[owner], weight, patcher.patches.get(key, [])


def _beside_fp8(owner: nn.Module, name: str) -> bool:
    """Whether this is the bias of a layer in fp8: 0.3.75 rounds it to fp8 as well, newer cores do not."""
    weight = getattr(owner, "weight", None)
    return name.endswith("bias") and weight is not None and any("float8" in str(part.dtype) for part in _stored(weight))


def _stored(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold a weight: itself, or of a quantized one its data and scales."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def _of_any_rank(tensor: Tensor) -> bytes:
    shape = [size for size in tensor.shape if size > 1]  # a scale is a number here, a vector of one number there
    return f"{shape}".encode() + _sample(tensor)


def _of_patches(patches: list[Any]) -> Iterator[bytes]:
    for patch in patches:
        yield f"{patch[0]} {patch[2]}".encode()
        yield from map(_sample, _tensors(patch[1]))


def _sample(tensor: Tensor) -> bytes:
    """At most 64 values spread over a tensor."""
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // 64)][:64].float().cpu().numpy().tobytes()


def _tensors(patch: Any) -> Iterator[Tensor]:
    """The tensors of a weight patch: bare, in tuples, or in one of core's adapter objects."""
    if isinstance(patch, Tensor):
        yield patch
    elif isinstance(patch, (tuple, list)):
        for part in patch:
            yield from _tensors(part)
    elif hasattr(patch, "weights"):
        yield from _tensors(patch.weights)


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()
