"""Credit for every edge."""

from __future__ import annotations

from comfy_api.latest import io

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
                    options=["none", "per depth"],
                    default="none",
                    tooltip="'per depth' standardises the edges of each depth among themselves (BranchGRPO).",
                ),
            ],
            outputs=[TreeType.Output(display_name="TREE", tooltip="The trees with advantages, for LoRAUpdate.")],
        )

    @classmethod
    def execute(cls, tree: Tree, estimator: str, normalisation: str) -> io.NodeOutput:
        return io.NodeOutput(tree.with_advantages(estimator=estimator, normalisation=normalisation))  # type: ignore[arg-type]
