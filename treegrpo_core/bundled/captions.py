"""The language of the bundled model: ``[small] <thing> on <colour>``.

Captions are compositional, so whether a picture follows its caption can be measured exactly instead of judged:
the background colour and the size are properties of the pixels (:func:`background_match`, :func:`size_match`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

IMAGE_SIZE = 64
"""Pixels per side of the pictures the model is trained on."""

MAX_TOKENS = 8
"""Tokens per caption, start and end included."""

COLOURS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "red": (220, 60, 60),
    "orange": (240, 150, 50),
    "yellow": (245, 215, 70),
    "green": (80, 170, 90),
    "blue": (70, 120, 220),
    "purple": (150, 90, 200),
    "black": (30, 30, 34),
    "pink": (245, 160, 190),
}
"""Background colours as 8-bit sRGB."""

THINGS: dict[str, str] = {
    "fox": "fox_face",
    "tiger": "tiger",
    "lion": "lion_face",
    "cat": "cat",
    "dog": "dog",
    "panda": "panda_face",
    "koala": "koala",
    "bear": "bear",
    "pig": "pig",
    "frog": "frog",
    "monkey": "monkey_face",
    "rabbit": "rabbit",
    "unicorn": "unicorn_face",
    "penguin": "penguin",
    "owl": "owl",
    "chick": "hatched_chick",
    "duck": "duck",
    "flamingo": "flamingo",
    "elephant": "elephant",
    "turtle": "turtle",
    "octopus": "octopus",
    "crab": "crab",
    "fish": "tropical_fish",
    "dolphin": "dolphin",
    "whale": "whale",
    "snail": "snail",
    "butterfly": "butterfly",
    "ladybug": "ladybug",
    "bee": "bee",
    "tulip": "tulip",
    "rose": "rose",
    "sunflower": "sunflower",
    "cactus": "cactus",
    "mushroom": "mushroom",
    "clover": "four_leaf_clover",
    "maple": "maple_leaf",
    "watermelon": "watermelon",
    "banana": "banana",
    "apple": "apple",
    "lemon": "lemon",
    "tangerine": "tangerine",
    "pear": "pear",
    "peach": "peach",
    "cherries": "cherries",
    "strawberry": "strawberry",
    "grapes": "grapes",
    "pineapple": "pineapple",
    "tomato": "tomato",
    "eggplant": "eggplant",
    "carrot": "carrot",
    "corn": "corn",
    "broccoli": "broccoli",
    "avocado": "avocado",
    "pepper": "hot_pepper",
    "hamburger": "hamburger",
    "pizza": "pizza",
    "doughnut": "doughnut",
    "cookie": "cookie",
    "icecream": "icecream",
    "cupcake": "cupcake",
    "egg": "fried_egg",
    "cheese": "cheese_wedge",
    "lollipop": "lollipop",
    "fries": "fries",
}
"""Word in a caption -> short name of the emoji it was learned from."""

VOCABULARY = ["[PAD]", "[START]", "[END]", "[UNK]", "small", "on", *THINGS, *COLOURS]
"""Word of each token id."""

_BORDER = 2
_BACKGROUND_TOLERANCE = 0.16
_NOTHING_BELOW = 0.1
_SMALL_BELOW = 0.66


@dataclass(frozen=True)
class Caption:
    """What a caption asks for."""

    thing: str
    colour: str
    small: bool = False

    def __str__(self) -> str:
        return f"{'small ' if self.small else ''}{self.thing} on {self.colour}"

    @classmethod
    def parse(cls, text: str) -> Caption:
        """Read a caption. Raises ValueError, naming the text, if it is not of the form ``[small] thing on colour``."""
        words = text.strip().lower().split()
        small = words[:1] == ["small"]
        if small:
            words = words[1:]
        if len(words) == 3 and words[0] in THINGS and words[1] == "on" and words[2] in COLOURS:
            return cls(words[0], words[2], small)
        raise ValueError(
            f"caption {text!r} is not of the form '[small] <thing> on <colour>' "
            f"(colours: {', '.join(COLOURS)}; things: {', '.join(list(THINGS)[:4])}, ...)"
        )


def random_captions(count: int, seed: int) -> list[Caption]:
    """``count`` captions drawn uniformly, three in ten of them small. The same seed gives the same list."""
    draw = random.Random(seed)
    return [Caption(draw.choice(list(THINGS)), draw.choice(list(COLOURS)), draw.random() < 0.3) for _ in range(count)]


def _border(images: torch.Tensor) -> torch.Tensor:
    """(N, H, W, 3) -> (N, pixels, 3): the frame of pixels in which nearly always only background shows."""
    b = _BORDER
    parts = (images[:, :b], images[:, -b:], images[:, b:-b, :b], images[:, b:-b, -b:])
    return torch.cat([part.flatten(1, 2) for part in parts], dim=1)


def background_match(images: torch.Tensor, captions: list[str]) -> torch.Tensor:
    """1 where the background is the colour the caption asks for, else 0.

    images: (N, H, W, 3) float RGB in [0, 1]; captions: N texts. Returns (N,) float. The background is the median
    colour of the border; it matches when the nearest of :data:`COLOURS` is the one asked for.
    """
    palette = torch.tensor(list(COLOURS.values()), dtype=torch.float32) / 255
    found = _border(images.float().cpu()).median(dim=1).values
    nearest = torch.cdist(found, palette).argmin(dim=1)
    wanted = torch.tensor([list(COLOURS).index(Caption.parse(text).colour) for text in captions])
    return (nearest == wanted).float()


def extent(images: torch.Tensor) -> torch.Tensor:
    """Longer side of the thing's bounding box as a share of the picture's side: (N, H, W, 3) -> (N,) in [0, 1]."""
    images = images.float().cpu()
    background = _border(images).median(dim=1).values[:, None, None]
    thing = (images - background).abs().amax(dim=3) > _BACKGROUND_TOLERANCE
    height = _span(thing.any(dim=2)) / images.shape[1]
    width = _span(thing.any(dim=1)) / images.shape[2]
    return torch.maximum(height, width)


def _span(occupied: torch.Tensor) -> torch.Tensor:
    """(N, L) bool -> (N,): distance from the first to the last True, 0 if there is none."""
    position = torch.arange(occupied.shape[1]).expand_as(occupied)
    last = torch.where(occupied, position, -1).amax(dim=1)
    first = torch.where(occupied, position, occupied.shape[1]).amin(dim=1)
    return (last - first + 1).clamp(min=0).float()


def size_match(images: torch.Tensor, captions: list[str]) -> torch.Tensor:
    """1 where the thing is small exactly if the caption says so, else 0; an empty picture is always 0.

    Same shapes as :func:`background_match`.
    """
    found = extent(images)
    wanted_small = torch.tensor([Caption.parse(text).small for text in captions])
    return ((found >= _NOTHING_BELOW) & ((found < _SMALL_BELOW) == wanted_small)).float()
