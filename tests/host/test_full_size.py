"""Published model sizes at random weights: one whole update, pictures of 64 x 64 pixels."""

from __future__ import annotations

import json

import pytest
from random_graphs import random_training
from safetensors.numpy import load_file

from treegrpo_core.architectures import architecture_named


def one_update(comfy, graph, run_name, family, dtype):
    """Metrics of one update of the whole model, and the hash of its weights before and after."""
    nodes = random_training(graph, run_name, architecture_named(family)).set("model", dtype=dtype, full_size=True)
    after = graph.add("TestInspect", model=nodes.model[0], after=nodes.update[0])
    shown = comfy.run(graph)
    (line,) = (comfy.output / "treegrpo" / run_name / "metrics.jsonl").read_text().splitlines()
    comfy.free()
    return json.loads(line), shown[nodes.before]["hash"], shown[after]["hash"]


def test_sd15_runs_one_whole_update(comfy, graph, run_name):
    metrics, before, after = one_update(comfy, graph, run_name, "SD1.5", "float32")
    assert metrics["grad_norm"] > 0
    assert metrics["log_ratio_max"] < 1e-3
    assert before == after
    state = load_file(comfy.output / "treegrpo" / run_name / "state.safetensors")
    assert sum(name.startswith("adapter.") and "lora_B" in name for name in state) == 16 * 10
    assert f"run {run_name}, memory: model 3.44 GB" in comfy.log()


@pytest.mark.slow
def test_sdxl_in_bf16_runs_one_whole_update(comfy, graph, run_name):
    metrics, before, after = one_update(comfy, graph, run_name, "SDXL", "bfloat16")
    assert metrics["grad_norm"] > 0
    assert metrics["log_ratio_max"] < 1e-2
    assert before == after
    assert f"run {run_name}, memory: model 5.1" in comfy.log()
