"""What all tests share: one real ComfyUI server for the whole session, started when the first test asks for it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.client import Graph
from tools.host import Server


@pytest.fixture(scope="session")
def comfy() -> Iterator[Server]:
    """A running ComfyUI with this pack and the tests' own nodes; see tools/client.py for what it can be asked."""
    with Server(others=[Path(__file__).parent / "host" / "random_models"]) as server:
        yield server


@pytest.fixture
def graph() -> Graph:
    """An empty graph in API format."""
    return Graph()


@pytest.fixture
def run_name() -> str:
    """A run name that no other test uses."""
    return f"test {uuid.uuid4().hex[:8]}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "comfy" in getattr(item, "fixturenames", ()):
            item.add_marker("host")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    server = getattr(item, "funcargs", {}).get("comfy")
    if report.failed and server is not None:
        report.sections.append(("end of ComfyUI's log", server.log_end()))
    return report
