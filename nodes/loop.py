"""Many updates in one Queue.

LoopEnd runs after each update. If another is due it frees the trees of the update before and expands into a copy of the
loop's body and of itself. Every copy reads the run from the same policy wire, so no copy's inputs grow with the number
of updates.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import nodes as core_nodes
from comfy_api.latest import io
from comfy_execution.graph_utils import GraphBuilder, is_link

from ..treegrpo_core.lora import lora_tensors
from ..treegrpo_core.tree import Tree
from . import host
from .policy import PolicyHandle
from .types import CATEGORY, LoopType, LoraModelType, LossMapType, PolicyType, TreeType
from .update import loss_map

STATE_INPUT = "loop_state"
"""Undeclared input of LoopEnd's copies; the host keeps it in the graph and passes it to nobody."""


@dataclass(frozen=True)
class Loop:
    """What the loop wire carries: the settings of LoopStart, and which node that is."""

    start: str
    iterations: int
    max_minutes: float
    started: float


@dataclass(frozen=True)
class LoopState:
    """Progress of one Queue's loop, from one copy of LoopEnd to the next."""

    loop: Loop
    end: str
    body: frozenset[str]
    done: int = 0
    previous: tuple[Tree, ...] = ()

    @property
    def is_over(self) -> bool:
        minutes = (time.monotonic() - self.loop.started) / 60
        return self.done >= self.loop.iterations or 0 < self.loop.max_minutes <= minutes


def loop_body(graph: Any, start: str, end: str) -> frozenset[str]:
    """Nodes that run once per update: those between start and end, and output nodes fed from inside the loop."""
    inputs = {node: _sources(graph, node) for node in graph.all_node_ids()}
    after_start, after_end = _descendants(inputs, start), _descendants(inputs, end)
    inside = (after_start - after_end) | {start}
    body: set[str] = set()
    pending = [end] + [node for node in inside if _is_output_node(graph, node)]
    while pending:
        node = pending.pop()
        if node in inside and node not in body:
            body.add(node)
            pending.extend(inputs[node])
    return frozenset(body | {start, end})


def checked_body(graph: Any, start: str, end: str) -> frozenset[str]:
    """The loop's body; ValueError if it trains nothing or holds another loop."""
    body = loop_body(graph, start, end)
    classes = [graph.get_node(node)["class_type"] for node in body]
    if "LoRAUpdate" not in classes:
        raise ValueError(
            "loop: there is no LoRAUpdate between this TreeGRPO Loop Start and Loop End; give LoRAUpdate's "
            "inputs the POLICY of "
            "the Loop Start that is connected here, and connect LoRAUpdate's POLICY to Loop End"
        )
    if classes.count("TreeGRPOLoopStart") > 1:
        raise ValueError(
            "loop: there is another loop inside this one; put loops one after the other and not into each other"
        )
    return body


def _sources(graph: Any, node: str) -> set[str]:
    return {value[0] for value in graph.get_node(node)["inputs"].values() if is_link(value)}


def _descendants(inputs: dict[str, set[str]], origin: str) -> set[str]:
    found = {origin}
    while True:
        more = {node for node, sources in inputs.items() if sources & found} - found
        if not more:
            return found - {origin}
        found |= more


def _is_output_node(graph: Any, node: str) -> bool:
    return bool(getattr(core_nodes.NODE_CLASS_MAPPINGS[graph.get_node(node)["class_type"]], "OUTPUT_NODE", False))


def next_round(graph: Any, state: LoopState) -> GraphBuilder:
    """A copy of the body, its inner links to the copies, its outer links as they are."""
    builder = GraphBuilder(prefix=f"{state.end}.{state.done}.")
    for node in state.body:
        builder.node(graph.get_node(node)["class_type"], node).set_override_display_id(node)
    for node in state.body:
        copy = builder.lookup_node(node)
        for name, value in graph.get_node(node)["inputs"].items():
            inner = is_link(value) and value[0] in state.body
            copy.set_input(name, builder.lookup_node(value[0]).out(value[1]) if inner else value)
    builder.lookup_node(state.end).set_input(STATE_INPUT, state)
    return builder


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
        loop = Loop(cls.hidden.unique_id, iterations, max_minutes, time.monotonic())
        return io.NodeOutput(loop, policy, policy.run.iteration)


class LoopEnd(io.ComfyNode):
    """The end of the loop's body."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TreeGRPOLoopEnd",
            display_name="TreeGRPO Loop End",
            category=CATEGORY,
            description="Runs the body again until all updates are done; frees an update's trees after the next.",
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
            hidden=[io.Hidden.unique_id, io.Hidden.dynprompt],
        )

    @classmethod
    def execute(cls, loop: list[Loop], policy: list[PolicyHandle], tree: list[Tree]) -> io.NodeOutput:
        node, graph = cls.hidden.unique_id, cls.hidden.dynprompt
        state = graph.get_node(node)["inputs"].get(STATE_INPUT)
        if state is None:
            state = LoopState(loop[0], node, checked_body(graph, loop[0].start, node))
        for old in state.previous:
            old.growth.forget()
        state = replace(state, done=state.done + 1, previous=tuple(tree))
        host.progress(state.loop.iterations, node).update_absolute(state.done)
        if state.is_over:
            run = policy[0].run
            return io.NodeOutput(policy[0], tree[0], lora_tensors(run.adapter), loss_map(run))
        builder = next_round(graph, state)
        end = builder.lookup_node(state.end)
        return io.NodeOutput(*(end.out(slot) for slot in range(4)), expand=builder.finalize())
