"""The example workflows in ComfyUI's own editor, in a real browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.client import Graph
from tools.host import ROOT, Server
from tools.workflow_layout import MARGIN
from tools.workflows import GRAPHS, NOTES, WORKFLOWS

pytestmark = pytest.mark.browser

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # the editor's calls to the outside fail at once
)
SCREENSHOTS = ROOT / "outputs" / "browser"
"""What the editor showed, to look at."""
MILLISECONDS = 600_000
# Boolean, because Playwright hangs on handing over what it found
READY = "Boolean(window.app?.graph && window.app.extensionManager?.setting)"
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


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser with an empty profile."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        program = shutil.which("chromium") or shutil.which("google-chrome") or driver.chromium.executable_path
        if not Path(program).is_file():
            pytest.skip("needs a browser: install Debian's chromium, or run `playwright install chromium`")
        profile = tmp_path_factory.mktemp("profile")
        options = {"executable_path": program, "args": ARGUMENTS, "viewport": {"width": 1920, "height": 1080}}
        context = driver.chromium.launch_persistent_context(profile, timeout=MILLISECONDS, **options)
        yield context
        context.close()


@pytest.fixture(scope="session")
def page(browser: Any, comfy: Server) -> Any:
    """ComfyUI's editor."""
    comfy.request("/settings", {"Comfy.TutorialCompleted": True})  # or the templates lie over the first workflow
    page = browser.pages[0]
    page.set_default_timeout(MILLISECONDS)
    page.goto(f"http://{comfy.address}/", wait_until="domcontentloaded")
    page.wait_for_function(READY, polling=500)
    return page


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
