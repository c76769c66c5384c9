"""PickScore (arXiv 2305.01569, github.com/yuvalkirstain/PickScore): CLIP ViT-H/14 trained on Pick-a-Pic's choices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from . import Checkpoint, check_pictures, missing
from .clip import cosines, load_clip
from .learned import LEARNED
from .prepare import cropped
from .tokens import ClipTokenizer
from .weights import read_weights


class PickScore:
    """Cosine between picture and prompt times the trained scale, as published: about 15 to 25 for real pictures."""

    name = "pickscore"

    def __init__(self, *, source: str = "", locate: Callable[[Checkpoint], Path] = missing) -> None:
        """FileNotFoundError as ``locate`` says; ValueError if a file is not the right one."""
        file, merges = map(locate, LEARNED[self.name].checkpoints)
        self.tokenizer = ClipTokenizer(merges)
        self.module = load_clip(read_weights(file), file.name, quick_gelu=False)

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1], any size; prompts: N texts. Returns (N,) float32 on the CPU."""
        check_pictures(images, prompts)
        return self.module.logit_scale.exp().cpu() * cosines(self.module, self.tokenizer, cropped, images, prompts)
