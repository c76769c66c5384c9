"""Inputs that several sampling nodes share."""

from __future__ import annotations

from comfy_api.latest import io

from ..treegrpo_core.transition import KERNELS


def latent() -> io.Latent.Input:
    """An empty latent."""
    return io.Latent.Input("latent", tooltip="An empty latent of the image size; batch size 1 serves all prompts.")


def prompts(tooltip: str = "The prompts the guider encodes, one per line.") -> io.String.Input:
    """The texts of the guider's conditioning."""
    return io.String.Input("prompts", multiline=True, dynamic_prompts=False, tooltip=tooltip)


def kernel() -> io.Combo.Input:
    """The stochastic step."""
    return io.Combo.Input(
        "kernel",
        options=["auto", *KERNELS],
        default="auto",
        tooltip="The stochastic step. 'auto': flow_sde for flow models, ancestral for eps and v-prediction.",
    )


def eta() -> io.Float.Input:
    """The strength of its noise."""
    return io.Float.Input(
        "eta",
        default=0.0,
        min=0.0,
        max=10.0,
        step=0.01,
        tooltip="Strength of the stochastic steps' noise. 0: the kernel's usual value (flow_sde 0.7, ancestral 1). cps "
        "takes at most 1.",
    )


def max_batch(tooltip: str = "Most latents per model forward; lower it to save memory.") -> io.Int.Input:
    """Rows of a micro-batch."""
    return io.Int.Input("max_batch", default=64, min=1, max=4096, tooltip=tooltip)
