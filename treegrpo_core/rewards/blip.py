"""BLIP (arXiv 2201.12086) as far as ImageReward has it: a text that looks at a picture.

Parameter names are those of the published checkpoint (github.com/salesforce/BLIP).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .weights import depth

HEAD_WIDTH = 64


@dataclass(frozen=True)
class Shape:
    """How large both towers are; ViT-L/16 at 224 and bert-base in ImageReward."""

    image_width: int = 1024
    image_layers: int = 24
    patch: int = 16
    positions: int = 197
    text_width: int = 768
    text_layers: int = 12
    words: int = 30524
    window: int = 512

    @property
    def side(self) -> int:
        return self.patch * int((self.positions - 1) ** 0.5)


def shape_of(weights: Mapping[str, Tensor]) -> Shape:
    """What the checkpoint says, ImageReward's sizes where it says nothing."""
    shape = Shape()

    def size(name: str, dim: int, default: int) -> int:
        value = weights.get(name)
        return value.shape[dim] if value is not None and value.ndim > dim else default

    return Shape(
        size("visual_encoder.patch_embed.proj.weight", 0, shape.image_width),
        depth(weights, r"visual_encoder\.blocks\.(\d+)\.") or shape.image_layers,
        size("visual_encoder.patch_embed.proj.weight", 2, shape.patch),
        size("visual_encoder.pos_embed", 1, shape.positions),
        size("text_encoder.embeddings.word_embeddings.weight", 1, shape.text_width),
        depth(weights, r"text_encoder\.encoder\.layer\.(\d+)\.") or shape.text_layers,
        size("text_encoder.embeddings.word_embeddings.weight", 0, shape.words),
        size("text_encoder.embeddings.position_embeddings.weight", 0, shape.window),
    )


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """(N, T, width) each -> (N, T, width), with heads of 64."""
    query, key, value = (part.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for part in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)


class _ImageAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(_attend(*self.qkv(x).chunk(3, dim=-1)))


class _Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class _ImageBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = _ImageAttention(width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = _Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class _Patches(nn.Module):
    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, stride=patch)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.proj(pixels).flatten(2).transpose(1, 2)


class ImageEncoder(nn.Module):
    """(N, 3, side, side), normalised -> (N, 1 + patches, image width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.empty(1, 1, shape.image_width))
        self.pos_embed = nn.Parameter(torch.empty(1, shape.positions, shape.image_width))
        self.patch_embed = _Patches(shape.image_width, shape.patch)
        self.blocks = nn.ModuleList(_ImageBlock(shape.image_width) for _ in range(shape.image_layers))
        self.norm = nn.LayerNorm(shape.image_width, eps=1e-6)

    def forward(self, pixels: Tensor) -> Tensor:
        x = torch.cat([self.cls_token.expand(len(pixels), -1, -1), self.patch_embed(pixels)], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class _Output(nn.Module):
    """A linear layer whose result is added to what was there, then normalised: BERT's way."""

    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + before)


class _Projections(nn.Module):
    def __init__(self, width: int, source_width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(source_width, width)
        self.value = nn.Linear(source_width, width)

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None) -> Tensor:
        return _attend(self.query(x), self.key(source), self.value(source), mask)


class _TextAttention(nn.Module):
    def __init__(self, width: int, source_width: int) -> None:
        super().__init__()
        self.self = _Projections(width, source_width)
        self.output = _Output(width, width)

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.output(self.self(x, source, mask), x)


class _Intermediate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.dense(x))


class _TextLayer(nn.Module):
    """Text looks at itself, then at the picture."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = _TextAttention(shape.text_width, shape.text_width)
        self.crossattention = _TextAttention(shape.text_width, shape.image_width)
        self.intermediate = _Intermediate(shape.text_width)
        self.output = _Output(4 * shape.text_width, shape.text_width)

    def forward(self, x: Tensor, mask: Tensor, image: Tensor) -> Tensor:
        x = self.crossattention(self.attention(x, x, mask), image)
        return self.output(self.intermediate(x), x)


class _Embeddings(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.words, shape.text_width)
        self.position_embeddings = nn.Embedding(shape.window, shape.text_width)
        self.LayerNorm = nn.LayerNorm(shape.text_width, eps=1e-12)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.LayerNorm(self.word_embeddings(ids) + self.position_embeddings(places))


class _Layers(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layer = nn.ModuleList(_TextLayer(shape) for _ in range(shape.text_layers))


class TextEncoder(nn.Module):
    """(N, T) token ids, (N, T) bool where there is text, what the image encoder made -> (N, T, text width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embeddings = _Embeddings(shape)
        self.encoder = _Layers(shape)

    def forward(self, ids: Tensor, there: Tensor, image: Tensor) -> Tensor:
        x, mask = self.embeddings(ids), there[:, None, None, :]
        for layer in self.encoder.layer:
            x = layer(x, mask, image)
        return x


class Blip(nn.Module):
    """Both encoders."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.visual_encoder = ImageEncoder(shape)
        self.text_encoder = TextEncoder(shape)

    def forward(self, pixels: Tensor, ids: Tensor, there: Tensor) -> Tensor:
        """pixels: (N, 3, side, side); ids, there: (N, T). Returns (N, text width): what the first token has become."""
        return self.text_encoder(ids, there, self.visual_encoder(pixels))[:, 0]
