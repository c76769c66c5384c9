"""Aesthetic Predictor V2.5 (github.com/discus0434/aesthetic-predictor-v2-5): SigLIP's image tower and a linear head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from . import Checkpoint, check_pictures, missing
from .batch import in_batches
from .clip import BATCH
from .learned import LEARNED
from .prepare import eight_bit
from .weights import depth, fill, read_weights

HEAD_WIDTH = 72
"""Of an attention head of so400m, the tower the predictor was trained on."""
EPSILON = 1e-6


class Attention(nn.Module):
    """Self-attention under SigLIP's parameter names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            part(x).unflatten(2, (-1, HEAD_WIDTH)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        ]
        return self.out_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two layers with GELU in its tanh form between them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Layer(nn.Module):
    """A transformer layer, normalised before each half."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(width, eps=EPSILON) for _ in range(2))
        self.self_attn, self.mlp = Attention(width), Mlp(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Pooling(nn.Module):
    """One learned question to all patches."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.empty(1, 1, width))
        self.attention = nn.MultiheadAttention(width, width // HEAD_WIDTH, batch_first=True)
        self.layernorm, self.mlp = nn.LayerNorm(width, eps=EPSILON), Mlp(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.probe.expand(len(x), 1, -1), x, x, need_weights=False)[0]
        return (x + self.mlp(self.layernorm(x)))[:, 0]


class Tower(nn.Module):
    """(N, 3, side, side), normalised -> (N, width): SigLIP (arXiv 2303.15343), its image half."""

    def __init__(self, width: int, inner: int, layers: int, patch: int, positions: int) -> None:
        super().__init__()
        embedding = {
            "patch_embedding": nn.Conv2d(3, width, patch, patch),
            "position_embedding": nn.Embedding(positions, width),
        }
        self.embeddings = nn.ModuleDict(embedding)
        self.encoder = nn.ModuleDict({"layers": nn.Sequential(*(Layer(width, inner) for _ in range(layers)))})
        self.post_layernorm, self.head = nn.LayerNorm(width, eps=EPSILON), Pooling(width, inner)
        self.side = patch * round(positions**0.5)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embeddings["patch_embedding"](pixels).flatten(2).transpose(1, 2)
        x = x + self.embeddings["position_embedding"].weight
        x = self.encoder["layers"](x)
        return self.head(self.post_layernorm(x))


class Predictor(nn.Module):
    """(N, 3, side, side), normalised -> (N,)."""

    def __init__(self, tower: Tower, head: nn.Module) -> None:
        super().__init__()
        self.tower, self.head = tower, head

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(F.normalize(self.tower(pixels), dim=1))[:, 0]


def load_tower(weights: Mapping[str, Tensor], file: str) -> Tower:
    """The image tower of a SigLIP checkpoint, of whatever size. ValueError if it is none."""
    own = {
        name.removeprefix("vision_model."): value for name, value in weights.items() if name.startswith("vision_model.")
    }
    conv, inner = own.get("embeddings.patch_embedding.weight"), own.get("head.mlp.fc1.weight")
    places = own.get("embeddings.position_embedding.weight")
    if conv is None or conv.ndim != 4 or inner is None or places is None or len(conv) % HEAD_WIDTH:
        raise ValueError(f"{file} is not SigLIP so400m: check that it is the file docs/rewards.md names")
    with torch.device("meta"):
        tower = Tower(len(conv), len(inner), depth(own, r"encoder\.layers\.(\d+)\."), conv.shape[2], len(places))
    return fill(tower, own, file)


def head(width: int) -> nn.Sequential:
    """The published head; dropout layers count in its names."""
    sizes, layers = (width, 1024, 128, 64, 16, 1), []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Dropout()]
    return nn.Sequential(*layers[:-1])


class AestheticV25:
    """How beautiful people would call the picture, 1 to 10; above 5.5 is very good. The prompt plays no part."""

    name = "aesthetic2.5"

    def __init__(self, *, source: str = "", locate: Callable[[Checkpoint], Path] = missing) -> None:
        """FileNotFoundError as ``locate`` says; ValueError if a file is not the right one."""
        file, siglip = map(locate, LEARNED[self.name].checkpoints)
        tower = load_tower(read_weights(siglip), siglip.name)
        weights = {name.removeprefix("scoring_head."): value for name, value in read_weights(file).items()}
        with torch.device("meta"):
            empty = head(len(tower.post_layernorm.weight))
        self.module = Predictor(tower, fill(empty, weights, file.name)).eval()

    @torch.no_grad()
    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1], any size. Returns (N,) float32 on the CPU."""
        check_pictures(images, prompts)
        tower = self.module.tower
        device = tower.post_layernorm.weight.device
        return in_batches(
            self.module, len(images), BATCH, lambda part: self.module(squared(images[part], tower.side).to(device))
        )


def squared(images: Tensor, side: int) -> Tensor:
    """SigLIP's way: both sides become ``side``, whatever the proportions. (N, H, W, 3) -> (N, 3, side, side)."""
    pictures = [Image.fromarray(picture) for picture in eight_bit(images).numpy()]
    small = np.stack([np.asarray(each.resize((side, side), Image.Resampling.BICUBIC)) for each in pictures])
    return torch.from_numpy(small).permute(0, 3, 1, 2).float() / 127.5 - 1
