"""Nodes of the running graph run again, by core's own executor and with a memory of their own.

An expansion would do it too, but all that it adds stays until the Queue ends: its nodes in the graph and in every
progress message, its outputs in the cache, and one level of nesting per round. Here the very nodes of the graph run, so
messages name the nodes the user sees, and what a round has made is gone once nobody holds it.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import execution
from comfy_execution.caching import CacheKeySetID, LRUCache
from comfy_execution.graph import ExecutionList
from comfy_execution.progress import NodeState, get_progress_state

from . import host

Link = tuple[str, int]
"""A node and the number of its output."""
Values = list[Any]
"""What one output holds: core keeps lists, usually of one value."""


class Again:
    """Nodes ``inside`` of a graph, to be run as often as one likes; what comes from ``outside`` them is known.

    ``targets``: the nodes that are asked for, inside. ``hidden``: what core hands to every node of a Queue.
    """

    def __init__(
        self,
        graph: Any,
        inside: Collection[str],
        targets: Sequence[str],
        outside: dict[Link, Values],
        hidden: dict[str, Any],
    ) -> None:
        self.graph, self.inside, self.targets, self.outside, self.hidden = graph, inside, targets, outside, hidden
        self.objects = _Cache()

    async def run(self, given: dict[Link, Values], results: Sequence[Link]) -> list[Values]:
        """Run them once, with values ``given`` that change from round to round, and return what ``results`` hold.

        Raises what the node that fails raises.
        """
        known = {**self.outside, **given}
        sources = {node for node, _ in known}
        outputs = _Cache()
        for cache in (outputs, self.objects):
            await cache.set_prompt(self.graph, [*self.inside, *sources], None)
        for node in sources:
            slots = {slot: values for (source, slot), values in known.items() if source == node}
            entry = execution.CacheEntry(ui=None, outputs=[slots.get(slot) for slot in range(max(slots) + 1)])
            await _now(outputs.set(node, entry))
        await self._execute(outputs)
        return [(await _now(outputs.get(node))).outputs[slot] for node, slot in results]

    async def _execute(self, outputs: LRUCache) -> None:
        """As core's ``PromptExecutor.execute_async`` does with a whole graph."""
        waiting = ExecutionList(self.graph, outputs)
        for node in self.targets:
            waiting.add_node(node)
        common = {
            "server": host.server() or SimpleNamespace(client_id=None),
            "dynprompt": self.graph,
            "caches": SimpleNamespace(outputs=outputs, objects=self.objects, all=[outputs, self.objects]),
            "extra_data": self.hidden,
            "executed": set(),
            "prompt_id": host.running_prompt(),
            "execution_list": waiting,
            "pending_subgraph_results": {},
            "pending_async_nodes": {},
            "ui_outputs": {},
        }
        while not waiting.is_empty():
            node, error, exception = await waiting.stage_node_execution()
            result = None
            if exception is None:
                result, error, exception = await execution.execute(current_item=node, **common)
            if exception is not None:
                raise NodeFailedError(error["node_id"], exception)
            if result == execution.ExecutionResult.PENDING:
                waiting.unstage_node_execution()
            else:
                waiting.complete_node_execution()


class NodeFailedError(Exception):
    """A node has raised ``error``; ``node`` is the one to show to the user."""

    def __init__(self, node: str, error: BaseException) -> None:
        self.node, self.error = node, error


class _Cache(LRUCache):
    """Core's flat cache by node id, which never drops anything by itself."""

    def __init__(self) -> None:
        super().__init__(CacheKeySetID, max_size=sys.maxsize)


async def _now(value: Any) -> Any:
    """The value; newer cores' caches answer with a coroutine."""
    return await value if inspect.isawaitable(value) else value


async def let_others_finish(graph: Any, nodes: Collection[str]) -> None:
    """Step aside until core has run whatever else of the graph can run now, and these nodes to their end.

    Core runs nodes one after the other and gives others their turn only when it waits; before, once per asynchronous
    node.
    """
    while True:
        for _ in graph.all_node_ids():
            await asyncio.sleep(0)
        known = get_progress_state().nodes
        if all(known[node]["state"] != NodeState.Running for node in nodes if node in known):
            return
        await asyncio.sleep(0.05)
