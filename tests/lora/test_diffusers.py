"""Diffusers' own loaders take the files whole, and its models then compute what ComfyUI's do."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from probed import FAMILIES, Probe
from torch import Tensor, nn

from treegrpo_core.architectures import architecture_named
from treegrpo_core.lora import FORMATS, Format, LoraFile, parts, write
from treegrpo_core.lora.keys import key_map
from treegrpo_core.lora.programs import loaded_by

diffusers = pytest.importorskip("diffusers")
from diffusers.loaders import lora_pipeline, single_file_utils  # noqa: E402

SD: dict[str, Any] = {
    "sample_size": 16, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 48, "layers_per_block": 2,
}  # fmt: skip
SD_UNET = SD | {"block_out_channels": (32, 32, 64, 64), "attention_head_dim": 4}
XL_UNET = SD | {
    "block_out_channels": (32, 64, 64), "down_block_types": ("DownBlock2D", *["CrossAttnDownBlock2D"] * 2),
    "up_block_types": (*["CrossAttnUpBlock2D"] * 2, "UpBlock2D"), "transformer_layers_per_block": (1, 2, 3),
    "attention_head_dim": (2, 4, 4), "use_linear_projection": True, "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80,
}  # fmt: skip
FLUX: dict[str, Any] = {
    "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 32, "num_attention_heads": 2, "in_channels": 16,
    "joint_attention_dim": 48,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "SD1.5": ("UNet2DConditionModel", SD_UNET, "StableDiffusionLoraLoaderMixin"),
    "SD2": ("UNet2DConditionModel", SD_UNET | {"use_linear_projection": True}, "StableDiffusionLoraLoaderMixin"),
    "SDXL": ("UNet2DConditionModel", XL_UNET, "StableDiffusionXLLoraLoaderMixin"),
    "SD3": (
        "SD3Transformer2DModel",
        {"sample_size": 16, "num_layers": 2, "attention_head_dim": 64, "num_attention_heads": 2, "qk_norm": "rms_norm",
         "joint_attention_dim": 48, "caption_projection_dim": 128, "pooled_projection_dim": 24, "pos_embed_max_size": 8,
         "dual_attention_layers": (0,)},
        "SD3LoraLoaderMixin",
    ),
    "Flux": (
        "FluxTransformer2DModel",
        FLUX | {"pooled_projection_dim": 24, "guidance_embeds": True, "axes_dims_rope": (8, 12, 12)},
        "FluxLoraLoaderMixin",
    ),
    "Flux 2": ("Flux2Transformer2DModel", FLUX | {"axes_dims_rope": (8, 8, 8, 8)}, "Flux2LoraLoaderMixin"),
    "Qwen-Image": (
        "QwenImageTransformer2DModel",
        {"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 32, "num_attention_heads": 2,
         "joint_attention_dim": 48, "axes_dims_rope": (8, 12, 12)},
        "QwenImageLoraLoaderMixin",
    ),
    "Z-Image": (
        "ZImageTransformer2DModel",
        {"dim": 288, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 9, "n_kv_heads": 9, "cap_feat_dim": 48,
         "axes_dims": [8, 12, 12], "axes_lens": [64, 32, 32]},
        "ZImageLoraLoaderMixin",
    ),
    "Lumina 2": (
        "Lumina2Transformer2DModel",
        {"hidden_size": 96, "num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 6, "num_kv_heads": 2,
         "multiple_of": 8, "cap_feat_dim": 48, "axes_dim_rope": (8, 4, 4), "axes_lens": (32, 32, 32)},
        "Lumina2LoraLoaderMixin",
    ),
    "Wan": (
        "WanTransformer3DModel",
        {"num_attention_heads": 2, "attention_head_dim": 32, "text_dim": 48, "freq_dim": 32, "ffn_dim": 128,
         "num_layers": 2},
        "WanLoraLoaderMixin",
    ),
}  # fmt: skip


def model_of(family: str) -> nn.Module:
    kind, settings, _ = MODELS[family]
    model = getattr(diffusers, kind)(**settings).eval()
    if family == "Z-Image":  # has 1024 channels in there at any size of the model; ComfyUI's has the model's, if fewer
        model.t_embedder = type(model.t_embedder)(256, mid_size=settings["dim"])
    return model


def load(model: nn.Module, family: str, path: Any) -> None:
    """As the family's pipeline does."""
    mixin = getattr(lora_pipeline, MODELS[family][2])
    unet = {"unet_config": model.config} if MODELS[family][0].startswith("UNet") else {}
    found = mixin.lora_state_dict(str(path), return_lora_metadata=True, **unet)
    state, alphas, metadata = found if len(found) == 3 else (found[0], None, found[1])
    if unet:
        mixin.load_lora_into_unet(state, alphas, model, metadata=metadata)
    else:
        more = {"network_alphas": alphas} if family == "Flux" or alphas else {}
        mixin.load_lora_into_transformer(state, transformer=model, metadata=metadata, **more)


def differences(model: nn.Module) -> dict[str, Tensor]:
    """What the loaded adapter adds to each layer's weights."""
    from peft.tuners.lora import LoraLayer

    return {
        name: module.get_delta_weight(module.active_adapters[0]).detach()
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def expected(family: str, layers: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """The same according to the rules."""
    rules = key_map(architecture_named(family)).by_native
    return {
        name: part[parts.B] @ part[parts.A]
        for layer, content in layers.items()
        for name, part in parts.split(content, rules[layer], layer).items()
    }


def trained_part(file: LoraFile) -> LoraFile:
    """The attention and MLP layers alone, all that diffusers' converters of other formats promise."""
    pattern = f"{file.architecture.attention}|{file.architecture.mlp}"
    layers = {name: layer for name, layer in file.layers.items() if re.fullmatch(pattern, name)}
    return LoraFile(layers, file.metadata, file.architecture)


def loads_whole(family: str, file: LoraFile, path: Path, caplog: Any) -> bool:
    """Whether diffusers loads all of it without complaint; then the effect must be the right one too."""
    model = model_of(family)
    diffusers.utils.logging.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            load(model, family, path)
    except (ValueError, RuntimeError, AssertionError, IndexError):
        return False
    if caplog.records:
        return False
    found, wanted = differences(model), expected(family, file.layers)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].view_as(value), value, atol=1e-6, rtol=1e-5)
    return True


# Diffusers' converter of this one knows Flux's own size only; see the test of it below.
FILES = [(family, to) for family in FAMILIES for to in FORMATS if (family, to) != ("Flux", "kohya")]


@pytest.mark.parametrize(("family", "to"), FILES)
def test_diffusers_loads_what_the_table_says(
    probe: Probe, family: str, to: Format, tmp_path: Path, caplog: Any
) -> None:
    file = probe.file(family)
    file = file if to == "diffusers" else trained_part(file)
    write(tmp_path / "lora.safetensors", file, to)
    stated = "diffusers" in loaded_by(file.architecture, to, {"LoRA"})
    assert loads_whole(family, file, tmp_path / "lora.safetensors", caplog) == stated


def test_diffusers_loads_kohyas_files_of_flux(tmp_path: Path) -> None:
    sizes = {
        "double_blocks.0.img_attn.qkv": (9216, 3072),
        "double_blocks.0.txt_mlp.0": (12288, 3072),
        "single_blocks.37.linear1": (21504, 3072),
        "single_blocks.37.linear2": (3072, 15360),
    }
    layers = {
        name: {parts.A: torch.randn(2, columns), parts.B: torch.randn(rows, 2), parts.ALPHA: torch.tensor(3.0)}
        for name, (rows, columns) in sizes.items()
    }
    write(tmp_path / "lora.safetensors", LoraFile(layers, {}, architecture_named("Flux")), "kohya")
    state = lora_pipeline.FluxLoraLoaderMixin.lora_state_dict(str(tmp_path / "lora.safetensors"))
    wanted = expected("Flux", layers)
    assert len(state) == 2 * len(wanted)
    for name, value in wanted.items():
        found = state[f"transformer.{name}.lora_B.weight"] @ state[f"transformer.{name}.lora_A.weight"]
        torch.testing.assert_close(found, value, atol=1e-4, rtol=1e-5)


def test_diffusers_loads_dora(probe: Probe, tmp_path: Path, caplog: Any) -> None:
    file = probe.file("SD3")
    layers = {name: {**layer, parts.DORA: torch.rand(len(layer[parts.B]), 1)} for name, layer in file.layers.items()}
    write(tmp_path / "lora.safetensors", LoraFile(layers, {}, file.architecture), "diffusers")
    model = model_of("SD3")
    with caplog.at_level(logging.WARNING):
        load(model, "SD3", tmp_path / "lora.safetensors")
    assert not caplog.records
    found = {name: value for name, value in model.named_parameters() if "lora_magnitude_vector" in name}
    rules = key_map(file.architecture).by_native
    for layer, content in layers.items():
        for name, part in parts.split(content, rules[layer], layer).items():
            value = found.pop(f"{name}.lora_magnitude_vector.default_0.weight")
            assert torch.equal(value.detach(), part[parts.DORA].flatten())
    assert not found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_of_diffusers_model_has_a_rule(family: str) -> None:
    known = {name for rule in key_map(architecture_named(family)).by_native.values() for name in rule.diffusers}
    linear = {name for name, module in model_of(family).named_modules() if isinstance(module, nn.Linear)}
    assert linear <= known


CONVERTERS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "SD1.5": single_file_utils.convert_ldm_unet_checkpoint,
    "SD2": single_file_utils.convert_ldm_unet_checkpoint,
    "SDXL": single_file_utils.convert_ldm_unet_checkpoint,
    "SD3": single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers,
    "Flux 2": single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers,
    "Z-Image": single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers,
    "Wan": single_file_utils.convert_wan_transformer_to_diffusers,
}


def converted(family: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of ComfyUI's model as diffusers itself converts a checkpoint."""
    config = dict(model_of(family).config)
    weights = {f"model.diffusion_model.{name}": value for name, value in weights.items()} if "SD" in family else weights
    weights.pop("model.diffusion_model.pos_embed_", None)
    return CONVERTERS[family](dict(weights), config=config)


@pytest.mark.parametrize("family", CONVERTERS)
def test_the_rules_are_those_of_diffusers_own_converters(probe: Probe, family: str) -> None:
    """Weights with the LoRA, converted, are the converted weights with the LoRA's diffusers file."""
    file, weights = probe.file(family), probe.weights(family)
    changed = dict(weights)
    for layer, content in file.layers.items():
        changed[f"{layer}.weight"] = (
            weights[f"{layer}.weight"] + parts.scale(content) * content[parts.B] @ content[parts.A]
        )
    before, after = converted(family, weights), converted(family, changed)
    wanted = expected(family, file.layers)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {f"{name}.weight" for name in wanted}
    for name, value in wanted.items():
        torch.testing.assert_close(after[f"{name}.weight"] - before[f"{name}.weight"], value, atol=1e-6, rtol=1e-4)


RENAMED: dict[str, dict[str, str]] = {
    "Flux": {
        r"double_blocks\.(\d+)\.img_attn\.norm\.(q|k)\w+\.scale": r"transformer_blocks.\1.attn.norm_\2.weight",
        r"double_blocks\.(\d+)\.txt_attn\.norm\.(q|k)\w+\.scale": r"transformer_blocks.\1.attn.norm_added_\2.weight",
        r"single_blocks\.(\d+)\.norm\.(q|k)\w+\.scale": r"single_transformer_blocks.\1.attn.norm_\2.weight",
    },
    "Lumina 2": {
        r"cap_embedder\.0\.(.*)": r"time_caption_embed.caption_embedder.0.\1",
        r"(.*)\.attention\.(q|k)_norm\.(.*)": r"\1.attn.norm_\2.\3",
        r"(context_refiner\.\d+)\.attention_norm1\.(.*)": r"\1.norm1.\2",
        r"(.*)\.attention_norm1\.(.*)": r"\1.norm1.norm.\2",
        r"(.*)\.attention_norm2\.(.*)": r"\1.norm2.\2",
        r"(.*\.ffn_norm[12]\..*)": r"\1",
    },
}
"""Names of weights that have no rule because no LoRA changes them."""
UNUSED = {"Lumina 2": "norm_final.weight"}
"""A weight of ComfyUI's model that takes no part in its output."""


def converted_by_our_rules(family: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same where diffusers' converter knows one size only, or has nothing to convert."""
    rules, found = key_map(architecture_named(family)).by_native, {}
    for key, value in weights.items():
        layer, _, kind = key.rpartition(".")
        if layer in rules:
            rows = value.shape[0]
            identity = {parts.A: torch.eye(rows), parts.B: torch.eye(rows)}
            if rules[layer].swap:
                found[f"{rules[layer].diffusers[0]}.{kind}"] = torch.cat(value.chunk(2)[::-1])
                continue
            for name, part in parts.split(identity, rules[layer], layer).items():
                found[f"{name}.{kind}"] = (part[parts.B] @ part[parts.A]) @ value
        elif key != UNUSED.get(family):
            matches = ((re.fullmatch(old, key), new) for old, new in RENAMED.get(family, {}).items())
            found[next((match.expand(new) for match, new in matches if match), key)] = value
    return found


def output_of(model: Any, family: str, given: dict[str, Tensor]) -> Tensor:
    """Diffusers' model on the inputs of ComfyUI's."""
    x, context, y = given["x"], given["context"], given.get("y")
    if family in ("SD1.5", "SD2"):
        return model(x, given["timesteps"], encoder_hidden_states=context).sample
    if family == "SDXL":
        assert y is not None
        model.add_time_proj.forward = lambda ids: y[:, 32:].reshape(ids.shape[0], -1)  # the sizes, embedded already
        added = {"text_embeds": y[:, :32], "time_ids": torch.zeros(2, 6)}
        return model(x, given["timesteps"], encoder_hidden_states=context, added_cond_kwargs=added).sample
    if family == "SD3":
        return model(x, encoder_hidden_states=context, pooled_projections=y, timestep=given["timesteps"]).sample
    if family == "Wan":
        return model(x, given["timestep"], context).sample
    if family == "Lumina 2":  # this and the next: diffusers' pipelines turn time and sign round, as ComfyUI's models do
        return -model(x, 1 - given["timesteps"], context, torch.ones(context.shape[:2], dtype=torch.int32)).sample
    if family == "Z-Image":
        made = model(list(x[:, :, None]), 1 - given["timesteps"], list(context)).sample
        return -torch.stack(made)[:, :, 0]
    if family == "Flux 2":
        places = torch.cartesian_prod(*map(torch.arange, (1, *x.shape[2:], 1)))
        words = torch.cartesian_prod(*map(torch.arange, (1, 1, 1, context.shape[1])))
        made = model(
            x.flatten(2).transpose(1, 2), context, given["timestep"], places, words, guidance=given["guidance"]
        ).sample
        return made.transpose(1, 2).reshape(x.shape)
    side = x.shape[-1] // 2
    packed = x.view(2, 4, side, 2, side, 2).permute(0, 2, 4, 1, 3, 5).reshape(2, side * side, 16)
    if family == "Qwen-Image":
        made = model(packed, context, timestep=given["timestep"], img_shapes=[[(1, side, side)]] * 2).sample
        return made.view(2, side, side, 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(x.shape)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    places = torch.stack([torch.zeros(side, side), rows, columns], dim=-1).view(-1, 3)
    text = {"encoder_hidden_states": context, "txt_ids": torch.zeros(context.shape[1], 3), "pooled_projections": y}
    made = model(packed, timestep=given["timestep"], img_ids=places, guidance=given["guidance"], **text).sample
    return made.view(2, side, side, 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(x.shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_diffusers_computes_what_comfyui_does(probe: Probe, family: str) -> None:
    model, given, weights = model_of(family), probe.output(family), probe.weights(family)
    model.load_state_dict(
        converted(family, weights) if family in CONVERTERS else converted_by_our_rules(family, weights)
    )
    with torch.no_grad():
        before = output_of(model, family, given)
        load(model, family, probe.path(family, "diffusers"))
        after = output_of(model, family, given)
    size = given["output"].std()
    assert (given["output"] - given["before"]).abs().max() > 0.1 * size
    for found, wanted in ((before, given["before"]), (after, given["output"])):
        torch.testing.assert_close(found / size, wanted / size, atol=1e-4, rtol=1e-4)
