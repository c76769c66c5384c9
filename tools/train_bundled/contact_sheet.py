"""COMFYUI_PATH=... python contact_sheet.py --output contact_sheet.png [--guidance 2.5] [--steps 20]

Draws every thing of the bundled model large, then small, straight from assets/, with Euler steps.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from pack_assets import ASSETS
from train_denoiser import SCALE, SHIFT, Trained, tokens
from treegrpo_core.bundled.captions import COLOURS, THINGS, Caption
from treegrpo_core.bundled.vae import TinyVAE

COLUMNS = 16


def load() -> tuple[Trained, TinyVAE]:
    model, vae = Trained(), TinyVAE()
    model.load_assets()
    vae.load_state_dict(load_file(ASSETS / "vae.safetensors"))
    return model.eval(), vae.eval()


@torch.no_grad()
def sample(model: Trained, vae: TinyVAE, captions: list[Caption], guidance: float, steps: int, seed: int) -> Tensor:
    """(N, 64, 64, 3) uint8."""
    ids, empty = tokens(list(captions)), tokens([None] * len(captions))
    x = torch.randn(len(captions), 16, 8, 8, generator=torch.Generator().manual_seed(seed))
    for sigma, sigma_next in torch.linspace(1, 0, steps + 1).unfold(0, 2, 1):
        level = sigma.expand(len(x))
        velocity = model(x, level, ids)
        if guidance != 1:
            free = model(x, level, empty)
            velocity = free + guidance * (velocity - free)
        x = x + velocity * (sigma_next - sigma)
    pictures = vae.decode(x / SCALE + SHIFT).clamp(-1, 1) * 127.5 + 127.5
    return pictures.permute(0, 2, 3, 1).round().byte()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True)
    parser.add_argument("--guidance", type=float, default=2.5)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    colours = list(COLOURS)
    captions = [Caption(thing, colours[i % 9], small) for small in (False, True) for i, thing in enumerate(THINGS)]
    pictures = sample(*load(), captions, args.guidance, args.steps, seed=0)
    rows = [torch.cat(list(pictures[i : i + COLUMNS]), 1) for i in range(0, len(pictures), COLUMNS)]
    sheet = Image.fromarray(np.asarray(torch.cat(rows, 0)))
    sheet.save(args.output)
    print("\n".join(" | ".join(str(c) for c in captions[i : i + COLUMNS]) for i in range(0, len(captions), COLUMNS)))


if __name__ == "__main__":
    main()
