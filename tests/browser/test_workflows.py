"""The example workflows in ComfyUI's own editor, in a real browser."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.client import Graph
from tools.host import ROOT, Server
from tools.workflow_layout import MARGIN
from tools.workflows import GRAPHS, NOTES, WORKFLOWS

pytestmark = pytest.mark.browser

SCREENSHOTS = ROOT / "outputs" / "browser"
"""What the editor showed, to look at."""
OPEN = """async workflow => {
    await window.app.loadGraphData(workflow);
    await new Promise(resolve => setTimeout(resolve, 1000));  // a few frames, in which nodes may grow
    const nodes = window.app.graph.nodes;
    return {
        queued: (await window.app.graphToPrompt()).output,
        unknown: nodes.map(node => node.type).filter(type => !(type in window.LiteGraph.registered_node_types)),
        sizes: Object.fromEntries(nodes.map(node => [node.id, [...node.size]])),
    };
}"""


def without_meta(graph: dict[str, Any]) -> dict[str, Any]:
    return {name: {"class_type": node["class_type"], "inputs": node["inputs"]} for name, node in graph.items()}


@pytest.mark.parametrize("name", NOTES)
def test_the_editor_opens_a_workflow_and_queues_the_graph_it_was_made_of(page: Any, name: str) -> None:
    workflow = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    shown = page.evaluate(OPEN, workflow)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")
    assert shown["unknown"] == []
    assert without_meta(shown["queued"]) == without_meta(Graph.load(GRAPHS / f"{name}.json"))
    for node in workflow["nodes"]:  # no node needs so much more room that it covers the next one
        (width, height), (real_width, real_height) = node["size"], shown["sizes"][str(node["id"])]
        assert real_width < width + MARGIN, node["type"]
        assert real_height < height + MARGIN, node["type"]


def test_the_template_browser_lists_the_workflows(comfy: Server) -> None:
    assert set(comfy.get("/api/workflow_templates")[comfy.pack_name]) == set(NOTES)
