"""The written documentation agrees with the code and with what is in the repository."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from runs import table

from tools.host import ROOT

HELP = ROOT / "web" / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
TEXTS = [
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "assets/README.md",
    "docs/architectures.md",
    "docs/lora.md",
    "docs/remote_reward.md",
    "docs/rewards.md",
]
COMMANDS = ["python -m pip install nox && python -m nox -s demo", "python -m nox -s tests"]


@dataclass(frozen=True)
class Schema:
    """What a node's ``io.Schema(...)`` says, read from the source text."""

    node_id: str
    display_name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return self.node_id


def keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def schemas() -> list[Schema]:
    found = []
    for file in sorted((ROOT / "nodes").glob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "Schema":
                given = keywords(call)
                inputs = [input_name(each) for each in calls(given["inputs"])]
                outputs = [ast.literal_eval(keywords(each)["display_name"]) for each in calls(given["outputs"])]
                names = ast.literal_eval(given["node_id"]), ast.literal_eval(given["display_name"])
                found.append(Schema(*names, tuple(inputs), tuple(outputs)))
    return found


def calls(listed: ast.expr) -> list[ast.Call]:
    assert isinstance(listed, ast.List)
    assert all(isinstance(each, ast.Call) for each in listed.elts), "inputs and outputs are written out one by one"
    return [each for each in listed.elts if isinstance(each, ast.Call)]


def input_name(call: ast.Call) -> str:
    """The name of an input that is written out, or of one from nodes/inputs.py, whose functions are named like it."""
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "inputs":
        return function.attr
    return str(ast.literal_eval(call.args[0]))


def section(page: str, title: str) -> str:
    """The text under a heading of the second level."""
    return page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def first_column(text: str) -> tuple[str, ...]:
    """What stands in backticks at the beginning of each table row."""
    return tuple(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))


NODES = schemas()


def test_every_node_has_a_help_page_and_every_help_page_a_node() -> None:
    assert len({node.node_id for node in NODES}) == len(NODES) == 20
    assert {page.name for page in HELP.iterdir()} == {f"{node}.md" for node in NODES}


@pytest.mark.parametrize("node", NODES, ids=str)
def test_a_help_page_explains_exactly_the_inputs_and_outputs_of_its_node(node: Schema) -> None:
    page = (HELP / f"{node}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {node.display_name}\n")
    assert first_column(section(page, "Inputs")) == node.inputs
    assert first_column(section(page, "Outputs")) == node.outputs
    assert section(page, "Example").strip()
    assert section(page, "Common errors").strip()


def test_the_readme_lists_exactly_the_nodes_under_the_names_they_are_shown_by() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| \S", section(README, "Nodes"), re.MULTILINE)
    assert sorted(rows) == sorted((node.node_id, node.display_name) for node in NODES)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readme_gives_the_two_commands_on_lines_of_their_own(command: str) -> None:
    assert command in README.splitlines()


def test_every_file_that_the_architecture_names_exists() -> None:
    named = re.findall(r"`([\w.]+(?:/[\w.]+)*(?:\.py|/))`", ARCHITECTURE)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("text", TEXTS)
def test_every_link_to_a_file_of_the_repository_leads_to_one(text: str) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)\)", (ROOT / text).read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (ROOT / text).parent.joinpath(target).exists()] == []


def test_the_included_words_are_all_in_the_help_page() -> None:
    from treegrpo_core.bundled.captions import COLOURS, THINGS

    page = (HELP / "TreeGRPOTinyModel.md").read_text(encoding="utf-8")
    listed = {name: found.split(", ") for name, found in re.findall(r"\*\*(\w+):\*\* (.+)", page)}
    assert listed == {"Things": list(THINGS), "Colours": list(COLOURS)}


def test_the_page_of_families_says_what_the_table_says() -> None:
    from treegrpo_core.architectures import ARCHITECTURES

    page = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    lines = [line.replace(r"\|", "/") for line in page.splitlines() if line.startswith("| ")]
    rows = [line.split("|")[1:-1] for line in lines if "`, " in line]
    told = [[cell.strip().strip("`").replace("/", "|") for cell in row] for row in rows if len(row) == 6]
    assert told == [
        [
            entry.name,
            ", ".join(entry.host_classes),
            entry.kernel,
            f"{entry.scheduler}`, {entry.steps} steps",
            entry.attention,
            entry.mlp,
        ]
        for entry in ARCHITECTURES
    ]


def test_the_page_of_families_says_what_was_run_where() -> None:
    assert table() in (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8"), table()


def test_the_table_of_patches_says_what_the_code_refuses() -> None:
    from treegrpo_core.patches import BATCH_TOLERANCE, PROBE_ROWS, REFUSED, TOLERANCE

    page = section((ROOT / "docs" / "architectures.md").read_text(encoding="utf-8"), "Model patches")
    rows = [line for line in page.splitlines() if line.startswith("| ")][2:]
    assert rows == [f"| {entry} | {entry.why} |" for entry in REFUSED]
    assert f"{PROBE_ROWS} latents per prompt" in page
    text = page.replace("\n", " ").replace(" %", "%")
    assert f"more than {TOLERANCE:.1%} of their size, or by more than {BATCH_TOLERANCE:.0%} alone" in text


def test_the_only_scripts_are_those_of_the_web_folder_itself_and_they_load_nothing_from_outside() -> None:
    """The host loads every .js under web/, so none may lie among the help pages."""
    folders = [Path("web"), Path("docs")]
    scripts = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in {".js", ".mjs"}]
    assert {path.parent for path in scripts} == {ROOT / "web"}
    for path in scripts:
        text = path.read_text(encoding="utf-8")
        assert "://" not in text
        assert set(re.findall(r'from "([^"]+)"', text)) <= {
            "../../scripts/api.js",
            "../../scripts/app.js",
            *(f"./{other.name}" for other in scripts if other.suffix == ".mjs"),
        }


def test_the_page_of_rewards_says_what_the_registry_says() -> None:
    from treegrpo_core.rewards import REWARDS

    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    rows = {row.split("`")[1]: row for row in page.splitlines() if row.startswith("| `")}
    assert set(rows) == set(REWARDS)
    for name, info in REWARDS.items():
        assert info.licence in rows[name]
        for checkpoint in info.checkpoints:
            assert checkpoint.file in page and checkpoint.repository in page
