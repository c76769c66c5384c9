"""Further names that ComfyUI's loader takes for a family's layers, as data: those of a sister family, or of a part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .keys import Rule

SINGLE = "single_transformer_blocks.{}"


def _names(native: str, other: str, names: Mapping[str, str]) -> Iterable[Rule]:
    return (Rule(native + mine, (other + theirs,)) for mine, theirs in names.items())


def _attention_of_linear1(mlp: int) -> Rule:
    """Names of the first rows of ``linear1`` (q, k and v) and of the others, ``mlp`` times as many as q has."""
    return Rule("single_blocks.{}.linear1", ("single_blocks.{}.linear1_qkv", "single_blocks.{}.linear1_mlp"), (3, mlp))


OTHER_NAMES: dict[str, list[Rule]] = {
    "SDXL": [
        Rule(f"label_emb.0.{place}", (f"class_embedding.linear_{number}",)) for number, place in ((1, "0"), (2, "2"))
    ],
    "Flux": [
        _attention_of_linear1(4),
        *_names("single_blocks.{}.", f"{SINGLE}.attn.", {"linear1": "to_qkv_mlp_proj", "linear2": "to_out"}),
        *_names(
            "double_blocks.{}.",
            "transformer_blocks.{}.",
            {
                f"{stream}_mlp.{place}": f"{theirs}.linear_{way}"
                for stream, theirs in (("img", "ff"), ("txt", "ff_context"))
                for place, way in ((0, "in"), (2, "out"))
            },
        ),
    ],
    "Flux 2": [
        _attention_of_linear1(6),
        Rule(
            "single_blocks.{}.linear1",
            tuple(f"{SINGLE}.{name}" for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")),
            (1, 1, 1, 6),
        ),
        *_names("single_blocks.{}.", f"{SINGLE}.", {"linear2": "proj_out"}),
        *_names(
            "double_blocks.{}.",
            "transformer_blocks.{}.",
            {
                f"{stream}_mlp.{place}": f"{theirs}.net.{layer}"
                for stream, theirs in (("img", "ff"), ("txt", "ff_context"))
                for place, layer in ((0, "0.proj"), (2, "2"))
            },
        ),
        *(
            Rule(f"{mine}.{half}_layer", (f"time_text_embed.{theirs}.linear_{number}",))
            for mine, theirs in (("time_in", "timestep_embedder"), ("guidance_in", "guidance_embedder"))
            for number, half in ((1, "in"), (2, "out"))
        ),
    ],
    "Lumina 2": [
        *(
            rule
            for part in ("layers.{}.", "noise_refiner.{}.", "context_refiner.{}.")
            for rule in (
                Rule(f"{part}attention.qkv", tuple(f"{part}attention.to_{letter}" for letter in "qkv"), (3, 1, 1)),
                Rule(f"{part}attention.out", (f"{part}attention.to_out.0",)),
            )
        ),
        *_names(
            "",
            "",
            {
                "x_embedder": "all_x_embedder.2-1",
                "final_layer.linear": "all_final_layer.2-1.linear",
                "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
            },
        ),
    ],
}
"""By the name of the family's entry in the table of architectures."""
