"""Qwen2-VL (arXiv 2409.12191) as far as HPSv3 has it: pictures of one size and a text in, hidden states out.

Parameter names are those of the published checkpoint, which are transformers' of version 4.45. HPSv3 was trained with
token positions 0, 1, 2, ... also inside the picture, so the three-dimensional rotary positions of Qwen2-VL are the
ordinary ones here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .clip import QuickGELU
from .weights import depth

PATCH, MERGE, TIMES = 14, 2, 2
"""Pixels a side of a patch, patches a side that become one token, how often a still picture is shown."""
IMAGE_HEAD, TEXT_HEAD = 80, 128
"""Widths of the attention heads."""
_THETA_IMAGE, _THETA_TEXT = 10_000.0, 1_000_000.0


@dataclass(frozen=True)
class Shape:
    """Sizes of both towers: those of Qwen2-VL-7B, with HPSv3's one more word."""

    image_width: int = 1280
    image_layers: int = 32
    width: int = 3584
    layers: int = 28
    keys: int = 512
    """Width of keys and values: several queries share one."""
    inner: int = 18944
    words: int = 151_658


def shape_of(weights: Mapping[str, Tensor]) -> Shape:
    """What the checkpoint says, the published sizes where it says nothing."""
    usual = Shape()

    def size(name: str, dim: int, default: int) -> int:
        return weights[name].shape[dim] if name in weights and weights[name].ndim > dim else default

    return Shape(
        size("visual.patch_embed.proj.weight", 0, usual.image_width),
        depth(weights, r"visual\.blocks\.(\d+)\.") or usual.image_layers,
        size("model.embed_tokens.weight", 1, usual.width),
        depth(weights, r"model\.layers\.(\d+)\.") or usual.layers,
        size("model.layers.0.self_attn.k_proj.weight", 0, usual.keys),
        size("model.layers.0.mlp.gate_proj.weight", 0, usual.inner),
        size("model.embed_tokens.weight", 0, usual.words),
    )


def patches(pixels: Tensor) -> Tensor:
    """(N, 3, H, W), normalised, sides multiples of 28 -> (N, H/14 * W/14, 1176), the four of a token in a row."""
    count, _, height, width = pixels.shape
    rows, columns = height // (PATCH * MERGE), width // (PATCH * MERGE)
    cut = pixels.reshape(count, 3, rows, MERGE, PATCH, columns, MERGE, PATCH).permute(0, 2, 5, 3, 6, 1, 4, 7)
    shown = cut.unsqueeze(-3).expand(*cut.shape[:-2], TIMES, PATCH, PATCH)
    return shown.reshape(count, rows * columns * MERGE * MERGE, -1)


def _rotary(positions: Tensor, width: int, theta: float) -> Tensor:
    """(T,) positions -> (T, width / 2) angles."""
    frequencies = theta ** -(torch.arange(0, width, 2, device=positions.device).float() / width)
    return positions.float()[:, None] * frequencies


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """(N, heads, T, width) with its halves turned against each other by (T, width / 2) angles."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class _ImageAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, -1, IMAGE_HEAD)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(_turned(query, angles), _turned(key, angles), value)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class _ImageMlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.act = QuickGELU()
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class _ImageBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = _ImageAttention(width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = _ImageMlp(width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), angles)
        return x + self.mlp(self.norm2(x))


class _PatchEmbed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv3d(3, width, (TIMES, PATCH, PATCH), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.proj.weight.dtype), self.proj.weight.flatten(1))


class _Merger(nn.Module):
    """Four patches become one token of the text tower's width."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        together = width * MERGE * MERGE
        self.ln_q = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(together, together), nn.GELU(), nn.Linear(together, out))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x).unflatten(1, (-1, MERGE * MERGE)).flatten(2))


class ImageTower(nn.Module):
    """(N, rows * columns * 4, 1176) patches -> (N, rows * columns, width) tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.patch_embed = _PatchEmbed(shape.image_width)
        self.blocks = nn.ModuleList(_ImageBlock(shape.image_width) for _ in range(shape.image_layers))
        self.merger = _Merger(shape.image_width, shape.width)

    def forward(self, x: Tensor, rows: int, columns: int) -> Tensor:
        grid = torch.cartesian_prod(torch.arange(rows * MERGE), torch.arange(columns * MERGE)).to(x.device)
        grid = grid.reshape(rows, MERGE, columns, MERGE, 2).transpose(1, 2).reshape(-1, 2)
        angles = torch.cat([_rotary(grid[:, axis], IMAGE_HEAD // 2, _THETA_IMAGE) for axis in (0, 1)], dim=1)
        x = self.patch_embed(x)
        for block in self.blocks:
            x = block(x, angles)
        return self.merger(x)


class RmsNorm(nn.Module):
    """Scales each token to the same root mean square, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class _TextAttention(nn.Module):
    def __init__(self, width: int, keys: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, keys)
        self.v_proj = nn.Linear(width, keys)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        heads = [
            part(x).unflatten(-1, (-1, TEXT_HEAD)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        ]
        query, key, value = _turned(heads[0], angles), _turned(heads[1], angles), heads[2]
        shared = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class _TextMlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _TextLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.width)
        self.self_attn = _TextAttention(shape.width, shape.keys)
        self.post_attention_layernorm = RmsNorm(shape.width)
        self.mlp = _TextMlp(shape.width, shape.inner)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class TextTower(nn.Module):
    """(N, T, width) embeddings -> (N, T, width); a token sees none behind it, so padding behind needs no mask."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.words, shape.width)
        self.layers = nn.ModuleList(_TextLayer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        angles = _rotary(torch.arange(x.shape[1], device=x.device), TEXT_HEAD, _THETA_TEXT)
        for layer in self.layers:
            x = layer(x, angles)
        return self.norm(x)
