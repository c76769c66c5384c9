"""Looking at a tree, and taking its best leaves."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import io, ui
from PIL import Image
from torch import Tensor

from ..treegrpo_core.picture import draw_tree
from ..treegrpo_core.plan import Plan
from ..treegrpo_core.tree import Tree, by_prompt, taken
from . import host
from .types import CATEGORY, TreeType

JPEG_HEIGHT = 65500
"""Pixels that the format allows."""


class Preview(io.ComfyNode):
    """The tree as a picture in the node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TreeGRPOPreview",
            display_name="TreeGRPO Preview",
            category=CATEGORY,
            description="Draws the tree: columns are the steps of the window and the leaves with their rewards; "
            "green edges have a positive "
            "advantage, red a negative one. Inside a loop it is drawn anew for every update.",
            is_output_node=True,
            inputs=[
                TreeType.Input("tree", tooltip="Trees at any stage; best after TreeAdvantage."),
                io.Int.Input("prompt", default=0, min=0, max=4095, tooltip="Which prompt's tree to draw, from 0."),
            ],
            outputs=[],
        )

    @classmethod
    def execute(cls, tree: Tree, prompt: int) -> io.NodeOutput:
        if prompt >= len(tree.prompts):
            raise ValueError(f"prompt is {prompt}, but this tree has {len(tree.prompts)} prompts, counted from 0")
        return io.NodeOutput(ui=_shown(draw_tree(tree, prompt)))


def _shown(picture: Image.Image) -> ui.SavedImages:
    """The picture among ComfyUI's temporary files. As JPEG: core's PNG of it takes as long as several forwards."""
    kind = "jpg" if picture.height <= JPEG_HEIGHT else "png"
    folder, name = Path(folder_paths.get_temp_directory()), f"treegrpo_{uuid.uuid4().hex}.{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    picture.save(folder / name, quality=92, subsampling=0)
    return ui.SavedImages([ui.SavedResult(name, "", io.FolderType.temp)])


class BestLeaf(io.ComfyNode):
    """Best of the tree, for ordinary use."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TreeGRPOBestLeaf",
            display_name="TreeGRPO Best Leaf",
            category=CATEGORY,
            description="The leaves with the highest reward of each prompt as LATENT, best first, for VAE Decode "
            "or any other node.",
            inputs=[
                TreeType.Input("tree", tooltip="Trees with rewards."),
                io.Int.Input("count", default=1, min=1, max=4096, tooltip="Leaves per prompt."),
            ],
            outputs=[
                io.Latent.Output(
                    display_name="LATENT", tooltip="The best leaves: those of the first prompt, then the second, ..."
                )
            ],
        )

    @classmethod
    def execute(cls, tree: Tree, count: int) -> io.NodeOutput:
        if tree.rewards is None:
            raise ValueError("tree: it has no rewards yet; connect it after RewardScorer or TreeGRPORewardFromFloats")
        check_count(count, tree.plan)
        return io.NodeOutput(best_leaves(tree, tree.rewards.best(count)))


def check_count(count: int, plan: Plan) -> None:
    """ValueError if there are not so many leaves."""
    if count > plan.leaves:
        raise ValueError(f"count is {count}, but each prompt has only {plan.leaves} leaves; lower count")


def best_leaves(tree: Tree, best: Tensor) -> dict[str, Tensor]:
    """The LATENT of these leaves (count, P): all of the first prompt, then of the second."""
    policy: Any = tree.policy
    latents = by_prompt(taken(tree.leaves, best)).float().clone()
    samples = policy.guider.model_patcher.model.process_latent_out(latents)
    return {"samples": samples.to(host.intermediate_device())}
