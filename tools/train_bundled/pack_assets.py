"""python pack_assets.py --vae vae.safetensors --denoiser denoiser.pt

Writes the trained parts into assets/ in half precision, in the key formats ComfyUI's own loaders expect.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ASSETS = Path(__file__).resolve().parents[2] / "assets"


def part(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value.half() for name, value in state.items() if name.startswith(prefix)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vae", required=True)
    parser.add_argument("--denoiser", required=True)
    args = parser.parse_args()
    ASSETS.mkdir(exist_ok=True)
    state = torch.load(args.denoiser, weights_only=True)
    source = {"format": "pt", "source": "Noto Emoji (Apache-2.0) and Twemoji (CC-BY 4.0), see assets/README.md"}
    save_file(part(state, "denoiser."), ASSETS / "denoiser.safetensors", source)
    save_file(part(state, "text."), ASSETS / "text_encoder.safetensors", source)
    save_file({name: value.half() for name, value in load_file(args.vae).items()}, ASSETS / "vae.safetensors", source)
    for name in ("denoiser", "text_encoder", "vae"):
        print(f"{name}.safetensors {(ASSETS / f'{name}.safetensors').stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
