"""Frozen layers whose weights only pass through: the backward fetches them again.

A host streams weights that do not all fit on the device: it copies one layer's into a buffer, computes, and gives the
buffer to the next layer. It also casts or unpacks them for each call. Autograd would keep what the layer computed with
until the backward: a view of memory that holds other numbers by then, or a copy of the whole model. So the weights of
such layers never reach it. Their forward runs without a gradient; the backward runs it again, which fetches the weights
as the host always does, and takes its vector-Jacobian product at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from .differentiable import PLAIN, Constants, replaced_forward
from .quantized import dequantized, is_linear

_AFFINE = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Beside linear layers, those whose vector-Jacobian product does not depend on their input: it is not kept."""


def weights_pass_through(layer: nn.Module, x: Tensor) -> bool:
    """Whether ``layer`` cannot compute with its weights as they are: other device or type than ``x``, or packed."""
    return any(
        type(weight) not in PLAIN or weight.device != x.device or weight.dtype != x.dtype
        for weight in layer.parameters(recurse=False)
    )


@contextmanager
def frozen(
    module: nn.Module,
    trained: Iterable[Tensor],
    transient: Callable[[nn.Module, Tensor], bool] = weights_pass_through,
    precise: Callable[[nn.Module], Callable[..., Any]] = attrgetter("forward"),
) -> Iterator[None]:
    """Inside, only the ``trained`` weights of ``module`` take part in gradients.

    A layer that computes with other weights gives them to autograd only where they stay: where ``transient(layer,
    input)`` holds it keeps nothing of them and computes its forward a second time in the backward. Gradients are those
    of a model whose weights all stay where they are: bit for bit, but that a layer which uses its input more than once
    adds up its shares first.

    A quantized layer may round its inputs as well, by code without a derivative: the gradient is that of the numbers
    its weight stands for, as if the rounding were not. ``precise(layer)`` is a forward that does not round.
    """
    own = set(map(id, trained))
    others = [weight for weight in module.parameters() if id(weight) not in own]
    flagged = [weight for weight in others if weight.requires_grad and not weight.is_inference()]
    fixed = set(map(id, others))
    layers = [part for part in module.modules() if _is_layer(part) and fixed.issuperset(map(id, part.parameters()))]
    for weight in flagged:
        weight.requires_grad_(False)
    try:
        with replaced_forward({layer: _refetched(layer, transient, precise(layer)) for layer in layers}):
            yield
    finally:
        for weight in flagged:
            weight.requires_grad_(True)


def _is_layer(module: nn.Module) -> bool:
    """Whether it computes with weights of its own and has no parts."""
    return any(True for _ in module.parameters(recurse=False)) and not any(True for _ in module.children())


def _refetched(
    layer: nn.Module, transient: Callable[[nn.Module, Tensor], bool], precise: Callable[..., Any]
) -> Callable[..., Any]:
    forward = layer.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        traced = {key: value for key, value in given.items() if isinstance(value, Tensor) and value.requires_grad}
        if not (torch.is_grad_enabled() and traced and transient(layer, next(iter(traced.values())))):
            return forward(*args, **kwargs)
        constant, names = {key: value for key, value in given.items() if key not in traced}, tuple(kwargs)
        keys, count = tuple(traced), len(args)

        # Must not hold the tensors themselves: an affine layer does not keep them.
        def of_traced(function: Callable[..., Any], *inputs: Tensor) -> Any:
            values = {**constant, **dict(zip(keys, inputs, strict=True))}
            return function(*[values[place] for place in range(count)], **{name: values[name] for name in names})

        return _Refetched.apply(partial(of_traced, forward), partial(of_traced, precise), layer, *traced.values())

    return call


class _Refetched(torch.autograd.Function):
    """``forward(*inputs)``, whose backward computes ``again(*inputs)`` and keeps for it the inputs at most."""

    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., Any], again: Callable[..., Any], layer: nn.Module, *inputs: Tensor
    ) -> Any:
        ctx.again, ctx.layer = again, layer
        affine = is_linear(layer) or isinstance(layer, _AFFINE)
        ctx.like = [_Like(x.shape, x.stride(), x.dtype, x.device) for x in inputs] if affine else None
        if not affine:
            ctx.save_for_backward(*inputs)
        return forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors if ctx.like is None else [like.zeros() for like in ctx.like]
        with torch.enable_grad(), _Numbers():
            inputs = [x.detach().requires_grad_() for x in saved]
            outputs = ctx.again(*inputs)
            parts = outputs if isinstance(outputs, (tuple, list)) else [outputs]
            ends = [(part, gradient) for part, gradient in zip(parts, gradients, strict=True) if gradient is not None]
            results, taken = zip(*ends, strict=True)
            if not any(result.requires_grad for result in results):
                kind = f"{type(ctx.layer).__module__}.{type(ctx.layer).__qualname__}"
                raise ValueError(
                    f"model: its layers of type {kind} compute by code without a derivative, so it cannot be trained; "
                    "load it as a safetensors checkpoint (bf16, fp16, fp8) or as GGUF instead"
                )
            return None, None, None, *torch.autograd.grad(results, inputs, taken, allow_unused=True)


class _Numbers(Constants):
    """Inside, linear layers compute with the numbers that quantized weights stand for; inference tensors are constants.

    Products of quantized weights may have no derivative, or one that rounds the gradient.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.linear:
            args = tuple(map(dequantized, args))
        return super().__torch_function__(func, types, args, kwargs)


@dataclass(frozen=True)
class _Like:
    """All of a tensor but its values. Strides too: kernels choose by them, and round differently."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()
