"""Gradients through code for inference are those of the same formula without its tricks."""

from __future__ import annotations

import pytest
import torch

from treegrpo_core.differentiable import Differentiable, checkpointed


def residual(x):
    x += x.sin()
    x += x.square()
    return x


def residual_plain(x):
    x = x + x.sin()
    return x + x.square()


def called(x):
    y = x * x
    x.add_(y)
    return x * y


def called_plain(x):
    y = x * x
    return (x + y) * y


def slice_of_saved(x):
    y = x.square()
    z = y.square()
    y[1:] *= 2
    return y.sum() + z


def slice_of_saved_plain(x):
    y = x.square()
    return torch.cat([y[:1], 2 * y[1:]]).sum() + y.square()


def activation(x):
    y = x * x
    return torch.nn.functional.silu(y, inplace=True) + torch.nn.functional.silu(x, inplace=True)


def activation_plain(x):
    return torch.nn.functional.silu(x * x) + torch.nn.functional.silu(x)


CASES = [
    (residual, residual_plain),
    (called, called_plain),
    (slice_of_saved, slice_of_saved_plain),
    (activation, activation_plain),
]


def gradient(function):
    leaf = torch.tensor([0.3, -1.2, 0.7], requires_grad=True)
    function(leaf * 1.5).square().sum().backward()
    return leaf.grad


@pytest.mark.parametrize(("in_place", "plain"), CASES)
def test_the_gradient_is_that_of_the_formula(in_place, plain):
    with pytest.raises(RuntimeError, match="inplace operation"):
        gradient(in_place)
    with Differentiable():
        assert torch.equal(gradient(in_place), gradient(plain))


@pytest.mark.parametrize(("in_place", "plain"), CASES)
def test_so_it_is_with_checkpoints(in_place, plain):
    with Differentiable():
        assert torch.allclose(gradient(checkpointed(in_place)), gradient(plain), rtol=1e-6)


def test_a_checkpoint_leaves_its_inputs_as_they_were():
    x, options = torch.ones(3, requires_grad=True) * 2, {"block": 1}

    def block(x, options):
        options["block"] += 1
        x += options["block"] * x.detach()
        return x.square()

    with Differentiable():
        result = checkpointed(block)(x, options)
        options["block"] = 7
        assert result.tolist() == [36.0] * 3
        assert x.tolist() == [2.0] * 3
        result.sum().backward(inputs=[x])
    assert x.grad.tolist() == [12.0] * 3


def test_a_change_that_python_does_not_make_is_refused():
    """Rather than a wrong gradient."""

    def hidden(x):
        y = x.square()
        torch._foreach_add_([x], 1.0)
        return y

    with Differentiable(), pytest.raises(RuntimeError, match="in place"):
        gradient(hidden)


def test_inference_tensors_are_constants_of_the_formula():
    with torch.inference_mode():
        layer, shift = torch.nn.Linear(3, 3), torch.ones(3)

    def formula(x):
        x *= shift
        return layer(x * shift) * torch.stack([shift, shift]) + torch.addcmul(x, tensor1=x, tensor2=shift)

    with pytest.raises(RuntimeError, match="Inference tensors"):
        gradient(formula)
    with Differentiable():
        assert gradient(formula).abs().min() > 0
    assert layer.weight.is_inference()


def test_nothing_is_kept_afterwards():
    with Differentiable() as keep:
        gradient(residual)
    assert not keep._saved
