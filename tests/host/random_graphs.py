"""A training graph on a reduced model with random weights (random_models/): what the tests of model families share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.client import Graph, Node
from treegrpo_core.architectures import Architecture
from treegrpo_core.plan import tree_plan

PROMPTS = "one\ntwo"
PLAN = tree_plan(num_steps=4, branching=2, depth=2, start=1)
GUIDANCE_EMBEDDED = ("Flux", "Flux 2")
"""Families that take guidance as an input and are sampled without a negative prompt."""


@dataclass
class RandomTraining:
    """The nodes of the graph, to change their inputs or to wire more to them."""

    graph: Graph
    model: Node
    before: Node
    policy: Node
    guider: Node
    sigmas: Node
    leaves: Node
    """Shows the leaves' values."""
    update: Node

    def set(self, node: str, **inputs: Any) -> RandomTraining:
        """Change inputs of a node named by its field."""
        self.graph.inputs(getattr(self, node)).update(inputs)
        return self


def random_model(graph: Graph, entry: Architecture) -> Node:
    """MODEL, positive conditioning of two prompts, negative conditioning, LATENT."""
    return graph.add("TestRandomModel", architecture=entry.name, rows=2, seed=0)


def run_policy(graph: Graph, run_name: str, model: list[Any]) -> Node:
    """The run's policy on ``model``, with a learning rate whose first step shows."""
    return graph.add(
        "TreeGRPOPolicy",
        model=model,
        run_name=run_name,
        rank=2,
        alpha=2.0,
        targets="attention+mlp",
        learning_rate=1e-2,
        optimizer="adamw",
        seed=0,
        if_run_exists="continue or create",
        start_from="none",
    )


def random_guider(
    graph: Graph, entry: Architecture, model: list[Any], positive: list[Any], negative: list[Any]
) -> Node:
    """The guider that the family is usually sampled with."""
    if entry.name in GUIDANCE_EMBEDDED:
        guided = graph.add("FluxGuidance", conditioning=positive, guidance=3.5)
        return graph.add("BasicGuider", model=model, conditioning=guided[0])
    return graph.add("CFGGuider", model=model, positive=positive, negative=negative, cfg=3.0)


def random_training(graph: Graph, run_name: str, entry: Architecture) -> RandomTraining:
    """One update of a tree with four leaves for each of two prompts, on rewards out of the air."""
    model = random_model(graph, entry)
    before = graph.add("TestInspect", model=model[0])
    policy = run_policy(graph, run_name, before[0])
    guider = random_guider(graph, entry, policy[1], model[1], model[2])
    sigmas = graph.add("BasicScheduler", model=policy[1], scheduler=entry.scheduler, steps=len(PLAN.steps), denoise=1.0)
    noise = graph.add("RandomNoise", noise_seed=3)
    sampler = graph.add(
        "TreeSampler",
        policy=policy[0],
        guider=guider[0],
        sigmas=sigmas[0],
        noise=noise[0],
        latent=model[3],
        prompts=PROMPTS,
        branching=2,
        depth=2,
        window="fixed",
        r=0.5,
        start=1,
        kernel="auto",
        eta=0.0,
        max_batch=64,
    )
    leaves = graph.add("TestLeaves", tree=sampler[0])
    numbers = graph.add("TestRewards", count=2 * PLAN.leaves)
    rewarded = graph.add("TreeGRPORewardFromFloats", tree=sampler[0], rewards=numbers[0])
    advantage = graph.add("TreeAdvantage", tree=rewarded[0], estimator="softmax", normalisation="none")
    update = graph.add(
        "LoRAUpdate",
        policy=policy[0],
        tree=advantage[0],
        clip=1e-4,
        kl=0.0,
        passes=1,
        max_batch=64,
        max_grad_norm=1.0,
        advantage_clip=5.0,
    )
    return RandomTraining(graph, model, before, policy, guider, sigmas, leaves, update)


def ordinary_latent(graph: Graph, entry: Architecture, model: Any, source: Node) -> Node:
    """Shows the values of KSampler's latent of ``model`` (a MODEL link), with the other outputs of a random model."""
    latent = graph.add(
        "KSampler",
        model=model,
        seed=5,
        steps=2,
        cfg=1.0,
        sampler_name="euler",
        scheduler=entry.scheduler,
        positive=source[1],
        negative=source[2],
        latent_image=source[3],
        denoise=1.0,
    )
    return graph.add("TestValues", latent=latent[0])
