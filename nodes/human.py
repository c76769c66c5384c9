"""Rewards given by a person in the browser."""

from __future__ import annotations

import time
from typing import Any

import torch
from comfy_api.latest import io
from torch import Tensor

from ..treegrpo_core.human import MODES, Judging
from ..treegrpo_core.rewards import check_pictures
from ..treegrpo_core.tree import Rewards, Tree, timed
from . import host
from .judging import Session, jpegs
from .reward import decode, thumbnails
from .types import CATEGORY, TreeType

NAME = "human"
KEEP, EQUAL, STOP = "use the answers so far", "no opinion", "stop"


class HumanReward(io.ComfyNode):
    """A person judges the leaves."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TreeGRPOHumanReward",
            display_name="TreeGRPO Human Reward",
            category=CATEGORY,
            description="Shows the leaves in the browser and waits until you have judged them, by mouse or keyboard. "
            "Every answer is written to human.jsonl in the run's folder.",
            inputs=[
                TreeType.Input("tree", tooltip="The trees of TreeSampler; rewards they already have stay."),
                io.Vae.Input("vae", tooltip="The VAE of the model."),
                io.Combo.Input(
                    "mode",
                    options=list(MODES),
                    default="stars",
                    tooltip="stars: 1 to 5 for each picture. pairs: the better of two, again and again. rank: drag all "
                    "pictures of a prompt into order.",
                ),
                io.Float.Input(
                    "minutes",
                    default=10.0,
                    min=0.0,
                    max=100000.0,
                    step=0.5,
                    tooltip="Longest time without an answer; every answer starts it anew. 0: wait without limit.",
                ),
                io.Combo.Input(
                    "fallback",
                    options=[KEEP, EQUAL, STOP],
                    default=KEEP,
                    tooltip="When the time is up: pictures without an answer count as average; or all answers of this "
                    "update are dropped, so that this reward trains nothing; or the queue stops with an error.",
                ),
                io.Float.Input(
                    "weight",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.05,
                    tooltip="Weight of this reward's advantage. 0: only logged, never trained on.",
                ),
                io.Int.Input(
                    "comparisons",
                    default=0,
                    min=0,
                    max=100000,
                    tooltip="Pairs per prompt in mode pairs. 0: two per picture.",
                ),
            ],
            outputs=[
                TreeType.Output(display_name="TREE", tooltip="The trees with the reward 'human', for TreeAdvantage."),
                io.Image.Output(
                    display_name="leaves",
                    tooltip="All leaves: those of the first prompt, then the second, ...; of films, all frames.",
                ),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.dynprompt],
        )

    @classmethod
    def execute(
        cls, tree: Tree, vae: Any, mode: Any, minutes: float, fallback: str, weight: float, comparisons: int
    ) -> io.NodeOutput:
        if tree.rewards and NAME in tree.rewards.names:
            raise ValueError("tree: it has a human reward already; use one TreeGRPO Human Reward per tree")
        if not weight and not (tree.rewards and any(tree.rewards.weights)):
            raise ValueError("weight is 0 and the tree has no other reward to train on; judging would be in vain")
        start = time.perf_counter()
        images = decode(tree, vae)
        check_pictures(images, [""] * len(images))
        frames = len(images) // (tree.plan.leaves * len(tree.prompts))
        shown = images[frames // 2 :: frames]
        tree.growth.thumbnails = thumbnails(shown, len(tree.prompts))
        session = _session(tree, jpegs(shown, len(tree.prompts)), mode, minutes, comparisons)
        # A loop keeps every output until the queue is done; images nobody reads would fill the memory.
        if not host.output_is_used(cls.hidden.dynprompt, cls.hidden.unique_id, 1):
            images = images[:1].clone()
        del shown
        tree = timed(tree, "decode", time.perf_counter() - start)
        host.release_memory()
        values = session.judging.scores() if session.wait() else _after_time(session, fallback, minutes)
        return io.NodeOutput(tree.scored(_with(tree.rewards, weight, values)), images)


def _session(tree: Tree, pictures: list[list[bytes]], mode: Any, minutes: float, comparisons: int) -> Session:
    policy: Any = tree.policy
    judging = Judging(mode, len(tree.prompts), tree.plan.leaves, comparisons=comparisons, seed=tree.iteration)
    return Session(
        judging, tree.prompts, pictures, policy.run.folder, tree.iteration, host.running_prompt(), minutes * 60
    )


def _after_time(session: Session, fallback: str, minutes: float) -> Tensor:
    """(L, P) scores when the time is up. TimeoutError if the fallback is to stop."""
    if fallback == STOP:
        raise TimeoutError(
            f"minutes: nobody answered for {minutes:g} minutes, so this update was stopped as fallback says; the run "
            "stays at its last update. Queue again when somebody is there, raise minutes, or choose another fallback"
        )
    values = session.judging.scores()
    return values if fallback == KEEP else torch.zeros_like(values)


def _with(before: Rewards | None, weight: float, values: Tensor) -> Rewards:
    """The rewards a tree had and one more: values (L, P)."""
    names, weights = (before.names, before.weights) if before else ((), ())
    stacked = torch.cat([before.values, values[None]]) if before else values[None]
    return Rewards((*names, NAME), (*weights, float(weight)), stacked)
