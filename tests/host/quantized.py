"""Checkpoints of the included model's size with random weights, quantized as published files are.

Each form is written by its own rules from the weights alone, so the numbers that a layer computes with are known too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from runs import NEWER, OLDER
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.host import ROOT

FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = torch.finfo(FP8).max
INPUT_SCALE = torch.tensor(0.02)
"""What inputs are divided by before they are rounded to fp8, where the hardware multiplies in fp8."""


@dataclass(frozen=True)
class Packed:
    """One layer's weight in a file: tensors by what follows the layer's name, and the numbers that they stand for."""

    tensors: dict[str, Tensor]
    numbers: Tensor
    settings: dict[str, Any]
    """What the layer's ``comfy_quant`` says."""


@dataclass(frozen=True)
class Form:
    """A way to write quantized weights. ``everywhere``: embedders and the last layer are quantized too."""

    pack: Callable[[Tensor], Packed]
    marks: Callable[[dict[str, Packed]], tuple[dict[str, Tensor], dict[str, str]]]
    """The tensors and the header that say how the file is to be read."""
    hosts: tuple[str, ...] = (OLDER, NEWER)
    everywhere: bool = False
    weight_dtype: str = "default"
    """Of UNETLoader."""
    likeness: float = 0.9999
    """Cosine of an update's gradient with that of the same numbers in float32: less where layers round their inputs."""
    likeness_in_few_bits: float | None = 0.997
    """The same on hardware that multiplies such numbers; None where core cannot do that on a CPU."""
    file_likeness: float = 0.7
    """Cosine of the effects of the run's file, added to the weights by core's loader, and of the live adapter."""
    beside: torch.dtype = torch.float32
    """Type of everything that is not quantized."""


def cast(dtype: torch.dtype) -> Callable[[Tensor], Packed]:
    def pack(weight: Tensor) -> Packed:
        rounded = weight.to(dtype)
        return Packed({"weight": rounded}, rounded.float(), {})

    return pack


def scaled(weight: Tensor, scale: str, **others: Tensor) -> Packed:
    factor = weight.abs().max() / LARGEST
    rounded = (weight / factor).to(FP8)
    tensors = {"weight": rounded, scale: factor, **{name: value.clone() for name, value in others.items()}}
    return Packed(tensors, rounded.float() * factor, {"format": "float8_e4m3fn"})


def kitchen(layout: str, settings: dict[str, Any], **how: Any) -> Callable[[Tensor], Packed]:
    """By the package that newer cores quantize with."""

    def pack(weight: Tensor) -> Packed:
        from comfy_kitchen.tensor import QuantizedTensor

        quantized = QuantizedTensor.from_float(weight, layout, **how)
        tensors = quantized.state_dict("weight")
        # safetensors knows no such type; files hold its bytes.
        tensors = {name: part.view(torch.uint8) if part.dtype == torch.float8_e8m0fnu else part
                   for name, part in tensors.items()}  # fmt: skip
        return Packed(tensors, quantized.dequantize().float(), settings)

    return pack


def marker(size: int) -> Callable[[dict[str, Packed]], tuple[dict[str, Tensor], dict[str, str]]]:
    """The older mark of scaled fp8: empty, or of two numbers where products in fp8 are not precise enough."""
    return lambda _layers: ({"scaled_fp8": torch.zeros(size, dtype=FP8)}, {})


def beside(layers: dict[str, Packed]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each layer says what it is."""
    settings = {name: json.dumps(packed.settings).encode() for name, packed in layers.items()}
    return {f"{name}.comfy_quant": torch.tensor(list(text), dtype=torch.uint8) for name, text in settings.items()}, {}


def in_header(layers: dict[str, Packed]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The file's header says what each layer is."""
    settings = {"format_version": "1.0", "layers": {name: packed.settings for name, packed in layers.items()}}
    return {}, {"_quantization_metadata": json.dumps(settings)}


def unmarked(_layers: dict[str, Packed]) -> tuple[dict[str, Tensor], dict[str, str]]:
    return {}, {}


def newer(
    layout: str,
    settings: dict[str, Any],
    *,
    likeness: float = 0.9999,
    few: float | None,
    file: float = 0.7,
    **how: Any,
) -> Form:
    pack = kitchen(layout, settings, **how)
    return Form(pack, beside, (NEWER,), likeness=likeness, likeness_in_few_bits=few, file_likeness=file)


ROTATED = {"convrot_groupsize": 64}
FORMS = {
    "fp8": Form(cast(FP8), unmarked, everywhere=True, weight_dtype="fp8_e4m3fn", beside=FP8),
    "fp8 e5m2": Form(cast(E5M2), unmarked, everywhere=True, weight_dtype="fp8_e5m2", beside=E5M2),
    "fp8, fast": Form(cast(FP8), unmarked, everywhere=True, weight_dtype="fp8_e4m3fn_fast", beside=FP8),
    "scaled fp8": Form(lambda w: scaled(w, "scale_weight"), marker(0), everywhere=True),
    "scaled fp8, full precision products": Form(lambda w: scaled(w, "scale_weight"), marker(2), everywhere=True),
    "scaled fp8, scaled inputs": Form(
        lambda w: scaled(w, "scale_weight", scale_input=INPUT_SCALE), marker(0), everywhere=True
    ),
    "comfy_quant fp8 in the header": Form(lambda w: scaled(w, "weight_scale"), in_header),
    "comfy_quant fp8 in the header, scaled inputs": Form(
        lambda w: scaled(w, "weight_scale", input_scale=INPUT_SCALE), in_header
    ),
    "comfy_quant fp8": Form(lambda w: scaled(w, "weight_scale"), beside, hosts=(NEWER,)),
    "nvfp4": newer("TensorCoreNVFP4Layout", {"format": "nvfp4"}, few=0.97, file=0.1),
    "mxfp8": newer("TensorCoreMXFP8Layout", {"format": "mxfp8"}, few=None),
    "int8": newer("TensorWiseINT8Layout", {"format": "int8_tensorwise"}, likeness=0.9997, few=0.9997),
    "int8, scales per row": newer(
        "TensorWiseINT8Layout", {"format": "int8_tensorwise"}, likeness=0.9997, few=0.9997, per_channel=True
    ),
    "int8, rotated": newer(
        "TensorWiseINT8Layout",
        {"format": "int8_tensorwise", "convrot": True, **ROTATED},
        likeness=0.9997,
        few=0.9997,
        per_channel=True,
        convrot=True,
        **ROTATED,
    ),
    "int4": newer(
        "TensorCoreConvRotW4A4Layout",
        {"format": "convrot_w4a4", **ROTATED},
        likeness=0.96,
        few=0.96,
        file=0.1,
        **ROTATED,
    ),
    "int4 with int8 inputs": newer(
        "AsymW4A8Int8Layout",
        {"format": "asym_w4a8_int8", "group_size": 16, **ROTATED},
        likeness=0.9997,
        few=0.9997,
        file=0.1,
        **ROTATED,
    ),
}


GGUF = ("Q8_0", "Q5_1", "Q4_0", "BF16")
"""Of gguf's types of blocks, those whose quantization it can do itself."""


def write_gguf(folder: Path, form: str) -> tuple[str, str]:
    """As :func:`write`, a GGUF file as ComfyUI-GGUF converts models: what is no matrix is in float32."""
    import gguf

    kind, weights = getattr(gguf.GGMLQuantizationType, form), random_weights()
    names, plain = (f"{form}.gguf", f"{form} as float32.safetensors"), dict(weights)
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / names[0], "sd3")
    for name, value in weights.items():
        if value.ndim == 2:
            blocks = gguf.quants.quantize(value.numpy(), kind)
            plain[name] = torch.from_numpy(gguf.quants.dequantize(blocks, kind)).reshape(value.shape)
            writer.add_tensor(name, blocks, raw_dtype=kind)
        else:
            writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(plain, folder / names[1])
    return names


def random_weights(seed: int = 0) -> dict[str, Tensor]:
    """By the names and shapes of the included model; activations stay at about 1, and no layer is zero."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, like in load_file(ROOT / "assets" / "denoiser.safetensors").items():
        noise = torch.randn(like.shape, generator=generator)
        if like.ndim > 1:
            found[name] = noise / like[0].numel() ** 0.5
        else:  # numbers that both types of fp8 have: what is beside quantized weights is cast to fp8 in some hosts
            shifted = noise * 0.1 + (0 if name.endswith("bias") else 1)
            found[name] = shifted.to(FP8).to(torch.float8_e5m2).float()
    return found


def quantized_layers(weights: dict[str, Tensor], *, everywhere: bool) -> list[str]:
    """The linear layers, as a rule those of the blocks alone."""
    linear = [
        name.removesuffix(".weight") for name, one in weights.items() if name.endswith(".weight") and one.ndim == 2
    ]
    return [name for name in linear if everywhere or name.startswith("joint_blocks")]


def write(folder: Path, form: str) -> tuple[str, str]:
    """A checkpoint in this form in ``folder``, and one of the same numbers in float32; their names."""
    how, weights = FORMS[form], random_weights()
    layers = {
        name: how.pack(weights[f"{name}.weight"]) for name in quantized_layers(weights, everywhere=how.everywhere)
    }
    tensors, header = how.marks(layers)
    rest = {name: value.to(how.beside) for name, value in weights.items()}
    numbers = {f"{name}.weight": packed.numbers for name, packed in layers.items()}
    parts = {f"{name}.{part}": value for name, packed in layers.items() for part, value in packed.tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    names = f"{form}.safetensors", f"{form} as float32.safetensors"
    save_file({**rest, **parts, **tensors}, folder / names[0], header)
    save_file({**{name: value.float() for name, value in rest.items()}, **numbers}, folder / names[1])
    return names
