"""CLIP (arXiv 2103.00020): pictures and texts in one space.

The towers have the parameter names of open_clip, which OpenAI's and HPSv2's checkpoints have too; those of transformers
are renamed. So a checkpoint decides everything by itself, and neither library is needed.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .batch import in_batches
from .tokens import ClipTokenizer
from .weights import depth, fill

BATCH = 16
"""Pictures at once: what fits beside a training of the same size of model."""
_HEAD_WIDTH = {1280: 80, 1408: 88, 1664: 104}
"""Width of an attention head by width of the image tower (ViT-H, ViT-g, ViT-bigG); all other towers have 64."""
_RENAMED = (
    (r"vision_model\.encoder\.layers\.", "visual.transformer.resblocks."),
    (r"text_model\.encoder\.layers\.", "transformer.resblocks."),
    (r"vision_model\.embeddings\.class_embedding", "visual.class_embedding"),
    (r"vision_model\.embeddings\.patch_embedding\.", "visual.conv1."),
    (r"vision_model\.embeddings\.position_embedding\.weight", "visual.positional_embedding"),
    (r"vision_model\.pre_layrnorm\.", "visual.ln_pre."),
    (r"vision_model\.post_layernorm\.", "visual.ln_post."),
    (r"visual_projection\.weight", "visual.proj"),
    (r"text_model\.embeddings\.token_embedding\.", "token_embedding."),
    (r"text_model\.embeddings\.position_embedding\.weight", "positional_embedding"),
    (r"text_model\.final_layer_norm\.", "ln_final."),
    (r"text_projection\.weight", "text_projection"),
    (r"\.layer_norm(\d)\.", r".ln_\1."),
    (r"\.mlp\.fc1\.", ".mlp.c_fc."),
    (r"\.mlp\.fc2\.", ".mlp.c_proj."),
    (r"\.self_attn\.", ".attn."),
)
_TRANSPOSED = ("visual_projection.weight", "text_projection.weight")
_CONSTANTS = ("position_ids", "attn_mask")
"""Ends of the names of tables that older checkpoints hold beside their weights."""


def open_clip_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A CLIP checkpoint under the names of open_clip, whichever of the two naming schemes it has."""
    weights = {name: value for name, value in weights.items() if not name.endswith(_CONSTANTS)}
    if not any(name.startswith(("vision_model.", "text_model.")) for name in weights):
        return weights
    renamed = {}
    for name, value in weights.items():
        new = name
        for pattern, replacement in _RENAMED:
            new = re.sub(pattern, replacement, new)
        renamed[new] = value.T if name in _TRANSPOSED else value
    for name in [name for name in renamed if ".attn.q_proj." in name]:  # open_clip keeps the three in one matrix
        parts = [name.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
        if all(part in renamed for part in parts):
            renamed[name.replace("q_proj.", "in_proj_")] = torch.cat([renamed.pop(part) for part in parts])
    return renamed


@dataclass(frozen=True)
class Size:
    """How large a tower is."""

    width: int
    layers: int
    heads: int
    quick_gelu: bool
    """OpenAI's CLIP has x * sigmoid(1.702 x) in place of GELU."""


class QuickGELU(nn.Module):
    """The approximation of GELU in OpenAI's checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Attention(nn.Module):
    """Multi-head self-attention over (N, T, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, causal: bool) -> Tensor:
        parts = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One layer, normalised before each of its two steps."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(size.width)
        self.attn = Attention(size.width, size.heads)
        self.ln_2 = nn.LayerNorm(size.width)
        parts = [
            ("c_fc", nn.Linear(size.width, 4 * size.width)),
            ("gelu", QuickGELU() if size.quick_gelu else nn.GELU()),
            ("c_proj", nn.Linear(4 * size.width, size.width)),
        ]
        self.mlp = nn.Sequential(OrderedDict(parts))

    def forward(self, x: Tensor, causal: bool) -> Tensor:
        x = x + self.attn(self.ln_1(x), causal)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Layers one after the other over (N, T, width); causal: a token sees none behind it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(Block(size) for _ in range(size.layers))

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        for block in self.resblocks:
            x = block(x, causal)
        return x


class ImageTower(nn.Module):
    """(N, 3, side, side), normalised -> (N, embedding)."""

    def __init__(self, size: Size, patch: int, grid: int, embedding: int) -> None:
        super().__init__()
        self.side = patch * grid
        self.class_embedding = nn.Parameter(torch.empty(size.width))
        self.positional_embedding = nn.Parameter(torch.empty(grid * grid + 1, size.width))
        self.proj = nn.Parameter(torch.empty(size.width, embedding))
        self.conv1 = nn.Conv2d(3, size.width, patch, stride=patch, bias=False)
        self.ln_pre = nn.LayerNorm(size.width)
        self.transformer = Transformer(size)
        self.ln_post = nn.LayerNorm(size.width)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.conv1(pixels).flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(len(pixels), 1, -1)
        x = self.transformer(self.ln_pre(torch.cat([first, patches], 1) + self.positional_embedding))
        return self.ln_post(x[:, 0]) @ self.proj


class Clip(nn.Module):
    """Both towers."""

    def __init__(self, visual: ImageTower, text: Size, words: int, window: int, embedding: int) -> None:
        super().__init__()
        self.visual = visual
        self.token_embedding = nn.Embedding(words, text.width)
        self.positional_embedding = nn.Parameter(torch.empty(window, text.width))
        self.transformer = Transformer(text)
        self.ln_final = nn.LayerNorm(text.width)
        self.text_projection = nn.Parameter(torch.empty(text.width, embedding))
        self.logit_scale = nn.Parameter(torch.empty(()))

    def texts(self, ids: Tensor) -> Tensor:
        """(N, 77) token ids -> (N, embedding): what the last token, the one with the largest id, has become."""
        x = self.transformer(self.token_embedding(ids) + self.positional_embedding, causal=True)
        ends = x[torch.arange(len(ids), device=ids.device), ids.argmax(1)]
        return self.ln_final(ends) @ self.text_projection


def load_clip(weights: Mapping[str, Tensor], file: str, *, quick_gelu: bool) -> Clip:
    """CLIP of whatever size the checkpoint has. ValueError if it is not one, as :func:`fill` says."""
    weights = open_clip_names(weights)
    _check_names(weights, ("visual.conv1.weight", "token_embedding.weight", "positional_embedding"), file)
    with torch.device("meta"):
        words, width = weights["token_embedding.weight"].shape
        size = Size(width, depth(weights, r"transformer\.resblocks\.(\d+)\."), max(1, width // 64), quick_gelu)
        visual = _image_tower({name: weights[name] for name in weights if name.startswith("visual.")}, quick_gelu)
        model = Clip(visual, size, words, len(weights["positional_embedding"]), visual.proj.shape[1])
    return fill(model, weights, file)


def load_image_tower(weights: Mapping[str, Tensor], file: str, *, quick_gelu: bool) -> ImageTower:
    """The image tower alone of a CLIP checkpoint."""
    weights = {name: value for name, value in open_clip_names(weights).items() if name.startswith("visual.")}
    _check_names(weights, ("visual.conv1.weight",), file)
    with torch.device("meta"):
        tower = _image_tower(weights, quick_gelu)
    return fill(tower, {name.removeprefix("visual."): value for name, value in weights.items()}, file)


def _image_tower(weights: Mapping[str, Tensor], quick_gelu: bool) -> ImageTower:
    width, _, patch, _ = weights["visual.conv1.weight"].shape
    positions, embedding = weights.get("visual.positional_embedding"), weights.get("visual.proj")
    grid = int((len(positions) - 1) ** 0.5) if positions is not None else 1
    heads = max(1, width // _HEAD_WIDTH.get(width, 64))
    size = Size(width, depth(weights, r"visual\.transformer\.resblocks\.(\d+)\."), heads, quick_gelu)
    return ImageTower(size, patch, grid, embedding.shape[1] if embedding is not None else 1)


def _check_names(weights: Mapping[str, Tensor], names: tuple[str, ...], file: str) -> None:
    absent = [name for name in names if name not in weights]
    if absent:
        raise ValueError(
            f"{file} is not a CLIP checkpoint with image and text tower: {', '.join(absent)} is missing. "
            "Check that it is the file docs/rewards.md names"
        )


@torch.no_grad()
def cosines(
    clip: Clip, tokenizer: ClipTokenizer, prepare: Callable[[Tensor, int], Tensor], images: Tensor, prompts: list[str]
) -> Tensor:
    """Cosine between each picture and its prompt: (N,) float32 on the CPU, in [-1, 1].

    images: (N, H, W, 3) in [0, 1]; ``prepare``: makes (n, 3, side, side) of some of them and a side.
    """
    device = clip.logit_scale.device
    texts = sorted(set(prompts))
    rows = tokenizer(texts).to(device).split(BATCH)
    of_text = dict(zip(texts, F.normalize(torch.cat([clip.texts(part) for part in rows]), dim=1), strict=True))

    def work(part: slice) -> Tensor:
        of_image = F.normalize(clip.visual(prepare(images[part], clip.visual.side).to(device)), dim=1)
        return (of_image * torch.stack([of_text[prompt] for prompt in prompts[part]])).sum(1)

    return in_batches(clip, len(images), BATCH, work)
