"""A LoRA file in each format."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ..architectures import OTHER
from . import parts
from .endings import MAGNITUDE, Format
from .file import FORMATS, LoraFile
from .header import complete_header
from .keys import is_unet, key_map, kohya_name


def to_tensors(file: LoraFile, to: Format) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of the file in a format; ValueError for what that format cannot say."""
    tensors = tensors_only(file, to)
    return tensors, complete_header(file.layers, file.metadata, file.architecture, tensors, to)


def tensors_only(file: LoraFile, to: Format) -> dict[str, Tensor]:
    """The tensors of :func:`to_tensors`; hashing for the header takes time that not everyone needs to spend."""
    if to == "comfyui":
        tensors = {
            f"diffusion_model.{layer}.{suffix}": value
            for layer, content in file.layers.items()
            for suffix, value in content.items()
        }
    elif to == "kohya":
        endings = {parts.A: "lora_down.weight", parts.B: "lora_up.weight"}
        tensors = {
            f"lora_unet_{kohya_name(file.architecture, layer)}.{endings.get(suffix, suffix)}": value
            for layer, content in file.layers.items()
            for suffix, value in content.items()
        }
    elif to == "diffusers":
        tensors = _diffusers_tensors(file)
    else:
        raise ValueError(f"format {to!r} is unknown; known are {', '.join(FORMATS)}")
    return {key: value.detach().cpu().contiguous() for key, value in tensors.items()}


def write(path: Path, file: LoraFile, to: Format) -> None:
    """Write the file in one atomic step; ValueError, and no file, for what the format cannot say."""
    from safetensors.torch import save_file

    from ..files import write_atomically

    named = {"ss_output_name": path.stem, "modelspec.title": path.stem}
    tensors, metadata = to_tensors(LoraFile(file.layers, named | file.metadata, file.architecture), to)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata))


def _diffusers_tensors(file: LoraFile) -> dict[str, Tensor]:
    rules = key_map(file.architecture).by_native
    unknown = sorted(layer for layer in file.layers if layer not in rules)
    if unknown:
        family = "this model family" if file.architecture == OTHER else file.architecture.name
        raise ValueError(
            f"diffusers' format has no name for {len(unknown)} layers of {family} ({', '.join(unknown[:3])}); "
            "export as comfyui"
        )
    doras = {parts.kind(content) == "DoRA": layer for layer, content in file.layers.items()}
    if len(doras) > 1:
        raise ValueError(
            f"layer {doras[True]} is DoRA and {doras[False]} is not, and diffusers' format has one kind for all "
            "layers; export as comfyui or kohya"
        )
    prefix = "unet" if is_unet(file.architecture) else "transformer"
    tensors = {}
    for layer, content in file.layers.items():
        for name, part in parts.split(content, rules[layer], layer).items():
            for suffix, value in part.items():
                if suffix == parts.DORA:  # peft keeps a row of numbers, for a convolution (1, out, 1, 1)
                    suffix, value = MAGNITUDE, value.flatten() if value.ndim == 2 else value.transpose(0, 1)
                tensors[f"{prefix}.{name}.{suffix}"] = value
    return tensors
