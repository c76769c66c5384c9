"""What ``python -m benchmarks.gpu`` measures: graphs of the real nodes in a real server, and what they say."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tools.client import Graph
from tools.host import Server

from .host import quickstart as quickstart_graph
from .session import FLAT, STEPS

PARAMETERS = {"SD1.5": 0.86e9, "SDXL": 2.57e9, "SD3": 2.47e9, "Flux": 11.9e9}
"""Of the published models; SD3 is SD3.5 medium."""
BYTES = {"bfloat16": 2, "float8_e4m3fn": 1}
SIDE = {True: 512, False: 64}
"""Of the pictures in pixels, by whether models have their whole size."""
COSINE = 0.999
"""Least cosine between the adapter's gradients of a partly and a wholly resident model."""
ESTIMATE = 1.3
"""Most times the estimate that the peak may be: temporary tensors of a forward are not in it."""
HALF = 0.65
"""Most of the weights that the device may hold when it is to hold half of them."""
PLAN = {"preset": "row", "steps": 10, "group": 12, "window": 4, "start": 0}
"""Inputs of TreeGRPO Plan; all but the first are not used."""

Figures = dict[str, Any]


@dataclass
class Bench:
    """A server, the size of the models, and when the time is over."""

    comfy: Server
    reduced: bool
    end: float

    def run(self, graph: Graph) -> Any:
        """The graph's outputs. TimeoutError when the time is over."""
        return self.comfy.run(graph, timeout=max(1.0, self.end - time.monotonic()))

    def metrics(self, run_name: str) -> list[Figures]:
        """What every update of the run logged."""
        path = self.comfy.output / "treegrpo" / run_name / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def lacking(self, size: float, share: float) -> str:
        """Why a model of ``size`` bytes does not fit with this share of it on the device; empty if it does."""
        if self.reduced:
            return ""
        stats = self.comfy.get("/system_stats")
        for place, free, need in (
            ("the device", stats["devices"][0]["vram_total"], 1.1 * share * size),
            ("main memory", stats["system"]["ram_free"], 1.1 * size),
        ):
            if free < need:
                return f"{place} has {free / 1e9:.1f} GB, {need / 1e9:.1f} GB are needed"
        return ""


@dataclass(frozen=True)
class Setup:
    """One update of a model at random weights, as a graph."""

    family: str
    dtype: str
    share: float = 1.0
    """How much of the model the device may hold."""
    allowance: float = 0.0
    """Bytes the update may take beside what is there already; 0: all there are."""
    steps: int = 4
    branching: int = 2
    depth: int = 2
    row: str = ""
    """A plan in place of the tree, each of as many pictures from a noise of its own."""
    train_steps: int = 0
    max_batch: int = 2

    @property
    def checkpointing(self) -> bool:
        return self.family != "SD1.5"

    def graph(self, run_name: str, reduced: bool) -> tuple[Graph, Any]:
        """The graph, and the node that shows what the update took."""
        graph = Graph()
        whole = not reduced
        model = graph.add(
            "TestRandomModel", architecture=self.family, rows=1, seed=0, dtype=self.dtype, full_size=whole
        )
        placed = graph.add("MeasureResidency", model=model[0], share=self.share)
        policy = graph.add(
            "TreeGRPOPolicy",
            model=placed[0],
            run_name=run_name,
            rank=4,
            alpha=4.0,
            targets="attention+mlp",
            learning_rate=1e-4,
            optimizer="adamw",
            seed=0,
            if_run_exists="continue or create",
            start_from="none",
        )
        guider = graph.add("BasicGuider", model=policy[1], conditioning=model[1])
        latent = graph.add("EmptyLatentImage", width=SIDE[whole], height=SIDE[whole], batch_size=1)
        leaves = self.branching**self.depth
        plan = {"plan": graph.add("TreeGRPOPlan", **PLAN, row=self.row, roots=leaves)[0]} if self.row else {}
        sampler = graph.add(
            "TreeSampler",
            policy=policy[0],
            guider=guider[0],
            sigmas=graph.add("TreeGRPOSchedule", model=policy[1], steps=self.steps)[0],
            noise=graph.add("RandomNoise", noise_seed=3)[0],
            latent=latent[0],
            prompts="random",
            branching=self.branching,
            depth=self.depth,
            window="fixed",
            r=0.5,
            start=1,
            kernel="auto",
            eta=0.0,
            max_batch=9,
            **plan,
        )
        numbers = graph.add("TestRewards", count=leaves)
        rewarded = graph.add("TreeGRPORewardFromFloats", tree=sampler[0], rewards=numbers[0])
        advantage = graph.add(
            "TreeAdvantage",
            tree=rewarded[0],
            estimator="softmax",
            normalisation="none",
            train_steps=self.train_steps,
        )
        start = graph.add("MeasureStart", tree=advantage[0], model=policy[1], allowance=self.allowance)
        update = graph.add(
            "LoRAUpdate",
            policy=policy[0],
            tree=start[0],
            clip=1e-4,
            kl=0.0,
            passes=1,
            max_batch=self.max_batch,
            max_grad_norm=1e6,
            advantage_clip=5.0,
            gradient_checkpointing=self.checkpointing,
        )
        return graph, graph.add("MeasureEnd", before=start[1], model=policy[1], after=update[0])


def update(bench: Bench, setup: Setup, run_name: str) -> Figures:
    """One update; its seconds, bytes and the estimate of them."""
    graph, shown = setup.graph(run_name, bench.reduced)
    (found,) = bench.run(graph)[shown]["figures"]
    metrics = bench.metrics(run_name)[-1]
    return {
        **found,
        "estimate": estimate(bench.comfy.log(), run_name, setup, found["held"]),
        "grad_norm": metrics["grad_norm"],
        "stages": metrics["stages"],
        "seconds": metrics["stages"]["rollout"] + metrics["stages"]["update"],
    }


_SIZE = r"([\d.e+]+) (kB|MB|GB)"
_LINE = rf"memory: model {_SIZE}, adapter {_SIZE}, stored latents {_SIZE}, and per node in the update {_SIZE} \({_SIZE}"


def estimate(log: str, run_name: str, setup: Setup, held: int) -> float:
    """Bytes at the peak by the line that the run's first update left in the console, with ``held`` of the model."""
    found = re.search(rf"run {re.escape(run_name)}, {_LINE}", log)
    if not found:
        raise ValueError(f"run {run_name!r}: the console has no line of its memory")
    numbers = [float(value) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit] for value, unit in re.findall(_SIZE, found[0])]
    _model, adapter, latents, plain, checkpointed = numbers
    return held + adapter + latents + setup.max_batch * (checkpointed if setup.checkpointing else plain)


def gradient(bench: Bench, run_name: str) -> Any:
    """The gradient of a run's first update, (N,), which Adam's first moment is a tenth of."""
    import torch
    from safetensors.torch import load_file

    state = load_file(bench.comfy.output / "treegrpo" / run_name / "state.safetensors")
    moments = [value.flatten().double() for name, value in sorted(state.items()) if name.endswith(".exp_avg")]
    return 10 * torch.cat(moments)


def compared(right: Any, other: Any) -> Figures:
    """How far a gradient lies from the right one."""
    return {
        "cosine": float(right @ other / (right.norm() * other.norm())),
        "relative_error": float((other - right).norm() / right.norm()),
    }


def quickstart(bench: Bench) -> Figures:
    """Two updates of the example workflow."""
    bench.run(quickstart_graph("quickstart", 2))
    lines = bench.metrics("quickstart")
    return {
        "updates": len(lines),
        "seconds": [line["seconds"] for line in lines],
        "rewards": [line["reward_mean"] for line in lines],
        "replay_noise": lines[0]["replay_noise"],
        "exported": (bench.comfy.base / "models" / "loras" / "quickstart.safetensors").is_file(),
    }


def model(family: str, dtype: str) -> Callable[[Bench], Figures]:
    """An update with the whole model on the device, one with half of it, and how far their gradients are apart."""

    def work(bench: Bench) -> Figures:
        found: Figures = {"family": family, "dtype": dtype}
        size = PARAMETERS[family] * BYTES[dtype]
        names = {"full": 1.0, "half": 0.5}
        for name, share in names.items():
            lacking = bench.lacking(size, share)
            run_name = f"{family} {dtype} {name}"
            found[name] = {"skipped": lacking} if lacking else update(bench, Setup(family, dtype, share), run_name)
        if not any("skipped" in found[name] for name in names):
            found["gradient"] = compared(*(gradient(bench, f"{family} {dtype} {name}") for name in names))
        return found

    return work


def out_of_memory(bench: Bench) -> Figures:
    """The same update with enough memory, and with too little for its three nodes at once."""
    setup = {"family": "SD1.5", "dtype": "bfloat16", "branching": 3, "max_batch": 3}
    plenty = update(bench, Setup(**setup), "memory plenty")  # type: ignore[arg-type]
    taken = (plenty["peak"] or 2) - (plenty["before"] or 0)
    scarce = update(bench, Setup(**setup, allowance=0.6 * taken), "memory scarce")  # type: ignore[arg-type]
    sizes = re.findall(r"out of memory, going on with (\d+) latents", bench.comfy.log())
    gradients = (gradient(bench, f"memory {name}") for name in ("plenty", "scarce"))
    return {"plenty": plenty, "scarce": scarce, "sizes": [int(size) for size in sizes], **compared(*gradients)}


def speed(family: str) -> Callable[[Bench], Figures]:
    """Seconds of an update of TreeGRPO and of DanceGRPO (6 of 9 steps trained), each after one that warms up."""

    def work(bench: Bench) -> Figures:
        found: Figures = {"family": family}
        tree = Setup(family, "bfloat16", steps=STEPS, branching=2 if bench.reduced else 3, depth=3, max_batch=4)
        for name, setup in (("TreeGRPO", tree), ("DanceGRPO", replace(tree, row=FLAT, train_steps=6))):
            for _ in range(2):
                found[name] = update(bench, setup, f"{name} {family}")
        found["ratio"] = found["DanceGRPO"]["seconds"] / found["TreeGRPO"]["seconds"]
        return found

    return work


def failures(found: Figures) -> list[str]:
    """What of a section's figures is not as it should be, as sentences."""
    wrong = []
    if "updates" in found and (found["updates"] != 2 or not found["exported"]):
        wrong.append(f"{found['updates']} updates for 2, LoRA exported: {found['exported']}")
    cosine = found.get("gradient", found).get("cosine")
    if cosine is not None and not cosine > COSINE:
        wrong.append(f"the gradients' cosine is {cosine:.4f}, it should be above {COSINE}")
    if "sizes" in found and not found["sizes"]:
        wrong.append("the micro-batch was not halved")
    peaks = {name: found[name] for name in ("full", "half") if found.get(name, {}).get("peak")}
    for name, figures in peaks.items():
        if figures["peak"] > ESTIMATE * figures["estimate"]:
            wrong.append(f"{name}: the peak is {figures['peak'] / figures['estimate']:.2f} times the estimate")
    half = found.get("half", {})
    if half.get("held", 0) > HALF * half.get("weights", 0):
        wrong.append(f"half: the device holds {half['held'] / half['weights']:.2f} of the weights")
    if len(peaks) == 2 and peaks["half"]["peak"] >= peaks["full"]["peak"]:
        wrong.append("half of the model on the device takes no less memory than all of it")
    return wrong
