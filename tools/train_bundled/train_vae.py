"""EMOJI=... python train_vae.py --seconds 900 --output vae.safetensors

Trains the VAE on both drawing styles (L1 + gradient loss + a trace of KL) and stores the latents' mean and deviation
in it.
"""

from __future__ import annotations

import argparse
import time

import torch
from safetensors.torch import load_file, save_file

from pack_assets import ASSETS
from pictures import dataset
from treegrpo_core.bundled.vae import TinyVAE


def loss(vae: TinyVAE, pixels: torch.Tensor) -> torch.Tensor:
    mean, log_variance = vae.posterior(pixels)
    rebuilt = vae.decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp())
    error = rebuilt - pixels
    gradient = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return error.abs().mean() + 0.5 * gradient + 1e-4 * kl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--start", action="store_true", help="go on from the weights in assets/")
    parser.add_argument("--output", default="vae.safetensors")
    args = parser.parse_args()

    torch.manual_seed(0)
    pool, _ = dataset(12000, ("google", "twitter"), seed=0)
    vae = TinyVAE().to(memory_format=torch.channels_last)
    if args.start:
        vae.load_state_dict(load_file(ASSETS / "vae.safetensors"))
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.9, 0.99))
    start, step = time.time(), 0
    while (elapsed := time.time() - start) < args.seconds:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 100) * (0.03 + 0.97 * (1 - elapsed / args.seconds))
        batch = pool[torch.randint(len(pool), (args.batch,))].contiguous(memory_format=torch.channels_last)
        value = loss(vae, batch)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"{step} steps, {elapsed:.0f} s, loss {value.item():.4f}", flush=True)

    with torch.no_grad():
        google, _ = dataset(1000, ("google",), seed=1)
        latents = torch.cat([vae.posterior(part)[0] for part in google.split(100)])
        vae.latent_mean.copy_(latents.mean((0, 2, 3))[:, None, None])
        vae.latent_std.copy_(latents.std((0, 2, 3))[:, None, None])
        error = torch.cat([vae.decode(vae.encode(part)) - part for part in google.split(100)])
    print(f"mean squared error on unseen pictures {error.square().mean().item():.5f} (pixels in [-1, 1])")
    save_file({name: value.contiguous() for name, value in vae.state_dict().items()}, args.output)


if __name__ == "__main__":
    main()
