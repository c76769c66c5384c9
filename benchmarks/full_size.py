"""``python -m benchmarks.full_size`` compares the methods on a whole SD1.5 with random weights.

An update of a model this large takes minutes, so each amount of work is done once: trees whose window lies first and
last (between them a step later trades one batch of 27 for one of 1, so other starts are on the straight line), one
rollout of 27 trajectories, and updates on four, six and nine of their steps. Rewards are random. Decoding is measured
on a few pictures; it is the same for every method.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tools.host import ROOT

from .iteration import STAGES, STARTS, Cost, expected
from .session import FLAT, LEAVES, Method, Session

BATCHES = (1, 3, 9, 27)
SETTINGS = ((16, False), (16, True), (24, True))
"""Side of the latents, and whether the model's blocks are computed again in the backward."""
TRAINED = {
    "DanceGRPO, 6 of 9 steps trained": 6,
    "DanceGRPO, all 9 steps trained; Flow-GRPO": 9,
    "MixGRPO, window of 4": 4,
}
"""Trained steps of the methods whose rollout is 27 whole trajectories."""
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


def rows(one: FullSize, batches: Sequence[int] = BATCHES, *, checkpointing: bool = False) -> list[dict[str, float]]:
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
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            one.parts["treegrpo_core.differentiable"].make_ordinary(model.diffusion_model)
            if checkpointing:
                stack.enter_context(one.parts["treegrpo_core.memory"].gradient_checkpointing(model.diffusion_model))
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
    """Seconds by stage, forwards, and ``ratio``: how many times the tree's seconds that is, decoding left out."""
    settings, decode = {"gradient_checkpointing": checkpointing}, decode_seconds(one)
    first, last = STARTS[0], STARTS[-1]
    early, late = (
        _cost(one.step(Method("", window={"policy": "fixed", "start": start}, update=settings)), decode)
        for start in (first, last)
    )
    shares = [(start - first) / (last - first) for start in STARTS]
    costs = {"TreeGRPO": expected([_between(early, late, share) for share in shares])}
    gc.collect()
    flat = one.tree(Method("", FLAT, roots=LEAVES))
    for name, steps in TRAINED.items():
        costs[name] = _cost(one.update(flat.with_advantages(train_steps=steps), **settings), decode)
    base = costs["TreeGRPO"].seconds - decode
    return [
        {
            "method": name,
            **vars(cost),
            "seconds": cost.seconds,
            "ratio": (cost.seconds - decode) / base,
        }
        for name, cost in costs.items()
    ]


def _cost(metrics: Any, decode: float) -> Cost:
    stages = {**dict.fromkeys(STAGES, 0.0), **metrics.stages, "decode": decode}
    cost = Cost(stages, metrics.nfe_sample, metrics.nfe_train)
    print(json.dumps(vars(cost)), file=sys.stderr, flush=True)
    return cost


def _between(one: Cost, other: Cost, share: float) -> Cost:
    """The cost on the straight line from one to the other."""

    def between(first: float, last: float) -> float:
        return first + share * (last - first)

    stages = {stage: between(one.stages[stage], other.stages[stage]) for stage in STAGES}
    return Cost(stages, between(one.forwards, other.forwards), between(one.trained, other.trained))


def measure_all() -> list[dict[str, Any]]:
    """Every one of :data:`SETTINGS`, which takes three quarters of an hour."""
    return [measure_one(*setting) for setting in SETTINGS]


def measure_one(size: int, checkpointing: bool) -> dict[str, Any]:
    """Seconds per row, and every method's update, of latents of ``size`` by ``size``."""
    one = session(size)
    return {
        "size": size,
        "checkpointing": checkpointing,
        "rows": rows(one, checkpointing=checkpointing),
        "methods": measure(one, checkpointing=checkpointing),
    }


def main() -> None:
    """Print the figures of one setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=16, help="side of the latents")
    parser.add_argument("--checkpointing", action="store_true", help="blocks are computed again in the backward")
    args = parser.parse_args()
    print(json.dumps(measure_one(args.size, args.checkpointing), indent=1))


if __name__ == "__main__":
    main()
