"""The example workflows are the tests' graphs, readable, and complete for the template browser."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tools.client import Graph
from tools.workflow_layout import TITLE
from tools.workflows import GRAPHS, NOTE, NOTES, WORKFLOWS, to_api

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


@pytest.fixture(params=sorted(path.stem for path in WORKFLOWS.glob("*.json")))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def workflow(name: str) -> dict[str, Any]:
    text: dict[str, Any] = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    return text


def node_box(node: dict[str, Any]) -> Box:
    (x, y), (width, height) = node["pos"], node["size"]
    return x, y - TITLE, x + width, y + height


def group_box(group: dict[str, Any]) -> Box:
    x, y, width, height = group["bounding"]
    return x, y, x + width, y + height


def overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def contains(outer: Box, inner: Box) -> bool:
    return outer[0] <= inner[0] and outer[1] <= inner[1] and inner[2] <= outer[2] and inner[3] <= outer[3]


def test_every_example_is_there() -> None:
    assert {path.stem for path in WORKFLOWS.glob("*.json")} == set(NOTES)


def test_it_is_the_graph_that_the_tests_run(name: str, workflow: dict[str, Any]) -> None:
    graph = Graph.load(GRAPHS / f"{name}.json")
    assert to_api(workflow) == {
        node: {"class_type": content["class_type"], "inputs": content["inputs"]} for node, content in graph.items()
    }


def test_every_link_is_known_at_both_ends(workflow: dict[str, Any]) -> None:
    nodes = {node["id"]: node for node in workflow["nodes"]}
    assert len(nodes) == len(workflow["nodes"])
    assert workflow["last_node_id"] == max(nodes)
    assert workflow["last_link_id"] == max(link[0] for link in workflow["links"])
    for link, origin, output, target, slot, kind in workflow["links"]:
        assert link in nodes[origin]["outputs"][output]["links"]
        assert nodes[target]["inputs"][slot]["link"] == link
        assert nodes[origin]["outputs"][output]["type"] == nodes[target]["inputs"][slot]["type"] == kind
    ends = [entry["link"] for node in nodes.values() for entry in node["inputs"] if entry["link"] is not None]
    starts = [link for node in nodes.values() for entry in node["outputs"] for link in entry["links"]]
    assert sorted(ends) == sorted(starts) == sorted(link[0] for link in workflow["links"])


def test_no_node_covers_another_and_each_lies_in_one_group(workflow: dict[str, Any]) -> None:
    groups = [group_box(group) for group in workflow["groups"]]
    assert not [pair for pair in itertools.combinations(groups, 2) if overlap(*pair)]
    boxes = [node_box(node) for node in workflow["nodes"]]
    assert not [pair for pair in itertools.combinations(boxes, 2) if overlap(*pair)]
    for node in workflow["nodes"]:
        touched = [group for group in groups if overlap(group, node_box(node))]
        assert len(touched) == (node["type"] != NOTE)
        assert all(contains(group, node_box(node)) for group in touched)


def test_it_begins_with_a_note_that_says_what_to_do(workflow: dict[str, Any]) -> None:
    notes = [node for node in workflow["nodes"] if node["type"] == NOTE]
    assert len(notes) == 1
    assert "**Run**" in notes[0]["widgets_values"][0]


def test_it_has_a_picture(name: str) -> None:
    assert (WORKFLOWS / f"{name}.jpg").read_bytes().startswith(b"\xff\xd8")
