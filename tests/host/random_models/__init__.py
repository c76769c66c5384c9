"""A node pack for the tests: core's own model classes, reduced and with random weights, and nodes to look into them."""

from .nodes import Extension


async def comfy_entrypoint() -> Extension:
    """ComfyUI's door into the pack."""
    return Extension()
