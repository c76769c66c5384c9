"""One reduced model per family: core's configuration class with a smaller ``unet_config``, and nothing else changed."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import comfy.ldm.flux.model
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import torch
from torch import Tensor, nn

TOKENS = 6
"""Length of every text of a reduced model."""

UNET = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1],
    "transformer_depth_middle": 1,
    "use_spatial_transformer": True,
    "use_temporal_attention": False,
    "use_temporal_resblock": False,
    "use_checkpoint": False,
    "legacy": False,
    "adm_in_channels": None,
}
FLUX = {
    "hidden_size": 64,
    "num_heads": 4,
    "depth": 2,
    "depth_single_blocks": 2,
    "context_in_dim": 32,
    "guidance_embed": True,
}
LUMINA = {
    "image_model": "lumina2",
    "patch_size": 2,
    "in_channels": 16,
    "dim": 64,
    "cap_feat_dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 4,
    "multiple_of": 32,
    "qk_norm": True,
    "axes_dims": [4, 6, 6],
    "axes_lens": [64, 64, 64],
}


def word_axes(*axes: int) -> dict[str, Any]:
    """Which of Flux's position axes count the words of a text: newer cores ask, 0.3.75 knows no such setting."""
    known = {setting.name for setting in fields(comfy.ldm.flux.model.FluxParams)}
    return {"txt_ids_dims": list(axes)} if "txt_ids_dims" in known else {}


@dataclass(frozen=True)
class Reduced:
    """A configuration class of core by name, its reduced ``unet_config``, and the inputs that such a model takes."""

    host_class: str
    unet_config: dict[str, Any]
    latent: tuple[int, ...]
    """Shape of the LATENT without its batch, as the family's own empty latent node makes it."""
    text_width: int
    pooled_width: int = 0
    hints: dict[str, Tensor] = field(default_factory=dict)
    """What core reads in a checkpoint to tell variants of this family apart."""


MODELS: dict[str, Reduced] = {
    "SD1.5": Reduced(
        "SD15",
        {**UNET, "model_channels": 32, "context_dim": 768, "use_linear_in_transformer": False},
        latent=(4, 8, 8),
        text_width=768,
    ),
    "SD2": Reduced(
        "SD20",
        {**UNET, "model_channels": 64, "context_dim": 1024, "use_linear_in_transformer": True},
        latent=(4, 8, 8),
        text_width=1024,
        hints={"output_blocks.11.1.transformer_blocks.0.norm1.bias": torch.tensor([-1.0, 1.0])},  # v-prediction
    ),
    "SDXL": Reduced(
        "SDXL",
        {
            **UNET,
            "model_channels": 64,
            "context_dim": 2048,
            "adm_in_channels": 2816,
            "num_classes": "sequential",
            "use_linear_in_transformer": True,
            "transformer_depth": [0, 2],
            "transformer_depth_output": [0, 0, 2, 2],
            "transformer_depth_middle": 2,
        },
        latent=(4, 8, 8),
        text_width=2048,
        pooled_width=1280,
    ),
    "SD3": Reduced(
        "SD3",
        {
            "in_channels": 16,
            "out_channels": 16,
            "patch_size": 2,
            "depth": 2,
            "input_size": None,
            "adm_in_channels": 48,
            "context_embedder_config": {
                "target": "torch.nn.Linear",
                "params": {"in_features": 32, "out_features": 128},
            },
            "num_patches": 256,
            "pos_embed_max_size": 16,
            "pos_embed_scaling_factor": None,
            "qk_norm": "rms",
            "x_block_self_attn_layers": [0],
        },
        latent=(16, 8, 8),
        text_width=32,
        pooled_width=48,
    ),
    "Flux": Reduced(
        "Flux",
        {
            **FLUX,
            **word_axes(),
            "image_model": "flux",
            "in_channels": 16,
            "out_channels": 16,
            "patch_size": 2,
            "vec_in_dim": 48,
            "mlp_ratio": 4.0,
            "axes_dim": [4, 6, 6],
            "theta": 10000,
            "qkv_bias": True,
        },
        latent=(16, 8, 8),
        text_width=32,
        pooled_width=48,
    ),
    "Flux 2": Reduced(
        "Flux2",
        {
            **FLUX,
            **word_axes(3),
            "image_model": "flux2",
            "in_channels": 128,
            "out_channels": 128,
            "patch_size": 1,
            "vec_in_dim": None,
            "mlp_ratio": 3.0,
            "axes_dim": [4, 4, 4, 4],
            "theta": 2000,
            "qkv_bias": False,
            "global_modulation": True,
            "mlp_silu_act": True,
            "ops_bias": False,
            "default_ref_method": "index",
            "ref_index_scale": 10.0,
        },
        latent=(128, 4, 4),
        text_width=32,
    ),
    "Qwen-Image": Reduced(
        "QwenImage",
        {
            "image_model": "qwen_image",
            "in_channels": 64,
            "num_layers": 2,
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "joint_attention_dim": 32,
            "axes_dims_rope": (4, 6, 6),
        },
        latent=(16, 8, 8),
        text_width=32,
    ),
    "Z-Image": Reduced(
        "ZImage",
        {
            **LUMINA,
            "dim": 256,  # its time embedding is always this wide
            "axes_dims": [16, 24, 24],
            "n_kv_heads": 4,
            "rope_theta": 256.0,
            "ffn_dim_multiplier": 8.0 / 3.0,
            "z_image_modulation": True,
            "time_scale": 1000.0,
            "pad_tokens_multiple": 32,
        },
        latent=(16, 8, 8),
        text_width=32,
    ),
    "Lumina 2": Reduced(
        "Lumina2",
        {**LUMINA, "n_kv_heads": 2, "rope_theta": 10000.0, "ffn_dim_multiplier": 4.0},
        latent=(16, 8, 8),
        text_width=32,
    ),
    "Wan": Reduced(
        "WAN21_T2V",
        {
            "image_model": "wan2.1",
            "model_type": "t2v",
            "patch_size": (1, 2, 2),
            "in_dim": 16,
            "out_dim": 16,
            "dim": 64,
            "ffn_dim": 128,
            "freq_dim": 64,
            "text_dim": 32,
            "num_heads": 4,
            "num_layers": 2,
        },
        latent=(16, 3, 4, 4),
        text_width=32,
    ),
}


@dataclass(frozen=True)
class Whole:
    """What the published model has in place of the reduced numbers."""

    unet_config: dict[str, Any]
    tokens: int
    """Length of every text."""
    text_width: int
    pooled_width: int = 0


FULL_SIZE: dict[str, Whole] = {
    "SD1.5": Whole(
        {
            "model_channels": 320,
            "num_res_blocks": [2, 2, 2, 2],
            "channel_mult": [1, 2, 4, 4],
            "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
            "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        },
        tokens=77,
        text_width=768,
    ),
    "SDXL": Whole(
        {
            "model_channels": 320,
            "num_res_blocks": [2, 2, 2],
            "channel_mult": [1, 2, 4],
            "transformer_depth": [0, 0, 2, 2, 10, 10],
            "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
            "transformer_depth_middle": 10,
        },
        tokens=77,
        text_width=2048,
        pooled_width=1280,
    ),
    "SD3": Whole(  # SD3.5 medium
        {
            "depth": 24,
            "adm_in_channels": 2048,
            "context_embedder_config": {
                "target": "torch.nn.Linear",
                "params": {"in_features": 4096, "out_features": 24 * 64},
            },
            "num_patches": 384 * 384,
            "pos_embed_max_size": 384,
            "x_block_self_attn_layers": list(range(13)),
        },
        tokens=154,
        text_width=4096,
        pooled_width=2048,
    ),
    "Flux": Whole(  # Flux.1 dev
        {
            "hidden_size": 3072,
            "num_heads": 24,
            "depth": 19,
            "depth_single_blocks": 38,
            "context_in_dim": 4096,
            "vec_in_dim": 768,
            "axes_dim": [16, 56, 56],
        },
        tokens=256,
        text_width=4096,
        pooled_width=768,
    ),
}


def build(name: str, seed: int, dtype: torch.dtype, *, full_size: bool) -> Any:
    """A patcher of the family's reduced or whole model, as core makes one of a checkpoint.

    Weights in fp8 are computed with in bf16, as core does.
    """
    reduced = MODELS[name]
    unet_config = {**reduced.unet_config, **(FULL_SIZE[name].unet_config if full_size else {})}
    config = getattr(comfy.supported_models, reduced.host_class)(unet_config)
    config.set_inference_dtype(dtype, torch.bfloat16 if dtype.itemsize == 1 else None)
    management = comfy.model_management
    with weights_at_once():
        model = config.get_model(dict(reduced.hints), "")
    fill(model.diffusion_model, seed, management.get_torch_device())
    patcher = getattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcher)
    return patcher(model, load_device=management.get_torch_device(), offload_device=management.unet_offload_device())


@contextmanager
def weights_at_once() -> Iterator[None]:
    """Inside, layers have their weights from the start; a core that streams weights makes them of a file only."""
    memory: Any = sys.modules.get("comfy.memory_management")
    streaming = getattr(memory, "aimdo_enabled", False)
    try:
        if streaming:
            memory.aimdo_enabled = False
        yield
    finally:
        if streaming:
            memory.aimdo_enabled = True


def fill(module: nn.Module, seed: int, device: torch.device | str = "cpu") -> None:
    """Give every weight a value that keeps activations at about 1; ``device`` draws the numbers.

    That includes output layers which training starts at zero: behind a zero, no gradient would come through.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in module.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator, device=device)
        if name.endswith("modulation"):  # Wan's tables, added to a time embedding
            noise *= 0.1
        elif tensor.ndim > 1:
            noise /= math.sqrt(math.prod(tensor.shape[1:]))
        else:
            noise = noise * 0.1 + (0 if name.endswith("bias") else 1)
        tensor.copy_(noise.to(tensor.dtype))


def conditioning(name: str, rows: int, seed: int, *, full_size: bool = False) -> list[list[Any]]:
    """Text conditioning as this family's text encoder shapes it, one row per prompt."""
    shape, generator = FULL_SIZE[name] if full_size else MODELS[name], torch.Generator().manual_seed(seed)
    tokens = shape.tokens if isinstance(shape, Whole) else TOKENS
    text = torch.randn(rows, tokens, shape.text_width, generator=generator)
    pooled = torch.randn(rows, shape.pooled_width, generator=generator) if shape.pooled_width else None
    return [[text, {"pooled_output": pooled}]]
