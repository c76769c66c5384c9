"""The update: trees in, a better LoRA out."""

from __future__ import annotations

import logging
from typing import Any

from comfy_api.latest import io

from ..treegrpo_core.lora import lora_tensors
from ..treegrpo_core.metrics import Metrics, curve
from ..treegrpo_core.run import Run
from ..treegrpo_core.signals import warnings
from ..treegrpo_core.trainer import NOISE_MARGIN, ReplayError, UpdateSettings
from ..treegrpo_core.tree import Tree
from . import host, inputs
from .guided import outside_inference_mode
from .patches import suspects
from .policy import PolicyHandle
from .types import CATEGORY, LoraModelType, LossMapType, PolicyType, TreeType

log = logging.getLogger("treegrpo")


def loss_map(run: Run) -> dict[str, list[float]]:
    """Core's LOSS_MAP, for its Plot Loss Graph: one finite number per update, as :func:`.metrics.curve` gives them."""
    return {"loss": curve(run.losses)}


def _summary(run: Run, trees: list[Tree], metrics: Metrics, asked: float) -> str:
    """One line for the node: the reward, and whatever is not as it should be."""
    text = f"step {run.iteration}: reward {metrics.reward_mean:.4g} +- {metrics.reward_std:.2g}"
    if run.iteration == 1:
        text += f"; replay noise {metrics.replay_noise:.1e}"
    if metrics.clip > asked:
        text += f"; clip raised from {asked:.1e} to {metrics.clip:.1e}, {NOISE_MARGIN:g} times the replay noise"
    if metrics.nfe_train == 0:
        text += "; all rewards are equal, nothing was trained"
    if metrics.skipped:
        text += f"; {metrics.skipped} steps skipped, gradient not finite"
    if any(tree.iteration != metrics.iteration for tree in trees):
        text += "; trained on an old tree: give TreeSampler the POLICY of TreeGRPO Loop Start"
    if metrics.log_ratio_max > 1:
        text += f"; log-ratio {metrics.log_ratio_max:.1e}, the policy jumps: lower the learning rate"
    weights = {name: weight for entry in trees if entry.rewards for name, weight in _weights(entry)}
    for warning in warnings(run.history.ends(), weights):
        log.warning("TreeGRPO: run %s: %s", run.name, warning)
        text += f"\n{warning}"
    return text


def _weights(tree: Tree) -> list[tuple[str, float]]:
    return list(zip(tree.rewards.names, tree.rewards.weights, strict=True)) if tree.rewards else []


class LoRAUpdate(io.ComfyNode):
    """One optimizer update of a run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LoRAUpdate",
            display_name="LoRA Update (TreeGRPO)",
            category=CATEGORY,
            description="Trains the run's LoRA on the trees with GRPO's clipped objective: one forward per "
            "parent node trains all its children. "
            "The new state is on disk before this node is done.",
            is_input_list=True,
            is_output_node=True,
            inputs=[
                PolicyType.Input("policy", tooltip="The run to train."),
                TreeType.Input("tree", tooltip="Trees with advantages; a list of them makes one update."),
                io.Float.Input(
                    "clip",
                    default=1e-4,
                    min=1e-7,
                    max=0.5,
                    step=1e-7,
                    round=False,
                    tooltip="Clip range of the probability ratio. Tiny, since log-probabilities are means over "
                    "the latent.",
                ),
                io.Float.Input(
                    "kl",
                    default=0.0,
                    min=0.0,
                    max=1000.0,
                    step=0.001,
                    tooltip="Weight of the KL divergence to the base model. Keeps the style; 0 spends no time on it.",
                ),
                io.Int.Input("passes", default=1, min=1, max=100, tooltip="Optimizer steps on the same trees."),
                inputs.max_batch("Most latents per forward with gradient; lower it to save memory."),
                io.Float.Input(
                    "max_grad_norm",
                    default=1.0,
                    min=1e-6,
                    max=1e6,
                    step=0.01,
                    tooltip="Gradients longer than this are shortened to it.",
                ),
                io.Float.Input(
                    "advantage_clip",
                    default=5.0,
                    min=0.1,
                    max=100.0,
                    step=0.1,
                    tooltip="Advantages are cut at plus and minus this many standard deviations.",
                ),
                io.Boolean.Input(
                    "gradient_checkpointing",
                    default=False,
                    optional=True,
                    tooltip="Compute the model's blocks again in the backward pass: about a third more time for a "
                    "fraction of the memory. Needed for large models on consumer cards.",
                ),
                io.Float.Input(
                    "clip_high",
                    default=0.0,
                    min=0.0,
                    max=10.0,
                    step=1e-7,
                    round=False,
                    optional=True,
                    tooltip="Another clip range above 1, usually wider than clip: lets unlikely good edges grow "
                    "faster. 0: as clip.",
                ),
                io.Boolean.Input(
                    "ratio_norm",
                    default=False,
                    optional=True,
                    tooltip="GRPO-Guard, for flow models: ratios with mean 1 that do not depend on a step's noise "
                    "level, and equal weight for every step's gradient, against reward hacking.",
                ),
                io.Combo.Input(
                    "kl_reference",
                    options=["base", "average"],
                    default="base",
                    optional=True,
                    tooltip="What kl pulls towards: the base model, or the moving average of the run's own LoRA, which "
                    "only slows it down.",
                ),
            ],
            outputs=[
                PolicyType.Output(display_name="POLICY", tooltip="The run, one step further."),
                LoraModelType.Output(
                    display_name="LORA_MODEL", tooltip="For core's Save LoRA Weights and Load LoRA Model."
                ),
                LossMapType.Output(display_name="LOSS_MAP", tooltip="For core's Plot Loss Graph."),
                io.String.Output(display_name="metrics", tooltip="What happened, as JSON."),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.dynprompt],
        )

    @classmethod
    def execute(
        cls,
        policy: list[PolicyHandle],
        tree: list[Tree],
        clip: list[float],
        kl: list[float],
        passes: list[int],
        max_batch: list[int],
        max_grad_norm: list[float],
        advantage_clip: list[float],
        gradient_checkpointing: list[bool] | None = None,
        clip_high: list[float] | None = None,
        ratio_norm: list[bool] | None = None,
        kl_reference: list[str] | None = None,
    ) -> io.NodeOutput:
        run = policy[0].run
        for one in tree:
            owner: Any = one.policy
            if owner.run is not run:
                raise ValueError(
                    f"tree: it was grown by run {owner.run.name!r}, the policy is run {run.name!r}; connect the "
                    "same policy"
                )
        settings = UpdateSettings(
            clip=clip[0],
            kl=kl[0],
            passes=passes[0],
            max_batch=max_batch[0],
            max_grad_norm=max_grad_norm[0],
            advantage_clip=advantage_clip[0],
            gradient_checkpointing=bool(gradient_checkpointing and gradient_checkpointing[0]),
            clip_high=(clip_high or [0.0])[0] or None,
            ratio_norm=bool(ratio_norm and ratio_norm[0]),
            kl_reference=(kl_reference or ["base"])[0],  # type: ignore[arg-type]
        )
        with outside_inference_mode():
            try:
                metrics = run.update(tree, settings)
            except ReplayError as error:
                guiders: set[Any] = {one.policy.guider for one in tree}  # type: ignore[attr-defined]
                raise ReplayError(f"{error}{''.join(map(suspects, guiders))}") from error
        host.release_memory()
        text = metrics.model_dump_json(indent=1)
        ui = {"text": [_summary(run, tree, metrics, settings.clip)]}
        lora, losses = (host.output_is_used(cls.hidden.dynprompt, cls.hidden.unique_id, slot) for slot in (1, 2))
        return io.NodeOutput(
            policy[0], lora_tensors(run.adapter) if lora else {}, loss_map(run) if losses else {}, text, ui=ui
        )
