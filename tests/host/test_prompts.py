"""TreeGRPO Prompts on files: whatever editors write, read again once it was edited."""

from __future__ import annotations

import pytest
from graphs import training

from tools.client import ExecutionError


@pytest.fixture
def prompts_of(comfy, graph, run_name):
    """A function: the file's bytes, and the text box -> the prompts that TreeGRPO Encode hands on; None: from cache."""
    drawn = graph.add("TreeGRPOPrompts", text="", prompts_per_step=2, seed=0, file=f"{run_name}.txt")
    tiny = graph.add("TreeGRPOTinyModel")
    encoded = graph.add("TreeGRPOEncode", clip=tiny[1], prompts=drawn[0])
    shown = graph.add("PreviewAny", source=encoded[1])

    def run(data, text=""):
        (comfy.base / "input" / f"{run_name}.txt").write_bytes(data)
        graph.inputs(drawn)["text"] = text
        outputs = comfy.run(graph)
        return None if drawn.id in outputs.cached else sorted(outputs[shown]["text"][0].split("\n"))

    return run


def test_a_file_with_a_mark_and_odd_separators_beside_the_text_box(prompts_of):
    data = "\ufeff# mine\r\nfox on\u2028blue\r\n".encode("utf-16-le")
    assert prompts_of(data, "owl\x0bon\x85red") == ["fox on blue", "owl on red"]


def test_an_edited_file_is_read_again_and_an_unedited_one_is_not(prompts_of):
    assert prompts_of(b"fox on blue\nowl on red") == ["fox on blue", "owl on red"]
    assert prompts_of(b"fox on blue\nowl on red") is None
    assert prompts_of(b"fox on blue\nowl on sky") == ["fox on blue", "owl on sky"]


def test_a_run_goes_on_once_its_prompt_file_is_mended(comfy, graph, run_name):
    nodes = training(graph, run_name).set("prompts", text="", file=f"{run_name}.txt")
    file = comfy.base / "input" / f"{run_name}.txt"
    file.write_text("fox on blue\nowl on red")
    comfy.run(graph)
    file.write_text("fox on blue\nowl " + "on red " * 9)
    with pytest.raises(ExecutionError, match="prompts: they encode to different lengths"):
        comfy.run(graph)
    file.write_text("fox on blue\nowl on sky")
    comfy.run(graph)
    nodes.set("prompts", text="", file="")
    file.unlink()
    with pytest.raises(ExecutionError, match="no prompt"):
        comfy.run(graph)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            "owl on red\nfox \u2019\n".encode("cp1252"),
            "file: '{name}.txt' is not text in UTF-8: line 2, byte 15 is 0x92",
        ),
        ("owl\nfox".encode("utf-16-le"), r"file: '{name}.txt': line 1 has the character U\+0000"),
    ],
)
def test_a_file_that_is_no_text(prompts_of, run_name, data, message):
    with pytest.raises(ExecutionError, match=message.format(name=run_name)) as caught:
        prompts_of(data)
    assert (caught.value.node_type, caught.value.kind) == ("TreeGRPOPrompts", "ValueError")


@pytest.mark.parametrize("weight", ["nan", "1e39"])
def test_a_weight_that_is_no_number(comfy, graph, run_name, weight):
    training(graph, run_name).set("prompts", text=f"fox on blue\n(owl:{weight}) on red")
    with pytest.raises(
        ExecutionError, match=rf"prompts: '\(owl:{weight}\) on red' encodes to NaN or infinite"
    ) as caught:
        comfy.run(graph)
    assert caught.value.node_type == "TreeGRPOEncode"


@pytest.mark.parametrize("node", ["prompts", "encode", "sampler"])
def test_half_a_character_from_a_text_box(comfy, graph, run_name, node):
    field = "text" if node == "prompts" else "prompts"
    training(graph, run_name).set(node, **{field: "fox on blue\nowl \ud83e on red"})
    with pytest.raises(ExecutionError, match=rf"{field}: line 2 has the character U\+D83E") as caught:
        comfy.run(graph)
    assert caught.value.kind == "ValueError"
