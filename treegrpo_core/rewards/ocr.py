"""Text in pictures: does the picture show the words that the prompt puts into quotes?"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from . import check_pictures
from .helpers import optional_module, pictures

QUOTED = re.compile('"([^"]+)"|“([^”]+)”|„([^“”]+)[“”]|«([^»]+)»|「([^」]+)」')


class OcrReward:
    """1 - the edit distance between the text asked for and the text read, as a share of the longer one: 0 to 1.

    Asked for is what stands in double quotes in the prompt (several pieces: one after the other). It is read by
    PP-OCRv4 in the package rapidocr-onnxruntime, top to bottom. Capitals and spaces do not count, as readers often get
    them wrong. Cf. the text reward of Flow-GRPO (arXiv 2505.05470).
    """

    name = "ocr"

    def __init__(self) -> None:
        self.read = optional_module(self.name, "rapidocr_onnxruntime", "rapidocr-onnxruntime").RapidOCR()

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1]. Returns (N,) float32 in [0, 1].

        ValueError for any other shape, and for a prompt without text in double quotes.
        """
        check_pictures(images, prompts)
        asked = [quoted(prompt) for prompt in prompts]
        read = [self._text(picture) for picture in pictures(images)]
        return torch.tensor([likeness(*pair) for pair in zip(asked, read, strict=True)], dtype=torch.float32)

    def _text(self, picture: object) -> str:
        found, _ = self.read(picture)
        return " ".join(text for _, text, _ in found or ())


def quoted(prompt: str) -> str:
    """The text in double quotes. ValueError if there is none."""
    pieces = [piece.strip() for found in QUOTED.findall(prompt) for piece in found if piece.strip()]
    if not pieces:
        raise ValueError(
            f"prompt {prompt!r} has no text in double quotes for reward 'ocr': write, for example, a sign that says "
            '"OPEN"'
        )
    return " ".join(pieces)


def likeness(asked: str, read: str) -> float:
    """1 - edit distance / length of the longer text, both without spaces and in small letters; from 0 to 1."""
    first, second = ("".join(text.split()).casefold() for text in (asked, read))
    return 1 - edit_distance(first, second) / max(len(first), len(second), 1)


def edit_distance(first: str, second: str) -> int:
    """How many letters must be put in, taken out or changed to make one text of the other (Levenshtein)."""
    row = list(range(len(second) + 1))
    for line, letter in enumerate(first, 1):
        diagonal, row[0] = row[0], line
        for column, other in enumerate(second, 1):
            diagonal, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, diagonal + (letter != other))
    return row[-1]
