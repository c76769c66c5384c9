"""Layer names of the UNets: Stable Diffusion 1 and 2, and XL.

ComfyUI counts blocks through (``input_blocks.4``), diffusers by resolution (``down_blocks.1``), each with two residual
blocks on the way down and three on the way up.
"""

from __future__ import annotations

from collections.abc import Iterator

from .keys import Rule

ATTENTION_LEVELS = {"SD1.5": (0, 1, 2), "SD2": (0, 1, 2), "SDXL": (1, 2)}
"""The resolutions that have attention, the largest first."""
LEVELS = {"SD1.5": 4, "SD2": 4, "SDXL": 3}

RESIDUAL = {
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
TRANSFORMER = (
    *(f"attn{number}.to_{part}" for number in (1, 2) for part in ("q", "k", "v", "out.0")),
    "ff.net.0.proj",
    "ff.net.2",
)
REST = {
    "input_blocks.0.0": "conv_in",
    "out.2": "conv_out",
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
}
XL_REST = {"label_emb.0.0": "add_embedding.linear_1", "label_emb.0.2": "add_embedding.linear_2"}


def unet_rules(name: str) -> list[Rule]:
    """The rules of "SD1.5", "SD2" or "SDXL"."""
    rest = REST | (XL_REST if name == "SDXL" else {})
    rules = [Rule(native, (diffusers,)) for native, diffusers in rest.items()]
    # The others have one transformer block per attention, and so a file of XL is known by its second one.
    depth = "{}" if name == "SDXL" else "0"
    for kind, native, diffusers in _places(LEVELS[name], ATTENTION_LEVELS[name]):
        rules += [Rule(f"{native}{mine}", (f"{diffusers}{theirs}",)) for mine, theirs in _inside(kind, depth)]
    return rules


def _inside(kind: str, depth: str) -> list[tuple[str, str]]:
    """Pairs of names below a place of that kind."""
    if kind == "residual":
        return [(f".{native}", f".{diffusers}") for native, diffusers in RESIDUAL.items()]
    if kind == "attention":
        names = ["proj_in", "proj_out", *(f"transformer_blocks.{depth}.{name}" for name in TRANSFORMER)]
        return [(f".{name}", f".{name}") for name in names]
    return [("", "")]


def _places(levels: int, attention: tuple[int, ...]) -> Iterator[tuple[str, str, str]]:
    """Kind of a place, ComfyUI's name and diffusers' name of it."""
    for level in range(levels):
        for number in range(2):
            block = 1 + 3 * level + number
            yield "residual", f"input_blocks.{block}.0", f"down_blocks.{level}.resnets.{number}"
            if level in attention:
                yield "attention", f"input_blocks.{block}.1", f"down_blocks.{level}.attentions.{number}"
        if level < levels - 1:
            yield "layer", f"input_blocks.{3 * level + 3}.0.op", f"down_blocks.{level}.downsamplers.0.conv"
    yield "residual", "middle_block.0", "mid_block.resnets.0"
    yield "attention", "middle_block.1", "mid_block.attentions.0"
    yield "residual", "middle_block.2", "mid_block.resnets.1"
    for up in range(levels):
        has_attention = levels - 1 - up in attention
        for number in range(3):
            block = 3 * up + number
            yield "residual", f"output_blocks.{block}.0", f"up_blocks.{up}.resnets.{number}"
            if has_attention:
                yield "attention", f"output_blocks.{block}.1", f"up_blocks.{up}.attentions.{number}"
        if up < levels - 1:
            place = 2 if has_attention else 1
            yield "layer", f"output_blocks.{3 * up + 2}.{place}.conv", f"up_blocks.{up}.upsamplers.0.conv"
