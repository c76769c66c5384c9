"""EMOJI=... python train_reward.py --seconds 700 --output ../../assets/text_image_reward.safetensors

Trains the text-image reward's two towers contrastively on the 'twitter' drawing style alone and judges them on the
'google' style, the style of the generator, which they never see. Degraded pictures (blurred, fading, two things in one,
partly erased, of a wrong size) are trained to score below the clean picture of the same caption, the lower the worse
they are.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from pictures import dataset, emoji
from treegrpo_core.bundled.captions import COLOURS, IMAGE_SIZE, THINGS, Caption
from treegrpo_core.rewards.text_image import Towers, token_ids

PALETTE = torch.tensor(list(COLOURS.values())).float() / 255
SIZE_RANGE = {False: (0.82, 1.0), True: (0.42, 0.62)}
MARGIN = 0.5
GROUP = 4


@dataclass
class Batch:
    """Captions four by four: one thing, two colours, both sizes; so each caption meets near misses of each kind."""

    things: Tensor
    colours: Tensor
    small: Tensor

    @classmethod
    def draw(cls, groups: int) -> Batch:
        things = torch.randperm(len(THINGS))[:groups].repeat_interleave(GROUP)
        pairs = torch.stack([torch.randperm(len(COLOURS))[:2] for _ in range(groups)])
        colours = pairs[:, [0, 0, 1, 1]].flatten()
        return cls(things, colours, torch.tensor([False, True, False, True]).repeat(groups))

    def rows(self) -> Tensor:
        """Where each caption stands in :func:`every_caption`: (N,)."""
        return (self.things * len(COLOURS) + self.colours) * 2 + self.small


def every_caption() -> list[str]:
    """All 1,152 of them."""
    return [str(Caption(thing, colour, small)) for thing in THINGS for colour in COLOURS for small in (False, True)]


def textures() -> Tensor:
    """The 'twitter' pictures as (2, things, 4, 64, 64) premultiplied RGBA: sharp, and sharp enough for small ones."""
    side, sources = IMAGE_SIZE, list(emoji("twitter").values())
    rows = []
    for coarse in (side, side // 2):
        pictures = [np.asarray(picture.resize((coarse, coarse), Image.Resampling.LANCZOS)) for picture in sources]
        rgba = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255
        rgba = torch.cat([rgba[:, :3] * rgba[:, 3:], rgba[:, 3:]], dim=1)
        rows.append(F.interpolate(rgba, size=(side, side), mode="bilinear"))
    return torch.stack(rows)


def field(count: int, channels: int, cells: int) -> Tensor:
    """Smooth random fields of about unit size: (count, channels, 64, 64)."""
    return F.interpolate(torch.randn(count, channels, cells, cells), size=IMAGE_SIZE, mode="bicubic")


def uniform(count: int, low: float, high: float) -> Tensor:
    return torch.empty(count).uniform_(low, high)


def place(rgba: Tensor, small: Tensor, warp: Tensor) -> Tensor:
    """Things (N, 4, 64, 64) turned, mirrored, sheared, warped (by warp, (N,)) and put anywhere at their size."""
    count = len(rgba)
    side = torch.where(small, uniform(count, *SIZE_RANGE[True]), uniform(count, *SIZE_RANGE[False]))
    turn, mirror = torch.randn(count) * 0.2, torch.randint(0, 2, (count,)) * 2.0 - 1
    stretch, shear = uniform(count, 0.82, 1.0), torch.randn(count) * 0.1
    stretch_x = torch.where(torch.rand(count) < 0.5, stretch, 1.0)
    stretch_y = torch.where(stretch_x < 1, 1.0, stretch)
    room = (1 - side).clamp(min=0)
    shift_x, shift_y = uniform(count, -1, 1) * room, uniform(count, -1, 1) * room
    # rows of the inverse map: where in the texture does a pixel of the picture look
    cos, sin = turn.cos() / side, turn.sin() / side
    first = torch.stack([mirror * cos / stretch_x, mirror * (sin + shear), torch.zeros(count)], 1)
    second = torch.stack([-sin, cos / stretch_y, torch.zeros(count)], 1)
    theta = torch.stack([first, second], 1)
    theta[:, :, 2] = -(theta[:, :, :2] @ torch.stack([shift_x, shift_y], 1)[:, :, None])[:, :, 0]
    grid = F.affine_grid(theta, list(rgba.shape), align_corners=False)
    bend = field(count, 2, 5) * warp[:, None, None, None]
    return F.grid_sample(rgba, grid + bend.permute(0, 2, 3, 1), padding_mode="zeros", align_corners=False)


def recolour(rgba: Tensor) -> Tensor:
    """Other drawers use other colours, lines and detail: random filters near the identity, contrast, shading."""
    count = len(rgba)
    strength = uniform(count, 0.0, 1.0)[:, None, None, None, None]
    kernel = torch.randn(count, 3, 3, 3, 3) * 0.08 * strength
    kernel[..., 1, 1] += torch.eye(3) + torch.randn(count, 3, 3) * 0.15 * strength[..., 0, 0]
    padded = F.pad(rgba[:, :3].reshape(1, -1, IMAGE_SIZE, IMAGE_SIZE), [1] * 4, mode="replicate")
    colour = F.conv2d(padded, kernel.flatten(0, 1), groups=count).reshape(count, 3, IMAGE_SIZE, IMAGE_SIZE)
    colour = colour.clamp(0.001, 1) ** (0.3 * torch.randn(count, 3)).exp()[:, :, None, None]
    colour = colour * uniform(count, 0.8, 1.2)[:, None, None, None]
    colour = colour * (1 + 0.12 * field(count, 1, 4))
    return torch.cat([torch.minimum(colour, rgba[:, 3:]), rgba[:, 3:]], dim=1)


def blur(pixels: Tensor, radius: float) -> Tensor:
    """Gaussian blur with that standard deviation in pixels."""
    place = torch.arange(IMAGE_SIZE).float()
    kernel = torch.softmax(-0.5 * ((place[:, None] - place) / radius) ** 2, dim=1)
    return kernel @ pixels @ kernel.T


def cut(rgba: Tensor, size: Tensor) -> Tensor:
    """Erase a rectangle of about that size (N,), as a share of the side, so that the background shows there."""
    line = torch.linspace(0, 1, IMAGE_SIZE)
    edge = uniform(len(rgba), 0.2, 0.8)[:, None] - line, uniform(len(rgba), 0.2, 0.8)[:, None] - line
    inside = [part.abs() < size[:, None] / 2 for part in edge]
    return rgba * ~(inside[0][:, None, :, None] & inside[1][:, None, None, :])


def over(rgba: Tensor, colours: Tensor) -> Tensor:
    """Things on slightly off palette colours: (N, 3, 64, 64) in [0, 1]."""
    background = PALETTE[colours] + torch.randn(len(rgba), 3) * 0.02
    return rgba[:, :3] + (1 - rgba[:, 3:]) * background[:, :, None, None]


def clean(store: Tensor, batch: Batch) -> Tensor:
    """The batch's things with the variety that must not matter: (N, 4, 64, 64), not yet on a background."""
    count = len(batch.things)
    rgba = recolour(store[batch.small.long(), batch.things])
    rgba = place(rgba, batch.small, uniform(count, 0.0, 0.12))
    return cut(rgba, torch.where(torch.rand(count) < 0.3, uniform(count, 0.05, 0.2), 0.0))


def develop(pixels: Tensor) -> Tensor:
    """Camera faults that must not matter: a little blur and noise. [0, 1] -> [-1, 1]."""
    pixels = blur(pixels, random.uniform(0.2, 0.9))
    return (pixels + torch.randn_like(pixels) * random.uniform(0, 0.04)).clamp(0, 1) * 2 - 1


def resized(rgba: Tensor, factor: Tensor) -> Tensor:
    """Things (N, 4, 64, 64) magnified about the picture's middle by factor (N,)."""
    theta = torch.eye(2, 3) / factor[:, None, None]
    return F.grid_sample(rgba, F.affine_grid(theta, list(rgba.shape), align_corners=False), align_corners=False)


def degraded(things: Tensor, small: Tensor, other: Tensor, colours: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures (N, 3, 64, 64), each spoilt in one of five ways, and how badly (N,), in [0, 1]."""
    severity = uniform(len(things), 0.15, 1.0)
    amount = severity[:, None, None, None]
    way = torch.arange(len(things)) % 5
    fading, mixed = things * (1 - amount), torch.lerp(things, other, amount / 2)
    wrong_size = resized(things, torch.where(small, 1 + 0.8 * severity, 1 / (1 + 0.8 * severity)))
    ways = torch.stack([fading, mixed, cut(things, 0.2 + 0.8 * severity), wrong_size, things])
    pixels = over(ways[way, torch.arange(len(things))], colours)
    radius = random.uniform(1.5, 5)
    pixels[way == 4] = blur(pixels[way == 4], radius)
    return pixels, torch.where(way == 4, radius / 5, severity)


def contrastive(pictures: Tensor, words: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    """Symmetric InfoNCE: pictures (N, D) among all captions (C, D), and the right captions among the pictures.

    right: (N,) the row of each picture's caption; no caption occurs twice.
    """
    logits = scale * pictures @ words.T
    return (F.cross_entropy(logits, right) + F.cross_entropy(logits[:, right].T, torch.arange(len(right)))) / 2


def step_loss(towers: Towers, store: Tensor, every: Tensor, log_scale: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    batch = Batch.draw(groups)
    things = clean(store, batch)
    some = torch.randperm(len(things))[: len(things) // 4]
    spoilt, severity = degraded(things[some], batch.small[some], things[some.roll(1)], batch.colours[some])
    shown = torch.cat([over(things, batch.colours), spoilt])
    pictures = towers.image(develop(shown).contiguous(memory_format=torch.channels_last))
    words, right = towers.text(every), batch.rows()
    good, bad = pictures[: len(things)], pictures[len(things) :]
    gap = ((good[some] - bad) * words[right[some]]).sum(1)
    ranking = F.softplus(10 * (MARGIN * severity - gap)).mean() / 10
    return contrastive(good, words, right, log_scale.exp()), ranking


@torch.no_grad()
def judge(towers: Towers) -> dict[str, float]:
    """Figures on 1,500 pictures of the 'google' style, which the towers were not trained on."""
    towers.eval()
    pixels, captions = dataset(1500, ("google",), seed=3)

    def embed(images: Tensor) -> Tensor:
        return torch.cat(
            [towers.image(part.contiguous(memory_format=torch.channels_last)) for part in images.split(250)]
        )

    def choose(choices: list[list[Caption]]) -> float:
        """Share of pictures whose right caption (the first of its choices) scores highest."""
        words = towers.text(token_ids([str(caption) for row in choices for caption in row]))
        scores = torch.einsum("ne,nce->nc", good, words.reshape(len(choices), -1, words.shape[-1]))
        return (scores.argmax(1) == 0).float().mean().item()

    def others(names: dict, name: str) -> list[str]:
        return [name, *(each for each in names if each != name)]

    good, words = embed(pixels), towers.text(token_ids([str(caption) for caption in captions]))
    background = torch.stack([PALETTE[list(COLOURS).index(caption.colour)] for caption in captions]) * 2 - 1
    empty = background[:, :, None, None].expand_as(pixels)
    noisy = (pixels + 0.15 * torch.randn_like(pixels)).clamp(-1, 1)
    variants = {"true": good, "noisy": embed(noisy), "erased": embed(empty), "shuffled": good.roll(1, 0)}
    variants |= {f"blurred_{radius}": embed(blur(pixels, radius)) for radius in (1, 2, 4)}
    variants |= {"fading": embed(torch.lerp(pixels, empty, 0.5)), "two_things": embed((pixels + pixels.roll(1, 0)) / 2)}
    scores = {name: (found * words).sum(1) for name, found in variants.items()}
    figures = {
        "thing": choose([[Caption(t, c.colour, c.small) for t in others(THINGS, c.thing)] for c in captions]),
        "colour": choose([[Caption(c.thing, o, c.small) for o in others(COLOURS, c.colour)] for c in captions]),
        "size": choose([[c, Caption(c.thing, c.colour, not c.small)] for c in captions]),
    }
    figures |= {f"score_{name}": value.mean().item() for name, value in scores.items()}
    figures |= {f"above_{name}": (scores["true"] > value).float().mean().item() for name, value in scores.items()}
    towers.train()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=700)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--output", default="text_image_reward.safetensors")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    store, every = textures(), token_ids(every_caption())
    towers = Towers().to(memory_format=torch.channels_last)
    log_scale = nn.Parameter(torch.tensor(math.log(20.0)))
    optimizer = torch.optim.AdamW([*towers.parameters(), log_scale], lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05)
    print(f"{sum(p.numel() for p in towers.parameters()) / 1e6:.2f} M parameters", flush=True)

    start, step = time.time(), 0
    while (elapsed := time.time() - start) < args.seconds:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 50) * (0.01 + 0.99 * (1 - elapsed / args.seconds))
        match, ranking = step_loss(towers, store, every, log_scale, args.groups)
        optimizer.zero_grad()
        (match + 2 * ranking).backward()
        nn.utils.clip_grad_norm_(towers.parameters(), 5.0)
        optimizer.step()
        with torch.no_grad():
            log_scale.clamp_(max=math.log(40.0))
        step += 1
        if step % 50 == 0:
            print(f"{step} steps, {elapsed:.0f} s, match {match.item():.3f}, ranking {ranking.item():.4f}", flush=True)

    for name, value in judge(towers).items():
        print(f"{name}: {value:.3f}")
    weights = {name: value.half().contiguous() for name, value in towers.state_dict().items()}
    save_file(weights, args.output)


if __name__ == "__main__":
    main()
