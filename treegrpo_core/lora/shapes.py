"""What the shapes of a LoRA's matrices say about the model family, where families have layers of the same names.

A layer's inputs and outputs are multiples of the model's width, which differ between families and are the same for
all sizes of one, also for sizes that nobody has published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from torch import Tensor

from ..architectures import Architecture
from . import parts
from .keys import Place

Multiples = dict[str, tuple[Fraction | int | None, Fraction | int]]


@dataclass(frozen=True)
class Size:
    """A published model: its width, and how many blocks there are of each kind (none named: not told apart by it)."""

    width: int
    blocks: tuple[tuple[str, int], ...] = ()


def _unet(widths: Mapping[str, int]) -> Multiples:
    inside: Multiples = {
        r"attn1\.to_(q|k|v|out\.0)|attn2\.to_(q|out\.0)": (1, 1),
        r"attn2\.to_[kv]": (None, 1),
        r"ff\.net\.0\.proj": (1, 8),
        r"ff\.net\.2": (4, 1),
    }
    found: Multiples = {}
    for place, times in widths.items():
        found[rf"({place})\.1\.proj_(in|out)"] = (times, times)
        for layer, (columns, rows) in inside.items():
            own = (columns and columns * times, rows * times)
            found[rf"({place})\.1\.transformer_blocks\.\d+\.({layer})"] = own
    return found


_FLUX_ATTENTION: Multiples = {r".*_attn\.qkv": (1, 3), r".*_attn\.proj": (1, 1)}
_SD = _unet(
    {
        r"input_blocks\.[12]|output_blocks\.(9|10|11)": 1,
        r"input_blocks\.[45]|output_blocks\.[678]": 2,
        r"input_blocks\.[78]|middle_block|output_blocks\.[345]": 4,
    }
)

MULTIPLES: dict[str, Multiples] = {
    "SD1.5": _SD,
    "SD2": _SD,
    "SDXL": _unet(
        {
            r"input_blocks\.[45]|output_blocks\.[345]": 2,
            r"input_blocks\.[78]|middle_block|output_blocks\.[012]": 4,
        }
    ),
    "SD3": {r".*\.attn2?\.qkv": (1, 3), r".*\.attn2?\.proj": (1, 1), r".*\.mlp\.fc1": (1, 4), r".*\.mlp\.fc2": (4, 1)},
    "Flux": {
        **_FLUX_ATTENTION,
        r".*_mlp\.0": (1, 4),
        r".*_mlp\.2": (4, 1),
        r".*_mod\.lin": (1, 6),
        r".*\.linear1": (1, 7),
        r".*\.linear2": (5, 1),
        r".*\.modulation\.lin": (1, 3),
    },
    "Flux 2": {
        **_FLUX_ATTENTION,
        r".*_mlp\.0": (1, 6),
        r".*_mlp\.2": (3, 1),
        r".*\.linear1": (1, 9),
        r".*\.linear2": (4, 1),
    },
    "Qwen-Image": {
        r".*\.attn\..*": (1, 1),
        r".*_mlp\.net\.0\.proj": (1, 4),
        r".*_mlp\.net\.2": (4, 1),
        r".*_mod\.1": (1, 6),
    },
    "Z-Image": {
        r".*\.attention\.qkv": (1, 3),
        r".*\.attention\.out": (1, 1),
        r".*\.feed_forward\.w[13]": (1, Fraction(8, 3)),
        r".*\.feed_forward\.w2": (Fraction(8, 3), 1),
    },
    "Lumina 2": {
        r".*\.attention\.qkv": (1, Fraction(5, 3)),
        r".*\.attention\.out": (1, 1),
        r".*\.feed_forward\.w[13]": (1, 4),
        r".*\.feed_forward\.w2": (4, 1),
    },
}
"""Family -> pattern of ComfyUI's layer names -> inputs and outputs in model widths (None: not of the model's width)."""

SIZES: dict[str, tuple[Size, ...]] = {
    "SD1.5": (Size(320),),
    "SD2": (Size(320),),
    "SDXL": (Size(320),),
    "SD3": (Size(1536, (("joint_blocks", 24),)), Size(2432, (("joint_blocks", 38),))),
    "Flux": (Size(3072, (("double_blocks", 19), ("single_blocks", 38))),),
    "Flux 2": (
        Size(3072, (("double_blocks", 5), ("single_blocks", 20))),
        Size(4096, (("double_blocks", 8), ("single_blocks", 24))),
        Size(6144, (("double_blocks", 8), ("single_blocks", 48))),
    ),
    "Qwen-Image": (Size(3072, (("transformer_blocks", 60),)),),
    "Z-Image": (Size(3840, (("layers", 30),)),),
    "Lumina 2": (Size(2304, (("layers", 26),)),),
}
"""The published models of those families."""

Layers = Mapping[str, Mapping[str, Tensor]]


def consistent(entry: Architecture, found: Mapping[str, Place], layers: Layers) -> bool:
    """Whether the family has a size, published or not, whose layers all have these inputs and outputs."""
    return len(_widths(entry, found, layers)) <= 1


def published(entry: Architecture, found: Mapping[str, Place], layers: Layers) -> bool:
    """Whether one of the family's published models has all these layers."""
    widths = _widths(entry, found, layers)
    blocks: dict[str, int] = {}
    for place in found.values():
        if match := re.match(r"(\w+)\.(\d+)\.", place.rule.native):
            blocks[match[1]] = max(blocks.get(match[1], 0), int(match[2]) + 1)
    return any(
        widths <= {Fraction(size.width)} and all(blocks.get(kind, 0) <= count for kind, count in size.blocks)
        for size in SIZES.get(entry.name, ())
    )


def same_form(entry: Architecture, found: Mapping[str, Place], layers: Layers) -> bool:
    """Whether the layers around a UNet's attention are convolutions, as in SD1.5, or linear, as in its successors."""
    dimensions = {
        layers[name][parts.A].ndim
        for name, place in found.items()
        if re.fullmatch(r".*\.proj_(in|out)", place.rule.native) and parts.A in layers[name]
    }
    return dimensions <= {4 if entry.name == "SD1.5" else 2}


def _widths(entry: Architecture, found: Mapping[str, Place], layers: Layers) -> set[Fraction]:
    """The model's width according to each matrix of the file; more than one is a contradiction."""
    widths: set[Fraction] = set()
    for name, place in found.items():
        columns, rows = _multiples(entry.name, place.rule.native)
        if parts.A not in layers[name] or rows is None:
            continue
        if place.part is not None and len(place.rule.diffusers) > 1:
            shares = place.rule.shares or (1,) * len(place.rule.diffusers)
            rows *= Fraction(shares[place.part], sum(shares))
        if columns:
            widths.add(layers[name][parts.A].shape[1] / Fraction(columns))
        widths.add(layers[name][parts.B].shape[0] / Fraction(rows))
    return widths


@cache
def _multiples(family: str, native: str) -> tuple[Fraction | int | None, Fraction | int | None]:
    table = MULTIPLES.get(family, {})
    return next((value for pattern, value in table.items() if re.fullmatch(pattern, native)), (None, None))
