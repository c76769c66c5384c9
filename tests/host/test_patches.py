"""Patches that remember or draw are refused by name before anything is sampled; all others change nothing."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from graphs import training
from random_graphs import random_training
from test_evaluation import evaluated
from test_search import searching

from tools.client import ExecutionError, Graph
from tools.host import comfyui_folder
from treegrpo_core.architectures import architecture_named
from treegrpo_core.patches import FINE as FINE_FILES
from treegrpo_core.patches import REFUSED as TABLE

CACHE = {"reuse_threshold": 0.05, "start_percent": 0.15, "end_percent": 0.95, "verbose": False}
WINDOWS: dict[str, Any] = {
    "context_length": 16,
    "context_overlap": 4,
    "context_schedule": "standard_static",
    "context_stride": 1,
    "closed_loop": False,
    "fuse_method": "pyramid",
    "freenoise": False,
    "cond_retain_index_list": "",
    "split_conds_to_windows": False,
    "latent_retain_index_list": "",
    "causal_window_fix": True,
}
NEWER = ("KV_Attn_Input", "PoseBranchCache")
"""Came after ComfyUI 0.3.75."""
APG = {"eta": 1.0, "norm_threshold": 5.0}
TILES = {"tile_size": 256, "max_depth": 0, "scale_depth": False}

REFUSED = {
    "EasyCache": ("EasyCache", CACHE, "EasyCache is among its patches"),
    "LazyCache": ("LazyCache", CACHE, "LazyCache is among its patches"),
    "APG": ("APG", {**APG, "momentum": -0.75}, "with momentum is among its patches.*set it to 0"),
    "ToMe": ("TomePatchModel", {"ratio": 0.5}, "TomePatchModel with a ratio above 0 .*at random"),
    "HyperTile": ("HyperTile", {**TILES, "swap_size": 3}, "HyperTile with swap_size above 2"),
    "linear CFG": ("VideoLinearCFGGuidance", {"min_cfg": 1.0}, "for the frames of a film"),
    "triangle CFG": ("VideoTriangleCFGGuidance", {"min_cfg": 1.0}, "for the frames of a film"),
    "windows over the batch": ("ContextWindowsManual", {**WINDOWS, "dim": 0}, "Context Windows over dim 0"),
    "FreeNoise": ("ContextWindowsManual", {**WINDOWS, "dim": 2, "freenoise": True}, "turn freenoise off"),
    "TSR": ("TemporalScoreRescaling", {"tsr_k": 0.9, "tsr_sigma": 1.0}, "one latent at a time"),
    "RenormCFG": ("RenormCFG", {"cfg_trunc": 100.0, "renorm_cfg": 1.0}, "one latent at a time.*set renorm_cfg to 0"),
    "Flux KV cache": ("FluxKVCache", {}, "Flux KV Cache is among"),
    "a cache of another pack": ("TestPatch", {"kind": "cached"}, r"SimilarInputs \(wrappers.diffusion_model.cache\)"),
    "a cache per sampling": ("TestPatch", {"kind": "cached_per_sampling"}, "differ by.*SimilarInputs"),
    "every second": ("TestPatch", {"kind": "every_second"}, "batches of one size after another.*EverySecond"),
    "momentum": ("TestPatch", {"kind": "momentum"}, "earlier evaluations.*momentum.<locals>.smooth"),
    "noise": ("TestPatch", {"kind": "noise"}, "random numbers.*noise.<locals>"),
    "rows for frames": ("TestPatch", {"kind": "frames"}, "others in the batch.*frames.<locals>.scaled"),
    "a replaced method": ("TestPatch", {"kind": "replaced_forward"}, r"replaced_forward.*\(diffusion_model.forward\)"),
}

FINE = {
    "APG without momentum": ("APG", {**APG, "momentum": 0.0}),
    "HyperTile": ("HyperTile", {**TILES, "swap_size": 2}),
    "windows over frames": ("ContextWindowsManual", {**WINDOWS, "dim": 2}),
    "SAG": ("SelfAttentionGuidance", {"scale": 0.5, "blur_sigma": 2.0}),
    "PAG": ("PerturbedAttentionGuidance", {"scale": 3.0}),
    "RescaleCFG": ("RescaleCFG", {"multiplier": 0.7}),
    "CFGZeroStar": ("CFGZeroStar", {}),
    "CFGNorm": ("CFGNorm", {"strength": 1.0}),
    "Epsilon Scaling": ("Epsilon Scaling", {"scaling_factor": 1.005}),
    "FreeU_V2": ("FreeU_V2", {"b1": 1.3, "b2": 1.4, "s1": 0.9, "s2": 0.2}),
    "FreSca": ("FreSca", {"scale_low": 1.0, "scale_high": 1.25, "freq_cutoff": 2}),
    "TCFG": ("TCFG", {}),
    "Mahiro": ("Mahiro", {}),
    "RenormCFG": ("RenormCFG", {"cfg_trunc": 100.0, "renorm_cfg": 0.0}),
    "ModelSamplingDiscrete": ("ModelSamplingDiscrete", {"sampling": "eps", "zsnr": False}),
    "Kohya Deep Shrink": (
        "PatchModelAddDownscale",
        {
            "block_number": 1,
            "downscale_factor": 2.0,
            "start_percent": 0.0,
            "end_percent": 0.35,
            "downscale_after_skip": True,
            "downscale_method": "bicubic",
            "upscale_method": "bicubic",
        },
    ),
}


def known(comfy, node):
    """Skips where this ComfyUI does not have the node."""
    if node not in comfy.get("/object_info"):
        pytest.skip(f"this ComfyUI has no {node}")


def patched(comfy, run_name, node, settings):
    """A training graph of a small SD1.5 whose guider has a patched model."""
    known(comfy, node)
    nodes = random_training(Graph(), run_name, architecture_named("SD1.5"))
    accepted = comfy.get("/object_info")[node]["input"]
    names = {*accepted["required"], *accepted.get("optional", {})}
    given = {name: value for name, value in settings.items() if name in names}
    if settings.get("freenoise") and "freenoise" not in names:
        pytest.skip("this ComfyUI has no FreeNoise")
    patch = nodes.graph.add(node, model=nodes.policy[1], **given)
    return nodes.set("guider", model=patch[0])


@pytest.mark.parametrize("case", REFUSED)
def test_a_patch_that_trees_cannot_do_with_is_named(comfy, run_name, case):
    node, settings, message = REFUSED[case]
    nodes = patched(comfy, run_name, node, settings)
    nodes.set("model", seed=1)  # a model of its own, since one of these changes it for good
    with pytest.raises(ExecutionError, match=message) as caught:
        comfy.run(nodes.graph)
    assert caught.value.node_type == "TreeSampler"
    assert caught.value.message.startswith("model: ")
    assert "Traceback" not in caught.value.message


@pytest.mark.parametrize("case", FINE)
def test_patches_of_core_that_remember_nothing_train_without_a_trial(comfy, run_name, case):
    nodes, said = patched(comfy, run_name, *FINE[case]), len(comfy.log())
    comfy.run(nodes.graph)
    assert "trying whether" not in comfy.log()[said:]
    assert (comfy.output / "treegrpo" / run_name / "state.safetensors").exists()


@pytest.mark.parametrize("entry", [architecture_named(name) for name in ("SD3", "Flux", "Wan")], ids=lambda e: e.name)
def test_a_model_without_patches_is_not_tried(comfy, run_name, entry):
    nodes, said = random_training(Graph(), run_name, entry), len(comfy.log())
    comfy.run(nodes.graph)
    assert "trying whether" not in comfy.log()[said:]


@pytest.mark.parametrize("kind", ["harmless", "drawing_for_nothing"])
def test_a_patch_of_another_pack_is_tried_once_and_trains(comfy, run_name, kind):
    nodes, said = patched(comfy, run_name, "TestPatch", {"kind": kind}), len(comfy.log())
    nodes.set("model", seed=2)
    again = nodes.graph.add("TestPatch", model=nodes.model[0], kind=kind)  # in front, where its output is kept
    nodes.set("before", model=again[0]).set("guider", model=nodes.policy[1])
    for _ in range(2):
        comfy.run(nodes.graph)
    assert comfy.log()[said:].count(f"remember or draw anything: random_models/patches.{kind}") == 1
    assert len((comfy.output / "treegrpo" / run_name / "metrics.jsonl").read_text().splitlines()) == 2


def test_what_the_trial_does_not_see_the_replay_finds_and_names(comfy, run_name):
    nodes = patched(comfy, run_name, "TestPatch", {"kind": "noise_at_the_start"})
    nodes.graph.inputs(nodes.graph.find("TreeSampler"))["start"] = 0
    with pytest.raises(ExecutionError, match="replaying a fresh tree.*patches are: random_models.*noisy") as caught:
        comfy.run(nodes.graph)
    assert caught.value.node_type == "LoRAUpdate"
    assert not (comfy.output / "treegrpo" / run_name / "metrics.jsonl").exists()


def test_a_guider_with_a_memory_is_refused(comfy, run_name):
    nodes = random_training(Graph(), run_name, architecture_named("SD1.5"))
    guider = nodes.graph.add(
        "TestMovingGuider", model=nodes.policy[1], positive=nodes.model[1], negative=nodes.model[2]
    )
    nodes.graph.inputs(nodes.graph.find("TreeSampler"))["guider"] = guider[0]
    with pytest.raises(ExecutionError, match=r"earlier evaluations.*MovingGuider \(guider\)"):
        comfy.run(nodes.graph)


@pytest.mark.parametrize(("node", "inputs"), [("LazyCache", CACHE), ("TestPatch", {"kind": "momentum"})])
def test_a_search_refuses_them_too(comfy, graph, node, inputs):
    nodes = searching(graph)
    patch = graph.add(node, model=nodes.model[0], **inputs)
    graph.inputs(graph.find("BasicGuider"))["model"] = patch[0]
    with pytest.raises(ExecutionError, match="model: .* Take") as caught:
        comfy.run(graph)
    assert caught.value.node_type == "TreeGRPOSearch"


def test_an_evaluation_refuses_them_too(comfy, graph, run_name):
    nodes, evaluate = evaluated(graph, run_name)
    patch = graph.add("LazyCache", model=nodes.policy[1], **CACHE)
    guider = graph.inputs(evaluate)["guider"][0]
    graph[guider]["inputs"]["model"] = patch[0]
    with pytest.raises(ExecutionError, match="LazyCache is among its patches") as caught:
        comfy.run(graph)
    assert caught.value.node_type == "TreeGRPOEvaluate"


def test_a_trial_changes_no_picture(comfy, graph, run_name):
    """The same leaves whether the patch is tried before them or was tried long before."""
    leaves = []
    nodes = training(graph, run_name)
    patch = graph.add("TestPatch", model=nodes.model[0], kind="drawing_for_nothing")
    nodes.set("policy", model=patch[0])
    shown = graph.add("PreviewImage", images=nodes.scorer[1])
    for node in (nodes.update, nodes.advantage):
        del graph[node.id]
    for seed in (3, 4, 3):
        nodes.set("noise", noise_seed=seed)
        leaves.append(comfy.images(comfy.run(graph)[shown]))
    first, other, again = leaves
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def patching_files():
    """The files of this ComfyUI's own nodes that hang something else than weights on a model."""
    hangs = re.compile(
        r"\.set_model_(?!compute_dtype|options_)\w+\(|\.add_wrapper|\.add_object_patch\(|context_handler|set_torch_compile"
        r"|\.model_options\[\"transformer_options\"\]\[|\.set_injections\("
    )
    folder = comfyui_folder() / "comfy_extras"
    return sorted(path for path in folder.glob("nodes_*.py") if hangs.search(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", patching_files(), ids=lambda path: path.stem)
def test_every_node_of_core_that_patches_a_model_was_judged(path):
    """One that is not named is tried like other packs' patches; naming it saves that."""
    refused = {entry.owner.rsplit(".", 1)[0] for entry in TABLE}
    assert path.stem.removeprefix("nodes_") in FINE_FILES or f"comfy_extras/{path.stem}" in refused


def test_every_refused_patch_is_in_core_where_the_table_says():
    """A class or setting that core renames must be looked for again."""
    for entry in TABLE:
        source, name = entry.owner.rsplit(".", 1)
        path = comfyui_folder() / f"{source}.py"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if name in NEWER and name not in text:
            continue
        assert re.search(rf"^class {name}\b", text, re.MULTILINE), entry.owner
        assert entry.setting in text or not entry.unread, (entry.owner, entry.setting)
