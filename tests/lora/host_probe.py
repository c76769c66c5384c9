"""Run as a program: ComfyUI's own models, tiny, of each family, with our LoRA files in ComfyUI's own loader.

``python host_probe.py COMFYUI FOLDER`` leaves in FOLDER for each family the weights (``<family>.weights``), the LoRA in
each format (``<family>.<format>.safetensors``), the model's input and its outputs without and with the LoRA
(``<family>.output``), and in ``report.json`` what ComfyUI could not load.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

COMFYUI, FOLDER, REPOSITORY = Path(sys.argv[1]), Path(sys.argv[2]), Path(__file__).resolve().parents[2]
sys.path[:0] = [str(COMFYUI), str(REPOSITORY)]
sys.argv = [sys.argv[0], "--cpu"]
import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy.ldm.flux.model  # noqa: E402
import comfy.lora  # noqa: E402
import comfy.supported_models as supported  # noqa: E402
import comfy.utils  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from treegrpo_core.architectures import architecture_named  # noqa: E402
from treegrpo_core.lora import FORMATS, LoraFile, write  # noqa: E402

UNET: dict[str, Any] = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "num_head_channels": -1,
    "use_spatial_transformer": True, "legacy": False, "use_temporal_attention": False, "use_temporal_resblock": False,
    "context_dim": 48,
}  # fmt: skip
FLUX: dict[str, Any] = {
    "in_channels": 4, "out_channels": 4, "patch_size": 2, "vec_in_dim": 24, "context_in_dim": 48, "hidden_size": 64,
    "num_heads": 2, "axes_dim": [8, 12, 12], "mlp_ratio": 4.0, "depth": 2, "depth_single_blocks": 2, "theta": 10000,
    "qkv_bias": True, "guidance_embed": True,
}  # fmt: skip
WORD_AXES = {"Flux": [], "Flux 2": [3]}
"""Which of Flux's position axes count the words of a text: newer cores ask, 0.3.75 knows no such setting."""
NEXT_DIT: dict[str, Any] = {
    "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "n_layers": 2, "n_refiner_layers": 1, "qk_norm": True,
    "cap_feat_dim": 48, "axes_lens": [32, 32, 32],
}  # fmt: skip
SD_DEPTH = {"transformer_depth": [1] * 6 + [0, 0], "transformer_depth_output": [1] * 9 + [0] * 3}
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "SD1.5": (
        supported.SD15,
        UNET
        | {"num_res_blocks": [2] * 4, "channel_mult": [1, 1, 2, 2], "transformer_depth_middle": 1, "num_heads": 4}
        | {"use_linear_in_transformer": False, "adm_in_channels": None, **SD_DEPTH},
    ),
    "SD2": (
        supported.SD20,
        UNET
        | {"num_res_blocks": [2] * 4, "channel_mult": [1, 1, 2, 2], "transformer_depth_middle": 1, "num_heads": 4}
        | {"use_linear_in_transformer": True, "adm_in_channels": None, **SD_DEPTH},
    ),
    "SDXL": (
        supported.SDXL,
        UNET
        | {"num_res_blocks": [2] * 3, "channel_mult": [1, 2, 2], "num_classes": "sequential", "adm_in_channels": 80}
        | {"transformer_depth": [0, 0, 2, 2, 3, 3], "transformer_depth_output": [0, 0, 0, 2, 2, 2, 3, 3, 3]}
        | {"transformer_depth_middle": 3, "use_linear_in_transformer": True, "num_head_channels": 16},
    ),
    "SD3": (
        supported.SD3,
        {
            "input_size": None, "in_channels": 16, "patch_size": 2, "depth": 2, "adm_in_channels": 24, "qk_norm": "rms",
            "num_patches": 64, "pos_embed_max_size": 8, "x_block_self_attn_layers": [0],
            "context_embedder_config": {
                "target": "torch.nn.Linear", "params": {"in_features": 48, "out_features": 128},
            },
        },
    ),
    "Flux": (supported.Flux, FLUX | {"image_model": "flux"}),
    "Flux 2": (
        supported.Flux2,
        FLUX
        | {"image_model": "flux2", "mlp_ratio": 3.0, "qkv_bias": False, "ops_bias": False, "global_modulation": True}
        | {"mlp_silu_act": True, "axes_dim": [8, 8, 8, 8], "vec_in_dim": None, "theta": 2000}
        | {"in_channels": 16, "out_channels": 16, "patch_size": 1},
    ),
    "Qwen-Image": (
        supported.QwenImage,
        {
            "image_model": "qwen_image", "in_channels": 16, "out_channels": 4, "num_layers": 2,
            "attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 48,
            "axes_dims_rope": (8, 12, 12),
        },
    ),
    "Z-Image": (
        supported.ZImage,
        NEXT_DIT | {"dim": 288, "n_heads": 9, "n_kv_heads": 9, "axes_dims": [8, 12, 12], "z_image_modulation": True}
        | {"ffn_dim_multiplier": 8 / 3, "multiple_of": 8, "pad_tokens_multiple": 32, "rope_theta": 256.0}
        | {"time_scale": 1000.0},  # fewer channels than 256 do not fit its time embedding
    ),
    "Lumina 2": (
        supported.Lumina2,
        NEXT_DIT | {"dim": 96, "n_heads": 6, "n_kv_heads": 2, "axes_dims": [8, 4, 4], "ffn_dim_multiplier": 4.0}
        | {"multiple_of": 8},
    ),
    "Wan": (
        supported.WAN21_T2V,
        {
            "image_model": "wan2.1", "model_type": "t2v", "in_dim": 16, "out_dim": 16, "dim": 64, "ffn_dim": 128,
            "num_heads": 2, "num_layers": 2, "text_dim": 48, "freq_dim": 32,
        },
    ),
}  # fmt: skip
if "txt_ids_dims" in {setting.name for setting in fields(comfy.ldm.flux.model.FluxParams)}:
    for family, axes in WORD_AXES.items():
        FAMILIES[family][1]["txt_ids_dims"] = axes


def built(kind: type, settings: dict[str, Any]) -> Any:
    """ComfyUI's model object with random weights; those of norms are about 1, so that no norm's epsilon matters."""
    config = kind(settings)
    config.unet_config.update(settings)  # ComfyUI's configuration classes put their own head sizes in
    model = config.get_model({}, "", device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if parameter.is_floating_point():
            mean = 1.0 if parameter.ndim == 1 and name.endswith(("weight", "scale")) else 0.0
            with torch.no_grad():
                parameter.copy_(mean + torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def random_lora(model: Any, name: str) -> LoraFile:
    """A LoRA of rank 2, alpha 3, for every linear layer."""
    generator = torch.Generator().manual_seed(1)
    layers = {}
    for layer, module in model.diffusion_model.named_modules():
        if isinstance(module, torch.nn.Linear):
            rows, columns = module.weight.shape
            layers[layer] = {
                "lora_A.weight": torch.randn(2, columns, generator=generator) * 0.1,
                "lora_B.weight": torch.randn(rows, 2, generator=generator) * 0.1,
                "alpha": torch.tensor(3.0),
            }
    return LoraFile(layers, {"treegrpo.run": "probe"}, architecture_named(name))


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    """Inputs of a family's model."""

    def draw(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    if name in ("SD1.5", "SD2"):
        return {
            "x": draw(2, 4, 16, 16, seed=2),
            "timesteps": torch.tensor([500.0, 30.0]),
            "context": draw(2, 7, 48, seed=3),
        }
    if name == "SDXL":
        return inputs_of("SD1.5") | {"y": draw(2, 80, seed=4)}
    if name == "SD3":
        shared = {"context": draw(2, 5, 48, seed=3), "y": draw(2, 24, seed=4)}
        return {"x": draw(2, 16, 16, 16, seed=2), "timesteps": torch.tensor([500.0, 30.0]), **shared}
    text, times = {"context": draw(2, 5, 48, seed=3)}, torch.tensor([0.5, 0.03])
    if name == "Flux":
        shared = {"y": draw(2, 24, seed=4), "guidance": torch.tensor([3.5, 1.0])}
        return {"x": draw(2, 4, 8, 8, seed=2), "timestep": times, **text, **shared}
    if name == "Flux 2":
        return {"x": draw(2, 16, 4, 4, seed=2), "timestep": times, **text, "guidance": torch.tensor([3.5, 1.0])}
    if name == "Qwen-Image":
        return {"x": draw(2, 4, 1, 8, 8, seed=2), "timestep": times, **text}
    if name == "Wan":
        return {"x": draw(2, 16, 3, 8, 8, seed=2), "timestep": times * 1000, **text}
    return {"x": draw(2, 16, 8, 8, seed=2), "timesteps": times, **text, "num_tokens": torch.tensor(5)}


def loaded(model: Any, path: Path, report: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weight differences that ComfyUI's loader makes of the file, by layer; what it cannot load goes to the report."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    patches = comfy.lora.load_lora(comfy.utils.load_torch_file(str(path)), comfy.lora.model_lora_keys_unet(model, {}))
    logging.getLogger().removeHandler(handler)
    weights = dict(model.named_parameters())
    differences: dict[str, torch.Tensor] = {}
    for key, patch in patches.items():
        name, offset, function = (key, None, None) if isinstance(key, str) else (*key, None)[:3]
        before = differences.get(name, torch.zeros_like(weights[name]))
        differences[name] = comfy.lora.calculate_weight([(1.0, patch, 1.0, offset, function)], before.clone(), name)
    report["unmatched"] = len([message for message in messages if "not loaded" in message])
    return {name.removeprefix("diffusion_model.").removesuffix(".weight"): value for name, value in differences.items()}


def published(key: str) -> str:
    """The name in published checkpoints, which newer cores change when they load one of Flux's family."""
    return re.sub(r"(query|key)_norm\.weight$", r"\1_norm.scale", key)


def probe(name: str) -> dict[str, Any]:
    """Write everything of one family; returns its part of the report."""
    model = built(*FAMILIES[name])
    file = random_lora(model, name)
    weights = {published(key): value.contiguous() for key, value in model.diffusion_model.state_dict().items()}
    save_file(weights, FOLDER / f"{name}.weights")
    expected = {
        layer: 1.5 * content["lora_B.weight"] @ content["lora_A.weight"] for layer, content in file.layers.items()
    }
    report: dict[str, Any] = {"layers": len(expected)}
    for to in FORMATS:
        path = FOLDER / f"{name}.{to}.safetensors"
        write(path, file, to)
        report[to] = {}
        found = loaded(model, path, report[to])
        report[to]["missing"] = sorted(expected.keys() - found.keys())[:5]
        report[to]["error"] = max(
            (float((found[layer] - expected[layer]).abs().max()) for layer in found if layer in expected), default=0.0
        )
    inputs = inputs_of(name)
    with torch.no_grad():
        before = model.diffusion_model(**inputs, transformer_options={})
        for layer, difference in expected.items():
            model.diffusion_model.get_submodule(layer).weight += difference
        output = model.diffusion_model(**inputs, transformer_options={})
    outputs = {"before": before.contiguous(), "output": output.contiguous()}
    save_file({**outputs, **inputs}, FOLDER / f"{name}.output")
    return report


if __name__ == "__main__":
    results = {}
    for family in FAMILIES:
        results[family] = probe(family)
    (FOLDER / "report.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
