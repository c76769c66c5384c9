"""Many updates in one Queue.

The graph itself runs the first update. LoopEnd then runs the loop's body again (nodes/again.py), update by update, and
frees an update's trees once it is done. Nothing it keeps grows with their number.

What the body takes from outside the loop must be at hand for every round, whatever core keeps in its caches: so LoopEnd
gets these links as inputs of its own, which no schema declares. :func:`hold_outside` adds them to a graph that is
queued; where it was not asked, LoopEnd expands once into a copy of itself that has them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import nodes as core_nodes
from comfy_api.latest import io
from comfy_execution.graph import DynamicPrompt, ExecutionBlocker
from comfy_execution.graph_utils import is_link

from ..treegrpo_core.lora import lora_tensors
from ..treegrpo_core.tree import Tree
from . import host
from .again import Again, Link, NodeFailedError, Values, let_others_finish
from .policy import PolicyHandle
from .types import CATEGORY, LoopType, LoraModelType, LossMapType, PolicyType, TreeType
from .update import loss_map

OUTSIDE = "outside "
"""Begins the names of LoopEnd's undeclared inputs: what the body takes from outside the loop."""
ROUND_INPUT = "first round"
"""Undeclared input of LoopEnd's copy: the first update's results. Core keeps it and passes it to nobody."""


@dataclass(frozen=True)
class Loop:
    """What the loop wire carries: the settings of LoopStart, its policy, and which node that is."""

    start: str
    iterations: int
    max_minutes: float
    started: float
    policy: PolicyHandle

    def is_over(self, done: int) -> bool:
        """Whether ``done`` updates are all, or the time is up."""
        minutes = (time.monotonic() - self.started) / 60
        return done >= self.iterations or 0 < self.max_minutes <= minutes


@dataclass(frozen=True)
class Round:
    """What reaches LoopEnd from one update."""

    loop: Loop
    end: str
    """The LoopEnd in the user's graph."""
    policy: list[PolicyHandle]
    tree: list[Tree]


@dataclass(frozen=True)
class Body:
    """The nodes that run once per update, without LoopStart and LoopEnd."""

    nodes: frozenset[str]
    outside: frozenset[Link]
    """What they take from nodes that are none of them, and not from LoopStart either."""
    targets: tuple[str, ...]
    """Those that must have run at the end of a round: output nodes, and what LoopEnd takes."""
    policy: Link
    tree: Link

    @classmethod
    def of(cls, graph: Any, start: str, end: str) -> Body:
        """All that lies between start and end, and output nodes fed from there with what they need."""
        inputs = {node: _links(graph, node) for node in graph.all_node_ids()}
        inside = (_descendants(inputs, start) - _descendants(inputs, end)) - {end}
        shown = [node for node in inputs if node in inside and _is_output_node(graph, node)]
        policy, tree = (_link(graph.get_node(end)["inputs"][name]) for name in ("policy", "tree"))
        targets = dict.fromkeys([*shown, *(node for node, _ in (policy, tree) if node in inside)])
        nodes: set[str] = set()
        pending = list(targets)
        while pending:
            node = pending.pop()
            if node in inside and node not in nodes:
                nodes.add(node)
                pending.extend(source for source, _ in inputs[node])
        taken = {link for node in nodes for link in inputs[node]} | {policy, tree}
        outside = frozenset(link for link in taken if link[0] not in nodes | {start})
        return cls(frozenset(nodes), outside, tuple(targets), policy, tree)

    def check(self, graph: Any) -> None:
        """ValueError if the body trains nothing, or other loops are mixed up with this one."""
        classes = {graph.get_node(node)["class_type"] for node in self.nodes}
        if "LoRAUpdate" not in classes:
            raise ValueError(
                "loop: there is no LoRAUpdate between this TreeGRPO Loop Start and Loop End; give LoRAUpdate's inputs "
                "the POLICY of the Loop Start that is connected here, and connect LoRAUpdate's POLICY to Loop End"
            )
        if "TreeGRPOLoopStart" in classes:
            raise ValueError(
                "loop: there is another loop inside this one; put loops one after the other and not into each other"
            )
        if "TreeGRPOLoopEnd" in classes:
            raise ValueError("loop: two TreeGRPO Loop Ends have the same Loop Start; remove one of them")


def _link(value: list[Any]) -> Link:
    return value[0], value[1]


def _links(graph: Any, node: str) -> set[Link]:
    return {_link(value) for value in graph.get_node(node)["inputs"].values() if is_link(value)}


def _descendants(inputs: dict[str, set[Link]], origin: str) -> set[str]:
    found = {origin}
    while True:
        more = {node for node, links in inputs.items() if any(source in found for source, _ in links)} - found
        if not more:
            return found - {origin}
        found |= more


def _is_output_node(graph: Any, node: str) -> bool:
    node_class = core_nodes.NODE_CLASS_MAPPINGS.get(graph.get_node(node)["class_type"])
    return bool(getattr(node_class, "OUTPUT_NODE", False))


def hold_outside(queued: dict[str, Any]) -> dict[str, Any]:
    """The queued message, in which every LoopEnd takes what its loop's body needs from outside; for core's server.

    Without, core would forget these values or run their nodes again, where little is kept in its caches. What is wrong
    with a graph, core will say.
    """
    prompt = queued.get("prompt")
    if not isinstance(prompt, dict):
        return queued
    graph = DynamicPrompt(prompt)
    for end, node in prompt.items():
        if node.get("class_type") != "TreeGRPOLoopEnd":
            continue
        inputs = {name: value for name, value in node["inputs"].items() if not name.startswith(OUTSIDE)}
        node["inputs"] = inputs  # those of an earlier Queue, read out of a picture, are forgotten
        if not all(is_link(inputs.get(name)) for name in ("loop", "policy", "tree")):
            continue
        start = inputs["loop"][0]
        if prompt.get(start, {}).get("class_type") == "TreeGRPOLoopStart":
            inputs.update(_held(Body.of(graph, start, end).outside))
    return queued


def _held(outside: frozenset[Link]) -> dict[str, list[Any]]:
    """LoopEnd's undeclared inputs."""
    return {f"{OUTSIDE}{place}": list(link) for place, link in enumerate(sorted(outside))}


class LoopStart(io.ComfyNode):
    """The beginning of the loop's body."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TreeGRPOLoopStart",
            display_name="TreeGRPO Loop Start",
            category=CATEGORY,
            description="Everything between this node and TreeGRPO Loop End runs once per update, within one "
            "Queue. Give its policy output to "
            "TreeGRPO Prompts, TreeSampler and LoRAUpdate.",
            inputs=[
                PolicyType.Input("policy", tooltip="The run to train."),
                io.Int.Input("iterations", default=20, min=1, max=100000, tooltip="Updates in this Queue."),
                io.Float.Input(
                    "max_minutes",
                    default=0.0,
                    min=0.0,
                    max=100000.0,
                    step=0.5,
                    tooltip="Start no further update after this many minutes. 0: no limit.",
                ),
            ],
            outputs=[
                LoopType.Output(display_name="loop", tooltip="Connect to TreeGRPO Loop End."),
                PolicyType.Output(display_name="POLICY", tooltip="The run, for the nodes of the loop's body."),
                io.Int.Output(display_name="iteration", tooltip="The number of the update in the whole run, from 0."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        """Never cached: the loop begins anew with every Queue."""
        return float("nan")

    @classmethod
    def execute(cls, policy: PolicyHandle, iterations: int, max_minutes: float) -> io.NodeOutput:
        loop = Loop(cls.hidden.unique_id, iterations, max_minutes, time.monotonic(), policy)
        return io.NodeOutput(loop, policy, policy.run.iteration)


class LoopEnd(io.ComfyNode):
    """The end of the loop's body."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TreeGRPOLoopEnd",
            display_name="TreeGRPO Loop End",
            category=CATEGORY,
            description="Runs the body again until all updates are done; frees the trees of every update but the last.",
            enable_expand=True,
            is_output_node=True,
            is_input_list=True,
            inputs=[
                LoopType.Input("loop", tooltip="From TreeGRPO Loop Start."),
                PolicyType.Input("policy", tooltip="From LoRAUpdate: the run after its update."),
                TreeType.Input("tree", tooltip="The trees of this update, from TreeAdvantage; also a list of them."),
            ],
            outputs=[
                PolicyType.Output(display_name="POLICY", tooltip="The run after all updates, for TreeGRPOExport."),
                TreeType.Output(
                    display_name="TREE", tooltip="The trees of the last update (of a list of trees, the first)."
                ),
                LoraModelType.Output(
                    display_name="LORA_MODEL", tooltip="For core's Save LoRA Weights and Load LoRA Model."
                ),
                LossMapType.Output(display_name="LOSS_MAP", tooltip="For core's Plot Loss Graph."),
            ],
            hidden=list(io.Hidden),  # beside the graph, what core gives to nodes of the body that ask for it
        )

    @classmethod
    async def execute(
        cls,
        loop: list[Loop] | None = None,
        policy: list[PolicyHandle] | None = None,
        tree: list[Tree] | None = None,
        **outside: Values,
    ) -> io.NodeOutput:
        own, graph = cls.hidden.unique_id, cls.hidden.dynprompt
        inputs = graph.get_node(own)["inputs"]
        first = inputs.get(ROUND_INPUT)
        if first is None:
            assert loop and policy and tree
            first = Round(loop[0], own, policy, tree)
        body = Body.of(graph, first.loop.start, first.end)
        body.check(graph)
        values = {_link(link): outside[name] for name, link in inputs.items() if name in outside}
        if body.outside - values.keys() and not first.loop.is_over(1):
            return _expanded(graph, first, body)
        await let_others_finish(graph, body.nodes)
        hidden = {one.name: getattr(cls.hidden, one.name) for one in io.Hidden}
        again = Again(graph, body.nodes, body.targets, values, hidden)
        try:
            last = await _all_rounds(first, body, again, own)
        except NodeFailedError as failed:
            # Core shows the failure at the node that an added node comes from: here at the one that has failed.
            graph.add_ephemeral_node(own, graph.get_node(own), failed.node, failed.node)
            raise failed.error from None
        blocked = [value for value in (*last.policy, *last.tree) if isinstance(value, ExecutionBlocker)]
        if blocked:
            return io.NodeOutput(*blocked[:1] * 4)
        run = last.policy[0].run
        return io.NodeOutput(last.policy[0], last.tree[0], lora_tensors(run.adapter), loss_map(run))


def _expanded(graph: Any, first: Round, body: Body) -> io.NodeOutput:
    """LoopEnd's copy, which has what the loop takes from outside."""
    copy = f"{first.end}.rounds"
    inputs = {ROUND_INPUT: first, **_held(body.outside)}
    node = {"class_type": graph.get_node(first.end)["class_type"], "inputs": inputs, "override_display_id": first.end}
    return io.NodeOutput(*([copy, slot] for slot in range(4)), expand={copy: node})


async def _all_rounds(first: Round, body: Body, again: Again, shown_at: str) -> Round:
    """The last update's results; progress is shown at the node ``shown_at``."""
    loop, policy, tree, done = first.loop, first.policy, first.tree, 1

    def progress() -> None:  # by a bar of its own, because newer cores' bars tell not every step
        host.progress(loop.iterations, shown_at).update_absolute(done)

    progress()
    while not loop.is_over(done):
        for old in tree:
            _forget(old, again.outside)
        outputs = (loop, loop.policy, loop.policy.run.iteration)
        given = {(loop.start, slot): [value] for slot, value in enumerate(outputs)}
        del tree, policy  # or they would live through the next round
        policy, tree = await again.run(given, (body.policy, body.tree))
        if any(isinstance(value, ExecutionBlocker) for value in (*policy, *tree)):
            break
        done += 1
        progress()
    return Round(loop, first.end, policy, tree)


def _forget(tree: Tree, outside: dict[Link, Values]) -> None:
    """Free a tree's latents, unless it comes from outside the loop and is trained on again."""
    kept = [value.growth for values in outside.values() for value in values or () if isinstance(value, Tree)]
    if all(growth is not tree.growth for growth in kept):
        tree.growth.forget()
