"""A denoiser small enough to reason about, with the same parts as a real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from treegrpo_core.plan import Plan, tree_plan
from treegrpo_core.policy import Denoiser
from treegrpo_core.run import Run, RunSettings
from treegrpo_core.sampler import edge_noise, grow
from treegrpo_core.tree import Rewards, Tree

LATENT = (4, 2, 2)
SIGMAS = tuple(float(sigma) for sigma in torch.linspace(1, 0, 11))


class ToyModel(nn.Module):
    """Predicts the clean latent with one attention-like and one MLP layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.attn = nn.ModuleDict({"proj": nn.Linear(16, 32)})
            self.mlp = nn.ModuleDict({"fc1": nn.Linear(32, 16)})
            self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor, sigma: float) -> Tensor:
        hidden = torch.tanh(self.attn["proj"](x.float().flatten(1))) + sigma
        return self.head(self.mlp["fc1"](hidden)).view_as(x)


@dataclass
class ToyPolicy:
    """A run's adapter on a toy model; counts the rows it denoises."""

    run: Run
    model: ToyModel
    prediction: str = "flow"
    rows: int = 0
    denoiser: Denoiser | None = None
    """What denoises instead of the model itself."""

    def use(self, work: Callable[[Denoiser], Any], *, train: bool, checkpointing: bool = False) -> Any:
        def denoise(x: Tensor, sigma: float) -> Tensor:
            self.rows += len(x)
            return (self.denoiser or self.model)(x, sigma)

        self.run.adapter.put_in(self.model)
        try:
            with torch.set_grad_enabled(train):
                return work(denoise)
        finally:
            self.run.adapter.take_out(self.model)


def toy_run(folder: Path, name: str = "toy", **settings: Any) -> tuple[Run, ToyPolicy]:
    """A new run on a new toy model, or the one that is already in ``folder``."""
    model = ToyModel()
    wanted = RunSettings(**{"base": "toy", "rank": 4, "alpha": 4.0, "learning_rate": 1e-2, **settings})
    exists = (folder / name / "state.safetensors").exists()
    run = Run.open(folder, name, wanted, model) if exists else Run.create(folder, name, wanted, model)
    return run, ToyPolicy(run, model)


def roots_for(plan: Plan, prompts: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """(R, P, *latent) of noise."""
    rows = [[edge_noise(LATENT, seed, prompt, (root,)) for prompt in range(prompts)] for root in range(plan.roots)]
    return torch.stack([torch.stack(row) for row in rows]).to(dtype)


def grow_toy(
    policy: ToyPolicy,
    plan: Plan | None = None,
    *,
    prompts: Sequence[str] = ("a", "b"),
    seed: int = 1,
    max_batch: int = 64,
    dtype: torch.dtype = torch.float32,
    kernel: str = "flow_sde",
    eta: float = 0.7,
) -> Tree:
    """A tree of the policy as it is now."""
    plan = plan or tree_plan(10, start=1)
    roots = roots_for(plan, len(prompts), seed, dtype)
    options: dict[str, Any] = {"kernel": kernel, "eta": eta, "seed": seed, "max_batch": max_batch}
    options["limits"] = policy.run.limits
    growth = policy.use(lambda denoise: grow(denoise, roots, SIGMAS, plan, **options), train=False)
    return Tree(plan, SIGMAS, kernel, eta, tuple(prompts), policy, policy.run.iteration, growth)  # type: ignore[arg-type]


def with_rewards(tree: Tree, values: Tensor | None = None) -> Tree:
    """The tree scored with ``values`` (L, P), by default the mean of each leaf, and advantages on its edges."""
    rewards = tree.leaves.float().flatten(2).mean(2) if values is None else values
    return tree.scored(Rewards(("toy",), (1.0,), rewards[None])).with_advantages()
