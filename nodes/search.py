"""Tree search: better pictures from a model as it is."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io
from torch import Tensor

from ..treegrpo_core.plan import tree_plan, with_tail
from ..treegrpo_core.rewards import WeightedReward
from ..treegrpo_core.tree import Tree, by_prompt, taken
from . import inputs
from .preview import best_leaves, check_count
from .reward import decode, decode_latents, rewards_of
from .sampling import bare_tree, grown, guided_policy, levels_of
from .types import CATEGORY, RewardType


class Search(io.ComfyNode):
    """Samples a tree of which only the branches with the best early rewards go on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TreeGRPOSearch",
            display_name="Tree Search (TreeGRPO)",
            category=CATEGORY,
            description="Samples the pictures with the best reward without any training, from any model: a tree of "
            "pictures is grown, after every branching step the predicted pictures are scored, and only the best "
            "branches go on. Replaces SamplerCustomAdvanced.",
            inputs=[
                io.Guider.Input("guider", tooltip="CFGGuider, BasicGuider, ...: on any model, with or without LoRA."),
                io.Sigmas.Input("sigmas", tooltip="The noise schedule, ending at 0 (BasicScheduler with denoise 1)."),
                io.Noise.Input("noise", tooltip="RandomNoise: its seed fixes everything that is drawn."),
                inputs.latent(),
                inputs.prompts(),
                io.Vae.Input("vae", tooltip="The VAE of the model."),
                RewardType.Input("reward", tooltip="What a good picture is: one reward or a chain of them."),
                io.Int.Input("branching", default=4, min=1, max=64, tooltip="Children per node in the window (k)."),
                io.Int.Input(
                    "depth", default=5, min=1, max=64, tooltip="Branching steps, the width of the window (d)."
                ),
                io.Int.Input("start", default=4, min=0, max=1000, tooltip="First step of the window, from 0."),
                io.Int.Input(
                    "beam",
                    default=3,
                    min=0,
                    max=4096,
                    tooltip="Nodes per prompt that go on after each step of the window, the best by an early reward. "
                    "0: all go on, and only the finished pictures are scored.",
                ),
                io.Int.Input("roots", default=4, min=1, max=1024, tooltip="Independent initial noises per prompt."),
                inputs.kernel(),
                inputs.eta(),
                io.Int.Input(
                    "tail_steps",
                    default=0,
                    min=0,
                    max=1000,
                    tooltip="Steps after the window, taken by DPM-Solver++ 2M. 0: every step of the schedule, by "
                    "Euler.",
                ),
                inputs.max_batch(),
                io.Int.Input("count", default=1, min=1, max=4096, tooltip="Pictures per prompt that come out."),
            ],
            outputs=[
                io.Latent.Output(
                    display_name="LATENT", tooltip="The best pictures: those of the first prompt, then the second, ..."
                ),
                io.Float.Output(
                    display_name="rewards", is_output_list=True, tooltip="Weighted sum of the rewards of each of these."
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        guider: Any,
        sigmas: Tensor,
        noise: Any,
        latent: dict[str, Any],
        prompts: str,
        vae: Any,
        reward: list[WeightedReward],
        branching: int,
        depth: int,
        start: int,
        beam: int,
        roots: int,
        kernel: str,
        eta: float,
        tail_steps: int,
        max_batch: int,
        count: int,
    ) -> io.NodeOutput:
        asked = [entry for entry in reward if entry.weight]
        if not asked:
            raise ValueError("reward: all weights are 0, so no picture is better than another; give one a weight")
        policy, texts = guided_policy(None, guider, sigmas, latent, prompts)
        schedule = levels_of(sigmas)
        plan = tree_plan(len(schedule) - 1, branching, depth, start, roots=roots, beam=beam)
        check_count(count, plan)
        plan, schedule = with_tail(plan, schedule, tail_steps)
        tree = bare_tree(plan, schedule, kernel, eta, texts, policy)
        tree = searched(tree, noise, vae, asked, max_batch, tail_steps > 0, cls.hidden.unique_id)
        assert tree.rewards is not None
        best = tree.rewards.best(count)
        return io.NodeOutput(best_leaves(tree, best), by_prompt(taken(tree.rewards.total, best)).tolist())


def searched(
    tree: Tree,
    noise: Any,
    vae: Any,
    reward: list[WeightedReward],
    max_batch: int,
    second_order: bool,
    node_id: str | None,
) -> Tree:
    """The tree with leaves and their rewards; with a beam, those of a weight prune it by the early predictions."""
    policy: Any = tree.policy
    asked = [entry for entry in reward if entry.weight]

    def early(denoised: Tensor) -> Tensor:
        images = decode_latents(policy.guider, by_prompt(denoised), vae)
        return rewards_of(asked, images, tree.prompts, len(denoised)).standing

    score = early if tree.plan.beam else None
    tree = grown(tree, noise, max_batch, None, second_order, node_id, score)
    return tree.scored(rewards_of(reward, decode(tree, vae), tree.prompts, tree.plan.leaves))
