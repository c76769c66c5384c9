"""Frozen layers whose weights only pass through: gradients are those of a model whose weights stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from treegrpo_core.adapter import Adapter
from treegrpo_core.frozen import frozen, weights_pass_through
from treegrpo_core.memory import gradient_checkpointing, measure_activations

WIDTH = 32


class Streamed(nn.Linear):
    """A layer as a host streams it: its weight is copied into one buffer, which the next layer overwrites."""

    buffer = torch.empty(4 * WIDTH * WIDTH)
    fetches = 0

    def forward(self, x):
        type(self).fetches += 1
        count = self.weight.numel()
        self.buffer.numpy()[:count] = self.weight.detach().flatten().numpy()  # behind autograd's back, as a host does
        return nn.functional.linear(x, self.buffer[:count].view_as(self.weight), self.bias)


class Norm(nn.LayerNorm):
    """A layer with weights that is not affine in its input, cast for each call."""

    def forward(self, x):
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight.to(x), self.bias.to(x), self.eps)


class Block(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.norm, self.up, self.down = Norm(WIDTH), linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """``resident``: the share of blocks whose weights stay on the device."""

    def __init__(self, resident=0.0, depth=4):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(nn.Linear if i < resident * depth else Streamed) for i in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def transient(layer, x):
    return isinstance(layer, Streamed) or weights_pass_through(layer, x)


def adapted(model):
    adapter = Adapter(model, rank=2, alpha=2.0, targets=".*(up|down)", seed=1)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(0.05)
    adapter.put_in(model)
    return adapter


def gradients(model, adapter):
    x = torch.linspace(-2, 2, 3 * WIDTH).view(3, WIDTH)
    return torch.autograd.grad(model(x).square().sum(), adapter.parameters())


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def true_gradients():
    model = Model(resident=1.0)
    return gradients(model, adapted(model))


def test_autograd_alone_is_wrong_when_layers_share_a_buffer(true_gradients):
    """What the rest of this file is about: the same numbers go forward, others come back, and nothing is said."""
    model = Model()
    assert not same(gradients(model, adapted(model)), true_gradients)


@pytest.mark.parametrize("resident", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_bit_equal_however_many_weights_stay(true_gradients, resident, checkpointing):
    model = Model(resident)
    adapter = adapted(model)
    with frozen(model, adapter.parameters(), transient):
        if not checkpointing:
            assert same(gradients(model, adapter), true_gradients)
        else:
            with gradient_checkpointing(model):
                assert same(gradients(model, adapter), true_gradients)
    assert not any("forward" in vars(module) for module in model.modules())


def test_weights_that_stay_cost_nothing_and_others_one_more_fetch_where_a_gradient_passes():
    for resident, layers in ((1.0, 0), (0.5, 4)):
        model = Model(resident)
        adapter = adapted(model)
        Streamed.fetches = 0
        with frozen(model, adapter.parameters(), transient):
            gradients(model, adapter)
            assert Streamed.fetches == 2 * layers
            Streamed.fetches = 0
            with torch.no_grad():
                model(torch.zeros(1, WIDTH))
        assert Streamed.fetches == layers


def kept_bytes(model, rows):
    """What one forward keeps for its backward, weights that are computed with from where they are left out."""
    return measure_activations(model, lambda: model(torch.ones(rows, WIDTH))).plain


def test_the_bytes_kept_for_the_backward_hold_no_weights():
    """A model in half precision, cast for every call: what is kept grows with the rows alone."""

    class Cast(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))

    model = Model()
    for block in model.blocks:
        block.up, block.down = Cast(WIDTH, 4 * WIDTH).half(), Cast(4 * WIDTH, WIDTH).half()
    adapter = adapted(model)
    weights = sum(block.up.weight.nbytes + block.down.weight.nbytes for block in model.blocks)
    one = kept_bytes(model, 1)
    with frozen(model, adapter.parameters()):
        assert kept_bytes(model, 2) == pytest.approx(2 * kept_bytes(model, 1), rel=0.01)
        saved = one - kept_bytes(model, 1)
    assert saved >= 2 * weights, "cast to float32, every weight was kept in twice its size"


def test_a_layer_with_two_traced_inputs_gives_both_their_gradient():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float16), requires_grad=False)

        def forward(self, x, *, scale):
            return x * scale * self.weight.to(x.dtype), scale * 3

    layer, x, scale = Two(), torch.tensor([1.0, 2, 3], requires_grad=True), torch.tensor(5.0, requires_grad=True)
    with frozen(layer, []):
        one, two = layer(x, scale=scale)
        found = torch.autograd.grad(one.sum() + two, (x, scale))
    assert found[0].tolist() == [10.0, 10, 10]
    assert float(found[1]) == 12 + 3


def test_inference_tensors_are_constants_in_their_own_memory():
    """A host makes weights in inference mode; what it has noted on them stays."""
    from treegrpo_core.differentiable import make_ordinary

    with torch.inference_mode():
        model = Model(1.0)
        model.register_buffer("table", torch.ones(3))
    weight = model.blocks[0].up.weight
    weight._model_dtype = torch.bfloat16
    make_ordinary(model)
    now = model.blocks[0].up.weight
    assert not now.is_inference() and not model.table.is_inference()
    assert now.data_ptr() == weight.data_ptr()
    assert now._model_dtype == torch.bfloat16
    assert gradients(model, adapted(model))


def test_a_fetched_inference_tensor_is_differentiated_past():
    class Kept(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.resident, self.bias)

    layer, x = Kept(3, 2), torch.ones(2, 3, requires_grad=True)
    with torch.inference_mode():
        layer.resident = layer.weight.clone()
    with frozen(layer, [], lambda *_: True):
        (found,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(found[0], layer.weight.sum(0))
