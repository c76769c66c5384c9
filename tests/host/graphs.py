"""Graphs the host tests share, built as a user wires them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.client import Graph, Node

PROMPTS = ["fox on blue", "small tulip on white"]


@dataclass
class Training:
    """The nodes of a training graph, to change their inputs or to wire more to them."""

    graph: Graph
    model: Node
    policy: Node
    start: Node | None
    prompts: Node
    encode: Node
    guider: Node
    sigmas: Node
    noise: Node
    latent: Node
    sampler: Node
    reward: Node
    scorer: Node
    advantage: Node
    update: Node
    end: Node | None = None

    def set(self, node: str, **inputs: Any) -> Training:
        """Change inputs of a node named by its field."""
        self.graph.inputs(getattr(self, node)).update(inputs)
        return self


def training(graph: Graph, run_name: str, *, iterations: int | None = None) -> Training:
    """TinyModel trained on two prompts with four leaves each, on the JPEG reward; in a loop if iterations are given."""
    model = graph.add("TreeGRPOTinyModel")
    policy = graph.add(
        "TreeGRPOPolicy",
        model=model[0],
        run_name=run_name,
        rank=4,
        alpha=4.0,
        targets="attention+mlp",
        learning_rate=1e-3,
        optimizer="adamw",
        seed=0,
        if_run_exists="continue or create",
        start_from="none",
    )
    start = (
        graph.add("TreeGRPOLoopStart", policy=policy[0], iterations=iterations, max_minutes=0.0) if iterations else None
    )
    run = start[1] if start else policy[0]
    prompts = graph.add("TreeGRPOPrompts", text="\n".join(PROMPTS), prompts_per_step=2, seed=0, policy=run)
    encode = graph.add("TreeGRPOEncode", clip=model[1], prompts=prompts[0])
    guider = graph.add("BasicGuider", model=policy[1], conditioning=encode[0])
    sigmas = graph.add("BasicScheduler", model=policy[1], scheduler="simple", steps=6, denoise=1.0)
    noise = graph.add("RandomNoise", noise_seed=3)
    latent = graph.add("EmptySD3LatentImage", width=64, height=64, batch_size=1)
    sampler = graph.add(
        "TreeSampler",
        policy=run,
        guider=guider[0],
        sigmas=sigmas[0],
        noise=noise[0],
        latent=latent[0],
        prompts=encode[1],
        branching=2,
        depth=2,
        window="fixed",
        r=0.5,
        start=1,
        kernel="auto",
        eta=0.0,
        max_batch=64,
    )
    reward = graph.add("TreeGRPORewardModel", name="jpeg", weight=1.0)
    scorer = graph.add("RewardScorer", tree=sampler[0], vae=model[2], reward=reward[0])
    advantage = graph.add("TreeAdvantage", tree=scorer[0], estimator="softmax", normalisation="none")
    update = graph.add(
        "LoRAUpdate",
        policy=run,
        tree=advantage[0],
        clip=1e-4,
        kl=0.0,
        passes=1,
        max_batch=64,
        max_grad_norm=1.0,
        advantage_clip=5.0,
    )
    end = graph.add("TreeGRPOLoopEnd", loop=start[0], policy=update[0], tree=advantage[0]) if start else None
    return Training(
        graph,
        model,
        policy,
        start,
        prompts,
        encode,
        guider,
        sigmas,
        noise,
        latent,
        sampler,
        reward,
        scorer,
        advantage,
        update,
        end,
    )


def ordinary_image(graph: Graph, tiny: Node, model: Any, *, prompt: str = "fox on blue", cfg: float = 1.0) -> Node:
    """An ordinary KSampler picture of ``model`` (a MODEL link); returns the node that shows it."""
    positive = graph.add("CLIPTextEncode", clip=tiny[1], text=prompt)
    negative = graph.add("CLIPTextEncode", clip=tiny[1], text="")
    latent = graph.add("EmptySD3LatentImage", width=64, height=64, batch_size=4)
    samples = graph.add(
        "KSampler",
        model=model,
        seed=5,
        steps=6,
        cfg=cfg,
        sampler_name="euler",
        scheduler="simple",
        positive=positive[0],
        negative=negative[0],
        latent_image=latent[0],
        denoise=1.0,
    )
    images = graph.add("VAEDecode", samples=samples[0], vae=tiny[2])
    return graph.add("PreviewImage", images=images[0])
