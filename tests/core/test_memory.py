"""Memory: micro-batches that halve, checkpointed blocks, and an estimate that counts what is really kept."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from toy import LATENT, ToyModel, grow_toy, toy_run, with_rewards

from tools.measure_memory import measure
from treegrpo_core.adapter import Adapter
from treegrpo_core.batches import MicroBatches, empty_caches
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


def test_what_fits_is_remembered_for_the_next_update(tmp_path, caplog):
    run, policy = toy_run(tmp_path)
    policy.denoiser = SmallDevice(policy.model, 5)
    for update in range(3):
        run.update([with_rewards(grow_toy(policy, tree_plan(10, start=1)))], UpdateSettings())
        halvings = [record for record in caplog.records if "out of memory" in record.message]
        assert len(halvings) == 2 * 4, f"64, 32, 16, 8, 4 in rollout and update, and never again ({update})"
    caplog.clear()
    prompts = [str(number) for number in range(5)]
    run.update([with_rewards(grow_toy(policy, tree_plan(10, start=1), prompts=prompts))], UpdateSettings())
    assert not caplog.records, "more prompts than the remembered rows still go together"


FULL = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB, other allocations: 1.00 GB, max allowed: 9 GB)."),
    RuntimeError("XPU out of memory. Tried to allocate 20.00 GiB (GPU 0; 15.9 GiB total capacity)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried to "),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("CUDA error: out of memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", FULL, ids=lambda error: str(error)[:20])
def test_a_full_memory_is_known_on_every_kind_of_device(error):
    done = []

    def work(nodes):
        if nodes.stop - nodes.start > 2:
            raise error
        done.append(nodes)

    MicroBatches(8, 1).run(4, 1, work)
    assert done == [slice(0, 2), slice(2, 4)]


def test_another_error_is_no_full_memory():
    calls = []

    def work(nodes):
        calls.append(nodes)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        MicroBatches(8, 1).run(4, 1, work)
    assert len(calls) == 1


def test_the_cache_of_every_kind_of_device_is_emptied(monkeypatch):
    emptied = []
    for name, place in (("cuda", torch.cuda), ("mps", torch.backends.mps), ("xpu", torch.xpu)):
        monkeypatch.setattr(place, "is_available", lambda: True)
        monkeypatch.setattr(getattr(torch, name), "empty_cache", lambda name=name: emptied.append(name))
    empty_caches()
    assert emptied == ["cuda", "mps", "xpu"]


def test_the_adapter_leaves_the_device_after_a_sampling_and_only_then_after_an_update(tmp_path, monkeypatch):
    run, policy = toy_run(tmp_path)
    use, places = policy.use, []

    def on_a_device(*args, **options):
        """As in the host: to the device for each sampling, and away when it is over."""
        run.adapter.to("device")
        try:
            return use(*args, **options)
        finally:
            run.adapter.leave("away")

    monkeypatch.setattr(policy, "use", on_a_device)
    monkeypatch.setattr(run.adapter, "to", places.append)
    tree = with_rewards(grow_toy(policy))
    assert places == ["device", "away"]
    run.update([tree], UpdateSettings(passes=3))
    assert places == ["device", "away"] + ["device"] * 3 + ["away"], "the optimizer steps on the device too"
    assert not tree.leaves.is_inference()


def test_moving_an_adapter_in_inference_mode_leaves_it_trainable():
    adapter = Adapter(Deep(), rank=2, alpha=2.0, targets="all linear", seed=0)
    with torch.inference_mode():
        adapter.to(torch.float64)  # as good as another device
        adapter.to(torch.float32)
    assert not any(parameter.data.is_inference() for parameter in adapter.parameters())


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
