"""Where the tree grows."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from comfy_api.latest import io
from torch import Tensor

from ..treegrpo_core.adapter import Adapter
from ..treegrpo_core.batches import is_out_of_memory
from ..treegrpo_core.memory import Estimate, measure_activations
from ..treegrpo_core.plan import Plan, Window, derive_seed, plan_for, with_tail
from ..treegrpo_core.policy import Denoiser
from ..treegrpo_core.prompts import check_text, split_lines
from ..treegrpo_core.sampler import Score, check_sigmas, grow
from ..treegrpo_core.transition import KERNELS, check_eta, choose_kernel
from ..treegrpo_core.tree import Growth, Tree, timed
from . import host, inputs, latents
from .guided import GuidedPolicy
from .patches import check_patches
from .policy import PolicyHandle
from .types import CATEGORY, PlanType, PolicyType, TreeType

log = logging.getLogger("treegrpo")


def split_prompts(text: str, rows: int) -> tuple[str, ...]:
    """The prompts of ``rows`` rows of conditioning; ValueError if the counts differ or a line is no text."""
    check_text(text, "prompts")
    if rows == 1:
        return (host.plain_prompt(text),)
    lines = tuple(host.plain_prompt(line) for line in split_lines(text) if line.strip())
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


def guided_policy(
    policy: PolicyHandle | None, guider: Any, sigmas: Tensor, latent: dict[str, Any], prompts: str
) -> tuple[GuidedPolicy, tuple[str, ...]]:
    """The run's policy under this guider, and the prompts.

    Without a policy, whatever model the guider has. ValueError if the guider has another model, another number of
    prompts, or patches that trees cannot do with, or if the sigmas or the latent do not fit the model.
    """
    model = guider.model_patcher
    if policy and host.adapter_of(model) is not policy.run.adapter:
        raise ValueError(
            "guider: it is not built on this run's model; connect TreeGRPOPolicy's MODEL output to the guider"
        )
    texts = split_prompts(prompts, host.prompt_rows(guider))
    prediction = host.prediction_of(model)
    check_sigmas(sigmas.tolist(), prediction)
    host.warn_of_high_sigmas(model, float(sigmas[0]))
    size = latents.fix_latent(model, latent, len(texts))
    run = policy.run if policy else None
    guided = GuidedPolicy(run, guider, size, sigmas.clone(), prediction)
    check_patches(guided)
    return guided, texts


def levels_of(sigmas: Tensor) -> tuple[float, ...]:
    """The noise levels of a SIGMAS input; ValueError if there are too few for a tree."""
    if len(sigmas) < 3:
        raise ValueError("sigmas: the schedule has fewer than 2 steps; give the scheduler more steps and denoise 1")
    return tuple(float(sigma) for sigma in sigmas)


def bare_tree(
    plan: Plan, sigmas: tuple[float, ...], kernel: str, eta: float, prompts: tuple[str, ...], policy: GuidedPolicy
) -> Tree:
    """A tree that has not grown yet. ``kernel`` may be "auto"; eta 0: the kernel's usual value."""
    model = policy.guider.model_patcher
    kernel = choose_kernel(kernel, policy.prediction, host.architecture(model).kernel)
    eta = eta or KERNELS[kernel].default_eta
    check_eta(kernel, eta)
    host.warn_of_double_guidance(policy.guider)
    return Tree(
        plan=plan,
        sigmas=sigmas,
        kernel=kernel,
        eta=eta,
        prompts=prompts,
        policy=policy,
        iteration=policy.run.iteration if policy.run else 0,
        growth=Growth([], policy.latent, 0),
    )


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
                inputs.latent(),
                inputs.prompts(),
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
                    options=["random", "fixed", "shifting", "adaptive"],
                    default="random",
                    tooltip="Where the window lies: drawn anew for every update, fixed, moving on by one step per "
                    "update, or drawn more often where the rewards of earlier updates spread more.",
                ),
                io.Float.Input(
                    "r",
                    default=0.5,
                    min=0.01,
                    max=0.99,
                    step=0.01,
                    tooltip="For 'random' and 'adaptive': the start is step i with probability proportional to r^i. "
                    "Lower trains layout, higher detail.",
                ),
                io.Int.Input(
                    "start",
                    default=0,
                    min=0,
                    max=1000,
                    tooltip="For 'fixed' and 'shifting': first step of the window, from 0.",
                ),
                inputs.kernel(),
                inputs.eta(),
                inputs.max_batch(),
                PlanType.Input("plan", optional=True, tooltip="Replaces branching, depth, window, r and start."),
                io.Boolean.Input(
                    "store_on_cpu",
                    default=False,
                    optional=True,
                    tooltip="Keep the tree's latents in main memory until they are needed: for large trees of large "
                    "latents.",
                ),
                io.Int.Input(
                    "tail_steps",
                    default=0,
                    min=0,
                    max=1000,
                    optional=True,
                    tooltip="Steps after the window, where most of the time goes, taken by DPM-Solver++ 2M: 3 or 4 do "
                    "the work of twice as many. 0: every step of the schedule, by Euler.",
                ),
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
        store_on_cpu: bool = False,
        tail_steps: int = 0,
    ) -> io.NodeOutput:
        run = policy.run
        guided, texts = guided_policy(policy, guider, sigmas, latent, prompts)
        source = plan or Window(window, branching, depth, r, start)  # type: ignore[arg-type]
        spread = run.history.step_spread.means() if window == "adaptive" and plan is None else None
        schedule = levels_of(sigmas)
        this_plan = plan_for(source, len(schedule) - 1, run.iteration, noise.seed, spread)
        this_plan, schedule = with_tail(this_plan, schedule, tail_steps)
        tree = bare_tree(this_plan, schedule, kernel, eta, texts, guided)
        if run.iteration == 0:
            log.info("TreeGRPO: run %s, %s", run.name, _estimate(tree, run.adapter))
        store = torch.device("cpu") if store_on_cpu else None
        return io.NodeOutput(grown(tree, noise, max_batch, store, tail_steps > 0, cls.hidden.unique_id))


def _estimate(tree: Tree, adapter: Adapter) -> str:
    """What the run's updates will need in memory, measured by one forward of one node."""
    policy: GuidedPolicy = tree.policy  # type: ignore[assignment]

    def work(denoise: Denoiser, _sampling: Any, latent: Tensor) -> str:
        module = policy.guider.model_patcher.model.diffusion_model
        node = measure_activations(module, lambda: denoise(latent, tree.sigmas[0]))
        estimate = Estimate.of(module, adapter, tree.plan, latent, node)
        return estimate.text(host.free_memory(policy.guider.model_patcher) + estimate.weights)

    try:
        return policy.open(work, train=True)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return "memory: one node does not fit without gradient_checkpointing; turn it on in LoRAUpdate"


def grown(
    tree: Tree,
    noise: Any,
    max_batch: int,
    store: torch.device | None,
    second_order: bool,
    node_id: str | None,
    score: Score | None = None,
) -> Tree:
    """The tree with leaves: sampled by its policy, timed, with progress on the node.

    ``score``, for a plan with a beam, is called amid the sampling and may load models of its own.
    """
    start = time.perf_counter()
    bar = host.progress(tree.plan.nfe_sample * len(tree.prompts), node_id)
    policy: GuidedPolicy = tree.policy  # type: ignore[assignment]
    seed = derive_seed(noise.seed, tree.iteration)
    keys = prompt_keys(tree.prompts)

    def work(denoise: Denoiser, sampling: Any, latent: Tensor) -> Growth:
        def counted(x: Tensor, sigma: float) -> Tensor:
            denoised = denoise(x, sigma)
            bar.update(len(x))
            return denoised

        noises = latents.root_noise(noise, policy.latent, tree.plan.roots, seed, keys)
        roots = latents.initial_states(sampling, tree.sigmas[0], noises, latent)
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
            store=store,
            second_order=second_order,
            score=score and (lambda denoised: policy.aside(partial(score, denoised))),
            limits=policy.run.limits if policy.run else None,
        )

    growth = policy.open(work, train=False)
    if not torch.isfinite(growth.leaves).all():
        raise ValueError(
            "model: the leaves contain NaN or infinite values; lower eta or the guidance, or use another kernel"
        )
    return timed(replace(tree, growth=growth), "rollout", time.perf_counter() - start)
