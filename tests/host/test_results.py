"""What comes out: LoRA files, core's own types, best leaves, and the bundled model as an ordinary one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from graphs import ordinary_image, training
from safetensors.numpy import load_file

from tools.client import ExecutionError, Graph
from treegrpo_core.adapter import KINDS
from treegrpo_core.bundled.captions import background_match, random_captions


def almost_equal(a, b) -> bool:
    """At most 1/255 apart in at least 99 % of pixels."""
    return bool((np.abs(a.astype(int) - b.astype(int)).max(axis=-1) <= 1).mean() >= 0.99)


@pytest.fixture
def trained(request, comfy, graph, run_name):
    """A trained run, exported; the graph's nodes and the picture of the live policy. Parameter: adapter, format."""
    kind, format_ = getattr(request, "param", ("lora", "comfyui"))
    nodes = training(graph, run_name, iterations=3).set("policy", learning_rate=1e-2, adapter=kind)
    graph.add("TreeGRPOExport", policy=nodes.end[0], file_name=run_name, format=format_)
    comfy.run(graph)
    looking = Graph()
    tiny = looking.add("TreeGRPOTinyModel")
    policy = looking.add(
        "TreeGRPOPolicy", **{**graph.inputs(nodes.policy), "model": tiny[0], "if_run_exists": "continue"}
    )
    live, base = ordinary_image(looking, tiny, policy[1]), ordinary_image(looking, tiny, tiny[0])
    outputs = comfy.run(looking)
    return nodes, comfy.images(outputs[live]), comfy.images(outputs[base])


@pytest.mark.parametrize(
    ("trained", "prefix"),
    [(("lora", "kohya"), "lora_unet_"), (("lora", "diffusers"), "transformer.")]
    + [((kind, "comfyui"), "diffusion_model.") for kind in KINDS],
    indirect=["trained"],
)
def test_the_exported_file_gives_the_trainers_pictures(comfy, trained, run_name, prefix):
    _, live, base = trained
    name = f"{run_name}.safetensors"
    assert name in comfy.files("LoraLoaderModelOnly", "lora_name")
    graph = Graph()
    tiny = graph.add("TreeGRPOTinyModel")
    lora = graph.add("LoraLoaderModelOnly", model=tiny[0], lora_name=name, strength_model=1.0)
    shown = ordinary_image(graph, tiny, lora[0])
    logged = len(comfy.log())
    pictures = comfy.images(comfy.run(graph)[shown])
    assert "not loaded" not in comfy.log()[logged:]
    assert almost_equal(pictures, live)
    assert not almost_equal(pictures, base)
    keys = load_file(comfy.base / "models" / "loras" / name)
    assert all(key.startswith(prefix) for key in keys)


@pytest.mark.parametrize("trained", [("lora", "comfyui"), ("lora", "kohya")], indirect=True)
def test_a_new_run_can_start_from_the_file(comfy, trained, run_name):
    nodes, live, _ = trained
    graph = Graph()
    tiny = graph.add("TreeGRPOTinyModel")
    inputs = {**nodes.graph.inputs(nodes.policy), "model": tiny[0], "run_name": f"{run_name} 2"}
    policy = graph.add("TreeGRPOPolicy", **{**inputs, "start_from": f"{run_name}.safetensors"})
    shown = ordinary_image(graph, tiny, policy[1])
    assert almost_equal(comfy.images(comfy.run(graph)[shown]), live)


def test_the_file_of_another_run_is_never_replaced(comfy, trained, run_name):
    graph = Graph()
    nodes = training(graph, f"{run_name} other")
    graph.add("TreeGRPOExport", policy=nodes.update[0], file_name=run_name)
    path = comfy.base / "models" / "loras" / f"{run_name}.safetensors"
    before = path.read_bytes()
    with pytest.raises(ExecutionError, match="does not come from run"):
        comfy.run(graph)
    assert path.read_bytes() == before


def test_the_average_of_the_weights_can_be_exported(comfy, graph, run_name):
    nodes = training(graph, run_name, iterations=3).set("policy", learning_rate=5e-3)
    for weights in ("last", "average"):
        graph.add("TreeGRPOExport", policy=nodes.end[0], file_name=f"{run_name} {weights}", weights=weights)
    comfy.run(graph)
    state = load_file(comfy.output / "treegrpo" / run_name / "state.safetensors")
    for weights, prefix in (("last", "adapter."), ("average", "average.")):
        file = load_file(comfy.base / "models" / "loras" / f"{run_name} {weights}.safetensors")
        exported = {key: value for key, value in file.items() if not key.endswith("alpha")}
        expected = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        assert exported.keys() == {f"diffusion_model.{key}" for key in expected}
        assert all(np.array_equal(exported[f"diffusion_model.{key}"], value) for key, value in expected.items())


def test_core_nodes_take_the_lora_and_the_losses(comfy, graph, run_name):
    """After one update the loss curve is a single point, on which core's plot alone would divide by zero."""
    nodes = training(graph, run_name).set("policy", learning_rate=5e-3)
    plot = graph.add("LossGraphNode", loss=nodes.update[2], filename_prefix=f"loss {run_name}")
    graph.add("SaveLoRA", lora=nodes.update[1], prefix=f"loras/{run_name}")
    loaded = graph.add("LoraModelLoader", model=nodes.model[0], lora=nodes.update[1], strength_model=1.0, bypass=False)
    with_lora = ordinary_image(graph, nodes.model, loaded[0])
    base = ordinary_image(graph, nodes.model, nodes.model[0])
    outputs = comfy.run(graph)
    assert comfy.images(outputs[plot]).std() > 0
    assert not np.array_equal(comfy.images(outputs[with_lora]), comfy.images(outputs[base]))
    assert len(list((comfy.output / "loras").glob(f"{run_name}*.safetensors"))) == 1


def test_an_update_without_a_loss_is_drawn_too_and_what_is_said_of_it_is_json(comfy, graph, run_name):
    """All its steps were left out; its line in the log has null, and the run is read from the disk again."""
    nodes = training(graph, run_name)
    comfy.run(graph)
    folder = comfy.output / "treegrpo" / run_name
    entry = json.loads((folder / "metrics.jsonl").read_text())
    (folder / "metrics.jsonl").write_text(json.dumps({**entry, "loss": None}) + "\n")
    (folder / "state.safetensors").touch()
    plot = graph.add("LossGraphNode", loss=nodes.update[2], filename_prefix=f"loss {run_name}")
    losses, metrics = (graph.add("PreviewAny", source=nodes.update[slot]) for slot in (2, 3))
    outputs = comfy.run(graph)
    assert comfy.images(outputs[plot]).std() > 0
    said = json.loads(outputs[metrics]["text"][0])
    assert said == json.loads((folder / "metrics.jsonl").read_text().splitlines()[1])
    assert json.loads(outputs[losses]["text"][0]) == {"loss": [0.0, said["loss"]]}


def test_best_leaves_are_the_ones_with_the_highest_reward(comfy, graph, run_name):
    nodes = training(graph, run_name)
    best = graph.add("TreeGRPOBestLeaf", tree=nodes.scorer[0], count=2)
    decoded = graph.add("VAEDecode", samples=best[0], vae=nodes.model[2])
    shown, leaves = graph.add("PreviewImage", images=decoded[0]), graph.add("PreviewImage", images=nodes.scorer[1])
    texts = graph.add("PreviewAny", source=nodes.scorer[2])
    outputs = comfy.run(graph)
    pictures, everything = comfy.images(outputs[shown]), comfy.images(outputs[leaves])
    assert (len(pictures), len(everything)) == (4, 8)
    rewards = np.array([float(text) for text in outputs[texts]["text"]]).reshape(2, 4)
    for prompt in range(2):
        ranked = everything[prompt * 4 : prompt * 4 + 4][np.argsort(-rewards[prompt])]
        assert almost_equal(pictures[prompt * 2 : prompt * 2 + 2], ranked[:2])


def test_leaves_are_distinct_pictures(comfy, graph, run_name):
    nodes = training(graph, run_name)
    leaves = graph.add("PreviewImage", images=nodes.scorer[1])
    pictures = comfy.images(comfy.run(graph)[leaves])
    assert all(not np.array_equal(a, b) for i, a in enumerate(pictures) for b in pictures[:i])


def test_the_bundled_model_is_an_ordinary_model(comfy, graph):
    tiny = graph.add("TreeGRPOTinyModel")
    plain, guided = ordinary_image(graph, tiny, tiny[0]), ordinary_image(graph, tiny, tiny[0], cfg=3.0)
    other = ordinary_image(graph, tiny, tiny[0], prompt="tulip on yellow")
    outputs = comfy.run(graph)
    a, b, c = (comfy.images(outputs[node]) for node in (plain, guided, other))
    assert a.shape == (4, 64, 64, 3)
    assert not np.array_equal(a, b)
    blue, yellow = (70, 120, 220), (245, 215, 70)
    for pictures, colour in ((b, blue), (c, yellow)):
        corners = np.median(pictures[:, :3, :3].reshape(-1, 3), axis=0)
        assert np.abs(corners - colour).max() < 60


def test_the_bundled_model_draws_what_it_was_trained_to(comfy, graph):
    """Backgrounds are nearly solved by its training, if ComfyUI encodes prompts exactly as the training did."""
    prompts = [str(caption) for caption in random_captions(32, seed=7)]
    tiny = graph.add("TreeGRPOTinyModel")
    pictures = [(prompt, ordinary_image(graph, tiny, tiny[0], prompt=prompt)) for prompt in dict.fromkeys(prompts)]
    outputs = comfy.run(graph)
    matches = [
        float(background_match(torch.from_numpy(comfy.images(outputs[shown])) / 255, [prompt] * 4).mean())
        for prompt, shown in pictures
    ]
    assert sum(matches) / len(matches) > 0.95


def test_the_vae_rebuilds_a_picture(comfy, graph, tmp_path):
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (64, 64), (70, 120, 220))
    ImageDraw.Draw(picture).ellipse((16, 16, 48, 48), (220, 60, 60))
    picture.save(tmp_path / "disc.png")
    tiny = graph.add("TreeGRPOTinyModel")
    loaded = graph.add("LoadImage", image=comfy.upload(tmp_path / "disc.png"))
    encoded = graph.add("VAEEncode", pixels=loaded[0], vae=tiny[2])
    decoded = graph.add("VAEDecode", samples=encoded[0], vae=tiny[2])
    shown = graph.add("PreviewImage", images=decoded[0])
    rebuilt = comfy.images(comfy.run(graph)[shown])[0].astype(int)
    assert np.abs(rebuilt - np.asarray(picture).astype(int)).mean() < 12
