"""Checkpoints of other people: read without running what is in them, and loaded whole or not at all."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)

_DAMAGE = (
    *(pickle.UnpicklingError, zipfile.BadZipFile, EOFError),
    *(AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
)
"""What torch and zipfile raise over files that were changed."""
_WRAPPERS = ("state_dict", "model")
"""Under which training programs put the weights beside other things."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a .safetensors file, or of a PyTorch file (.pt, .pth, .bin), by name.

    Of a PyTorch file only tensors and plain containers are unpacked: code in it is refused, not run. Raises ValueError
    for anything that is not a file of weights.
    """
    if path.suffix == ".safetensors":
        try:
            return dict(load_file(path))
        except SafetensorError as error:
            raise ValueError(f"{path.name} is no safetensors file or is damaged ({error}): download it again") from None
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except _DAMAGE as error:
        raise ValueError(
            f"{path.name} is not a file of plain weights: it is damaged, or holds code, which was not run. "
            f"Download it again from the place docs/rewards.md names ({str(error)[:200] or type(error).__name__})"
        ) from None
    for wrapper in _WRAPPERS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(wrapper), Mapping):
            loaded = loaded[wrapper]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"{path.name} holds other things than named tensors: give a checkpoint of weights")
    return {str(name).removeprefix("module."): value for name, value in loaded.items()}


def fill(module: Module, weights: Mapping[str, Tensor], file: str, dtype: torch.dtype = torch.float32) -> Module:
    """The module with exactly these weights in ``dtype``, ready to score; it may have been built on the meta device.

    Raises ValueError, with the module untouched, that names what is missing, unknown, of another shape or not finite.
    """
    expected = module.state_dict()
    shared = [name for name in expected if name in weights]
    faults = {
        "is missing": [name for name in expected if name not in weights],
        "does not belong there": [name for name in weights if name not in expected],
        "has another shape": [
            f"{name} {tuple(weights[name].shape)} (expected {tuple(expected[name].shape)})"
            for name in shared
            if weights[name].shape != expected[name].shape
        ],
        "is not finite": [name for name in shared if not weights[name].isfinite().all()],
    }
    told = [f"{_some(names)} {fault}" for fault, names in faults.items() if names]
    if told:
        raise ValueError(
            f"{file} does not fit this reward: {'; '.join(told)}. Check that it is the file docs/rewards.md names, "
            "or download it again"
        )
    module.load_state_dict({name: weights[name].to(dtype) for name in expected}, assign=True)
    return module.eval().requires_grad_(False)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def depth(weights: Mapping[str, Tensor], pattern: str) -> int:
    """How many layers there are: one more than the largest number that ``pattern``'s group catches in the names."""
    found = [re.match(pattern, name) for name in weights]
    return 1 + max((int(match[1]) for match in found if match), default=-1)
