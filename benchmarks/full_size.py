"""``python -m benchmarks.full_size`` compares the methods on a whole SD1.5 with random weights.

An update of a model this large takes minutes, so each amount of work is done once: a tree whose window lies first and
one whose window lies last, one rollout of 27 trajectories, and updates on four and on nine of their steps. What lies
between is on a straight line, since it is batches of the same sizes. Rewards are random. Decoding is measured apart.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tools.host import ROOT

from .iteration import METHODS
from .session import FLAT, LEAVES, STEPS, Method, Session, first_levels

BATCHES = (1, 3, 9, 27)
STARTS = {0: METHODS[0].row, 6: "0 0 0 0 0 0 3 3 3 0"}
"""First and last window of the tree. A step later, a batch of 27 is traded for one of 1."""
FLAT_ROWS = {"DanceGRPO, 6 of 9 steps trained": 6, "DanceGRPO, 9 of 9 steps trained": 9, "MixGRPO, window of 4": 4}
"""Trained steps of the methods whose rollout is 27 whole trajectories."""
R, DEPTH = 0.5, 3
VAE = {"z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128, "ch_mult": [1, 2, 4, 4]}


class FullSize(Session):
    """SD1.5 and its VAE as published, but with random weights and random conditioning."""

    whole = True
    """False: the small one that tests use."""

    def _load(self) -> None:
        import comfy.ldm.models.autoencoder
        import comfy.sd
        import torch

        sys.path.insert(0, str(ROOT / "tests" / "host"))
        from random_models.models import build, fill

        self.model = build("SD1.5", 0, torch.float32, full_size=self.whole)
        config = {**VAE, "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0, "double_z": True}
        vae = comfy.ldm.models.autoencoder.AutoencoderKL(ddconfig=config, embed_dim=4)
        fill(vae, 1)
        self.vae = comfy.sd.VAE(sd=vae.state_dict(), dtype=torch.float32)

    def _scored(self, tree: Any) -> Any:
        import torch

        values = torch.rand(1, tree.plan.leaves, len(tree.prompts), generator=torch.Generator().manual_seed(2))
        return tree.scored(self.parts["treegrpo_core.tree"].Rewards(("random",), (1.0,), values))

    def encode(self, prompts: Sequence[str]) -> Any:
        import torch

        return [[torch.randn(len(prompts), 77, 768, generator=torch.Generator().manual_seed(1)), {}]]


def session(size: int) -> FullSize:
    """One prompt, latents of ``size`` by ``size``."""
    FullSize.latent = (4, size, size)
    return FullSize(["random"], max_batch=LEAVES)


def rows(one: FullSize, batches: Sequence[int] = BATCHES) -> list[dict[str, float]]:
    """Seconds per row of a forward, and of one with its backward, alone and in larger batches."""
    import torch

    model, adapter = one.model.model, one.run.adapter
    text = one.guider.original_conds["positive"][0]["cross_attn"].clone()

    def forward(count: int) -> Any:
        latents, sigmas = torch.randn(count, *one.latent), torch.full((count,), float(one.sigmas[0]))
        return model.apply_model(latents, sigmas, c_crossattn=text.repeat(count, 1, 1))

    def both(count: int) -> None:
        torch.autograd.grad(forward(count).square().sum(), adapter.parameters())

    found = []
    adapter.put_in(model.diffusion_model)
    try:
        with torch.inference_mode(False):
            one.parts["nodes.guided"].make_differentiable(model.diffusion_model)
            for count in (batches[0], *batches):  # the first one warms up
                with torch.no_grad():
                    plain = _seconds(forward, count)
                found.append({"batch": count, "forward": plain / count, "with backward": _seconds(both, count) / count})
    finally:
        adapter.take_out(model.diffusion_model)
    return found[1:]


def _seconds(work: Callable[[int], Any], count: int) -> float:
    start = time.perf_counter()
    work(count)
    return time.perf_counter() - start


def decode_seconds(one: FullSize, pictures: int = 3) -> float:
    """Seconds to decode one update's leaves, from a batch of a few; the same for every method."""
    import torch

    with torch.inference_mode():
        latents = torch.randn(pictures, *one.latent)
        return _seconds(lambda _: one.vae.decode(latents), pictures) / pictures * LEAVES


def measure(one: FullSize, *, checkpointing: bool = False) -> list[dict[str, Any]]:
    """Seconds of one update by stage, forwards, and how many times the tree's seconds that is.

    The tree's window is drawn as in training. ``ratio`` is that of rollout and update, ``whole`` counts decoding too.
    """
    settings = {"gradient_checkpointing": checkpointing}
    decode = decode_seconds(one)
    starts = {start: _row(one.step(Method("", row, update=settings))) for start, row in STARTS.items()}
    gc.collect()
    flat = one.tree(Method("", FLAT, roots=LEAVES))
    trained = {steps: _row(one.update(first_levels(flat, steps), **settings)) for steps in (4, 9)}

    places = range(STEPS - DEPTH)
    weights = [R**place / sum(R**other for other in places) for place in places]
    tree = [_between(starts, place) for place in places]
    rows = {
        "TreeGRPO": {key: sum(w * row[key] for w, row in zip(weights, tree, strict=True)) for key in tree[0]},
        **{name: _between(trained, steps) for name, steps in FLAT_ROWS.items()},
    }
    base = rows["TreeGRPO"]["rollout"] + rows["TreeGRPO"]["update"]
    for row in rows.values():
        seconds = row["rollout"] + row["update"]
        row |= {"decode": decode, "ratio": seconds / base, "whole": (seconds + decode) / (base + decode)}
    return [{"method": name, **row} for name, row in rows.items()]


def _row(metrics: Any) -> dict[str, float]:
    row = {"rollout": metrics.stages["rollout"], "update": metrics.stages["update"]}
    row |= {"forwards": metrics.nfe_sample, "trained": metrics.nfe_train}
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def _between(measured: dict[int, dict[str, float]], place: int) -> dict[str, float]:
    """The figures at ``place`` on the straight line through two measured ones."""
    (first, one), (last, other) = measured.items()
    share = (place - first) / (last - first)
    return {key: one[key] + share * (other[key] - one[key]) for key in one}


def main() -> None:
    """Print the seconds per row and every method's update."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=16, help="side of the latents")
    parser.add_argument("--checkpointing", action="store_true", help="blocks are computed again in the backward")
    args = parser.parse_args()
    start, one = time.time(), session(args.size)
    print(json.dumps({"rows": rows(one)}), file=sys.stderr, flush=True)
    print(json.dumps(measure(one, checkpointing=args.checkpointing), indent=1))
    print(f"{time.time() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
