"""``python -m nox -s demo``: train the bundled model inside a real ComfyUI and measure what it learned.

Queues the quickstart workflow as a user would, then renders held-out prompts with core's own nodes and the same seeds:
base model, exported LoRA file, live adapter. Everything printed is measured; the exit status is 0 only if it all holds.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from tools.client import Graph, Node, Outputs
from tools.demo_figures import before_after, reward_curves
from tools.host import ROOT, Server
from treegrpo_core.bundled.captions import random_captions
from treegrpo_core.rewards import load_reward

OUTPUT = ROOT / "outputs" / "demo"
QUICKSTART = ROOT / "tests" / "graphs" / "treegrpo_quickstart.json"
BASE_WEIGHTS = ROOT / "assets" / "denoiser.safetensors"
RUN = "demo"
REWARDS = ("text_image", "background_match", "size_match")
"""Trained on, then the two that are only measured."""
MINIMUM_PICTURES = 64


def main() -> int:
    """Run the demonstration; 0 if the claims hold, else 1."""
    start = time.monotonic()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    graph = Graph.load(QUICKSTART)
    prompts = held_out(graph)
    weights = digest(BASE_WEIGHTS)
    with Server() as comfy:
        base = render(comfy, graph, prompts)
        lora = train(comfy, graph)
        base_again = render(comfy, graph, prompts, anew=True)
        trained = render(comfy, graph, prompts, lora=lora)
        live = render(comfy, graph, prompts, adapter=True)
    before_after(OUTPUT / "before_after.png", prompts, base, trained)

    passed = compare_rewards(prompts, base, trained)
    near = float((np.abs(trained.astype(int) - live.astype(int)).max(axis=-1) <= 1).mean())
    same_weights, same_pictures = digest(BASE_WEIGHTS) == weights, np.array_equal(base, base_again)
    print(f"LoRA file loaded by core against the live adapter: {near:.2%} of pixels within 1/255 (asked for: 99 %)")
    print(f"base weights' sha256: {weights[:16]} before, {digest(BASE_WEIGHTS)[:16]} after training")
    print(f"the base model's pictures before and after training: {'identical' if same_pictures else 'DIFFERENT'}")
    print(f"{time.monotonic() - start:.0f} s in all; results in {OUTPUT.relative_to(ROOT)}")
    return 0 if passed and near >= 0.99 and same_weights and same_pictures else 1


def held_out(graph: Graph) -> list[str]:
    """Prompts that the quickstart does not train on, without repetition, in a fixed order."""
    training = set(graph.inputs(graph.find("TreeGRPOPrompts"))["text"].splitlines())
    drawn = dict.fromkeys(str(caption) for caption in random_captions(96, seed=99))
    prompts = [prompt for prompt in drawn if prompt not in training]
    assert len(prompts) >= MINIMUM_PICTURES, f"only {len(prompts)} held-out prompts"
    return prompts


def train(comfy: Server, graph: Graph) -> str:
    """Run the quickstart with a progress bar, keep its results in OUTPUT; returns the LoRA file's name in ComfyUI."""
    policy, preview = graph.find("TreeGRPOPolicy"), graph.find("TreeGRPOPreview")
    iterations = graph.inputs(graph.find("TreeGRPOLoopStart"))["iterations"]
    graph.inputs(policy)["run_name"] = RUN
    log = comfy.output / "treegrpo" / RUN / "metrics.jsonl"
    known = set(comfy.files("LoraLoaderModelOnly", "lora_name"))
    step, trees = "-", []
    bar = tqdm(
        total=iterations, desc="training", unit="update", mininterval=1, miniters=0, smoothing=0, file=sys.stdout
    )
    with bar:

        def show(kind: str, data: dict[str, Any]) -> None:
            nonlocal step
            done = read_metrics(log)
            step = f"{data['value']}/{data['max']}" if kind == "progress" else step
            if kind == "executed" and data["node"] == preview.id:  # once per update
                trees.append(data["output"]["images"][0])
            bar.set_postfix(reward=f"{done[-1]['reward_mean']:.4f}" if done else "-", step=step, refresh=False)
            bar.update(len(done) - bar.n)

        comfy.run(graph, timeout=3600, on_event=show)
        show("end", {})
    metrics = read_metrics(log)
    shutil.copy2(log, OUTPUT / "metrics.jsonl")
    Image.open(BytesIO(comfy.view(trees[-1]))).save(OUTPUT / "tree.png")
    reward_curves(OUTPUT / "reward.png", metrics)
    (name,) = set(comfy.files("LoraLoaderModelOnly", "lora_name")) - known
    folders = (comfy.base / "models" / "loras", comfy.output / "loras")
    shutil.copy2(next(folder / name for folder in folders if (folder / name).is_file()), OUTPUT / Path(name).name)
    return name


def read_metrics(log: Path) -> list[dict[str, Any]]:
    """The finished lines of a run's metrics file; none if it does not exist yet."""
    text = log.read_text(encoding="utf-8") if log.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def render(
    comfy: Server, quickstart: Graph, prompts: list[str], lora: str = "", adapter: bool = False, anew: bool = False
) -> np.ndarray:
    """One 64x64 picture per prompt by core's KSampler and VAEDecode, (N, 64, 64, 3) uint8; seeds are always the same.

    The model is the quickstart's base model, alone, with a LoRA file by core's loader, or with the run's live adapter.
    ``anew`` makes ComfyUI compute what it has computed before.
    """
    policy = quickstart.find("TreeGRPOPolicy")
    graph = quickstart.upstream(policy)
    tiny, model = graph.find("TreeGRPOTinyModel"), graph.inputs(policy)["model"]
    if lora:
        model = graph.add("LoraLoaderModelOnly", model=model, lora_name=lora, strength_model=1.0)[0]
    if adapter:
        model = policy[1]
    count = len(prompts)
    listed = graph.add("TreeGRPOPrompts", text="\n".join(prompts), prompts_per_step=count, seed=0)
    encoded = graph.add("TreeGRPOEncode", clip=tiny[1], prompts=listed[0])
    order = graph.add("PreviewAny", source=encoded[1])
    latent = graph.add("EmptySD3LatentImage", width=64, height=64, batch_size=count)
    if anew:  # the same latent, but another input to the sampler
        latent = graph.add("RepeatLatentBatch", samples=latent[0], amount=1)
    ends = {"positive": encoded[0], "negative": encoded[0], "latent_image": latent[0]}
    fixed = {"seed": 99, "steps": 10, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    sampled = graph.add("KSampler", model=model, **ends, **fixed)
    decoded = graph.add("VAEDecode", samples=sampled[0], vae=tiny[2])
    saved = graph.add("SaveImage", images=decoded[0], filename_prefix="held out")
    outputs = comfy.run(graph)
    return in_order(comfy, outputs, prompts, order, saved, sampled)


def in_order(
    comfy: Server, outputs: Outputs, prompts: list[str], order: Node, saved: Node, sampled: Node
) -> np.ndarray:
    """The saved pictures in the order of ``prompts``."""
    assert sampled.id not in outputs.cached, "ComfyUI returned old pictures"
    drawn = outputs[order]["text"][0].splitlines()
    assert sorted(drawn) == sorted(prompts), "the pictures are not of the prompts asked for"
    return comfy.images(outputs[saved])[[drawn.index(prompt) for prompt in prompts]]


def compare_rewards(prompts: list[str], base: np.ndarray, trained: np.ndarray) -> bool:
    """Print each reward before and after; True if the trained one rose by at least three standard errors."""
    print(f"\n{len(prompts)} held-out prompts, one picture each, the same seeds (mean ± standard error)")
    print(f"{'reward':18}{'before':>18}{'after':>18}{'paired difference':>22}")
    rises = []
    for name in REWARDS:
        reward = load_reward(name)
        before, after = (reward.score(torch.from_numpy(images).float() / 255, prompts) for images in (base, trained))
        rise, error = mean_and_error(after - before)
        columns = [mean_and_error(before), mean_and_error(after), (rise, error)]
        texts = [f"{mean:.4f} ± {deviation:.4f}" for mean, deviation in columns]
        print(f"{name:18}{texts[0]:>18}{texts[1]:>18}{texts[2]:>22}")
        rises.append(rise / error if error else 0.0)
    print(f"{REWARDS[0]} rose by {rises[0]:.1f} standard errors (asked for: at least 3)\n")
    return rises[0] >= 3


def mean_and_error(values: torch.Tensor) -> tuple[float, float]:
    """Mean of (N,) values and its standard error."""
    return float(values.mean()), float(values.std() / len(values) ** 0.5)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
