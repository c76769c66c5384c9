"""Where the nodes of an example workflow lie: titled groups, filled and placed from top to bottom, then left to right.

Every node comes after those it reads, so that the links run downwards or to the right.
"""

from __future__ import annotations

from graphlib import TopologicalSorter
from typing import Any

from tools.client import Graph

Pair = tuple[int, int]
"""x and y, or width and height, in pixels at zoom 1."""

GROUPS = {
    "Model": {"TreeGRPOTinyModel", "ModelSamplingSD3", "TreeGRPOPolicy", "TreeGRPOLoopStart"},
    "Prompts": {"TreeGRPOPrompts", "TreeGRPOEncode"},
    "Sampling": {"BasicGuider", "BasicScheduler", "RandomNoise", "EmptySD3LatentImage"},
    "Rewards": {"TreeGRPORewardModel"},
    "One update": {"TreeSampler", "RewardScorer", "TreeAdvantage", "LoRAUpdate", "TreeGRPOLoopEnd"},
    "Result": {"TreeGRPOPreview", "TreeGRPOBestLeaf", "TreeGRPOExport"},
}
"""Title -> node types, unless a node of the graph names its group itself in ``_meta``."""

HEIGHT = 1240
"""Groups below each other are at most this high together, and the nodes inside a group GROUP_HEIGHT."""
GROUP_HEIGHT = 720
GAP = 40
MARGIN = 25
TITLE = 30
"""Height of a node's title bar, which lies above the node's position."""
HEADER = 50
"""Height of a group's title."""


def order(graph: Graph) -> list[str]:
    """The nodes, each after those it reads. Raises graphlib.CycleError."""
    sources = {
        name: [value[0] for value in node["inputs"].values() if isinstance(value, list)] for name, node in graph.items()
    }
    return list(TopologicalSorter(sources).static_order())


def arrange(graph: Graph, sizes: dict[str, Pair], note: Pair) -> tuple[dict[str, Pair], list[dict[str, Any]]]:
    """The nodes' positions and the groups as the editor stores them; sizes are without title bars.

    At (0, TITLE) there is room for a note of size ``note``.
    """
    inside: dict[str, dict[str, Pair]] = {}
    blocks = {"": (note[0], note[1] + TITLE)}
    for title, names in group_members(graph).items():
        bars = {name: (sizes[name][0], sizes[name][1] + TITLE) for name in names}
        inside[title], (width, height) = stack(bars, GROUP_HEIGHT, MARGIN)
        blocks[title] = (width + 2 * MARGIN, height + HEADER + MARGIN)
    corners, _ = stack(blocks, HEIGHT, GAP)
    places: dict[str, Pair] = {}
    groups: list[dict[str, Any]] = []
    for title, nodes in inside.items():
        x, y = corners[title]
        groups.append({"id": len(groups) + 1, "title": title, "bounding": [x, y, *blocks[title]], "color": "#3f789e"})
        for name, (right, down) in nodes.items():
            places[name] = (x + MARGIN + right, y + HEADER + down + TITLE)
    return places, groups


def group_members(graph: Graph) -> dict[str, list[str]]:
    """Title -> nodes in the order of :func:`order`; nodes of no group are under "More"."""
    titles = {class_type: title for title, types in GROUPS.items() for class_type in types}
    found: dict[str, list[str]] = {title: [] for title in GROUPS}
    for name in order(graph):
        title = graph[name].get("_meta", {}).get("group") or titles.get(graph[name]["class_type"], "More")
        found.setdefault(title, []).append(name)
    return {title: names for title, names in found.items() if names}


def stack(sizes: dict[str, Pair], most: int, gap: int) -> tuple[dict[str, Pair], Pair]:
    """Boxes below each other, in a further column where they would be higher than ``most``: corners and size of all."""
    corners: dict[str, Pair] = {}
    x = y = right = bottom = 0
    for name, (width, height) in sizes.items():
        if y and y + height > most:
            x, y = right + gap, 0
        corners[name] = (x, y)
        right, bottom = max(right, x + width), max(bottom, y + height)
        y += height + gap
    return corners, (right, bottom)
