"""Which programs load a LoRA file, as data."""

from __future__ import annotations

from collections.abc import Mapping

from ..architectures import Architecture
from . import parts

ANY = frozenset({"*"})

PROGRAMS: dict[str, dict[str, frozenset[str]]] = {
    "ComfyUI (and SwarmUI)": {
        "comfyui": ANY,
        "kohya": ANY,
        "diffusers": frozenset({"SD3", "Flux", "Qwen-Image"}),
    },
    "diffusers": {
        "comfyui": frozenset({"Qwen-Image", "Wan"}),
        "kohya": frozenset({"SD1.5", "SD2", "SDXL", "Flux", "Flux 2", "Qwen-Image", "Z-Image", "Wan"}),
        "diffusers": ANY,
    },
    "A1111": {"kohya": frozenset({"SD1.5", "SD2", "SDXL", "SD3"})},
    "Forge": {
        "comfyui": frozenset({"SD1.5", "SD2", "SDXL", "SD3", "Flux"}),
        "kohya": frozenset({"SD1.5", "SD2", "SDXL", "SD3", "Flux"}),
    },
    "InvokeAI": {
        "comfyui": frozenset({"Wan"}),
        "kohya": frozenset({"SD1.5", "SD2", "SDXL", "Flux", "Wan"}),
        "diffusers": frozenset({"Flux", "Flux 2", "Qwen-Image", "Z-Image", "Wan"}),
    },
}
"""Program -> format -> the families whose files of that format it loads whole.

Those of ComfyUI and diffusers are what their own loaders do with our files (tests/lora), for the attention and MLP
layers of a family; the others follow the key rules in the source of their loaders and were not run. Diffusers has no
LoHa, and of LoKr other names.
"""


DORA: dict[str, dict[str, frozenset[str]]] = {
    "DoRA": {
        "comfyui": frozenset({"ComfyUI (and SwarmUI)", "Forge"}),
        "kohya": frozenset({"ComfyUI (and SwarmUI)", "Forge"}),
        "diffusers": frozenset({"diffusers"}),
    },
    parts.PER_COLUMN: {
        "comfyui": frozenset({"ComfyUI (and SwarmUI)", "Forge", "InvokeAI"}),
        "kohya": frozenset({"ComfyUI (and SwarmUI)", "Forge", "A1111", "InvokeAI"}),
        "diffusers": frozenset(),
    },
}
"""Kind of DoRA -> format -> the programs that mean by its magnitudes what it does; others compute something else.

One per output row is divided by the norms of the base weights in ComfyUI and Forge, by those of the changed weights in
PEFT; A1111 and InvokeAI take every ``dora_scale`` as one per input column.
"""


def loaded_by(architecture: Architecture, to: str, kinds: set[str]) -> list[str]:
    """The programs that load a file of a family in a format with these kinds of adapters."""
    return [
        program
        for program, formats in PROGRAMS.items()
        if _includes(formats, to, architecture.name)
        and (program != "diffusers" or kinds <= {"LoRA", *DORA})
        and all(program in DORA[kind][to] for kind in kinds & DORA.keys())
    ]


def _includes(formats: Mapping[str, frozenset[str]], to: str, family: str) -> bool:
    families = formats.get(to, frozenset())
    return "*" in families or family in families
