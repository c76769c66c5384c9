"""Memory: micro-batches that halve, checkpointed blocks, and an estimate that counts what is really kept."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from toy import LATENT, ToyModel, grow_toy, toy_run, with_rewards

from tools.measure_memory import measure
from treegrpo_core.adapter import Adapter
from treegrpo_core.differentiable import Differentiable
from treegrpo_core.memory import Activations, Estimate, blocks, gradient_checkpointing, measure_activations
from treegrpo_core.plan import dance_grpo_plan, tree_plan
from treegrpo_core.trainer import UpdateSettings


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 256), nn.Linear(256, 16)
        self.calls: list[int] = []

    def forward(self, x, options):
        self.calls.append(options["number"])
        x += self.fc2(torch.tanh(self.fc1(x)))
        return x


class Deep(nn.Module):
    """Blocks in a list that change their input and read a dictionary that is written to, as ComfyUI's models do."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Sequential(nn.Linear(16, 16), nn.SiLU())

    def forward(self, x):
        options = {}
        for number, block in enumerate(self.blocks):
            options["number"] = number
            x = block(x, options)
        return self.head(x)


class SmallDevice:
    """A model whose device runs out of memory above some number of rows."""

    def __init__(self, model: ToyModel, rows: int) -> None:
        self.model, self.rows = model, rows

    def __call__(self, x, sigma):
        if len(x) > self.rows:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return self.model(x, sigma)


def trained(folder, *, limit: int, max_batch: int):
    """A run's adapter after one update on a device that holds ``limit`` rows."""
    run, policy = toy_run(folder)
    policy.denoiser = SmallDevice(policy.model, limit)
    tree = with_rewards(grow_toy(policy, tree_plan(10, start=1), max_batch=max_batch))
    metrics = run.update([tree], UpdateSettings(max_batch=max_batch))
    return run.adapter.state_dict(), metrics


def test_out_of_memory_halves_the_micro_batches_and_changes_nothing_else(tmp_path, caplog):
    halved, metrics = trained(tmp_path / "halved", limit=5, max_batch=64)
    chosen, expected = trained(tmp_path / "chosen", limit=64, max_batch=4)
    assert all(torch.equal(halved[name], chosen[name]) for name in halved)
    assert (metrics.nfe_train, metrics.loss) == (expected.nfe_train, expected.loss)
    lines = [record.message for record in caplog.records]
    assert lines.count("TreeGRPO: out of memory, going on with 4 latents at a time") == 2  # rollout and update


def test_a_node_that_does_not_fit_alone_is_an_error_with_advice(tmp_path):
    run, policy = toy_run(tmp_path)
    before = run.adapter.state_dict()
    tree = with_rewards(grow_toy(policy))
    policy.denoiser = SmallDevice(policy.model, 1)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="not hold even 2 latents.*gradient_checkpointing"):
        run.update([tree], UpdateSettings())
    assert all(torch.equal(before[name], value) for name, value in run.adapter.state_dict().items())
    assert run.iteration == 0


def test_checkpointed_blocks_give_the_same_gradient_and_are_given_back():
    model, x = Deep(), torch.randn(5, 16)
    adapter = Adapter(model, rank=2, alpha=2.0, targets="all linear", seed=0)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(0.05)
    adapter.put_in(model)

    def gradient():
        with Differentiable():
            return torch.autograd.grad(model(x.clone()).square().sum(), adapter.parameters())

    plain = gradient()
    for block in model.blocks:
        block.calls.clear()
    with gradient_checkpointing(model):
        checkpointed = gradient()
    assert all(torch.equal(one, other) for one, other in zip(plain, checkpointed, strict=True))
    assert [block.calls for block in model.blocks] == [[number, number] for number in range(4)], "each computed twice"
    assert not any("forward" in vars(module) for module in model.modules())


def test_blocks_are_the_outermost_members_of_lists():
    model = Deep()
    assert blocks(model) == list(model.blocks)


def test_activations_are_measured_and_checkpointing_keeps_fewer():
    model, rows = Deep(depth=8), 10
    adapter = Adapter(model, rank=2, alpha=2.0, targets=".*fc.*", seed=0)
    adapter.put_in(model)
    one = measure_activations(model, lambda: model(torch.randn(rows, 16)))
    two = measure_activations(model, lambda: model(torch.randn(2 * rows, 16)))
    tanh = rows * 256 * 4
    assert 8 * tanh < one.plain < 3 * 8 * tanh
    assert tanh < one.checkpointed < one.plain / 3
    assert two.plain == pytest.approx(2 * one.plain, rel=0.01)


def test_nothing_that_was_measured_stays():
    shape = (3, 17)

    def forward():
        return (torch.ones(shape, requires_grad=True) * 2).tanh().exp().square()

    measure_activations(Deep(), forward)
    gc.collect()
    assert [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == shape] == []


@pytest.mark.parametrize("plan", [tree_plan(10, start=0), tree_plan(10, start=4), dance_grpo_plan(10, 5)])
def test_only_the_window_and_the_leaves_are_stored(tmp_path, plan):
    _, policy = toy_run(tmp_path)
    tree = grow_toy(policy, plan)
    tensors = [tensor for level in tree.growth.levels for tensor in (level.parents, level.children)] + [tree.leaves]
    storages = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors}
    per_latent = 4 * torch.Size(LATENT).numel()
    assert sum(storages.values()) == plan.stored * len(tree.prompts) * per_latent


def test_peak_memory_grows_by_what_more_leaves_store_and_by_nothing_else():
    """In processes of their own, with latents of 1 MB: 27 and 243 leaves in the same micro-batches of 3."""
    few, many = measure(depth=3), measure(depth=5)
    grown, stored = many["peak"] - few["peak"], many["stored"] - few["stored"]
    assert stored > 500e6
    assert grown < 1.05 * stored


def test_the_estimate_adds_up_and_names_what_fits():
    model = ToyModel()
    adapter = Adapter(model, rank=2, alpha=2.0, targets="attention", seed=0)
    base = sum(parameter.nbytes for parameter in model.parameters())
    adapter.put_in(model)
    plan = tree_plan(10)
    estimate = Estimate.of(model, adapter, plan, torch.zeros(3, *LATENT), Activations(3000, 1000))
    assert estimate.weights == base
    assert estimate.adapter == 4 * 4 * (2 * 16 + 32 * 2)
    assert estimate.latents == plan.stored * 3 * 64
    text = estimate.text(estimate.fixed() + 9500)
    assert "room for 3 nodes (9)" in text
