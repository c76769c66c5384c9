"""Rewards at the leaves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from comfy_api.latest import io
from torch import Tensor
from torch.nn import functional as F

from ..treegrpo_core.rewards import WeightedReward, known_rewards, module_of, score
from ..treegrpo_core.tree import Rewards, Tree, by_leaf, by_prompt, timed
from . import host
from .guided import GuidedPolicy
from .reward_files import reward_named
from .types import CATEGORY, RewardType, TreeType

THUMBNAIL = 96
"""Longest side of the pictures kept with a tree, in pixels."""


class RewardModel(io.ComfyNode):
    """Names a reward and its weight."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        known = known_rewards()
        sources = "\n".join(f"{name}: {info.source}" for name, info in known.items() if info.source)
        return io.Schema(
            node_id="TreeGRPORewardModel",
            display_name="TreeGRPO Reward Model",
            category=CATEGORY,
            description="A reward from the registry. Chain several: each is standardised within its prompt's "
            "leaves before the weights apply.",
            inputs=[
                io.Combo.Input(
                    "name",
                    options=list(known),
                    tooltip="\n".join(f"{name}: {info.measures}" for name, info in known.items()),
                ),
                io.Float.Input(
                    "weight",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.05,
                    tooltip="Weight of this reward's advantage. 0: only logged, never trained on (an evaluation "
                    "reward).",
                ),
                RewardType.Input("previous", optional=True, tooltip="Other rewards to combine with."),
                io.String.Input(
                    "source",
                    default="",
                    optional=True,
                    tooltip=f"What some rewards need beside their name; leave it empty for all others.\n{sources}",
                ),
                io.Boolean.Input(
                    "download",
                    default=False,
                    optional=True,
                    tooltip="Fetch missing weights from Hugging Face into models/reward_models (gigabytes). Off: a "
                    "missing file is an error that says where to get it.",
                ),
            ],
            outputs=[RewardType.Output(display_name="REWARD_MODEL", tooltip="All rewards of the chain.")],
        )

    @classmethod
    def execute(
        cls,
        name: str,
        weight: float,
        previous: list[WeightedReward] | None = None,
        source: str = "",
        download: bool = False,
    ) -> io.NodeOutput:
        chain = list(previous or [])
        if any(entry.reward.name == name for entry in chain):
            raise ValueError(f"name: {name!r} is already in the chain of rewards; remove one of the two")
        return io.NodeOutput([*chain, WeightedReward(reward_named(name, source, download), weight)])


class RewardScorer(io.ComfyNode):
    """Decodes and scores the leaves."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="RewardScorer",
            display_name="Reward Scorer (TreeGRPO)",
            category=CATEGORY,
            description="Decodes the leaves and scores each against its own prompt; a film's score is the mean of its "
            "frames.",
            inputs=[
                TreeType.Input("tree", tooltip="The trees of TreeSampler."),
                io.Vae.Input("vae", tooltip="The VAE of the model."),
                RewardType.Input("reward", tooltip="One reward or a chain of them."),
            ],
            outputs=[
                TreeType.Output(display_name="TREE", tooltip="The trees with rewards, for TreeAdvantage."),
                io.Image.Output(
                    display_name="leaves",
                    tooltip="All leaves: those of the first prompt, then the second, ...; of films, all frames.",
                ),
                io.Float.Output(
                    display_name="rewards", is_output_list=True, tooltip="Weighted sum of the rewards of each leaf."
                ),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.dynprompt],
        )

    @classmethod
    def execute(cls, tree: Tree, vae: Any, reward: list[WeightedReward]) -> io.NodeOutput:
        start = time.perf_counter()
        images = decode(tree, vae)
        decoded = time.perf_counter()
        scored = tree.scored(rewards_of(reward, images, tree.prompts, tree.plan.leaves))
        frames = len(images) // (tree.plan.leaves * len(tree.prompts))
        tree.growth.thumbnails = thumbnails(images[frames // 2 :: frames], len(tree.prompts))
        scored = timed(timed(scored, "decode", decoded - start), "reward", time.perf_counter() - decoded)
        assert scored.rewards is not None
        # A loop keeps every output until the queue is done; images nobody reads would fill the memory.
        if not host.output_is_used(cls.hidden.dynprompt, cls.hidden.unique_id, 1):
            images = images[:1].clone()
        return io.NodeOutput(scored, images, by_prompt(scored.rewards.total).tolist())


def score_each(rewards: list[WeightedReward], images: Tensor, prompts: list[str]) -> Tensor:
    """As :func:`score`, (R, N), with one reward's weights after the other on the device."""
    rows = []
    for entry in rewards:
        module = module_of(entry.reward)
        if module is not None:
            host.load_weights(module)
        work = partial(score, [entry], images, prompts)
        rows.append(host.interruptible(work) if getattr(entry.reward, "waits", False) else work())
    return torch.cat(rows)


def rewards_of(rewards: list[WeightedReward], images: Tensor, prompts: Sequence[str], leaves: int) -> Rewards:
    """Rewards of (P * L * F, H, W, 3) pictures, all of the first prompt first; a film's is the mean of its frames."""
    frames = len(images) // (leaves * len(prompts))
    asked = [prompt for prompt in prompts for _ in range(leaves * frames)]
    values = score_each(rewards, images, asked).unflatten(1, (-1, frames)).mean(2)
    return Rewards(
        tuple(entry.reward.name for entry in rewards),
        tuple(float(entry.weight) for entry in rewards),
        torch.stack([by_leaf(row, len(prompts)) for row in values]),
    )


def decode(tree: Tree, vae: Any) -> Tensor:
    """(P * L * F, H, W, 3) float in [0, 1], all leaves of the first prompt first; F frames of a film, else 1."""
    policy: GuidedPolicy = tree.policy  # type: ignore[assignment]
    return decode_latents(policy.guider, by_prompt(tree.leaves), vae)


def decode_latents(guider: Any, latents: Tensor, vae: Any) -> Tensor:
    """(N, *latent) in the denoiser's space -> (N * F, H, W, 3) float in [0, 1] on the CPU."""
    latents = guider.model_patcher.model.process_latent_out(latents.float().clone())
    images = vae.decode(latents)
    if len(images) != len(latents):
        raise ValueError(
            f"vae: it made {len(images)} pictures of {len(latents)} latents; connect the VAE that belongs to the model"
        )
    if images.ndim == 5:
        images = images.flatten(0, 1)
    return images[..., :3].float().cpu()


def thumbnails(images: Tensor, prompts: int) -> Tensor:
    """(P * L, H, W, 3) -> (L, P, h, w, 3) uint8, at most :data:`THUMBNAIL` pixels a side."""
    scale = min(1.0, THUMBNAIL / max(images.shape[1:3]))
    small = images.movedim(-1, 1)
    if scale < 1:
        size = [max(1, round(side * scale)) for side in images.shape[1:3]]
        small = F.interpolate(small, size=size, mode="bilinear", antialias=True)
    return by_leaf((small.clamp(0, 1) * 255).round().byte().movedim(1, -1), prompts)


class RewardFromFloats(io.ComfyNode):
    """Scores from any other node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TreeGRPORewardFromFloats",
            display_name="TreeGRPO Reward from Floats",
            category=CATEGORY,
            description="Takes one number per leaf from any other nodes, in the order of RewardScorer's leaves output.",
            is_input_list=True,
            inputs=[
                TreeType.Input("tree", tooltip="The trees, scored or not; pictures are kept."),
                io.Float.Input(
                    "rewards", tooltip="One number per leaf, higher is better.", default=0.0, force_input=True
                ),
                io.String.Input("name", default="floats", optional=True, tooltip="Name of these numbers in the log."),
                io.Float.Input(
                    "weight",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.05,
                    optional=True,
                    tooltip="Weight of their advantage. 0: only logged, never trained on.",
                ),
                io.Boolean.Input(
                    "keep_others",
                    default=False,
                    optional=True,
                    tooltip="Keep the rewards the tree has already beside these; else these replace them.",
                ),
            ],
            outputs=[TreeType.Output(display_name="TREE", tooltip="The trees with these rewards.")],
        )

    @classmethod
    def execute(
        cls,
        tree: list[Tree],
        rewards: list[float],
        name: list[str] | None = None,
        weight: list[float] | None = None,
        keep_others: list[bool] | None = None,
    ) -> io.NodeOutput:
        if len(tree) != 1:
            raise ValueError(f"tree: {len(tree)} trees at once; give this node one TREE")
        (one,) = tree
        leaves = one.plan.leaves * len(one.prompts)
        if len(rewards) != leaves:
            raise ValueError(
                f"rewards: {len(rewards)} numbers for {leaves} leaves; give exactly one number per leaf, as a list "
                "(Rebatch Images with batch size 1 before a node that scores one picture)"
            )
        label, share = (name or ["floats"])[0], (weight or [1.0])[0]
        values = by_leaf(torch.tensor([float(value) for value in rewards]), len(one.prompts))
        if one.rewards is not None and keep_others and keep_others[0]:
            return io.NodeOutput(one.scored(one.rewards.plus(label, share, values)))
        return io.NodeOutput(one.scored(Rewards((label,), (share,), values[None])))
