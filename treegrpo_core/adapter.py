"""The adapter that is trained: peft's layers, kept beside the model and put into it only while the policy is in use."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .architectures import OTHER, Architecture
from .differentiable import PLAIN
from .quantized import is_quantized
from .targets import target_layers

KINDS = ("lora", "rslora", "dora", "loha", "lokr")
"""lora: W + alpha / rank * B A (arXiv 2106.09685); rslora: alpha / sqrt(rank) instead (2312.03732); dora: magnitude and
direction apart (2402.09353); loha, lokr: Hadamard and Kronecker products (LyCORIS, 2309.14859)."""

_ZERO_AT_START = (".lora_B.weight", ".hada_w2_b", ".lokr_w1")


def _refuse_quantized(layers: dict[str, Any]) -> None:
    for name, layer in layers.items():
        if is_quantized(layer.weight):
            raise ValueError(
                f"adapter: dora works with the size of the weights, and those of layer {name} are quantized "
                f"({type(layer.weight).__name__}, {layer.weight.dtype}); use the adapter lora, rslora, loha or lokr, "
                "or load the model in bf16 or fp16"
            )


@cache
def _hiding_quantized(kind: type[Any]) -> type[Any]:
    """A kind of peft's layer that shows a plain weight of no memory in place of a quantized one.

    Hosts compute with a quantized weight that they see in a layer, without calling the layer: the adapter would be
    passed by.
    """

    def weight(layer: Any) -> Tensor:
        found: Tensor = layer.get_base_layer().weight
        if type(found) in PLAIN:
            return found
        return torch.zeros((), dtype=found.dtype, device=found.device).expand(found.shape)

    return type(kind.__name__, (kind,), {"weight": property(weight)})


def _stand_in(layer: Any, kind: str) -> nn.Linear:
    """What peft builds an adapter on: a linear layer of the same size whose weights take no memory."""
    stand_in = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    if kind == "dora":  # its magnitudes start from the weights
        weight = layer.weight.detach().float().cpu()
    else:
        weight = torch.zeros(()).expand(layer.out_features, layer.in_features)
    stand_in.weight = nn.Parameter(weight, requires_grad=False)
    return stand_in


def _beside_the_adapter(layer: Any) -> Any:
    """The base layer of peft's DoRA, which computes with its weights: these, on the adapter's device."""
    base, device = layer.base_layer, layer.lora_A["default"].weight.device
    if base.weight.device == device:
        return base
    bias = None if base.bias is None else base.bias.to(device)
    return SimpleNamespace(weight=base.weight.to(device), bias=bias)


class Adapter:
    """Adapted layers for the linear layers of one model, owned by the run and not by the model.

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
        kind: str = "lora",
        architecture: Architecture = OTHER,
    ) -> None:
        """Build adapters without any effect (the policy starts as the base model), their weights drawn from ``seed``.

        ``kind`` is one of :data:`KINDS`. Raises ValueError for impossible settings.
        """
        from peft import inject_adapter_in_model

        if rank < 1:
            raise ValueError(f"rank is {rank}; it must be at least 1")
        if not (math.isfinite(alpha) and alpha > 0):
            raise ValueError(f"alpha is {alpha}; it must be a positive number")
        self.rank, self.alpha, self.kind, self.architecture = rank, alpha, kind, architecture
        self._stays = False
        self._away: Any = None
        """Where the host wants the adapter while it is not used; None: it has not said yet."""
        bases = target_layers(module, targets, architecture)
        if kind == "dora":
            _refuse_quantized(bases)
        # peft wraps stand-ins, so it leaves no trace in the host's module, and any layer may take their place.
        self._outside = {name: _stand_in(layer, kind) for name, layer in bases.items()}
        shell = nn.ModuleDict({name.replace(".", "/"): layer for name, layer in self._outside.items()})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(_peft_config(kind, rank, alpha, list(shell)), shell)
        # peft's layer, by the name of the layer it wraps.
        self.layers: dict[str, Any] = {name: shell[name.replace(".", "/")] for name in bases}
        for layer in self.layers.values():
            kind_of_layer: Any = type(layer)
            layer.__class__ = _hiding_quantized(kind_of_layer)
        if kind == "dora":
            for name, layer in self.layers.items():
                layer.base_layer, self._outside[name] = bases[name], _stand_in(bases[name], "lora")
                layer.get_base_layer = partial(_beside_the_adapter, layer)
        # Listed once: peft's layers are walked slowly, and an update asks often.
        self._parameters = {
            f"{name}.{part.replace('.default', '')}": parameter
            for name, layer in self.layers.items()
            for part, parameter in layer.named_parameters()
            if not part.startswith("base_layer.")
        }

    @property
    def scale(self) -> float:
        """What multiplies the adapter's product: alpha / rank, in rslora alpha / sqrt(rank)."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)

    def put_in(self, module: nn.Module) -> None:
        """Wrap the layers of ``module``, which may be another instance of the same model than the one built for."""
        for name, layer in self.layers.items():
            parent, place, current = _find(module, name)
            if current is layer:
                continue
            wanted = (self._outside[name].out_features, self._outside[name].in_features)
            if (found := (current.out_features, current.in_features)) != wanted:
                raise ValueError(
                    f"layer {name} has shape {found}, the adapter was built for {wanted}: this is another model"
                )
            layer.base_layer = current
            setattr(parent, place, layer)

    def take_out(self, module: nn.Module) -> None:
        """Give ``module`` its own layers back, and keep none of them, but for dora, whose files need their weights."""
        for name, layer in self.layers.items():
            parent, place, current = _find(module, name)
            if current is layer:
                setattr(parent, place, layer.base_layer)
                if self.kind != "dora":
                    layer.base_layer = self._outside[name]

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, adapted layers compute as the base model does: the reference policy."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    @contextmanager
    def holding(self, state: dict[str, Tensor]) -> Iterator[None]:
        """Inside, the adapter has these weights (:meth:`state_dict`); no gradient may be taken through it meanwhile."""
        own = {name: parameter.data for name, parameter in self.named_parameters().items()}
        try:
            for name, parameter in self.named_parameters().items():
                parameter.data = state[name].to(parameter)
            yield
        finally:
            for name, parameter in self.named_parameters().items():
                parameter.data = own[name]

    def _enable(self, on: bool) -> None:
        for layer in self.layers.values():
            layer.enable_adapters(on)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The trained tensors by ``<layer>.<part>``: ``lora_A.weight`` (rank, in), ``lora_B.weight`` (out, rank) ..."""
        return self._parameters

    def parameters(self) -> list[nn.Parameter]:
        return list(self._parameters.values())

    def to(self, device: Any) -> None:
        """Move the adapter's own weights (never the model's) to ``device``."""
        with torch.inference_mode(False):
            for parameter in self.parameters():
                parameter.data = parameter.data.to(device)

    def leave(self, device: Any) -> None:
        """A sampling is over and the adapter not needed: move to ``device``, or at the end of :meth:`staying`."""
        self._away = device
        if not self._stays:
            self.to(device)

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Inside, the adapter stays on the device of its samplings between them."""
        self._stays = True
        try:
            yield
        finally:
            self._stays = False
            if self._away is not None:
                self.to(self._away)

    def state_dict(self) -> dict[str, Tensor]:
        """Detached copies on the CPU, float32."""
        return {name: parameter.detach().cpu().clone() for name, parameter in self.named_parameters().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Set all weights. ValueError, before anything is changed, if names, shapes or values do not fit."""
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
            if not torch.isfinite(state[name]).all():
                raise ValueError(f"{name} holds NaN or infinite values; use another file or an earlier copy of the run")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(state[name])

    def factors(
        self, state: dict[str, Tensor] | None = None, *, for_comfyui: bool = True
    ) -> dict[str, dict[str, Tensor]]:
        """What a LoRA file holds, by layer and by ComfyUI's names of the parts; detached, on the CPU, float32.

        LoRA: ``lora_A.weight`` (rank, in), ``lora_B.weight`` (out, rank), with dora also ``dora_scale`` (out, 1); LoHa:
        ``hada_w1_a`` ... ; each with the scalar ``alpha`` that makes alpha / rank the adapter's scale. LoKr:
        ``lokr_w1``, ``lokr_w2`` or ``lokr_w2_a``, ``lokr_w2_b``, the scale multiplied in, because readers differ in it.

        ``state``: weights to take in place of the current ones. ``for_comfyui``: ComfyUI divides a DoRA by the norm of
        W, the paper (and peft) by that of W + scale B A; magnitudes are written so that the effect is the same.
        """
        state = self.state_dict() if state is None else state
        found: dict[str, dict[str, Tensor]] = {}
        for name, layer in self.layers.items():
            prefix = f"{name}."
            parts = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
            if self.kind == "lokr":
                parts["lokr_w1"] = parts["lokr_w1"] * self.scale
            else:
                parts["alpha"] = torch.tensor(self.scale * self.rank)
            if self.kind == "dora":
                magnitude = parts.pop("lora_magnitude_vector.weight")[:, None]
                if for_comfyui:
                    weight = layer.get_base_layer().weight.detach().float().cpu()
                    moved = weight + self.scale * parts["lora_B.weight"] @ parts["lora_A.weight"]
                    magnitude = magnitude * weight.norm(dim=1, keepdim=True) / moved.norm(dim=1, keepdim=True)
                parts["dora_scale"] = magnitude
            found[name] = parts
        return found

    def load_factors(self, layers: dict[str, dict[str, Tensor]]) -> None:
        """Start from a LoRA file's layers (as :meth:`factors` gives them), of this rank or a lower one.

        Layers the file lacks keep their start, which has no effect. ValueError, before anything is changed, for layers
        this adapter has not and for other kinds than lora and rslora.
        """
        from .lora.parts import kind

        kinds = {kind(parts) for parts in layers.values()} - {"LoRA"}
        more = {part.split(".")[0] for parts in layers.values() for part in parts} - {"lora_A", "lora_B", "alpha"}
        if self.kind not in ("lora", "rslora") or kinds:
            held = f"holds {', '.join(sorted(more))}, which is {', '.join(sorted(kinds))}" if kinds else "is a LoRA"
            raise ValueError(
                f"only a LoRA can be started from, and only by the adapter kinds lora and rslora; the file {held}, "
                f"the adapter is {self.kind}. Choose one of these kinds, or put the file in front of TreeGRPOPolicy "
                "with Load LoRA"
            )
        unknown = sorted(layers.keys() - self.layers.keys())
        if convolutions := [name for name in unknown if layers[name]["lora_A.weight"].ndim > 2]:
            raise ValueError(
                f"the LoRA adapts {len(convolutions)} convolutions, such as {convolutions[0]}, which TreeGRPO does not "
                "train; put it in front of TreeGRPOPolicy with Load LoRA instead, and train a new adapter on top"
            )
        if unknown:
            raise ValueError(
                f"the LoRA adapts {len(unknown)} layers that are not among the targets, such as {unknown[0]}; choose "
                f"targets that include them, or another LoRA (this one may be of another model family)"
            )
        state = self.state_dict()
        for name, parts in layers.items():
            a, b = (parts[f"lora_{half}.weight"].float().flatten(1) for half in "AB")
            own_a, own_b = state[f"{name}.lora_A.weight"], state[f"{name}.lora_B.weight"]
            rank = a.shape[0]
            if rank > self.rank:
                raise ValueError(f"the LoRA has rank {rank} in {name}, the adapter {self.rank}; set rank to {rank}")
            if a.shape[1] != own_a.shape[1] or b.shape != (own_b.shape[0], rank):
                raise ValueError(
                    f"the LoRA's {name} maps {a.shape[1]} to {b.shape[0]} numbers, the model's {own_a.shape[1]} to "
                    f"{own_b.shape[0]}: it belongs to another model"
                )
            scale = float(parts["alpha"]) / rank if "alpha" in parts else 1.0
            own_a[:rank] = a
            own_b[:, :rank] = b * (scale / self.scale)
        self.load_state_dict(state)

    def norm(self) -> float:
        """How far the policy has moved from the base model: norm of all weights that are zero at the start."""
        moved = (p for name, p in self.named_parameters().items() if name.endswith(_ZERO_AT_START))
        return math.sqrt(sum(float(p.detach().square().sum()) for p in moved))


def _peft_config(kind: str, rank: int, alpha: float, layers: list[str]) -> Any:
    from peft import LoHaConfig, LoKrConfig, LoraConfig

    if kind == "loha":
        return LoHaConfig(r=rank, alpha=alpha, target_modules=layers)
    if kind == "lokr":
        return LoKrConfig(r=rank, alpha=alpha, target_modules=layers)
    if kind not in KINDS:
        raise ValueError(f"adapter kind {kind!r} is unknown; use {', '.join(KINDS)}")
    return LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=layers, use_rslora=kind == "rslora", use_dora=kind == "dora"
    )


def _find(module: nn.Module, name: str) -> tuple[nn.Module, str, Any]:
    """The part of ``module`` that holds the layer of this full name, what the layer is called there, and the layer."""
    *path, place = name.split(".")
    for part in path:  # not by get_submodule: the host asks for all layers six times an update
        module = module._modules[part]  # type: ignore[assignment]
    return module, place, module._modules[place]
