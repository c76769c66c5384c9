"""How a key of a LoRA file is put together: whose prefix, the layer's name, and what the tensor is."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from . import parts

Format = Literal["comfyui", "kohya", "diffusers"]

PREFIXES: dict[str, Format] = {
    "diffusion_model.": "comfyui",
    "model.diffusion_model.": "comfyui",
    "lora_unet__": "kohya",
    "lora_unet_": "kohya",
    "lora_prior_unet_": "kohya",
    "lora_transformer_": "kohya",
    "lycoris_": "kohya",
    "base_model.model.": "diffusers",
    "transformer.": "diffusers",
    "unet.": "diffusers",
}
"""What stands before a layer's name, and whose format that is; a name without any is diffusers' or PEFT's."""
USUAL = ("diffusion_model.", "lora_unet_", "transformer.", "unet.")
TEXT_ENCODERS = ("lora_te", "text_encoder", "lora_prior_te")
"""How keys for text encoders begin."""
EMBEDDINGS = "bundle_emb."
"""How keys of embeddings begin that are bundled with a LoRA; they belong to text encoders too."""
MAGNITUDE = "lora_magnitude_vector"
"""PEFT's magnitudes of a DoRA, always one per output row; those called ``dora_scale`` are per row or per column."""

_HALVES = {"down": parts.A, "up": parts.B, "A": parts.A, "B": parts.B}
_ENDINGS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?P<name>.+)\.lora_(?P<half>down|up)\.weight",
        r"(?P<name>.+)[._]lora\.(?P<half>down|up)\.weight",
        r"(?P<name>.+)\.lora_linear_layer\.(?P<half>down|up)\.weight",
        # PEFT puts the adapter's name between, and Mochi's trainer leaves "weight" out.
        r"(?P<name>.+)\.lora_(?P<half>[AB])(\.[^.]+)?\.weight",
        r"(?P<name>.+)\.lora_(?P<half>[AB])",
        r"(?P<name>.+)\.(?P<rest>alpha|dora_scale|lora_mid\.weight|reshape_weight)",
        r"(?P<name>.+)\.(?P<rest>lora_magnitude_vector)(\.[^.]+)?(\.weight)?",
        r"(?P<name>.+)\.(?P<rest>hada_(w[12]_[ab]|t[12])|lokr_(w[12](_[ab])?|t2))(\.[^.]+)?",
    )
)

_NO_LORA = {
    r".*\.diff_b": "changes of biases (diff_b)",
    r".*\.diff": "whole changes of weights (diff)",
    r".*\.[wb]_norm": "changes of norm layers (w_norm, b_norm)",
    r".*(\.set_weight|_norm\.scale)": "replaced weights (set_weight)",
    r".*[._]lora(_[AB]|_down|_up|\.down|\.up)(\.[^.]+)?\.bias": "biases of LoRA matrices",
    r".*\.(a1|a2|b1|b2|bm)\.weight": "GLoRA",
    r".*\.(oft_blocks|oft_diag|oft_R|rescale)(\..*)?": "OFT or BOFT",
    r".*\.boft_[Rs](\..*)?": "BOFT",
    r".*(\.ia3_l(\..*)?|\.on_input)": "IA3",
    r".*\.vera_lambda_.*": "VeRA",
    r".*(\.lora_E(\..*)?|\.ranknum(\..*)?)": "AdaLoRA",
    r".*\.lora_embedding_[AB](\..*)?": "LoRA of an embedding",
    r"lora_controlnet": "a ControlNet's LoRA (control-lora)",
}
"""What of other kinds of adapters keys can be, by their whole name."""

_ADAPTED_PROCESSORS = {
    "qkv_lora1": "img_attn.qkv",
    "qkv_lora2": "txt_attn.qkv",
    "proj_lora1": "img_attn.proj",
    "proj_lora2": "txt_attn.proj",
    "qkv_lora": "linear1_qkv",
    "proj_lora": "linear2",
}
"""LoRAs of Flux inside attention processors (XLabs, USO), and the layers they adapt."""
_PROCESSOR = re.compile(r"(.*_blocks\.\d+)\.processor\.((?:qkv|proj)_lora[12]?)\.(down|up)\.weight")


class Pieces(NamedTuple):
    """A key taken apart."""

    format: Format
    name: str
    """The layer's, without prefixes."""
    suffix: str
    """What the tensor is: a name of :mod:`.parts`, or :data:`MAGNITUDE`."""
    usual: bool
    """Whether the prefix is the format's usual one, which all programs know that read the format."""


def take_apart(key: str) -> Pieces | None:
    """The pieces of a key; None if it ends like no adapter that can be read."""
    if match := _PROCESSOR.fullmatch(key):
        block, processor, half = match.groups()
        key = f"{block}.{_ADAPTED_PROCESSORS[processor]}.lora_{half}.weight"
    match = next((match for ending in _ENDINGS if (match := ending.fullmatch(key))), None)
    if match is None:
        return None
    groups = match.groupdict()
    suffix = _HALVES[groups["half"]] if "half" in groups else groups["rest"]
    name, format_, found = groups["name"], "diffusers", []
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None):
        name, format_ = name.removeprefix(prefix), PREFIXES[prefix]
        found.append(prefix)
    # Diffusers before peft: attn1.processor.to_out_lora.down.weight.
    if ".processor." in name:
        name = name.replace(".processor.", ".")
        name = f"{name}.0" if name.endswith(".to_out") else name
    return Pieces(format_, name, suffix, len(found) == 1 and found[0] in USUAL)  # type: ignore[arg-type]


def kind_of_other(key: str) -> str | None:
    """What a key is that :func:`take_apart` does not know, in words; None if nothing that is known here."""
    return next((kind for pattern, kind in _NO_LORA.items() if re.fullmatch(pattern, key)), None)
