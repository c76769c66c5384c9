"""CLIPScore (arXiv 2104.08718): how near a picture is to its prompt in the space of a CLIP of your choice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from . import Checkpoint, check_pictures, missing
from .clip import cosines, load_clip, open_clip_names
from .learned import LEARNED
from .prepare import cropped
from .tokens import ClipTokenizer
from .weights import read_weights

_WIDEST_OF_OPENAI = 1024


class ClipScore:
    """Cosine between picture and prompt. Neither scaled nor cut at 0, which would not change a ranking."""

    name = "clipscore"

    def __init__(self, *, source: str = "", locate: Callable[[Checkpoint], Path] = missing) -> None:
        """``source``: a CLIP checkpoint with both towers, or two (``a + b``) with one each; empty: OpenAI's L/14.

        Names in it are those of transformers or of open_clip.
        FileNotFoundError as ``locate`` says; ValueError if a file is not the right one.
        """
        published, vocabulary = LEARNED[self.name].checkpoints
        names = [part.strip() for part in source.split("+")] if " + " in source else [source]
        files = [locate(Checkpoint(name, "", "") if source else published) for name in names]
        self.tokenizer = ClipTokenizer(locate(vocabulary))
        weights: dict[str, Tensor] = {"logit_scale": torch.zeros(())}  # cosines do without; one tower's file has none
        for file in files:
            weights |= open_clip_names(read_weights(file))
        told = " and ".join(file.name for file in files)
        self.module = load_clip(weights, told, quick_gelu=_quick_gelu(weights, files[0]))

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1], any size; prompts: N texts. Returns (N,) float32 on the CPU."""
        check_pictures(images, prompts)
        return cosines(self.module, self.tokenizer, cropped, images, prompts)


def _quick_gelu(weights: dict[str, Tensor], file: Path) -> bool:
    """Which activation the checkpoint was trained with; its weights do not say.

    A ``<name>.json`` beside the file, transformers' config.json renamed, does. Without one: OpenAI's for the sizes that
    OpenAI published (B and L), else plain GELU, as in LAION's H, g and G.
    """
    config = file.with_suffix(".json")
    if config.is_file():
        said = json.loads(config.read_text(encoding="utf-8"))
        return (said.get("vision_config") or {}).get("hidden_act", "quick_gelu") == "quick_gelu"
    conv = weights.get("visual.conv1.weight")
    return conv is None or len(conv) <= _WIDEST_OF_OPENAI
