"""The model families that can be trained, one entry each: adding a family is adding an entry.

A family says how ComfyUI names it, which of its linear layers are attention and which MLP, how it is sampled by
default, and how other programs name it in the header of a LoRA file. Layer names are those of ComfyUI's own model
classes, without ``diffusion_model.``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

UNET_ATTENTION = r".*\.attn[12]\.to_(q|k|v|out\.0)"
UNET_MLP = r".*\.ff\.net\.(0\.proj|2)|.*\.proj_(in|out)"


@dataclass(frozen=True)
class Architecture:
    """One model family.

    signature and widths: a pattern of layer names, and their numbers of inputs in all published sizes, which tell a
    family from all others in a LoRA file that says nothing of itself.
    """

    name: str
    host_classes: tuple[str, ...]
    """ComfyUI's configuration classes (``comfy.supported_models``); their subclasses belong to the family too."""
    attention: str
    mlp: str
    signature: str
    widths: tuple[int, ...] = ()
    kernel: str = "flow_sde"
    scheduler: str = "simple"
    """ComfyUI's scheduler that the family is usually sampled with; the shift is the model's own."""
    steps: int = 10
    base_version: str = ""
    """kohya's ``ss_base_model_version``."""
    modelspec: str = ""
    """``modelspec.architecture`` of a LoRA (https://github.com/Stability-AI/ModelSpec)."""
    resolution: str = "1024x1024"
    """``modelspec.resolution``: the size the family was trained at."""


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        name="SD1.5",
        host_classes=("SD15",),
        attention=UNET_ATTENTION,
        mlp=UNET_MLP,
        signature=r".*\.attn2\.to_[kv]",
        widths=(768,),
        kernel="ancestral",
        scheduler="normal",
        base_version="sd_v1",
        modelspec="stable-diffusion-v1/lora",
        resolution="512x512",
    ),
    Architecture(
        name="SD2",
        host_classes=("SD20",),
        attention=UNET_ATTENTION,
        mlp=UNET_MLP,
        signature=r".*\.attn2\.to_[kv]",
        widths=(1024,),
        kernel="ancestral",
        scheduler="normal",
        base_version="sd_v2",
        modelspec="stable-diffusion-v2-768-v/lora",
        resolution="768x768",
    ),
    Architecture(
        name="SDXL",
        host_classes=("SDXL",),
        attention=UNET_ATTENTION,
        mlp=UNET_MLP,
        signature=r".*\.attn2\.to_[kv]",
        widths=(2048,),
        kernel="ancestral",
        scheduler="normal",
        base_version="sdxl_base_v1-0",
        modelspec="stable-diffusion-xl-v1-base/lora",
    ),
    Architecture(
        name="SD3",
        host_classes=("SD3",),
        attention=r"joint_blocks\.\d+\.(x|context)_block\.attn2?\.(qkv|proj)",
        mlp=r"joint_blocks\.\d+\.(x|context)_block\.mlp\.fc[12]",
        signature=r"joint_blocks\.\d+\.(x|context)_block\..*",
        widths=(1536, 2432),
        base_version="sd3",
        modelspec="stable-diffusion-v3-medium/lora",
    ),
    Architecture(
        name="Flux",
        host_classes=("Flux", "FluxSchnell"),
        attention=r"double_blocks\.\d+\.(img|txt)_attn\.(qkv|proj)|single_blocks\.\d+\.linear[12]",
        mlp=r"double_blocks\.\d+\.(img|txt)_mlp\.[02]",
        signature=r"double_blocks\.\d+\.(img|txt)_(attn\.(qkv|proj)|mlp\.0)|single_blocks\.\d+\.linear1",
        widths=(3072,),
        base_version="flux1",
        modelspec="flux-1-dev/lora",
    ),
    Architecture(
        name="Flux 2",
        host_classes=("Flux2",),
        attention=r"double_blocks\.\d+\.(img|txt)_attn\.(qkv|proj)|single_blocks\.\d+\.linear[12]",
        mlp=r"double_blocks\.\d+\.(img|txt)_mlp\.[02]",
        signature=r"double_blocks\.\d+\.(img|txt)_(attn\.(qkv|proj)|mlp\.0)|single_blocks\.\d+\.linear1",
        widths=(3072, 4096, 6144),
        base_version="flux2",
        modelspec="flux-2-dev/lora",
    ),
    Architecture(
        name="Qwen-Image",
        host_classes=("QwenImage",),
        attention=r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|to_out\.0|add_[qkv]_proj|to_add_out)",
        mlp=r"transformer_blocks\.\d+\.(img|txt)_mlp\.net\.(0\.proj|2)",
        signature=r"transformer_blocks\.\d+\.(attn\.(to_q|to_k|to_v|add_[qkv]_proj|to_add_out)|(img|txt)_mlp\..*)",
        widths=(3072,),
        base_version="qwen_image",
        modelspec="qwen-image/lora",
    ),
    Architecture(
        name="Z-Image",
        host_classes=("ZImage",),
        attention=r"(layers|noise_refiner|context_refiner)\.\d+\.attention\.(qkv|out)",
        mlp=r"(layers|noise_refiner|context_refiner)\.\d+\.feed_forward\.w[123]",
        signature=r"(layers|noise_refiner|context_refiner)\.\d+\.(attention\.qkv|feed_forward\.w[13])",
        widths=(3840,),
        base_version="zimage",
        modelspec="z-image/lora",
    ),
    Architecture(
        name="Lumina 2",
        host_classes=("Lumina2",),
        attention=r"(layers|noise_refiner|context_refiner)\.\d+\.attention\.(qkv|out)",
        mlp=r"(layers|noise_refiner|context_refiner)\.\d+\.feed_forward\.w[123]",
        signature=r"(layers|noise_refiner|context_refiner)\.\d+\.(attention\.qkv|feed_forward\.w[13])",
        widths=(2304,),
        base_version="lumina2",
        modelspec="lumina-2/lora",
    ),
    Architecture(
        name="Wan",
        host_classes=("WAN21_T2V",),
        attention=r"blocks\.\d+\.(self|cross)_attn\.(q|k|v|o)",
        mlp=r"blocks\.\d+\.ffn\.[02]",
        signature=r"blocks\.\d+\.((self|cross)_attn\.[qkvo]|ffn\.[02])",
        widths=(1536, 3072, 5120),
        base_version="wan",
        modelspec="wan2.1/lora",
        resolution="832x480",
    ),
)

OTHER = Architecture(
    name="other",
    host_classes=(),
    attention=r".*(attn|attention).*",
    mlp=r".*(mlp|ff|feed_forward|feedforward|transformer_blocks).*",
    signature="",
)
"""Any family without an entry: layers are chosen by the words that occur in most models."""


def architecture_named(name: str) -> Architecture:
    """The entry of that name; ValueError lists the names there are."""
    for entry in (*ARCHITECTURES, OTHER):
        if entry.name == name:
            return entry
    raise ValueError(f"architecture {name!r} is unknown; known are {', '.join(entry.name for entry in ARCHITECTURES)}")


def architecture_of(host_classes: Iterable[str]) -> Architecture:
    """The entry of a model whose configuration class and its parents have these names, nearest first; else OTHER."""
    for name in host_classes:
        for entry in ARCHITECTURES:
            if name in entry.host_classes:
                return entry
    return OTHER


def signature_widths(entry: Architecture, inputs: Mapping[str, int]) -> set[int]:
    """Numbers of inputs of those layers that fit the entry's signature; none for another family's layers."""
    return {width for name, width in inputs.items() if re.fullmatch(entry.signature, name)}
