"""Run by test_import.py in a process of its own: ``python probe_import.py COMFYUI PACK``.

Imports the real core, then the pack by core's own loader, and prints what changed as JSON.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
from types import ModuleType

comfyui, pack = sys.argv[1:]
sys.argv = [sys.argv[0], "--cpu"]
sys.path[0] = comfyui

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.model_management  # noqa: E402
import comfy.model_patcher  # noqa: E402
import comfy.samplers  # noqa: E402
import comfy.sd  # noqa: E402
import execution  # noqa: E402
import nodes  # noqa: E402

CORE = (comfy.samplers, comfy.model_management, comfy.sd, comfy.model_patcher, execution, nodes)


def functions(module: ModuleType) -> dict[str, tuple[object, object]]:
    """Name -> (object, code) of the module's functions and of its classes' methods."""
    found: dict[str, tuple[object, object]] = {}
    for name, value in vars(module).items():
        if inspect.isfunction(value) or inspect.isclass(value):
            found[name] = value, getattr(value, "__code__", None)
        if inspect.isclass(value):
            for method, body in vars(value).items():
                found[f"{name}.{method}"] = body, getattr(body, "__code__", None)
    return found


def unlike(before: dict[str, tuple[object, object]], after: dict[str, tuple[object, object]]) -> list[str]:
    """Names added, removed or bound to another object or other code."""

    def differs(name: str) -> bool:
        old, new = before.get(name, (None, None)), after.get(name, (None, None))
        return old[0] is not new[0] or old[1] is not new[1]

    return sorted(filter(differs, before.keys() | after.keys()))


asyncio.run(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
core_nodes = dict(nodes.NODE_CLASS_MAPPINGS)
core_modules = set(sys.modules)
before = {module.__name__: functions(module) for module in CORE}

start = time.process_time()
loaded = asyncio.run(nodes.load_custom_node(pack))
seconds = time.process_time() - start

changed = [
    f"{module.__name__}.{name}" for module in CORE for name in unlike(before[module.__name__], functions(module))
]
door = sys.modules[pack.replace(".", "_x_")]


async def pack_nodes() -> list[str]:
    """Ids of the nodes that the pack brings, before core drops those that clash."""
    return [node.GET_SCHEMA().node_id for node in await (await door.comfy_entrypoint()).get_node_list()]


print(
    json.dumps(
        {
            "loaded": loaded,
            "seconds": seconds,
            "watched": sum(map(len, before.values())),
            "changed": changed,
            "nodes": asyncio.run(pack_nodes()),
            "core_nodes": sorted(core_nodes),
            "replaced": [name for name, node in core_nodes.items() if nodes.NODE_CLASS_MAPPINGS.get(name) is not node],
            "nodes_module": sys.modules["nodes"].__file__,
            "modules": sorted(set(sys.modules) - core_modules),
        }
    )
)
