"""Test nodes that stand for other packs' and newer cores' ways of running a graph: expansions, loops, waiting."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

from comfy_api.latest import io
from comfy_execution.graph_utils import add_graph_prefix

Anything = io.Custom("*")


class TestWaiting(io.ComfyNode):
    """Hands its value on after a while, in which core runs other nodes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [Anything.Input("value"), io.Float.Input("seconds")]
        return io.Schema(node_id=cls.__name__, category="test", inputs=inputs, outputs=[Anything.Output()])

    @classmethod
    async def execute(cls, value: Any, seconds: float) -> io.NodeOutput:
        await asyncio.sleep(seconds)
        return io.NodeOutput(value)


class TestNativeLoop(io.ComfyNode):
    """Hands its value through ``times`` nodes, as loops by expansion do: every round is made by the one before."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id=cls.__name__,
            category="test",
            inputs=[Anything.Input("value"), io.Int.Input("times")],
            outputs=[Anything.Output()],
            enable_expand=True,
            is_output_node=True,
        )

    @classmethod
    def execute(cls, value: Any, times: int) -> io.NodeOutput:
        if not times:
            return io.NodeOutput(value, ui={"rounds": ["done"]})
        nodes = {
            "step": {"class_type": "TestWaiting", "inputs": {"value": value, "seconds": 0.0}},
            "next": {"class_type": "TestNativeLoop", "inputs": {"value": ["step", 0], "times": times - 1}},
        }
        graph, (result,) = add_graph_prefix(nodes, (["next", 0],), f"{times}.")
        return io.NodeOutput(result, expand=graph)


class TestGraph(io.ComfyNode):
    """Expands into a whole graph, a JSON text, and gives the first output of its node ``result``."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id=cls.__name__,
            category="test",
            inputs=[io.String.Input("graph"), io.String.Input("result")],
            outputs=[Anything.Output()],
            enable_expand=True,
            is_output_node=True,
        )

    @classmethod
    def execute(cls, graph: str, result: str) -> io.NodeOutput:
        nodes, (value,) = add_graph_prefix(json.loads(graph), ([result, 0],), "inner.")
        return io.NodeOutput(value, expand=nodes)


class TestTexts(io.ComfyNode):
    """A list of two prompts; ``value`` only sets the order."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        outputs = [io.String.Output(is_output_list=True)]
        return io.Schema(node_id=cls.__name__, category="test", inputs=[Anything.Input("value")], outputs=outputs)

    @classmethod
    def execute(cls, value: Any) -> io.NodeOutput:
        return io.NodeOutput(["fox on blue", "tulip on white"])


class TestCount(io.ComfyNode):
    """Shows how many objects of classes of these names are alive, of which none is held by a cycle alone."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.String.Input("classes"), Anything.Input("after", optional=True)]
        return io.Schema(node_id=cls.__name__, category="test", inputs=inputs, outputs=[], is_output_node=True)

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        return float("nan")

    @classmethod
    def execute(cls, classes: str, after: Any = None) -> io.NodeOutput:
        gc.collect()
        alive = [type(one).__name__ for one in gc.get_objects()]
        return io.NodeOutput(ui={"alive": [alive.count(name) for name in classes.split()]})


NODES: list[type[io.ComfyNode]] = [TestWaiting, TestNativeLoop, TestGraph, TestTexts, TestCount]
