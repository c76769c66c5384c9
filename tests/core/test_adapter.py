"""The adapter: in and out without a trace, and errors that name the layer."""

from __future__ import annotations

import pytest
import torch
from toy import ToyModel

from treegrpo_core.adapter import KINDS, Adapter
from treegrpo_core.lora import metadata, read_header, read_lora, write_lora
from treegrpo_core.targets import target_layers


def moved_adapter(model: ToyModel, **options) -> Adapter:
    adapter = Adapter(model, **{"rank": 2, "alpha": 4.0, "targets": "attention+mlp", "seed": 1, **options})
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(0.1)
    return adapter


def test_presets_choose_layers():
    model = ToyModel()
    assert set(target_layers(model, "attention")) == {"attn.proj"}
    assert set(target_layers(model, "attention+mlp")) == {"attn.proj", "mlp.fc1"}
    assert set(target_layers(model, "all linear")) == {"attn.proj", "mlp.fc1", "head"}
    assert set(target_layers(model, r"he.*")) == {"head"}


def test_targets_that_match_nothing_name_the_nearest():
    with pytest.raises(ValueError, match=r"'mlp.fc2' match none of the model's 3 linear layers; near: \['mlp.fc1'"):
        target_layers(ToyModel(), "mlp.fc2")
    with pytest.raises(ValueError, match="no pattern"):
        target_layers(ToyModel(), "(")


@pytest.mark.parametrize(
    ("options", "names"),
    [({"rank": 0}, "rank is 0"), ({"alpha": float("nan")}, "alpha is nan"), ({"kind": "lorra"}, "lorra")],
)
def test_impossible_adapters_are_refused(options, names):
    with pytest.raises(ValueError, match=names):
        moved_adapter(ToyModel(), **options)


def test_in_and_out_leaves_no_trace():
    model, x = ToyModel(), torch.randn(3, 4, 2, 2)
    layers, flags = dict(model.named_modules()), [p.requires_grad for p in model.parameters()]
    base = model(x, 0.5)
    random = torch.random.get_rng_state()
    adapter = moved_adapter(model)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert dict(model.named_modules()) == layers
    adapter.put_in(model)
    adapter.put_in(model)
    assert not torch.equal(model(x, 0.5), base)
    with adapter.disabled():
        assert torch.equal(model(x, 0.5), base)
    adapter.take_out(model)
    assert torch.equal(model(x, 0.5), base)
    assert dict(model.named_modules()) == layers
    assert [p.requires_grad for p in model.parameters()] == flags
    assert not hasattr(model, "peft_config")


def test_the_adapter_fits_another_instance_of_the_same_model():
    first, second, x = ToyModel(), ToyModel(), torch.randn(3, 4, 2, 2)
    adapter = moved_adapter(first)
    adapter.put_in(first)
    expected = first(x, 0.5)
    adapter.take_out(first)
    adapter.put_in(second)
    assert torch.equal(second(x, 0.5), expected)
    other = ToyModel()
    other.attn["proj"] = torch.nn.Linear(16, 31)
    with pytest.raises(ValueError, match=r"attn.proj has shape \(31, 16\)"):
        adapter.put_in(other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_half_precision_weights_the_adapter_is_float32(dtype):
    model = ToyModel().to(dtype)
    adapter = Adapter(model, rank=2, alpha=2.0, targets="all linear", seed=0)
    assert {parameter.dtype for parameter in adapter.parameters()} == {torch.float32}
    adapter.put_in(model)
    hidden = model.attn["proj"](torch.randn(3, 16, dtype=dtype))
    assert hidden.dtype == dtype
    hidden.float().sum().backward(inputs=adapter.parameters()[:2])
    optimizer = torch.optim.AdamW(adapter.parameters()[:2], lr=1e-4, eps=1e-12)
    optimizer.step()
    assert all(torch.isfinite(parameter).all() for parameter in adapter.parameters())


def test_the_seed_fixes_the_initial_weights():
    a, b, c = (
        Adapter(ToyModel(), rank=2, alpha=2.0, targets="attention", seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_a_state_that_does_not_fit_changes_nothing():
    adapter = moved_adapter(ToyModel())
    before = adapter.state_dict()
    wrong_rank = moved_adapter(ToyModel(), rank=3).state_dict()
    for state, names in (
        (wrong_rank, r"shape \(3, 16\).*rank 2"),
        ({}, "missing"),
        ({**before, "x": before["attn.proj.lora_A.weight"]}, "unexpected"),
    ):
        with pytest.raises(ValueError, match=names):
            adapter.load_state_dict(state)
    assert all(torch.equal(before[name], value) for name, value in adapter.state_dict().items())


def product(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a LoRA loader adds to the layer's weight, by the formulas of the formats."""
    if "lokr_w1" in parts:
        second = parts["lokr_w2"] if "lokr_w2" in parts else parts["lokr_w2_a"] @ parts["lokr_w2_b"]
        return torch.kron(parts["lokr_w1"], second)
    if "hada_w1_a" in parts:
        rank = parts["hada_w1_b"].shape[0]
        both = (parts["hada_w1_a"] @ parts["hada_w1_b"]) * (parts["hada_w2_a"] @ parts["hada_w2_b"])
        return both * parts["alpha"] / rank
    return parts["lora_B.weight"] @ parts["lora_A.weight"] * parts["alpha"] / parts["lora_A.weight"].shape[0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_starts_without_effect_and_learns(kind):
    model, x = ToyModel(), torch.randn(3, 4, 2, 2)
    base = model(x, 0.5)
    adapter = Adapter(model, kind=kind, rank=2, alpha=3.0, targets="all linear", seed=0)
    adapter.put_in(model)
    assert torch.allclose(model(x, 0.5), base, atol=1e-6)
    assert adapter.norm() == 0
    optimizer = torch.optim.SGD(adapter.parameters(), lr=1.0)
    for _ in range(2):  # in the first step only the factors that are zero get a gradient
        optimizer.zero_grad()
        model(x, 0.5).square().sum().backward(inputs=adapter.parameters())
        optimizer.step()
    assert all(parameter.grad.abs().sum() > 0 for parameter in adapter.parameters())
    assert adapter.norm() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_factors_mean_what_the_live_adapter_does(kind):
    model, x = ToyModel(), torch.randn(3, 4, 2, 2)
    adapter = moved_adapter(model, kind=kind)
    adapter.put_in(model)
    live = model(x, 0.5)
    adapter.take_out(model)
    with torch.no_grad():
        for name, parts in adapter.factors().items():
            weight = model.get_submodule(name).weight
            norm = weight.norm(dim=1, keepdim=True)
            weight += product(parts)
            if kind == "dora":  # ComfyUI divides by the norm of the base weight
                weight *= parts["dora_scale"] / norm
    assert torch.allclose(model(x, 0.5), live, atol=1e-5)


def test_a_lora_file_holds_the_adapter(tmp_path):
    adapter = moved_adapter(ToyModel())
    path = tmp_path / "loras" / "x.safetensors"
    write_lora(path, adapter, metadata("x", 7, {"run": "toy"}))
    read, factors = read_lora(path).layers, adapter.factors()
    assert read.keys() == factors.keys()
    assert all(torch.equal(read[layer][part], factors[layer][part]) for layer in factors for part in factors[layer])
    assert read_header(path)["treegrpo.iteration"] == "7"
    assert [file.name for file in path.parent.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("rank", [2, 5])
@pytest.mark.parametrize("kind", ["lora", "rslora"])
def test_starting_from_a_file_keeps_its_effect_whatever_rank_and_alpha(tmp_path, kind, rank):
    model, other, x = ToyModel(), ToyModel(), torch.randn(3, 4, 2, 2)
    adapter = moved_adapter(model, alpha=6.0, targets="attention")
    write_lora(tmp_path / "x.safetensors", adapter, {})
    again = Adapter(other, kind=kind, rank=rank, alpha=2.0, targets="attention+mlp", seed=5)
    again.load_factors(read_lora(tmp_path / "x.safetensors").layers)
    adapter.put_in(model)
    again.put_in(other)
    assert torch.allclose(model(x, 0.5), other(x, 0.5), atol=1e-5)


def test_a_file_that_does_not_fit_changes_nothing():
    adapter = moved_adapter(ToyModel(), targets="attention")
    good, before = adapter.factors(), adapter.state_dict()
    layer = good["attn.proj"]
    for layers, names in (
        (moved_adapter(ToyModel(), rank=3, targets="attention").factors(), "rank 3 in attn.proj.*set rank to 3"),
        (moved_adapter(ToyModel()).factors(), "1 layers that are not among the targets, such as mlp.fc1"),
        (moved_adapter(ToyModel(), kind="loha", targets="attention").factors(), "the file holds hada"),
        ({"attn.proj": {**layer, "lora_A.weight": torch.ones(2, 9)}}, "maps 9 to 32.*another model"),
        ({"attn.proj": {**layer, "lora_B.weight": torch.full((32, 2), torch.nan)}}, "NaN"),
    ):
        with pytest.raises(ValueError, match=names):
            adapter.load_factors(layers)
    assert all(torch.equal(before[name], value) for name, value in adapter.state_dict().items())
