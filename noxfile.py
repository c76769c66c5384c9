"""``python -m nox -s demo`` and ``python -m nox -s tests``: one environment, made once, serves both."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["tests"]

ROOT = Path(__file__).resolve().parent
NO_TESTS = 5
"""What pytest returns when the arguments select no test."""
REFERENCES = {
    "HPSV2": ["hpsv2x==1.2.0", "ftfy", "wcwidth", "timm", "clint", "args", "braceexpand", "webdataset"],
    "HPSV3": ["hpsv3==1.0.0", "transformers==4.45.2", "tokenizers==0.20.3", "huggingface_hub==0.36.0"],
}
"""What the authors of these rewards published, and what of its requirements it really needs."""


@nox.session(reuse_venv=True)
def environment(session: nox.Session) -> None:
    """Install ComfyUI's requirements (torch among them), the pack's own and the development tools."""
    development = nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), "dev")
    comfyui = str(session.run("python", "-m", "tools.host", silent=True, stderr=None)).splitlines()
    session.install(*comfyui, "-r", "requirements.txt", *development)


@nox.session(python=False, requires=["environment"])
def tests(session: nox.Session) -> None:
    """Check style and types, then run pytest; arguments after ``--`` are pytest's, e.g. ``-- -m slow``.

    The session ``newer`` follows, whether or not these tests pass.
    """
    session.notify("newer", session.posargs)
    check(session)
    session.run(python(session), "-m", "pytest", *session.posargs, external=True)


@nox.session(reuse_venv=True, requires=["environment"])
def newer(session: nox.Session) -> None:
    """Run the tests that touch ComfyUI in a newer one too, where there is one (tools/host.py); arguments as above."""
    command = [python(session), "-m", "tools.host", "--newer"]
    found = json.loads(str(session.run(*command, silent=True, stderr=None, external=True)))
    if "missing" in found:
        session.skip(found["missing"])
    share(session, "python")
    session.install(*found["requirements"])
    command = ["python", "-m", "pytest", "--only-host", *session.posargs]
    session.run(*command, env=found["environment"], success_codes=[0, NO_TESTS])


@nox.session(python=False, requires=["environment"])
def browser(session: nox.Session) -> None:
    """Open the example workflows in ComfyUI's editor in a real Chromium, the system's or Playwright's."""
    session.run(python(session), "-m", "pip", "install", "playwright", external=True)
    session.run(python(session), "-m", "pytest", "tests/browser", *session.posargs, external=True)


@nox.session(python=False, requires=["environment"])
def lint(session: nox.Session) -> None:
    """Check style and types only."""
    check(session)


@nox.session(python=False, requires=["environment"])
def demo(session: nox.Session) -> None:
    """Train the bundled model inside a real ComfyUI and leave the results in outputs/demo."""
    session.run(python(session), "-m", "tools.demo", external=True)


@nox.session(python=False, requires=["environment"])
def bench(session: nox.Session) -> None:
    """Measure speed and memory and fill docs/benchmarks.md; ``-- --full`` repeats more often."""
    session.run(python(session), "-m", "benchmarks", *session.posargs, external=True)


@nox.session(python=False)
def gpu(session: nox.Session) -> None:
    """Measure on a machine with one GPU, in at most 8 minutes, and write docs/gpu.md; ``-- --reduced`` tries it out.

    Nothing is installed: without the shared environment, the interpreter that runs nox must have what is needed.
    """
    shared = python(session)
    own = shared if Path(shared).is_file() else sys.executable
    session.run(own, "-m", "benchmarks.gpu", *session.posargs, external=True)


@nox.session(python=False, requires=["environment"])
def references(session: nox.Session) -> None:
    """Compare HPSv2 and HPSv3 with their authors' packages, each in an environment beside the shared one."""
    env = {f"{name}_PYTHON": beside(session, name, packages) for name, packages in REFERENCES.items()}
    session.run(
        python(session), "-m", "pytest", "tests/rewards", "-m", "slow", *session.posargs, env=env, external=True
    )


def beside(session: nox.Session, name: str, packages: list[str]) -> str:
    """The interpreter of an environment that has these packages, without their requirements, before the shared ones."""
    folder = session.cache_dir.parent / name.lower()
    session.run(python(session), "-m", "venv", str(folder), external=True)
    own = str(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    share(session, own)
    session.run(own, "-m", "pip", "install", "--no-deps", *packages, external=True)
    return own


def share(session: nox.Session, own: str) -> None:
    """Let the interpreter ``own`` find the packages of the shared environment after those of its own."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    shared, first = (str(session.run(one, "-c", where, silent=True, external=True)) for one in (python(session), own))
    Path(first.strip(), "shared.pth").write_text(shared, encoding="utf-8")


def python(session: nox.Session) -> str:
    """The interpreter of the shared environment."""
    folder = session.cache_dir.parent / "environment"
    return str(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


def check(session: nox.Session) -> None:
    """Ruff, its formatter, and mypy."""
    for arguments in (["ruff", "check"], ["ruff", "format", "--check"], ["tools.check_types"]):
        session.run(python(session), "-m", *arguments, external=True)
