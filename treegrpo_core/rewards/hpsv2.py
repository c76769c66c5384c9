"""Human Preference Score v2 (arXiv 2306.09341, github.com/tgxs002/HPSv2): CLIP ViT-H/14 trained on people's choices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from . import Checkpoint, check_pictures, missing
from .clip import cosines, load_clip
from .learned import LEARNED
from .prepare import letterboxed
from .tokens import ClipTokenizer, tidy
from .weights import read_weights


class HpsV21:
    """Cosine between picture and prompt, without CLIP's scale: about 0.2 to 0.4 for real pictures."""

    name = "hpsv2.1"

    def __init__(self, *, source: str = "", locate: Callable[[Checkpoint], Path] = missing) -> None:
        """FileNotFoundError as ``locate`` says; ValueError if a file is not the right one."""
        file, merges = map(locate, LEARNED[self.name].checkpoints)
        self.tokenizer = ClipTokenizer(merges)
        self.module = load_clip(read_weights(file), file.name, quick_gelu=False)

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1], any size; prompts: N texts. Returns (N,) float32 on the CPU."""
        check_pictures(images, prompts)
        return cosines(self.module, self.tokenizer, letterboxed, images, [tidy(prompt) for prompt in prompts])


class HpsV20(HpsV21):
    """The version before; what the reference's package takes if it is not told otherwise."""

    name = "hpsv2.0"
