"""Quantized weights: linear layers and tensors of other types than PyTorch's own, told by what they can do.

A host keeps a quantized weight as numbers of few bits, with scales beside them or inside a tensor class of its own, and
computes with it in its own way. What is needed of it here is the same for all: where it lies in memory, and the numbers
that it stands for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .differentiable import PLAIN


def is_linear(layer: nn.Module) -> bool:
    """Whether it is a linear layer; with quantized weights it need not be a torch.nn.Linear."""
    sizes = (getattr(layer, "in_features", None), getattr(layer, "out_features", None))
    flat = getattr(getattr(layer, "weight", None), "ndim", 2) == 2  # else it is a bank of layers
    leaf = isinstance(layer, nn.Linear) or not any(True for _ in layer.children())
    return leaf and flat and all(isinstance(size, int) for size in sizes)


def is_packed(layer: nn.Module) -> bool:
    """Whether a linear layer's weight is no tensor of its outputs by its inputs, not even in a class of its own."""
    weight = getattr(layer, "weight", None)
    return weight is None or tuple(weight.shape) != (layer.out_features, layer.in_features)


def is_quantized(weight: Tensor) -> bool:
    """Whether a weight's values are not, or not alone, the numbers that it stands for."""
    return type(weight) not in PLAIN or weight.dtype not in (torch.float32, torch.float16, torch.bfloat16)


def stored(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold this one in memory: itself, or of a quantized one its values and their scales."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _rest = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def dequantized(value: Any) -> Any:
    """A quantized tensor's numbers as an ordinary tensor, if its class can tell them; any other value as it is."""
    if isinstance(value, Tensor) and type(value) not in PLAIN and type(value).dequantize is not Tensor.dequantize:
        return value.dequantize()
    return value
