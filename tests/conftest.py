"""What all tests share: one real ComfyUI server for the whole session, started when the first test asks for it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.client import Graph
from tools.host import Server

HOST_TESTS = Path(__file__).parent / "host"
HOST_FIXTURES = {"comfy", "probe"}
"""Tests in that folder or with one of these fixtures touch ComfyUI, and get the marker ``host``."""


@pytest.fixture(scope="session")
def comfy() -> Iterator[Server]:
    """A running ComfyUI with this pack and the tests' own nodes; see tools/client.py for what it can be asked."""
    with Server(others=[HOST_TESTS / "random_models"]) as server:
        yield server


@pytest.fixture
def graph() -> Graph:
    """An empty graph in API format."""
    return Graph()


@pytest.fixture
def run_name() -> str:
    """A run name that no other test uses."""
    return f"test {uuid.uuid4().hex[:8]}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--only-host", action="store_true", help="run only the tests that touch ComfyUI")


def pytest_report_header() -> list[str]:
    given = os.environ.get("COMFYUI_PATH")
    return [f"ComfyUI of COMFYUI_PATH: {given}"] if given else []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if HOST_TESTS in item.path.parents or HOST_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("host")
    if config.getoption("--only-host"):
        chosen = [item for item in items if item.get_closest_marker("host") and not item.get_closest_marker("once")]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    server = getattr(item, "funcargs", {}).get("comfy")
    if report.failed and server is not None:
        report.sections.append(("end of ComfyUI's log", server.log_end()))
    return report
