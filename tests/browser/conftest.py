"""A real browser with ComfyUI's editor; skipped with the reason where playwright or a browser is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.host import Server

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
MILLISECONDS = 600_000
# Boolean, because Playwright hangs on handing over what it found
READY = "Boolean(window.app?.graph && window.app.extensionManager?.setting)"


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
