"""The example workflows: the tests' graphs in API format, as the UI-format files that ComfyUI's editor opens.

``python -m tools.workflows`` writes workflows/*.json anew, from tests/graphs/ and what a running ComfyUI says about its
nodes. ``python -m tools.workflows thumbnail NAME PICTURE ...`` makes workflows/NAME.jpg, the pictures side by side.

The editor keeps a node's widget values as a list without names. As the editor itself does, :func:`to_ui` writes an
input for every widget too, and so :func:`to_api` can name the values without asking a server.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tools.client import Graph
from tools.host import ROOT, Server
from tools.workflow_layout import TITLE, Pair, arrange, order

GRAPHS = ROOT / "tests" / "graphs"
WORKFLOWS = ROOT / "workflows"
NOTE = "MarkdownNote"
"""The editor's node for texts; the server does not know it."""
NOTES = {
    "treegrpo_quickstart": """## TreeGRPO quickstart

Trains a LoRA for the bundled small model towards a reward. Nothing to download, a CPU is enough.

1. Press **Run**. One run does all updates of *Loop Start*.
2. *Preview* shows a tree of each update: the leaves and their rewards.
3. *Export* writes `treegrpo_quickstart.safetensors` into the loras folder. The template **use_trained_lora** \
compares it with the base model.

**Run** again to train on from there, or choose another *run_name* to start anew. A reward with weight 0 is \
measured but not trained on.
""",
    "use_trained_lora": """## Use the trained LoRA

Draws one prompt from the same noise with the trained LoRA and without.

1. Run **treegrpo_quickstart** first: it writes `treegrpo_quickstart.safetensors`.
2. Press **R** so that *Load LoRA* lists the file, then **Run**.

The bundled model knows prompts like *small fox on blue*: a thing on a colour.
""",
    "tree_search": """## Tree search

Better pictures from a model as it is, without training: a tree of pictures grows, the predicted pictures are scored \
after every branching step, and only the best branches go on.

Press **Run** and compare: *Searched* has the best picture of each prompt, *One picture each* what the model draws by \
itself. Any model and any *Reward Model* will do. What looks best to the reward may not look best to you.
""",
}
"""The graphs that are example workflows, and what the note in each says."""

WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
SEEDS = {"seed", "noise_seed"}
"""Unless a node says otherwise, the editor puts a second widget after these: how the seed changes after each run."""

SHOWS_PICTURES = {"PreviewImage", "SaveImage", "TreeGRPOPreview"}
NOTE_SIZE = (400, 250)


class Input(NamedTuple):
    """An input as a node declares it; ``controlled``: it has the editor's second widget."""

    name: str
    type: str
    default: Any
    widget: bool
    multiline: bool
    controlled: bool


def declared_inputs(info: dict[str, Any]) -> list[Input]:
    """The inputs of a node in the editor's order: sockets before widgets, and required before optional ones."""
    found = []
    for group in ("required", "optional"):
        for name, (kind, *rest) in info["input"].get(group, {}).items():
            options = rest[0] if rest else {}
            kind = "COMBO" if isinstance(kind, list) else kind
            widget = kind in WIDGETS and not options.get("forceInput")
            controlled = options.get("control_after_generate", kind == "INT" and name in SEEDS)
            multiline, default = bool(options.get("multiline")), options.get("default")
            found.append(Input(name, kind, default, widget, widget and multiline, widget and bool(controlled)))
    return sorted(found, key=lambda one: one.widget)


def ui_node(name: str, node: dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
    """A node without links and position. Raises ValueError if the graph's inputs are not the node's."""
    inputs, declared = node["inputs"], declared_inputs(info)
    widgets = [one for one in declared if one.widget]
    unknown = inputs.keys() - {one.name for one in declared}
    missing = {one.name for one in widgets} - inputs.keys()
    if unknown or missing:
        place = f"node {name} ({node['class_type']})"
        raise ValueError(f"{place}: in the graph, remove the inputs {sorted(unknown)} and add {sorted(missing)}")
    values: list[Any] = []
    for one in widgets:
        linked = isinstance(inputs[one.name], list)
        values += [one.default if linked else inputs[one.name], *["fixed"] * one.controlled]
    slots = [
        {"name": one.name, "type": one.type, "link": None} | ({"widget": {"name": one.name}} if one.widget else {})
        for one in declared
    ]
    outputs = [
        {"name": label, "type": "COMBO" if isinstance(kind, list) else kind, "links": []}
        for label, kind in zip(info["output_name"], info["output"], strict=True)
    ]
    made = {"id": int(name), "type": node["class_type"], "size": node_size(node, declared, len(outputs))}
    if "title" in node.get("_meta", {}):
        made["title"] = node["_meta"]["title"]
    made |= {"inputs": slots, "outputs": outputs, "widgets_values": values}
    return made | {"properties": {"Node name for S&R": node["class_type"]}}


def node_size(node: dict[str, Any], declared: list[Input], outputs: int) -> Pair:
    """Width and height that leave room for the slots, the widgets, text boxes and the pictures that a node shows."""
    sockets = [one for one in declared if not one.widget]
    widgets = len(declared) - len(sockets) + sum(one.controlled for one in declared)
    width, height = 280, 20 * max(len(sockets), outputs) + 24 * widgets + 16
    for one in declared:
        if one.multiline:
            text = node["inputs"][one.name]
            lines = 2 if isinstance(text, list) else min(3 + text.count("\n"), 15)
            width, height = (280 if isinstance(text, list) else 380), height + 16 * lines
    return (400, height + 400) if node["class_type"] in SHOWS_PICTURES else (width, height)


def to_ui(graph: Graph, info: dict[str, Any], note: str) -> dict[str, Any]:
    """The workflow of a graph whose ids are integers; ``info`` is the server's object_info, ``note`` is Markdown."""
    names = order(graph)
    nodes = {name: ui_node(name, graph[name], info[graph[name]["class_type"]]) for name in names}
    links: list[list[Any]] = []
    for name in names:
        for slot, entry in enumerate(nodes[name]["inputs"]):
            value = graph[name]["inputs"].get(entry["name"])
            if isinstance(value, list):
                source = nodes[value[0]]
                output = source["outputs"][value[1]]
                entry["link"] = len(links) + 1
                output["links"].append(entry["link"])
                links.append([entry["link"], source["id"], value[1], int(name), slot, output["type"]])
    shown = {"id": max(map(int, names)) + 1, "type": NOTE, "title": "What to do", "size": NOTE_SIZE, "inputs": []}
    shown |= {"outputs": [], "properties": {}, "widgets_values": [note], "color": "#432", "bgcolor": "#653"}
    places, groups = arrange(graph, {name: node["size"] for name, node in nodes.items()}, NOTE_SIZE)
    everything = [shown | {"pos": (0, TITLE)}, *(nodes[name] | {"pos": places[name]} for name in names)]
    return {
        "last_node_id": shown["id"],
        "last_link_id": len(links),
        "nodes": [node | {"flags": {}, "order": place, "mode": 0} for place, node in enumerate(everything)],
        "links": links,
        "groups": groups,
        "config": {},
        "extra": {},
        "version": 0.4,
    }


def to_api(workflow: dict[str, Any]) -> Graph:
    """The graph that the editor queues for a workflow made by :func:`to_ui`."""
    sources = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    graph = Graph()
    for node in workflow["nodes"]:
        if node["type"] == NOTE:
            continue
        values, widgets = iter(node["widgets_values"]), [entry for entry in node["inputs"] if "widget" in entry]
        controlled = SEEDS if len(node["widgets_values"]) > len(widgets) else set()
        inputs: dict[str, Any] = {}
        for entry in widgets:
            inputs[entry["name"]] = next(values)
            if entry["name"] in controlled:
                next(values)
        inputs |= {entry["name"]: sources[entry["link"]] for entry in node["inputs"] if entry["link"] is not None}
        graph[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return graph


def thumbnail(name: str, pictures: list[Path]) -> None:
    """Write workflows/NAME.jpg: the pictures side by side, each 400 pixels high."""
    from PIL import Image

    loaded = [Image.open(path).convert("RGB") for path in pictures]
    scaled = [image.resize((round(400 * image.width / image.height), 400)) for image in loaded]
    sheet = Image.new("RGB", (sum(image.width for image in scaled), 400))
    for place, image in enumerate(scaled):
        sheet.paste(image, (sum(before.width for before in scaled[:place]), 0))
    sheet.save(WORKFLOWS / f"{name}.jpg", quality=90)


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["thumbnail"]:
        thumbnail(arguments[1], [Path(name) for name in arguments[2:]])
        return
    with Server() as comfy:
        info = comfy.object_info()
    WORKFLOWS.mkdir(exist_ok=True)
    for name, note in NOTES.items():
        workflow = to_ui(Graph.load(GRAPHS / f"{name}.json"), info, note)
        text = json.dumps(workflow, indent=1, ensure_ascii=False) + "\n"
        (WORKFLOWS / f"{name}.json").write_text(text, encoding="utf-8")
        print(f"workflows/{name}.json")


if __name__ == "__main__":
    main(sys.argv[1:])
