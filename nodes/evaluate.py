"""Held-out prompts, scored every few updates."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import torch
from comfy_api.latest import io
from comfy_execution.graph import ExecutionBlocker
from torch import Tensor

from ..treegrpo_core.evaluation import Evaluation, add_evaluation, read_evaluations
from ..treegrpo_core.policy import Denoiser
from ..treegrpo_core.rewards import WeightedReward
from ..treegrpo_core.sampler import sample
from . import inputs, latents
from .guided import GuidedPolicy
from .policy import PolicyHandle
from .reward import decode_latents, score_each
from .sampling import guided_policy, prompt_keys
from .types import CATEGORY, PolicyType, RewardType


class Evaluate(io.ComfyNode):
    """Draws and scores fixed prompts from fixed noise."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TreeGRPOEvaluate",
            display_name="TreeGRPO Evaluate",
            category=CATEGORY,
            description="Every few updates, draws held-out prompts from the same noise and scores them with all "
            "rewards, also those that are not trained on. The curve is kept in the run's folder, evaluation.jsonl, and "
            "begins with the model without the adapter.",
            is_output_node=True,
            inputs=[
                PolicyType.Input("policy", tooltip="The run after its update: POLICY of LoRAUpdate."),
                io.Guider.Input(
                    "guider", tooltip="Built on TreeGRPOPolicy's MODEL output, with the held-out prompts' conditioning."
                ),
                io.Sigmas.Input("sigmas", tooltip="The noise schedule of ordinary use, ending at 0."),
                io.Noise.Input("noise", tooltip="RandomNoise: its seed is the same for every evaluation."),
                inputs.latent(),
                inputs.prompts("The held-out prompts the guider encodes, one per line: none that is trained on."),
                io.Vae.Input("vae", tooltip="The VAE of the model."),
                RewardType.Input("reward", tooltip="The rewards; their weights play no part here."),
                io.Int.Input("every", default=10, min=1, max=10000, tooltip="Updates from one evaluation to the next."),
            ],
            outputs=[
                io.Image.Output(display_name="pictures", tooltip="One per prompt, only when they were drawn anew."),
                io.String.Output(display_name="curve", tooltip="Mean of every reward per evaluation, as JSON."),
            ],
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
        vae: Any,
        reward: list[WeightedReward],
        every: int,
    ) -> io.NodeOutput:
        run = policy.run
        guided, texts = guided_policy(policy, guider, sigmas, latent, prompts)
        done = {entry.iteration for entry in read_evaluations(run.folder, texts)}
        pictures: Any = ExecutionBlocker(None)
        for iteration in (0, run.iteration):
            starts_here = iteration > 0 or not run.settings.start_from
            if iteration in done or iteration % every or not starts_here:
                continue
            with run.adapter.disabled() if iteration == 0 else nullcontext():
                pictures = decode_latents(guider, drawn(guided, noise, texts), vae)
            frames = len(pictures) // len(texts)
            asked = [text for text in texts for _ in range(frames)]
            scores = score_each(reward, pictures, asked).unflatten(1, (-1, frames)).mean(2)
            names = [each.reward.name for each in reward]
            add_evaluation(run.folder, Evaluation.of(iteration, texts, names, scores))
            done.add(iteration)
        curve = [{"iteration": entry.iteration, **entry.means} for entry in read_evaluations(run.folder, texts)]
        lines = [
            ", ".join(f"{name} {value:.4g}" for name, value in entry.items()) for entry in curve[:1] + curve[1:][-1:]
        ]
        return io.NodeOutput(pictures, json.dumps(curve, indent=1), ui={"text": ["\n".join(lines)]})


def drawn(policy: GuidedPolicy, noise: Any, prompts: tuple[str, ...]) -> Tensor:
    """The latents (P, *latent), from noise that depends on the seed and the prompts alone."""
    sigmas = [float(sigma) for sigma in policy.sigmas]

    def work(denoise: Denoiser, sampling: Any, latent: Tensor) -> Tensor:
        noises = latents.root_noise(noise, policy.latent, 1, noise.seed, prompt_keys(prompts))
        roots = latents.initial_states(sampling, sigmas[0], noises, latent)
        return sample(denoise, roots, sigmas, max_batch=len(prompts))[0]

    leaves = policy.open(work, train=False)
    if not torch.isfinite(leaves).all():
        raise ValueError("model: the pictures contain NaN or infinite values; lower the learning rate or the guidance")
    return leaves
