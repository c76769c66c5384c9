"""EMOJI=... COMFYUI_PATH=... python train_denoiser.py --vae vae.safetensors --seconds 5400 --output denoiser.pt

Trains the MMDiT and its text encoder together (rectified flow, logit-normal sigmas, 10 % empty prompts) and keeps an
exponential moving average. The MMDiT is ComfyUI's own class at SD3.5's layout, so core's loader detects the result.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from pack_assets import ASSETS
from pictures import dataset, tokens
from treegrpo_core.bundled.captions import MAX_TOKENS, VOCABULARY
from treegrpo_core.bundled.vae import SCALE, SHIFT, TinyVAE

DEPTH, TEXT_WIDTH, GRID = 3, 128, 8


def text_encoder() -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=MAX_TOKENS,
            hidden_act="gelu",
            bos_token_id=VOCABULARY.index("[START]"),
            eos_token_id=VOCABULARY.index("[END]"),
            pad_token_id=VOCABULARY.index("[PAD]"),
        )
    )


def mmdit() -> nn.Module:
    """ComfyUI's MMDiT, freshly initialised as DiT is: modulation and output layers start at zero."""
    sys.path.insert(0, os.environ["COMFYUI_PATH"])
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.mmdit import MMDiT, get_2d_sincos_pos_embed_torch

    hidden = 64 * DEPTH
    model = MMDiT(
        input_size=None,
        patch_size=2,
        in_channels=16,
        depth=DEPTH,
        pos_embed_max_size=GRID,
        num_patches=GRID * GRID,
        adm_in_channels=TEXT_WIDTH,
        context_embedder_config={
            "target": "torch.nn.Linear",
            "params": {"in_features": TEXT_WIDTH, "out_features": hidden},
        },
        qk_norm="rms",
        operations=comfy.ops.disable_weight_init,
        dtype=torch.float32,
        device="cpu",
    )
    for name, parameter in model.named_parameters():
        if "adaLN_modulation" in name or "final_layer.linear" in name:
            nn.init.zeros_(parameter)
        elif parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter.view(parameter.shape[0], -1))
        elif "ln_" in name:
            nn.init.ones_(parameter)
        else:
            nn.init.zeros_(parameter)
    positions = get_2d_sincos_pos_embed_torch(hidden, GRID, GRID, device="cpu")
    model.pos_embed.copy_(positions.reshape(1, GRID * GRID, hidden))
    return model


class Trained(nn.Module):
    """Denoiser and text encoder as one module, called as the loss needs them."""

    def __init__(self) -> None:
        super().__init__()
        self.denoiser = mmdit()
        self.text = text_encoder()

    def load_assets(self) -> None:
        """Take over the weights in assets/, which are stored in half precision."""
        for name, part in (("denoiser", self.denoiser), ("text_encoder", self.text)):
            state = {key: value.float() for key, value in load_file(ASSETS / f"{name}.safetensors").items()}
            part.load_state_dict(state)

    def forward(self, x: Tensor, sigma: Tensor, ids: Tensor) -> Tensor:
        encoded = self.text(input_ids=ids)
        return self.denoiser(x, sigma * 1000, context=encoded.last_hidden_state, y=encoded.text_embeds)


def flow_loss(model: Trained, latent: Tensor, ids: Tensor) -> Tensor:
    sigma = torch.sigmoid(torch.randn(len(latent)))
    noise = torch.randn_like(latent)
    mix = sigma[:, None, None, None]
    velocity = model((1 - mix) * latent + mix * noise, sigma, ids)
    return (velocity - (noise - latent)).square().mean()


@torch.no_grad()
def latents(vae: TinyVAE, pixels: Tensor) -> Tensor:
    return torch.cat([(vae.encode(part) - SHIFT) * SCALE for part in pixels.split(250)])


def save(model: nn.Module, path: str) -> None:
    temporary = Path(path).with_suffix(".part")
    torch.save(model.state_dict(), temporary)
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vae", required=True)
    parser.add_argument("--seconds", type=float, default=5400)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--pictures", type=int, default=30000)
    parser.add_argument("--learning-rate", type=float, default=1.2e-3)
    parser.add_argument("--start", action="store_true", help="go on from the weights in assets/")
    parser.add_argument("--output", default="denoiser.pt")
    args = parser.parse_args()

    torch.manual_seed(0)
    vae = TinyVAE()
    vae.load_state_dict(load_file(args.vae))
    pixels, captions = dataset(args.pictures, ("google",), seed=2)
    pool, ids, empty = latents(vae, pixels), tokens(captions), tokens([None])[0]
    del pixels
    model = Trained()
    if args.start:
        model.load_assets()
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, latent std {pool.std():.3f}", flush=True
    )

    start, step, recent = time.time(), 0, []
    while (elapsed := time.time() - start) < args.seconds:
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1, (step + 1) / 200) * (0.02 + 0.98 * (1 - elapsed / args.seconds))
        chosen = torch.randint(len(pool), (args.batch,))
        prompt = torch.where(torch.rand(args.batch, 1) < 0.1, empty, ids[chosen])
        value = flow_loss(model, pool[chosen], prompt)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        recent.append(value.item())
        decay = min(0.999, step / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
        if step % 250 == 0:
            print(f"{step} steps, {elapsed:.0f} s, loss {sum(recent) / len(recent):.4f}", flush=True)
            recent.clear()
            save(average, args.output)
    save(average, args.output)


if __name__ == "__main__":
    main()
