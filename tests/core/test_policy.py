"""The adapter: in and out without a trace, and errors that name the layer."""

from __future__ import annotations

import pytest
import torch
from toy import ToyModel

from treegrpo_core.lora import lora_tensors, metadata, read_adapter, read_header, write_lora
from treegrpo_core.policy import Adapter, target_layers


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


@pytest.mark.parametrize(("options", "names"), [({"rank": 0}, "rank is 0"), ({"alpha": float("nan")}, "alpha is nan")])
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


def test_a_lora_file_holds_the_adapter(tmp_path):
    adapter = moved_adapter(ToyModel())
    path = tmp_path / "loras" / "x.safetensors"
    write_lora(path, adapter, metadata(adapter, "x", 7, {"run": "toy"}))
    read = read_adapter(path, scale=2.0)
    assert read.keys() == adapter.state_dict().keys()
    assert all(torch.equal(read[name], value) for name, value in adapter.state_dict().items())
    assert read_header(path)["treegrpo.iteration"] == "7"
    assert [file.name for file in path.parent.iterdir()] == ["x.safetensors"]


def test_a_file_with_another_alpha_keeps_its_effect(tmp_path):
    model, other, x = ToyModel(), ToyModel(), torch.randn(3, 4, 2, 2)
    adapter = moved_adapter(model, alpha=6.0)
    write_lora(tmp_path / "x.safetensors", adapter, {})
    again = Adapter(other, rank=2, alpha=2.0, targets="attention+mlp", seed=5)
    again.load_state_dict(read_adapter(tmp_path / "x.safetensors", scale=1.0))
    adapter.put_in(model)
    again.put_in(other)
    assert torch.allclose(model(x, 0.5), other(x, 0.5), atol=1e-5)


def test_the_file_means_what_the_live_adapter_does():
    """weight + B A alpha / rank, the formula of every LoRA loader, equals the adapter in place."""
    model, x = ToyModel(), torch.randn(3, 4, 2, 2)
    adapter = moved_adapter(model)
    adapter.put_in(model)
    live = model(x, 0.5)
    adapter.take_out(model)
    tensors = lora_tensors(adapter)
    with torch.no_grad():
        for name in adapter.layers:
            a, b = (tensors[f"diffusion_model.{name}.lora_{half}.weight"] for half in "AB")
            scale = tensors[f"diffusion_model.{name}.alpha"] / a.shape[0]
            model.get_submodule(name).weight += scale * b @ a
    assert torch.allclose(model(x, 0.5), live, atol=1e-5)


def test_files_that_are_no_lora_are_refused(tmp_path):
    from safetensors.torch import save_file

    other, broken = tmp_path / "other.safetensors", tmp_path / "broken.safetensors"
    save_file({"some.weight": torch.zeros(2)}, other)
    broken.write_bytes(other.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"other.safetensors holds no .*some.weight"):
        read_adapter(other, scale=1.0)
    with pytest.raises(ValueError, match="broken.safetensors is not a complete"):
        read_adapter(broken, scale=1.0)
