"""Captioned pictures composed from two emoji sets: the training data of everything under assets/.

Expects the environment variable EMOJI to name a folder that holds the unpacked npm packages
``emoji-datasource-google`` and ``emoji-datasource-twitter`` (version 16.0.0; see assets/README.md).
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from treegrpo_core.bundled.captions import COLOURS, IMAGE_SIZE, MAX_TOKENS, THINGS, VOCABULARY, Caption


def emoji(style: str) -> dict[str, Image.Image]:
    """The RGBA picture of every thing in one drawing style ('google' or 'twitter')."""
    folder = Path(os.environ["EMOJI"]) / f"emoji-datasource-{style}"
    index = {entry["short_name"]: entry["image"] for entry in json.loads((folder / "emoji.json").read_text())}
    return {
        thing: Image.open(folder / "img" / style / "64" / index[name]).convert("RGBA") for thing, name in THINGS.items()
    }


def compose(picture: Image.Image, caption: Caption, draw: random.Random) -> np.ndarray:
    """One training picture (64, 64, 3) uint8: the thing, mirrored or not, near the middle of a plain background."""
    if draw.random() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    side = int(IMAGE_SIZE * (draw.uniform(0.52, 0.6) if caption.small else draw.uniform(0.85, 1.0)))
    room = IMAGE_SIZE - side
    canvas = Image.new("RGBA", (IMAGE_SIZE, IMAGE_SIZE), (*COLOURS[caption.colour], 255))
    resized = picture.resize((side, side), Image.Resampling.LANCZOS)
    canvas.alpha_composite(resized, tuple(draw.randint(room * 3 // 8, room - room * 3 // 8) for _ in "xy"))
    return np.asarray(canvas.convert("RGB"))


def dataset(count: int, styles: tuple[str, ...], seed: int) -> tuple[torch.Tensor, list[Caption]]:
    """``count`` pictures as (N, 3, 64, 64) float in [-1, 1] and their captions."""
    draw = random.Random(seed)
    sets = [emoji(style) for style in styles]
    captions = [
        Caption(draw.choice(list(THINGS)), draw.choice(list(COLOURS)), draw.random() < 0.5) for _ in range(count)
    ]
    arrays = [compose(draw.choice(sets)[caption.thing], caption, draw) for caption in captions]
    pixels = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()
    return pixels.float() / 127.5 - 1, captions


def tokens(captions: list[Caption | None]) -> torch.Tensor:
    """Captions -> (N, 8) token ids: start, words, end, padding; None is the empty prompt."""
    rows = []
    for caption in captions:
        words = ["[START]", *(str(caption).split() if caption else []), "[END]"]
        rows.append([VOCABULARY.index(word) for word in words] + [0] * (MAX_TOKENS - len(words)))
    return torch.tensor(rows)
