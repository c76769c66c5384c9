"""Layers that behave as ComfyUI-GGUF's do, and the node that loads a file with them; what they mean is gguf's own.

Of a layer's weight only the blocks of quantized numbers are in memory. It is a tensor of a class of its own, with the
shape of what it stands for; copies and detached ones are itself. Every forward dequantizes it anew, and adds the
patches of LoRAs that are noted on it.
"""

from __future__ import annotations

from typing import Any

import comfy.lora
import comfy.model_patcher
import comfy.ops
import comfy.sd
import comfy.utils
import torch
from torch import Tensor, nn


class Blocks(Tensor):
    """Quantized numbers as they are in the file: ``form`` is gguf's, ``meant`` the shape that they stand for."""

    form: Any = None
    meant: Any = None
    patches: Any = ()

    @property
    def shape(self) -> Any:
        return self.size() if self.meant is None else self.meant

    def noted(self, like: Blocks) -> Blocks:
        self.form, self.meant, self.patches = like.form, like.meant, like.patches
        return self

    def to(self, *how: Any, **named: Any) -> Any:
        return super().to(*how, **named).noted(self)

    def clone(self, *_how: Any, **_named: Any) -> Blocks:
        return self

    def detach(self, *_how: Any, **_named: Any) -> Blocks:
        return self

    def numbers(self, dtype: torch.dtype) -> Tensor:
        from gguf.quants import dequantize

        plain = dequantize(self.as_subclass(Tensor).cpu().numpy(), self.form)
        found = torch.from_numpy(plain).reshape(self.meant).to(dtype)
        for patches, key in self.patches:
            found = comfy.lora.calculate_weight(patches, found, key)
        return found


class Layer(nn.Module):
    """What the layers share."""

    comfy_cast_weights = True

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_rest: Any) -> None:
        for name in ("weight", "bias"):
            if prefix + name in state_dict:
                setattr(self, name, nn.Parameter(state_dict[prefix + name], requires_grad=False))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, value in self._parameters.items():  # for core's estimate alone
            if value is not None:
                destination[prefix + name] = torch.zeros_like(value, device="meta")

    def numbers(self, like: Tensor) -> list[Tensor | None]:
        parts = (self._parameters.get(name) for name in ("weight", "bias"))
        return [part.numbers(like.dtype) if isinstance(part, Blocks) else part for part in parts]


class Operations(comfy.ops.manual_cast):
    """For a model class in place of core's own layers."""

    class Linear(Layer, comfy.ops.manual_cast.Linear):
        def __init__(self, in_features: int, out_features: int, bias: bool = True, **_how: Any) -> None:
            nn.Module.__init__(self)
            self.in_features, self.out_features, self.weight, self.bias = in_features, out_features, None, None

        def forward_comfy_cast_weights(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, *self.numbers(x))

    class Conv2d(Layer, comfy.ops.manual_cast.Conv2d):
        def forward_comfy_cast_weights(self, x: Tensor) -> Tensor:
            return self._conv_forward(x, *self.numbers(x))


class Patcher(comfy.model_patcher.ModelPatcher):
    """Notes a LoRA's patches on quantized weights and leaves their numbers alone."""

    def patch_weight_to_device(self, key: str, *rest: Any, **named: Any) -> Any:
        weight = comfy.utils.get_attr(self.model, key)
        if not isinstance(weight, Blocks):
            return super().patch_weight_to_device(key, *rest, **named)
        weight.patches = [(self.patches[key], key)] if key in self.patches else ()
        return None

    def unpatch_model(self, *rest: Any, **named: Any) -> None:
        for weight in self.model.parameters():
            if isinstance(weight, Blocks):
                weight.patches = ()
        super().unpatch_model(*rest, **named)

    def clone(self, *rest: Any, **named: Any) -> Any:
        copied = super().clone(*rest, **named)
        copied.__class__ = Patcher
        return copied


def load(path: str) -> Any:
    """The MODEL in this file."""
    from gguf import GGUFReader

    weights = {}
    for tensor in GGUFReader(path).tensors:
        blocks = torch.from_numpy(tensor.data.copy()).as_subclass(Blocks)
        blocks.form, blocks.meant = tensor.tensor_type, torch.Size(int(size) for size in reversed(tensor.shape))
        weights[tensor.name] = blocks
    patcher = comfy.sd.load_diffusion_model_state_dict(weights, model_options={"custom_operations": Operations})
    patcher.__class__ = Patcher
    return patcher
