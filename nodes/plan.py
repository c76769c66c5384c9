"""What a tree looks like before it grows: the plan, and the noise schedule."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..treegrpo_core import plan as plans
from ..treegrpo_core.plan import Plan
from . import host
from .types import CATEGORY, PlanType

PRESETS = ["row", "Flow-GRPO", "DanceGRPO", "MixGRPO", "BranchGRPO", "Flow-GRPO-Fast"]


def preset_plan(preset: str, row: str, steps: int, group: int, window: int, start: int, roots: int) -> Plan:
    """The plan of a method by name, or the row of integers itself."""
    if preset == "row":
        return Plan.parse(row, roots)
    if preset == "Flow-GRPO":
        return plans.flow_grpo_plan(steps, group)
    if preset == "DanceGRPO":
        return plans.dance_grpo_plan(steps, group)
    if preset == "MixGRPO":
        return plans.mix_grpo_plan(steps, group, window, start)
    if preset == "BranchGRPO":
        return plans.branch_grpo_plan(steps)
    return plans.flow_grpo_fast_plan(steps, group, start, window)


class TreePlan(io.ComfyNode):
    """Writes down a plan."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TreeGRPOPlan",
            display_name="TreeGRPO Plan",
            category=CATEGORY,
            description="What every sampling step does, as a row of integers: 0 deterministic, k stochastic with "
            "k children per node. "
            "TreeGRPO and its rivals are all such rows.",
            inputs=[
                io.Combo.Input(
                    "preset",
                    options=PRESETS,
                    default="row",
                    tooltip="A published method, or 'row' for your own integers.",
                ),
                io.String.Input(
                    "row",
                    default="0 3 3 3 0 0 0 0 0 0",
                    tooltip="For 'row': one integer per sampling step; the last must be 0.",
                ),
                io.Int.Input(
                    "roots", default=1, min=1, max=1024, tooltip="For 'row': independent initial noises per prompt."
                ),
                io.Int.Input(
                    "steps",
                    default=10,
                    min=2,
                    max=1000,
                    tooltip="For presets: sampling steps, as many as the sigmas have.",
                ),
                io.Int.Input("group", default=12, min=2, max=4096, tooltip="For presets: images per prompt."),
                io.Int.Input(
                    "window", default=4, min=1, max=1000, tooltip="For MixGRPO and Flow-GRPO-Fast: stochastic steps."
                ),
                io.Int.Input(
                    "start",
                    default=0,
                    min=0,
                    max=1000,
                    tooltip="For MixGRPO and Flow-GRPO-Fast: first stochastic step.",
                ),
            ],
            outputs=[
                PlanType.Output(display_name="TREE_PLAN", tooltip="For TreeSampler; replaces its window settings.")
            ],
        )

    @classmethod
    def execute(
        cls, preset: str, row: str, roots: int, steps: int, group: int, window: int, start: int
    ) -> io.NodeOutput:
        return io.NodeOutput(preset_plan(preset, row, steps, group, window, start, roots))


class Schedule(io.ComfyNode):
    """The noise schedule a model family is usually sampled with."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TreeGRPOSchedule",
            display_name="TreeGRPO Schedule",
            category=CATEGORY,
            description="Sigmas of the schedule the model's family is usually sampled with, under the shift that is "
            "set on the model. BasicScheduler does the same for a scheduler of your choice.",
            inputs=[
                io.Model.Input("model", tooltip="The MODEL output of TreeGRPOPolicy."),
                io.Int.Input(
                    "steps",
                    default=0,
                    min=0,
                    max=1000,
                    tooltip="Denoising steps, at least 2. 0: the family's usual number for training.",
                ),
            ],
            outputs=[
                io.Sigmas.Output(display_name="SIGMAS", tooltip="For TreeSampler."),
                io.String.Output(display_name="scheduler", tooltip="Name of the scheduler that was used."),
            ],
        )

    @classmethod
    def execute(cls, model: Any, steps: int) -> io.NodeOutput:
        family = host.architecture(model)
        return io.NodeOutput(host.schedule(model, family.scheduler, steps or family.steps), family.scheduler)
