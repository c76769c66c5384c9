"""The bundled learned reward: how well a picture shows what its caption says.

An image tower and a text tower, trained contrastively on one drawing style (tools/train_bundled/train_reward.py) and
used on pictures of another, put pictures and captions into one space; the score is the cosine between the two.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from ..bundled.captions import IMAGE_SIZE, MAX_TOKENS, VOCABULARY
from . import check_pictures

WEIGHTS = Path(__file__).parents[2] / "assets" / "text_image_reward.safetensors"
EMBEDDING = 128
BATCH = 256


def token_ids(prompts: list[str]) -> Tensor:
    """N texts -> (N, 8) token ids: start, words, end, padding.

    Unknown words are ``[UNK]``; words beyond the sixth are cut.
    """
    known = {word: index for index, word in enumerate(VOCABULARY)}
    rows = []
    for prompt in prompts:
        words = ["[START]", *prompt.lower().split()[: MAX_TOKENS - 2], "[END]"]
        rows.append([known.get(word, known["[UNK]"]) for word in words] + [known["[PAD]"]] * (MAX_TOKENS - len(words)))
    return torch.tensor(rows, dtype=torch.long).reshape(-1, MAX_TOKENS)


def _convolution(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()
    )


class _Skip(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.change = _convolution(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.change(x)


def close_up(pixels: Tensor, side: int = 32) -> Tensor:
    """(N, 3, H, W) in [-1, 1] -> (N, 3, side, side): the thing, centred and always about as large.

    The thing is what differs from the border's median colour. Its centre and spread make the frame; nothing gives the
    whole picture.
    """
    border = torch.cat([pixels[:, :, [0, 1, -2, -1]].flatten(2), pixels[:, :, :, [0, 1, -2, -1]].flatten(2)], dim=2)
    background = border.median(dim=2).values[:, :, None, None]
    weight = ((pixels - background).abs().amax(1) - 0.2).clamp(0, 0.5) + 0.002
    moments = []
    for dim, length in ((1, pixels.shape[3]), (2, pixels.shape[2])):
        place = torch.linspace(-1, 1, length, device=pixels.device)
        mass = weight.sum(dim) / weight.sum((1, 2))[:, None]
        centre = (mass * place).sum(1)
        moments.append((centre, (mass * (place - centre[:, None]).square()).sum(1).sqrt()))
    (x, spread_x), (y, spread_y) = moments
    half = (2.3 * torch.maximum(spread_x, spread_y)).clamp(0.25, 1.0)
    zero = torch.zeros_like(half)
    frame = torch.stack([torch.stack([half, zero, x], 1), torch.stack([zero, half, y], 1)], 1)
    grid = F.affine_grid(frame, [len(pixels), 3, side, side], align_corners=False)
    return F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)


class ImageTower(nn.Module):
    """(N, 3, 64, 64) in [-1, 1] -> (N, 128) of unit length. One branch sees the thing close up, one everything."""

    def __init__(self) -> None:
        super().__init__()
        self.thing = nn.Sequential(
            nn.PixelUnshuffle(2),
            _convolution(12, 32),
            _convolution(32, 64, stride=2),
            _Skip(64),
            _convolution(64, 128, stride=2),
            _Skip(128),
            _Skip(128),
        )
        self.whole = nn.Sequential(nn.AvgPool2d(4), _convolution(3, 32), _convolution(32, 64, stride=2), _Skip(64))
        self.out = nn.Linear(2 * (128 + 64), EMBEDDING)

    def forward(self, pixels: Tensor) -> Tensor:
        grids = self.thing(close_up(pixels).contiguous(memory_format=torch.channels_last)), self.whole(pixels)
        pooled = [pool for grid in grids for pool in (grid.mean((2, 3)), grid.amax((2, 3)))]
        return F.normalize(self.out(torch.cat(pooled, dim=1)), dim=1)


class TextTower(nn.Module):
    """(N, 8) token ids -> (N, 128) of unit length."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(len(VOCABULARY), EMBEDDING)
        self.position = nn.Parameter(torch.randn(MAX_TOKENS, EMBEDDING) * 0.1)
        self.out = nn.Sequential(nn.Linear(EMBEDDING, 2 * EMBEDDING), nn.GELU(), nn.Linear(2 * EMBEDDING, EMBEDDING))

    def forward(self, ids: Tensor) -> Tensor:
        there = (ids != VOCABULARY.index("[PAD]"))[..., None]
        return F.normalize(self.out(((self.word(ids) + self.position) * there).sum(1)), dim=1)


class Towers(nn.Module):
    """Both towers: pictures and token ids in, the cosine of each pair out."""

    def __init__(self) -> None:
        super().__init__()
        self.image = ImageTower()
        self.text = TextTower()

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        """pixels: (N, 3, 64, 64) in [-1, 1]; ids: (N, 8). Returns (N,) in [-1, 1]."""
        return (self.image(pixels) * self.text(ids)).sum(1)


class TextImageReward:
    """Cosine between picture and caption, in [-1, 1]. Made for the bundled model's captions and pictures."""

    name = "text_image"

    def __init__(self, weights: Path = WEIGHTS) -> None:
        if not weights.is_file():
            raise FileNotFoundError(
                f"the text_image reward's weights are missing: {weights} does not exist. "
                "Reinstall the pack, or train them with tools/train_bundled/train_reward.py"
            )
        self.module = Towers().eval().requires_grad_(False)
        self.module.load_state_dict({name: value.float() for name, value in load_file(weights).items()})

    @torch.no_grad()
    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1], any size; prompts: N texts. Returns (N,) float32 on the CPU."""
        check_pictures(images, prompts)
        device, ids = self.module.text.position.device, token_ids(prompts)
        parts = zip(images.split(BATCH), ids.split(BATCH), strict=True)
        return torch.cat([self.module(prepare(part).to(device), row.to(device)).cpu() for part, row in parts])


def prepare(images: Tensor) -> Tensor:
    """(N, H, W, 3) in [0, 1] -> (N, 3, 64, 64) float32 in [-1, 1], resized with antialiasing."""
    pixels = images.detach().float().clamp(0, 1).permute(0, 3, 1, 2)
    if pixels.shape[-2:] != (IMAGE_SIZE, IMAGE_SIZE):
        pixels = F.interpolate(pixels, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", antialias=True)
    return pixels.contiguous(memory_format=torch.channels_last) * 2 - 1
