"""What is trained: a denoiser with an adapter.

A denoiser is a callable ``(x, sigma) -> denoised`` with conditioning and guidance bound in, as in k-diffusion. The
adapter is peft's LoRA, kept beside the model and put into its layers only while the policy is in use.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from .architectures import OTHER, Architecture
from .transition import Prediction

T = TypeVar("T")


class Denoiser(Protocol):
    """(B, *latent) at noise level ``sigma`` -> the model's clean prediction, (B, *latent).

    B is a multiple of the prompts.
    """

    def __call__(self, x: Tensor, sigma: float) -> Tensor: ...


class Policy(Protocol):
    """A denoiser bound to prompts and guidance, ready to be used again with the very same conditioning."""

    @property
    def prediction(self) -> Prediction: ...

    def use(self, work: Callable[[Denoiser], T], *, train: bool) -> T:
        """Load the model with its adapter, call ``work`` with the denoiser and return its result."""
        ...


TARGETS = ("attention", "attention+mlp", "all linear")
"""Presets of layers to adapt; what they mean for a family is in its entry in :mod:`.architectures`."""


def target_pattern(targets: str, architecture: Architecture = OTHER) -> str:
    """The regular expression over layer names that a preset stands for; any other text is a pattern itself."""
    presets = {
        "attention": architecture.attention,
        "attention+mlp": f"{architecture.attention}|{architecture.mlp}",
        "all linear": ".*",
    }
    return presets.get(targets, targets)


def target_layers(module: nn.Module, targets: str, architecture: Architecture = OTHER) -> dict[str, nn.Linear]:
    """The linear layers of ``module`` whose full name matches the preset or regular expression ``targets``.

    Raises ValueError with the nearest layer names if none does.
    """
    linear = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    try:
        pattern = re.compile(target_pattern(targets, architecture))
    except re.error as error:
        raise ValueError(f"targets {targets!r} is no preset ({', '.join(TARGETS)}) and no pattern: {error}") from None
    chosen = {name: layer for name, layer in linear.items() if pattern.fullmatch(name)}
    if not chosen:
        near = difflib.get_close_matches(targets, linear, n=5, cutoff=0.0)
        raise ValueError(f"targets {targets!r} match none of the model's {len(linear)} linear layers; near: {near}")
    return chosen


class Adapter:
    """LoRA layers for the linear layers of one model, owned by the run and not by the model.

    :meth:`put_in` and :meth:`take_out` exchange the model's layers for adapted ones and back. The model's own
    weights are never changed, and a model without the adapter put in is exactly as before.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        rank: int,
        alpha: float,
        targets: str,
        seed: int,
        architecture: Architecture = OTHER,
    ) -> None:
        """Build adapters whose B is zero (the policy starts as the base model) and whose A is drawn from ``seed``."""
        from peft import LoraConfig, inject_adapter_in_model

        if rank < 1:
            raise ValueError(f"rank is {rank}; it must be at least 1")
        if not (math.isfinite(alpha) and alpha > 0):
            raise ValueError(f"alpha is {alpha}; it must be a positive number")
        self.rank, self.alpha = rank, alpha
        bases = target_layers(module, targets, architecture)
        # peft works on a shell that holds only the target layers, so it leaves no trace in the host's module.
        shell = nn.ModuleDict({name.replace(".", "/"): layer for name, layer in bases.items()})
        flags = {parameter: parameter.requires_grad for parameter in shell.parameters()}
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(shell))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, shell)
        for parameter, flag in flags.items():
            with torch.inference_mode(parameter.is_inference()):
                parameter.requires_grad_(flag)
        # peft's LoraLayer, by the name of the layer it wraps.
        self.layers: dict[str, Any] = {name: shell[name.replace(".", "/")] for name in bases}

        # peft takes the dtype of the base weights; half precision would round updates away.
        for parameter in self.parameters():
            parameter.data = parameter.data.float()

    def put_in(self, module: nn.Module) -> None:
        """Wrap the layers of ``module``, which may be another instance of the same model than the one built for."""
        for name, layer in self.layers.items():
            current: Any = module.get_submodule(name)
            if current is layer:
                continue
            if current.weight.shape != layer.weight.shape:
                raise ValueError(
                    f"layer {name} has shape {tuple(current.weight.shape)}, the adapter was built for "
                    f"{tuple(layer.weight.shape)}: this is another model"
                )
            layer.base_layer = current
            _set_submodule(module, name, layer)

    def take_out(self, module: nn.Module) -> None:
        """Give ``module`` its own layers back."""
        for name, layer in self.layers.items():
            current: Any = module.get_submodule(name)
            if current is layer:
                _set_submodule(module, name, layer.base_layer)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, adapted layers compute as the base model does: the reference policy."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    def _enable(self, on: bool) -> None:
        for layer in self.layers.values():
            layer.enable_adapters(on)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """``<layer>.lora_A.weight`` (rank, in) and ``<layer>.lora_B.weight`` (out, rank) of every adapted layer."""
        found: dict[str, nn.Parameter] = {}
        for name, layer in self.layers.items():
            found[f"{name}.lora_A.weight"] = layer.lora_A["default"].weight
            found[f"{name}.lora_B.weight"] = layer.lora_B["default"].weight
        return found

    def parameters(self) -> list[nn.Parameter]:
        return list(self.named_parameters().values())

    def to(self, device: Any) -> None:
        """Move the adapter's own weights (never the model's) to ``device``."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(device)

    def state_dict(self) -> dict[str, Tensor]:
        """Detached copies on the CPU, float32."""
        return {name: parameter.detach().cpu().clone() for name, parameter in self.named_parameters().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Set all weights. ValueError, before anything is changed, if names or shapes do not fit."""
        own = self.named_parameters()
        if state.keys() != own.keys():
            missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
            raise ValueError(f"the LoRA does not fit these targets: missing {missing[:3]}, unexpected {extra[:3]}")
        for name, parameter in own.items():
            if state[name].shape != parameter.shape:
                raise ValueError(
                    f"{name} has shape {tuple(state[name].shape)}, the adapter needs {tuple(parameter.shape)} "
                    f"(rank {self.rank}); use the rank the file was trained with"
                )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(state[name])

    def norm(self) -> float:
        """Root of the sum of squares of all B: how far the policy has moved from the base model (0 at the start)."""
        total = sum(
            float(p.detach().square().sum()) for name, p in self.named_parameters().items() if ".lora_B." in name
        )
        return math.sqrt(total)


def _set_submodule(module: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, layer)
