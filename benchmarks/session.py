"""ComfyUI, this pack and the included model in the process that measures."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.host import ROOT, comfyui_folder

PACK = "treegrpo_pack"
LEAVES, STEPS = 27, 10
FLAT = "1 1 1 1 1 1 1 1 1 0"
"""DanceGRPO's trajectories begin with one shared noise, but the published systems run every step of each by itself."""


@dataclass(frozen=True)
class Method:
    """One way to train: a plan's row, or where it is empty a window; and what differs from the nodes' defaults."""

    name: str
    row: str = ""
    roots: int = 1
    trained: int = 0
    """How many of its stochastic steps are trained, drawn anew for every update; 0: all."""
    tail_steps: int = 0
    """Steps after the window; 0: all."""
    window: Mapping[str, Any] = field(default_factory=dict)
    advantage: Mapping[str, Any] = field(default_factory=dict)
    update: Mapping[str, Any] = field(default_factory=dict)


def load_pack() -> ModuleType:
    """ComfyUI on the CPU, and the pack as ComfyUI imports it: a package of an arbitrary name."""
    if PACK in sys.modules:
        return sys.modules[PACK]
    arguments, sys.argv = sys.argv, [sys.argv[0], "--cpu"]
    sys.path.insert(0, str(comfyui_folder()))
    import comfy.options

    comfy.options.enable_args_parsing()
    spec = importlib.util.spec_from_file_location(PACK, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACK] = module
    spec.loader.exec_module(module)
    with contextlib.redirect_stdout(io.StringIO()):
        importlib.import_module(f"{PACK}.nodes")
    sys.argv = arguments
    return module


@dataclass
class Session:
    """A model, here the included one, under one guidance, with a run of its own, ready for updates of any plan."""

    latent = (16, 8, 8)

    prompts: Sequence[str]
    cfg: float = 1.0
    learning_rate: float = 5e-4
    seed: int = 0
    max_batch: int = 64
    rewards: Sequence[str] = ("text_image",)
    """The first is trained on, the others are only measured."""

    def __post_init__(self) -> None:
        import torch

        load_pack()
        from comfy_extras.nodes_custom_sampler import Noise_RandomNoise

        self.parts = {name: importlib.import_module(f"{PACK}.{name}") for name in MODULES}
        with torch.inference_mode():
            self._load()
        self.family = self.parts["nodes.host"].architecture(self.model)
        self.run = self._new_run()
        self.patcher = self.parts["nodes.host"].with_adapter(self.model, self.run.adapter)
        self.use_prompts(self.prompts)
        self.noise = Noise_RandomNoise(self.seed)
        self.sigmas = self.parts["nodes.host"].schedule(self.patcher, self.family.scheduler, STEPS)
        rewards = self.parts["treegrpo_core.rewards"]
        self.scorers = [
            rewards.WeightedReward(rewards.load_reward(name), float(name == self.rewards[0])) for name in self.rewards
        ]

    def _load(self) -> None:
        """Make ``model``, ``vae`` and what :meth:`encode` needs, as core's objects."""
        self.model, self.clip, self.vae = self.parts["nodes.tiny_model"].TinyModel.execute().args

    def encode(self, prompts: Sequence[str]) -> Any:
        """Conditioning with one row per prompt."""
        return self.parts["nodes.prompts"].Encode.execute([self.clip], list(prompts)).args[0]

    def _new_run(self) -> Any:
        import torch

        run = self.parts["treegrpo_core.run"]
        settings = run.RunSettings(
            base="bench", architecture=self.family.name, learning_rate=self.learning_rate, seed=self.seed
        )
        self.folder = tempfile.TemporaryDirectory()
        with torch.inference_mode(False):
            return run.Run.create(Path(self.folder.name), "bench", settings, self.model.model.diffusion_model)

    def use_prompts(self, prompts: Sequence[str]) -> None:
        """Sample and train these from now on."""
        self.prompts, self.guider = tuple(prompts), self._guider(prompts)

    def _guider(self, prompts: Sequence[str]) -> Any:
        import comfy.samplers
        import torch

        with torch.inference_mode():
            positive, negative = self.encode(prompts), self.encode([""])
        guider = comfy.samplers.CFGGuider(self.patcher)
        guider.set_conds(positive, negative)
        guider.set_cfg(self.cfg)
        return guider

    def tree(self, method: Method) -> Any:
        """The next tree of this method, grown, scored and with advantages, as the nodes do it; its stages are timed."""
        import torch

        core = self.parts["treegrpo_core.plan"]
        source = core.Plan.parse(method.row, method.roots) if method.row else core.Window(**method.window)
        spread = self.run.history.step_spread.means()
        plan = core.plan_for(source, STEPS, self.run.iteration, self.seed, spread)
        plan, sigmas = core.with_tail(plan, [float(sigma) for sigma in self.sigmas], method.tail_steps)
        with torch.inference_mode():
            sampling, policy = self.parts["nodes.sampling"], self.policy()
            bare = sampling.bare_tree(plan, sigmas, "auto", 0.0, tuple(self.prompts), policy)
            grown = sampling.grown(bare, self.noise, self.max_batch, None, method.tail_steps > 0, None)
            scored = self._scored(grown).with_advantages(**method.advantage)
        return self._with_steps_drawn(scored, method.trained) if method.trained else scored

    def _with_steps_drawn(self, tree: Any, count: int) -> Any:
        """The tree with only so many of its stochastic steps to train."""
        import torch

        steps, none = range(len(tree.plan.branching)), torch.empty(0, len(tree.prompts), dtype=torch.long)
        seed = self.parts["treegrpo_core.plan"].derive_seed(self.seed, "steps", self.run.iteration)
        drawn = random.Random(seed).sample(steps, count)
        return replace(tree, trained=tuple(None if step in drawn else none for step in steps))

    def step(self, method: Method) -> Any:
        """One update by this method; its metrics."""
        return self.update(self.tree(method), **method.update)

    def _policy(self, guider: Any, prompts: int) -> Any:
        import torch

        size = self.parts["nodes.latents"].fix_latent(self.patcher, {"samples": torch.zeros(1, *self.latent)}, prompts)
        return self.parts["nodes.guided"].GuidedPolicy(
            self.run, guider, size, self.sigmas, self.parts["nodes.host"].prediction_of(self.patcher)
        )

    def policy(self) -> Any:
        """The policy of the prompts in use, as the nodes see it."""
        return self._policy(self.guider, len(self.prompts))

    def evaluate(self, prompts: Sequence[str]) -> dict[str, float]:
        """Mean of every reward over one picture of each prompt, from the same noise every time."""
        import torch

        guider = self._guider(prompts)
        with torch.inference_mode():
            policy, evaluate = self._policy(guider, len(prompts)), self.parts["nodes.evaluate"]
            latents = evaluate.drawn(policy, self.noise, tuple(prompts))
            images = self.parts["nodes.reward"].decode_latents(guider, latents, self.vae)
            scores = self.parts["treegrpo_core.rewards"].score(self.scorers, images, list(prompts))
        return {name: float(row.mean()) for name, row in zip(self.rewards, scores, strict=True)}

    def _scored(self, tree: Any) -> Any:
        timed, reward = self.parts["treegrpo_core.tree"].timed, self.parts["nodes.reward"]
        start = time.perf_counter()
        images = reward.decode(tree, self.vae)
        decoded = time.perf_counter()
        scored = tree.scored(reward.rewards_of(self.scorers, images, tree.prompts, tree.plan.leaves))
        return timed(timed(scored, "decode", decoded - start), "reward", time.perf_counter() - decoded)

    def update(self, tree: Any, **settings: Any) -> Any:
        """One update on the tree; its metrics."""
        settings = self.parts["treegrpo_core.trainer"].UpdateSettings(max_batch=self.max_batch, **settings)
        with self.parts["nodes.guided"].outside_inference_mode():
            return self.run.update([tree], settings)


MODULES = (
    "nodes.tiny_model",
    "nodes.host",
    "nodes.latents",
    "nodes.guided",
    "nodes.prompts",
    "nodes.encoding",
    "nodes.sampling",
    "nodes.reward",
    "nodes.evaluate",
    "nodes.search",
    "treegrpo_core.bundled.captions",
    "treegrpo_core.plan",
    "treegrpo_core.tree",
    "treegrpo_core.sampler",
    "treegrpo_core.transition",
    "treegrpo_core.run",
    "treegrpo_core.rewards",
    "treegrpo_core.signals",
    "treegrpo_core.trainer",
    "treegrpo_core.batches",
    "treegrpo_core.differentiable",
    "treegrpo_core.memory",
)
