"""Gradients through model code that was written for inference only.

Hosts and their extensions save memory with ``x += y`` (ComfyUI does in the blocks of Flux), although a gradient may
need the ``x`` from before, and they make tensors in inference mode, which autograd refuses. PyTorch's own
``allow_mutation_on_saved_tensors`` solves the first at two or three times the time for a small model, because it looks
at every operation below Python.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

PLAIN = (Tensor, nn.Parameter)
"""Types of tensors with memory of their own; quantized weights are of others."""


def ordinary(value: Any) -> Any:
    """The value with every inference tensor in it, also in lists, replaced by an ordinary one in the same memory.

    A gradient may pass by an ordinary tensor, and none is taken to it.
    """
    if isinstance(value, Tensor):
        return _alias(value) if value.is_inference() else value
    if type(value) in (list, tuple):
        return type(value)([ordinary(item) for item in value])
    return value


def _alias(tensor: Tensor) -> Tensor:
    if type(tensor) not in PLAIN:
        return tensor.detach().clone()
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def make_ordinary(module: nn.Module) -> None:
    """Replace the inference tensors among a module's weights as :func:`ordinary` does.

    Nothing is copied, and what a host has noted on a weight stays on it. Packed weights are left alone.
    """
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None and type(parameter) in PLAIN and parameter.is_inference():
                alias = nn.Parameter(ordinary(parameter), requires_grad=False)
                alias.__dict__.update(parameter.__dict__)
                part._parameters[name] = alias
        for name, buffer in list(part._buffers.items()):
            if type(buffer) in PLAIN:
                part._buffers[name] = ordinary(buffer)


@contextmanager
def replaced_forward(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Inside, these modules compute by these functions; afterwards as before, also if they had one of their own."""
    before = {module: vars(module)["forward"] for module in forwards if "forward" in vars(module)}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module in forwards:
            vars(module).pop("forward", None)
        for module, forward in before.items():
            module.forward = forward


class Constants(TorchFunctionMode):
    """Inside, inference tensors may be computed with wherever a gradient passes, as constants."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*map(ordinary, args), **{key: ordinary(value) for key, value in (kwargs or {}).items()})


class _Saved:
    """A tensor that autograd keeps for the backward pass."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version


class Differentiable(TorchFunctionMode):
    """Inside, tensors that autograd has saved are copied before they are changed in place.

    Inference tensors count as constants.

    Forward and backward pass both belong inside. A change that goes unseen, since no call from Python made it, is an
    error at the backward pass, as it always is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._saved: defaultdict[int, weakref.WeakSet[_Saved]] = defaultdict(weakref.WeakSet)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> Differentiable:
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._hooks.__exit__(*raised)
        self._saved.clear()

    def _pack(self, tensor: Tensor) -> _Saved | Tensor:
        if type(tensor) not in PLAIN:
            return tensor
        saved = _Saved(tensor)
        self._saved[tensor.untyped_storage().data_ptr()].add(saved)
        return saved

    @staticmethod
    def _unpack(saved: _Saved | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.tensor._version != saved.version:
            raise RuntimeError("model: its code changes a tensor in place that the gradient needs")
        return saved.tensor

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = _changed(func, args, kwargs)
        if target is not None:
            self._copy(target)
        if torch.is_grad_enabled():
            args = tuple([value if value is target else ordinary(value) for value in args])
            kwargs = {key: ordinary(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _copy(self, target: Tensor) -> None:
        """Make what autograd saved of the memory of ``target`` independent of it."""
        for saved in self._saved.pop(target.untyped_storage().data_ptr(), ()):
            saved.tensor = saved.tensor.detach().clone()
            saved.version = saved.tensor._version


def _changed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor that this call changes in place; None if there is none."""
    if type(kwargs.get("out")) in PLAIN:
        return kwargs["out"]
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name[-1:] == "_" and name[-2:] != "__") or kwargs.get("inplace")
    return args[0] if in_place and args and type(args[0]) in PLAIN else None


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function, keeping for the backward only its inputs: it is computed again there, and may work in place."""

    def on_copies(*args: Any, **kwargs: Any) -> Any:
        # The inputs must be as they were when they are needed again, also the numbers in dictionaries of options.
        return forward(*map(_copied, args), **{key: _copied(value) for key, value in kwargs.items()})

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(
            on_copies,
            *map(_snapshot, args),
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), _Recomputation()),
            **{key: _snapshot(value) for key, value in kwargs.items()},
        )

    return call


def _snapshot(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else _snapshot(value)


class _Recomputation(TorchFunctionMode):
    """Gives a tensor memory of its own before it is changed in place.

    What PyTorch's checkpoint keeps of a second computation are aliases, which would change with it.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = _changed(func, args, kwargs)
        if target is not None and not target._is_view():
            target.data = target.data.clone()
        return func(*args, **kwargs)
