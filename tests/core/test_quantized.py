"""Layers that hold few bits for each number: an adapter goes on them, and the gradient is that of the numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from treegrpo_core.adapter import Adapter
from treegrpo_core.frozen import frozen
from treegrpo_core.quantized import stored
from treegrpo_core.targets import target_layers

WIDTH = 16


class Few(torch.Tensor):
    """Integers in a class of their own, which stand for a sixteenth of themselves."""

    def dequantize(self):
        return self.as_subclass(torch.Tensor).float() / 16


class Layer(nn.Module):
    """A linear layer as hosts make them: no torch.nn.Linear, and its input is rounded by code without a derivative."""

    def __init__(self):
        super().__init__()
        self.in_features, self.out_features = WIDTH, WIDTH
        integers = torch.randint(-16, 17, (WIDTH, WIDTH), dtype=torch.int8)
        self.weight = nn.Parameter(integers.as_subclass(Few), requires_grad=False)

    def forward(self, x):
        rounded = torch.round(x.detach() * 4) / 4
        return nn.functional.linear(rounded, self.weight.dequantize())

    def precise(self, x):
        return nn.functional.linear(x, self.weight)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Layer(), Layer()

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def plain(model):
    """The same numbers in torch.nn.Linear."""
    twin = nn.Module()
    for name, layer in model.named_children():
        twin.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False))
        twin.get_submodule(name).weight.data = layer.weight.dequantize()
    return twin


def test_the_gradient_is_that_of_the_numbers_and_passes_by_the_rounding():
    model, x = Model(), torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).requires_grad_()
    with frozen(model, [], precise=lambda layer: getattr(layer, "precise", layer.forward)):
        result = model.first(x)
        torch.testing.assert_close(result, Layer.forward(model.first, x))
        (found,) = torch.autograd.grad(result.square().sum(), x)
    (expected,) = torch.autograd.grad(plain(model).first(x), x, 2 * result.detach())
    assert torch.equal(found, expected)


def test_a_layer_without_a_derivative_is_named():
    model, x = Model(), torch.ones(1, WIDTH, requires_grad=True)
    with (
        frozen(model, []),
        pytest.raises(ValueError, match=r"layers of type .*\.Layer compute by code without a deriv"),
    ):
        model(x).sum().backward()


def test_an_adapter_goes_on_and_a_host_sees_no_quantized_weight_in_its_place():
    """Newer cores compute with a quantized weight that they see in a layer, and would pass the adapter by."""
    model = Model()
    adapter = Adapter(model, rank=2, alpha=2.0, targets=".*", seed=0)
    adapter.put_in(model)
    assert sorted(adapter.layers) == ["first", "second"]
    assert model.first.weight.shape == (WIDTH, WIDTH)
    assert type(model.first.weight) is torch.Tensor
    assert type(model.first.base_layer.weight) is not torch.Tensor


def test_dora_is_refused():
    with pytest.raises(ValueError, match="dora works with the size of the weights, and those of layer first are quant"):
        Adapter(Model(), rank=2, alpha=2.0, targets=".*", seed=0, kind="dora")


@pytest.mark.parametrize("module", ["nunchaku.models.linear", "svdq.layers"])
def test_kernels_without_a_derivative_are_refused_by_name_wherever_they_are(module):
    model = Model()
    model.second.__class__ = type("W4A4Linear", (Layer,), {"__module__": module})
    with pytest.raises(ValueError, match=rf"layer second is a {module}\.W4A4Linear .*nunchaku"):
        target_layers(model, "first")


@pytest.mark.parametrize("weight", [torch.zeros(WIDTH * WIDTH // 2, 1, dtype=torch.uint8), None])
def test_packed_weights_of_unknown_form_are_refused_by_name(weight):
    model = Model()
    del model.second.weight
    model.second.weight = weight if weight is None else nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ValueError, match=r"layer second is a .*Layer.*packed weights"):
        target_layers(model, ".*")
    assert list(target_layers(model, "first")) == ["first"]


def test_a_bank_of_layers_is_none():
    model = Model()
    model.second.weight = nn.Parameter(torch.zeros(4, WIDTH, WIDTH))
    assert list(target_layers(model, ".*")) == ["first"]


def test_what_holds_a_quantized_tensor_is_told_by_its_class():
    class Parts:
        values, scale = torch.ones(4, dtype=torch.int8), torch.ones(1)

        def __tensor_flatten__(self):
            return ["values", "scale"], None

    assert [part.nbytes for part in stored(Parts())] == [4, 4]
    tensor = torch.ones(2)
    assert stored(tensor) == [tensor]
