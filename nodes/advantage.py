"""Credit for every edge."""

from __future__ import annotations

from comfy_api.latest import io

from ..treegrpo_core.advantage import NORMALISATIONS
from ..treegrpo_core.tree import Tree
from .types import CATEGORY, TreeType


class TreeAdvantage(io.ComfyNode):
    """Backs the leaves' advantages up the tree."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TreeAdvantage",
            display_name="Tree Advantage (TreeGRPO)",
            category=CATEGORY,
            description="Standardises the rewards among the leaves of each prompt and backs them up, so that "
            "every edge gets its own credit.",
            inputs=[
                TreeType.Input("tree", tooltip="The trees with rewards."),
                io.Combo.Input(
                    "estimator",
                    options=["softmax", "uniform"],
                    default="softmax",
                    tooltip="Average over children: weighted by softmax of their log-probability (the paper), or "
                    "plain.",
                ),
                io.Combo.Input(
                    "normalisation",
                    options=list(NORMALISATIONS),
                    default="none",
                    tooltip="'per depth' standardises the edges of each depth among themselves (BranchGRPO); "
                    "'siblings' credits an edge with what it has over the others from the same parent.",
                ),
                io.Int.Input(
                    "train_steps",
                    default=0,
                    min=0,
                    max=1000,
                    optional=True,
                    tooltip="Train only so many of the stochastic steps, those whose branches differ most. 0: all.",
                ),
                io.Float.Input(
                    "train_share",
                    default=1.0,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    tooltip="Train only this share of each step's parents, those whose children's advantages differ "
                    "most, at least one per prompt. Saves time in LoRAUpdate.",
                ),
            ],
            outputs=[TreeType.Output(display_name="TREE", tooltip="The trees with advantages, for LoRAUpdate.")],
        )

    @classmethod
    def execute(
        cls, tree: Tree, estimator: str, normalisation: str, train_steps: int = 0, train_share: float = 1.0
    ) -> io.NodeOutput:
        return io.NodeOutput(
            tree.with_advantages(
                estimator=estimator,  # type: ignore[arg-type]
                normalisation=normalisation,  # type: ignore[arg-type]
                train_steps=train_steps,
                train_share=train_share,
            )
        )
