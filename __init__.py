"""The pack's door: ComfyUI calls :func:`comfy_entrypoint`; everything else is in ``nodes`` and ``treegrpo_core``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .nodes import TreeGRPOExtension

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> "TreeGRPOExtension":
    """ComfyUI's V3 entry point."""
    from .nodes import TreeGRPOExtension

    return TreeGRPOExtension()


__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
