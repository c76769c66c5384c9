"""TreeGRPO Human Reward in ComfyUI's own editor, with the keyboard alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from graphs import training

from tools.client import Graph, InterruptedRunError
from tools.host import ROOT, Server
from treegrpo_core.human_log import read_dataset

pytestmark = pytest.mark.browser

DIALOG = "dialog.treegrpo-human[open]"
SCREENSHOTS = ROOT / "outputs" / "browser"
WAIT = 30_000
"""Milliseconds a page may take."""
MILLISECONDS = 600_000
READY = "Boolean(window.app?.graph && window.app.extensionManager?.setting)"


@pytest.fixture
def editor(page: Any, comfy: Server) -> Iterator[Any]:
    """The page, with waits that end soon; afterwards nothing waits for a person any more."""
    page.set_default_timeout(WAIT)
    yield page
    page.set_default_timeout(MILLISECONDS)
    use_vue_nodes(page, False)
    comfy.interrupt()
    page.locator(DIALOG).wait_for(state="hidden")


def use_vue_nodes(page: Any, on: bool) -> None:
    """Choose the renderer of nodes: the newer one, or the canvas."""
    page.wait_for_function(READY, polling=500)
    page.evaluate(f"window.app.extensionManager.setting.set('Comfy.VueNodes.Enabled', {json.dumps(on)})")


def ask(comfy: Server, graph: Graph, run_name: str, mode: str, **sampler: Any) -> str:
    """Queue an update that waits for a person; returns the queued run's id."""
    nodes = training(graph, run_name).set("sampler", **sampler)
    human = graph.add(
        "TreeGRPOHumanReward",
        tree=nodes.sampler[0], vae=nodes.model[2], mode=mode, minutes=5.0, fallback="stop", weight=1.0, comparisons=0,
    )  # fmt: skip
    nodes.set("advantage", tree=human[0])
    return comfy.submit(graph)


def shows(page: Any, title: str) -> None:
    """Wait until the dialog's title says so."""
    page.locator(f"{DIALOG} h2", has_text=title).wait_for()


def type_keys(page: Any, keys: str) -> None:
    for key in keys.split():
        page.keyboard.press(key)


def rows(comfy: Server, run_name: str) -> list[dict[str, Any]]:
    return read_dataset(comfy.output / "treegrpo" / run_name)


def test_stars_by_keyboard_also_over_a_reload(comfy: Server, graph: Graph, run_name: str, editor: Any) -> None:
    run = ask(comfy, graph, run_name, "stars")
    shows(editor, "prompt 1 of 2")
    type_keys(editor, "5 ArrowRight 1 ArrowRight 3 u 2 ArrowRight 4")
    editor.locator(f'{DIALOG} [aria-label="Picture 4 of 4 4 stars"]').wait_for()
    editor.screenshot(path=SCREENSHOTS / "human_stars.png")
    assert editor.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    editor.reload(wait_until="domcontentloaded")
    editor.locator(f'{DIALOG} [aria-label="Picture 3 of 4 2 stars"]').wait_for()
    type_keys(editor, "Enter")
    shows(editor, "prompt 2 of 2")
    type_keys(editor, "2 ArrowRight s 5 Enter")
    comfy.wait(run)
    editor.locator(DIALOG).wait_for(state="hidden")
    given = [row["scores"] for row in rows(comfy, run_name)]
    assert given == [[5, 1, 2, 4], [2, 3.5, 5, 3.5]]
    log = comfy.output / "treegrpo" / run_name / "metrics.jsonl"
    entry = json.loads(log.read_text())
    assert entry["rewards"]["human"] == pytest.approx(sum(map(sum, given)) / 8)
    assert entry["grad_norm"] > 0


def test_many_pictures_scroll_and_take_stars_by_mouse(comfy: Server, graph: Graph, run_name: str, editor: Any) -> None:
    ask(comfy, graph, run_name, "stars", branching=3, depth=3)
    shows(editor, "prompt 1 of 2")
    columns = editor.locator(f"{DIALOG} .gallery").evaluate(
        "it => getComputedStyle(it).gridTemplateColumns.split(' ').length"
    )
    type_keys(editor, "ArrowDown ArrowDown ArrowRight 4 ArrowUp 2")
    expected = {2 * columns + 1: 4, columns + 1: 2, 0: 3, 26: 5}
    for leaf in (0, 26):
        editor.locator(f'{DIALOG} .card[data-leaf="{leaf}"] [aria-label="{expected[leaf]} stars"]').click()
    for leaf, stars in expected.items():
        editor.locator(f'{DIALOG} [aria-label="Picture {leaf + 1} of 27 {stars} stars"]').wait_for()
    (state,) = comfy.get("/treegrpo/human")
    assert {leaf: stars for leaf, stars in enumerate(state["stars"]) if stars} == expected


def test_a_lost_connection_says_so_and_loses_nothing(comfy: Server, graph: Graph, run_name: str, editor: Any) -> None:
    ask(comfy, graph, run_name, "stars")
    shows(editor, "prompt 1 of 2")
    editor.route("**/treegrpo/human/*", lambda route: route.abort())
    type_keys(editor, "5")
    editor.locator(f"{DIALOG} .message", has_text="fetch").wait_for()
    editor.unroute("**/treegrpo/human/*")
    type_keys(editor, "4")
    editor.locator(f'{DIALOG} [aria-label="Picture 1 of 4 4 stars"]').wait_for()
    assert editor.locator(f"{DIALOG} .message").inner_text() == ""


def test_pairs_by_keyboard(comfy: Server, graph: Graph, run_name: str, editor: Any) -> None:
    """Always the leaf with the lower number."""
    run = ask(comfy, graph, run_name, "pairs")
    for prompt in (1, 2):
        for pair in range(1, 7):
            shows(editor, f"prompt {prompt} of 2, pair {pair} of 6")
            leaves = editor.locator(f"{DIALOG} .card").evaluate_all("cards => cards.map(card => +card.dataset.leaf)")
            if pair == 1:
                editor.screenshot(path=SCREENSHOTS / "human_pairs.png")
            type_keys(editor, "1" if leaves[0] < leaves[1] else "ArrowRight Enter")
    comfy.wait(run)
    for row in rows(comfy, run_name):
        assert row["scores"] == sorted(row["scores"], reverse=True)


def test_a_ranking_by_keyboard_and_by_mouse(comfy: Server, graph: Graph, run_name: str, editor: Any) -> None:
    run = ask(comfy, graph, run_name, "rank")
    shows(editor, "prompt 1 of 2")
    type_keys(editor, "Shift+ArrowRight Shift+ArrowRight")
    editor.reload(wait_until="domcontentloaded")
    editor.locator(f'{DIALOG} .card[data-leaf="0"][data-place="3"]').wait_for()
    editor.screenshot(path=SCREENSHOTS / "human_rank.png")
    type_keys(editor, "Enter")
    shows(editor, "prompt 2 of 2")
    cards = editor.locator(f"{DIALOG} .card")
    cards.nth(3).drag_to(cards.nth(0))
    editor.locator(f'{DIALOG} .card[data-leaf="3"][data-place="1"]').wait_for()
    type_keys(editor, "Enter")
    comfy.wait(run)
    answers = [row["answers"][0]["order"] for row in rows(comfy, run_name)]
    assert answers == [[1, 2, 0, 3], [3, 0, 1, 2]]


@pytest.mark.parametrize("vue_nodes", [False, True])
def test_put_aside_and_opened_again_in_both_renderers(
    comfy: Server, graph: Graph, run_name: str, editor: Any, vue_nodes: bool
) -> None:
    use_vue_nodes(editor, vue_nodes)
    editor.evaluate("Boolean(window.app.graph.add(window.LiteGraph.createNode('TreeGRPOHumanReward')))")
    run = ask(comfy, graph, run_name, "rank")
    shows(editor, "prompt 1 of 2")
    editor.screenshot(path=SCREENSHOTS / f"human_vue_{vue_nodes}.png")
    type_keys(editor, "Escape")
    editor.locator(".treegrpo-human-reminder").click()
    shows(editor, "prompt 1 of 2")
    assert editor.locator(f"{DIALOG} .card").count() == 4
    comfy.interrupt(run)
    editor.locator(DIALOG).wait_for(state="hidden")
    editor.locator(".treegrpo-human-reminder").wait_for(state="hidden")
    editor.screenshot(path=SCREENSHOTS / f"human_node_vue_{vue_nodes}.png")
    with pytest.raises(InterruptedRunError):
        comfy.wait(run)
    assert not (comfy.output / "treegrpo" / run_name / "metrics.jsonl").exists(), "nothing was trained"
