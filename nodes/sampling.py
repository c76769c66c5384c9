"""Where the tree grows: plans and the tree sampler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from comfy_api.latest import io
from torch import Tensor

from ..treegrpo_core import plan as plans
from ..treegrpo_core.plan import Plan, Window, derive_seed, plan_for
from ..treegrpo_core.policy import Denoiser
from ..treegrpo_core.sampler import check_schedule, grow
from ..treegrpo_core.transition import KERNELS, choose_kernel
from ..treegrpo_core.tree import Growth, Tree, timed
from . import host
from .policy import PolicyHandle
from .types import CATEGORY, PlanType, PolicyType, TreeType

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


def split_prompts(text: str, rows: int) -> tuple[str, ...]:
    """The prompts of ``rows`` rows of conditioning; ValueError if the counts differ."""
    if rows == 1:
        return (host.plain_prompt(text),)
    lines = tuple(host.plain_prompt(line) for line in text.splitlines() if line.strip())
    if len(lines) != rows:
        raise ValueError(
            f"prompts: there are {len(lines)} lines, but the guider's conditioning has {rows} rows; "
            "connect TreeGRPOEncode's prompts output, or write one prompt per line"
        )
    return lines


def prompt_keys(prompts: Sequence[str]) -> list[int]:
    """What stands for each prompt in the seeds of its noise: its text, and a count if it occurs again.

    So a prompt grows the same tree alone, in a batch, and in a list of trees, and no two share their noise.
    """
    return [derive_seed(text, prompts[:place].count(text)) for place, text in enumerate(prompts)]


class TreeSampler(io.ComfyNode):
    """Grows one tree per prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TreeSampler",
            display_name="Tree Sampler (TreeGRPO)",
            category=CATEGORY,
            description="Samples a tree of images per prompt: shared noise and prefix, k-way branching in a "
            "window of stochastic steps, "
            "deterministic to the leaves. Replaces SamplerCustomAdvanced in a training graph.",
            inputs=[
                PolicyType.Input("policy", tooltip="The run that is trained."),
                io.Guider.Input(
                    "guider", tooltip="CFGGuider, BasicGuider, ...: built on TreeGRPOPolicy's MODEL output."
                ),
                io.Sigmas.Input("sigmas", tooltip="The noise schedule, ending at 0 (BasicScheduler with denoise 1)."),
                io.Noise.Input(
                    "noise", tooltip="RandomNoise: its seed fixes the whole run together with the run's step."
                ),
                io.Latent.Input(
                    "latent", tooltip="An empty latent of the image size; batch size 1 serves all prompts."
                ),
                io.String.Input(
                    "prompts",
                    multiline=True,
                    dynamic_prompts=False,
                    tooltip="The prompts the guider encodes, one per line.",
                ),
                io.Int.Input(
                    "branching",
                    default=3,
                    min=0,
                    max=64,
                    tooltip="Children per node (k). k to the power of depth leaves.",
                ),
                io.Int.Input(
                    "depth", default=3, min=0, max=64, tooltip="Branching steps, the width of the window (d)."
                ),
                io.Combo.Input(
                    "window",
                    options=["random", "fixed", "shifting"],
                    default="random",
                    tooltip="Where the window lies: drawn anew for every update, fixed, or moving on by one step "
                    "per update.",
                ),
                io.Float.Input(
                    "r",
                    default=0.5,
                    min=0.01,
                    max=0.99,
                    step=0.01,
                    tooltip="For 'random': the start is step i with probability proportional to r^i. Lower "
                    "trains layout, higher detail.",
                ),
                io.Int.Input(
                    "start",
                    default=0,
                    min=0,
                    max=1000,
                    tooltip="For 'fixed' and 'shifting': first step of the window, from 0.",
                ),
                io.Combo.Input(
                    "kernel",
                    options=["auto", *KERNELS],
                    default="auto",
                    tooltip="The stochastic step. 'auto': flow_sde for flow models, ancestral for eps and "
                    "v-prediction.",
                ),
                io.Float.Input(
                    "eta",
                    default=0.0,
                    min=0.0,
                    max=10.0,
                    step=0.01,
                    tooltip="Strength of the stochastic steps' noise. 0: the kernel's usual value (flow_sde 0.7, "
                    "ancestral 1).",
                ),
                io.Int.Input(
                    "max_batch",
                    default=64,
                    min=1,
                    max=4096,
                    tooltip="Most latents per model forward; lower it to save memory.",
                ),
                PlanType.Input("plan", optional=True, tooltip="Replaces branching, depth, window, r and start."),
            ],
            outputs=[TreeType.Output(display_name="TREE", tooltip="The trees, for RewardScorer and the rest.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        policy: PolicyHandle,
        guider: Any,
        sigmas: Tensor,
        noise: Any,
        latent: dict[str, Any],
        prompts: str,
        branching: int,
        depth: int,
        window: str,
        r: float,
        start: int,
        kernel: str,
        eta: float,
        max_batch: int,
        plan: Plan | None = None,
    ) -> io.NodeOutput:
        run, model = policy.run, guider.model_patcher
        if host.adapter_of(model) is not run.adapter:
            raise ValueError(
                "guider: it is not built on this run's model; connect TreeGRPOPolicy's MODEL output to the guider"
            )
        source = plan or Window(window, branching, depth, r, start)  # type: ignore[arg-type]
        schedule = tuple(float(sigma) for sigma in sigmas)
        if len(schedule) < 3:
            raise ValueError("sigmas: the schedule has fewer than 2 steps; give the scheduler more steps and denoise 1")
        this_plan = plan_for(source, len(schedule) - 1, run.iteration, noise.seed)
        check_schedule(schedule, this_plan)
        prediction = host.prediction_of(model.get_model_object("model_sampling"))
        kernel = choose_kernel(kernel, prediction)
        texts = split_prompts(prompts, host.prompt_rows(guider))
        size = host.fix_latent(model, latent, len(texts))
        tree = Tree(
            plan=this_plan,
            sigmas=schedule,
            kernel=kernel,
            eta=eta or KERNELS[kernel].default_eta,
            prompts=texts,
            policy=host.GuidedPolicy(run, guider, size, sigmas.clone(), prediction),
            iteration=run.iteration,
            growth=Growth([], size, 0),
        )
        return io.NodeOutput(_grown(tree, noise, max_batch, cls.hidden.unique_id))


def _grown(tree: Tree, noise: Any, max_batch: int, node_id: str | None) -> Tree:
    start = time.perf_counter()
    bar = host.progress(tree.plan.nfe_sample * len(tree.prompts), node_id)
    policy: host.GuidedPolicy = tree.policy  # type: ignore[assignment]
    seed = derive_seed(noise.seed, tree.iteration)
    keys = prompt_keys(tree.prompts)

    def work(denoise: Denoiser, sampling: Any, latent: Tensor) -> Growth:
        def counted(x: Tensor, sigma: float) -> Tensor:
            denoised = denoise(x, sigma)
            bar.update(len(x))
            return denoised

        noises = host.root_noise(noise, policy.latent, tree.plan.roots, seed, keys)
        roots = host.initial_states(sampling, tree.sigmas[0], noises, latent)
        return grow(
            counted,
            roots,
            tree.sigmas,
            tree.plan,
            kernel=tree.kernel,
            eta=tree.eta,
            seed=seed,
            prompts=keys,
            max_batch=max_batch,
        )

    growth = policy.open(work, train=False)
    if not torch.isfinite(growth.leaves).all():
        raise ValueError(
            "model: the leaves contain NaN or infinite values; lower eta or the guidance, or use another kernel"
        )
    return timed(replace(tree, growth=growth), "rollout", time.perf_counter() - start)
