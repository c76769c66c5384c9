"""Layer names of the diffusion transformers, as data."""

from __future__ import annotations

from collections.abc import Mapping

from .keys import BLOCKS, Rule

Names = Mapping[str, str | tuple[str, ...]]

SWAPPED = {"final_layer.adaLN_modulation.1", "joint_blocks.{}.context_block.adaLN_modulation.1"}
"""Layers with shift and scale in diffusers' other order; of the second, only the last block has just these two."""


def _rules(native: str, diffusers: str, names: Names, *, swapped: bool = True, blocks: int | None = None) -> list[Rule]:
    """A rule for each pair of names, with these prefixes; ``blocks``: how many there are, where that tells families."""
    found = []
    for mine, theirs in names.items():
        parts = (theirs,) if isinstance(theirs, str) else theirs
        layer = native + mine
        names_there = tuple(diffusers + part for part in parts)
        found.append(Rule(layer, names_there, swap=swapped and layer in SWAPPED, blocks=blocks or BLOCKS))
    return found


def _qkv(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.to_{part}" for part in "qkv")


ADDED_QKV = tuple(f"attn.add_{part}_proj" for part in "qkv")
EMBEDDER = ("linear_1", "linear_2")

SD3 = [
    *_rules(
        "joint_blocks.{}.",
        "transformer_blocks.{}.",
        {
            "x_block.attn.qkv": _qkv("attn"),
            "x_block.attn.proj": "attn.to_out.0",
            "x_block.attn2.qkv": _qkv("attn2"),
            "x_block.attn2.proj": "attn2.to_out.0",
            "x_block.mlp.fc1": "ff.net.0.proj",
            "x_block.mlp.fc2": "ff.net.2",
            "x_block.adaLN_modulation.1": "norm1.linear",
            "context_block.attn.qkv": ADDED_QKV,
            "context_block.attn.proj": "attn.to_add_out",
            "context_block.mlp.fc1": "ff_context.net.0.proj",
            "context_block.mlp.fc2": "ff_context.net.2",
            "context_block.adaLN_modulation.1": "norm1_context.linear",
        },
        blocks=38,
    ),
    *_rules(
        "",
        "",
        {
            "context_embedder": "context_embedder",
            "x_embedder.proj": "pos_embed.proj",
            "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
            "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
            "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
            "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
            "final_layer.linear": "proj_out",
            "final_layer.adaLN_modulation.1": "norm_out.linear",
        },
    ),
]

FLUX_ATTENTION: Names = {
    "img_attn.qkv": _qkv("attn"),
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.qkv": ADDED_QKV,
    "txt_attn.proj": "attn.to_add_out",
}
FLUX_REST: Names = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
}

FLUX = [
    *_rules("double_blocks.{}.", "transformer_blocks.{}.", FLUX_ATTENTION, blocks=19),
    *_rules(
        "double_blocks.{}.",
        "transformer_blocks.{}.",
        {
            "img_mlp.0": "ff.net.0.proj",
            "img_mlp.2": "ff.net.2",
            "txt_mlp.0": "ff_context.net.0.proj",
            "txt_mlp.2": "ff_context.net.2",
            "img_mod.lin": "norm1.linear",
            "txt_mod.lin": "norm1_context.linear",
        },
        blocks=19,
    ),
    Rule(
        "single_blocks.{}.linear1",
        tuple(f"single_transformer_blocks.{{}}.{name}" for name in (*_qkv("attn"), "proj_mlp")),
        shares=(1, 1, 1, 4),
        blocks=38,
    ),
    *_rules(
        "single_blocks.{}.",
        "single_transformer_blocks.{}.",
        {"linear2": "proj_out", "modulation.lin": "norm.linear"},
        blocks=38,
    ),
    *_rules("", "", FLUX_REST),
    *(
        Rule(f"{mine}.{half}_layer", (f"time_text_embed.{theirs}.{linear}",))
        for mine, theirs in (
            ("time_in", "timestep_embedder"),
            ("vector_in", "text_embedder"),
            ("guidance_in", "guidance_embedder"),
        )
        for half, linear in zip(("in", "out"), EMBEDDER, strict=True)
    ),
]

FLUX2 = [
    *_rules("double_blocks.{}.", "transformer_blocks.{}.", FLUX_ATTENTION, blocks=8),
    *_rules(
        "double_blocks.{}.",
        "transformer_blocks.{}.",
        {
            "img_mlp.0": "ff.linear_in",
            "img_mlp.2": "ff.linear_out",
            "txt_mlp.0": "ff_context.linear_in",
            "txt_mlp.2": "ff_context.linear_out",
        },
        blocks=8,
    ),
    *_rules(
        "single_blocks.{}.",
        "single_transformer_blocks.{}.",
        {"linear1": "attn.to_qkv_mlp_proj", "linear2": "attn.to_out"},
        blocks=48,
    ),
    *_rules("", "", FLUX_REST),
    *(
        Rule(f"{mine}.{half}_layer", (f"time_guidance_embed.{theirs}.{linear}",))
        for mine, theirs in (("time_in", "timestep_embedder"), ("guidance_in", "guidance_embedder"))
        for half, linear in zip(("in", "out"), EMBEDDER, strict=True)
    ),
    *(
        Rule(f"{name}.lin", (f"{name}.linear",))
        for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
    ),
]


def _same(*names: str) -> list[Rule]:
    return [Rule(name, (name,)) for name in names]


# ComfyUI's model of Qwen-Image is diffusers' own.
QWEN = _same(
    *(
        f"transformer_blocks.{{}}.attn.{name}"
        for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    ),
    *(
        f"transformer_blocks.{{}}.{stream}_{name}"
        for stream in ("img", "txt")
        for name in ("mlp.net.0.proj", "mlp.net.2", "mod.1")
    ),
    *(f"time_text_embed.timestep_embedder.{name}" for name in EMBEDDER),
    *("img_in", "txt_in", "norm_out.linear", "proj_out"),
)

Z_IMAGE = [
    *(
        rule
        for part in ("layers.{}.", "noise_refiner.{}.", "context_refiner.{}.")
        for rule in _rules(
            part,
            part,
            {
                "attention.qkv": _qkv("attention"),
                "attention.out": "attention.to_out.0",
                **{f"feed_forward.w{number}": f"feed_forward.w{number}" for number in (1, 2, 3)},
                "adaLN_modulation.0": "adaLN_modulation.0",
            },
        )
    ),
    *_same("cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2"),
    # Z-Image's final norm has a scale and no shift: nothing to swap.
    *_rules(
        "",
        "",
        {
            "x_embedder": "all_x_embedder.2-1",
            "final_layer.linear": "all_final_layer.2-1.linear",
            "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
        },
        swapped=False,
    ),
]

LUMINA2 = [
    *(
        rule
        for part in ("layers.{}.", "noise_refiner.{}.", "context_refiner.{}.")
        for rule in [
            # 24 heads of queries, 8 of keys and values.
            Rule(f"{part}attention.qkv", tuple(part + name for name in _qkv("attn")), shares=(3, 1, 1)),
            *_rules(
                part,
                part,
                {
                    "attention.out": "attn.to_out.0",
                    **{f"feed_forward.w{number}": f"feed_forward.linear_{number}" for number in (1, 2, 3)},
                    "adaLN_modulation.1": "norm1.linear",
                },
            ),
        ]
    ),
    *_same("x_embedder"),
    *_rules(
        "",
        "",
        {
            "cap_embedder.1": "time_caption_embed.caption_embedder.1",
            "t_embedder.mlp.0": "time_caption_embed.timestep_embedder.linear_1",
            "t_embedder.mlp.2": "time_caption_embed.timestep_embedder.linear_2",
            "final_layer.linear": "norm_out.linear_2",
            "final_layer.adaLN_modulation.1": "norm_out.linear_1",
        },
        swapped=False,
    ),
]

WAN = [
    *(
        Rule(f"blocks.{{}}.{mine}.{name}", (f"blocks.{{}}.{theirs}.{layer}",))
        for mine, theirs in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for name, layer in {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}.items()
    ),
    *_rules(
        "blocks.{}.",
        "blocks.{}.",
        {
            "cross_attn.k_img": "attn2.add_k_proj",
            "cross_attn.v_img": "attn2.add_v_proj",
            "ffn.0": "ffn.net.0.proj",
            "ffn.2": "ffn.net.2",
        },
    ),
    *_rules(
        "",
        "condition_embedder.",
        {
            "time_embedding.0": "time_embedder.linear_1",
            "time_embedding.2": "time_embedder.linear_2",
            "text_embedding.0": "text_embedder.linear_1",
            "text_embedding.2": "text_embedder.linear_2",
            "time_projection.1": "time_proj",
            "img_emb.proj.1": "image_embedder.ff.net.0.proj",
            "img_emb.proj.3": "image_embedder.ff.net.2",
        },
    ),
    Rule("head.head", ("proj_out",)),
    *_same("patch_embedding"),
]

TRANSFORMERS: dict[str, list[Rule]] = {
    "SD3": SD3,
    "Flux": FLUX,
    "Flux 2": FLUX2,
    "Qwen-Image": QWEN,
    "Z-Image": Z_IMAGE,
    "Lumina 2": LUMINA2,
    "Wan": WAN,
}
"""The rules of each family, by the name of its entry in the table of architectures."""
