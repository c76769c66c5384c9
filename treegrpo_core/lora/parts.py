"""One layer's LoRA from ComfyUI's layer to diffusers' layers and back.

A layer is a dictionary by suffix; ``lora_A.weight`` is (rank, in), ``lora_B.weight`` (out, rank), both with two more
dimensions for a convolution. Where ComfyUI's model has one layer (``qkv``) and diffusers' several (``to_q``, ...),
the rows of B are split among them and A is shared; back, B is stacked if all have the same A, else block-diagonal.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .keys import Rule

Layer = Mapping[str, Tensor]
A, B, ALPHA, DORA = "lora_A.weight", "lora_B.weight", "alpha", "dora_scale"
PLAIN = {A, B, ALPHA, DORA}
"""What can be split, merged, and said in diffusers' format; anything else belongs to LoHa, LoKr or Tucker."""
PER_COLUMN = "DoRA per column"
"""The kind of a DoRA whose magnitudes belong to the inputs (LyCORIS with ``wd_on_output=False``)."""


def scale(layer: Layer) -> float:
    """What B A is multiplied by: alpha / rank, or 1 without alpha."""
    return float(layer[ALPHA]) / layer[A].shape[0] if ALPHA in layer else 1.0


def rank(layer: Layer) -> int | None:
    """The rank of an adapter; None for a LoKr of whole matrices."""
    for name, axis in ((A, 0), ("hada_w1_b", 0), ("lokr_w2_b", 0), ("lokr_w1_b", 0)):
        if name in layer:
            return layer[name].shape[axis]
    return None


def folded(layer: Layer) -> dict[str, Tensor]:
    """The same effect without alpha."""
    rest = {name: value for name, value in layer.items() if name != ALPHA}
    return {**rest, B: _times(layer[B], scale(layer))}


def split(layer: Layer, rule: Rule, name: str) -> dict[str, dict[str, Tensor]]:
    """ComfyUI's layer ``name`` as diffusers' layers, without alpha. Raises ValueError if it cannot be split."""
    if not layer.keys() <= PLAIN:
        raise ValueError(f"layer {name} is {kind(layer)}, and only LoRA and DoRA can be written in diffusers' format")
    if kind(layer) == PER_COLUMN:
        raise ValueError(
            f"layer {name} is DoRA with a magnitude per input column (LyCORIS with wd_on_output=False), and diffusers "
            "knows only one per output row; export as comfyui or kohya"
        )
    whole = folded(layer)
    if rule.swap and _two_outputs(whole):
        whole = _swapped(whole)
    if len(rule.diffusers) == 1:
        return {rule.diffusers[0]: whole}
    rows = _rows(whole[B].shape[0], rule, name)
    rowwise = {key: whole[key].split(rows) for key in (B, DORA) if key in whole}
    return {
        part: _without_idle_ranks(whole | {key: values[number] for key, values in rowwise.items()})
        for number, part in enumerate(rule.diffusers)
    }


def merge(parts: Mapping[int, Layer], rule: Rule) -> dict[str, Tensor]:
    """Diffusers' layers, by their number in the rule, as ComfyUI's layer ``rule.native``; missing ones have no effect.

    Raises ValueError for kinds of adapters that have no such form.
    """
    if len(rule.diffusers) == 1:
        layer = dict(parts[0])
        return _swapped(layer) if rule.swap and _two_outputs(layer) else layer
    for number, piece in parts.items():
        partial = DORA in piece and len(parts) < len(rule.diffusers)
        if not piece.keys() <= PLAIN or partial or kind(piece) == PER_COLUMN:
            what = f"layer {rule.diffusers[number]} is {kind(piece)}"
            raise ValueError(f"{what}, which cannot become a part of ComfyUI's {rule.native}")
    given: list[Layer] = [parts[number] for number in sorted(parts)]
    if len({DORA in layer for layer in given}) > 1:
        raise ValueError(f"some layers of {rule.native} are DoRA and some are not; they cannot become one layer")
    scales = {scale(layer) for layer in given}
    common = scales.pop() if len(scales) == 1 else 1.0
    if scales:  # several: each goes into its own B
        given = [folded(layer) for layer in given]
    parts = dict(zip(sorted(parts), given, strict=True))
    ups = _all_rows(parts, rule)
    downs = [layer[A] for layer in given]
    if all(down.shape == downs[0].shape and torch.equal(down, downs[0]) for down in downs):
        down, up = downs[0], torch.cat(list(ups))
    else:
        down, up = torch.cat(downs), _block_diagonal(parts, ups)
    merged = {A: down, B: up, ALPHA: torch.tensor(common * down.shape[0])}
    if DORA in given[0]:
        merged[DORA] = torch.cat([layer[DORA] for layer in given])
    return merged


def magnitudes(values: Tensor, down: Tensor, up: Tensor, *, per_row: bool) -> Tensor:
    """A DoRA's magnitudes with as many dimensions as its matrices: (out, 1, ...) or, per input column, (1, in, ...).

    ``per_row``: they are known to be one per output; otherwise their shape says so, and plain rows of numbers are, if
    there are as many as outputs. Raises ValueError if they are neither as many as outputs nor as inputs.
    """
    rows, columns, ones = up.shape[0], down.shape[1], (1,) * (down.ndim - 2)
    flat = values.ndim == 1 or values.numel() == max(values.shape)
    if flat and values.numel() == rows and (per_row or values.ndim == 1 or values.shape[0] == rows):
        return values.reshape(rows, 1, *ones)
    if flat and values.numel() == columns and not per_row and (values.ndim == 1 or values.shape[1] == columns):
        return values.reshape(1, columns, *ones)
    raise ValueError(f"magnitudes of shape {tuple(values.shape)}, but {rows} outputs and {columns} inputs")


def kind(layer: Layer) -> str:
    """LoRA, DoRA, DoRA per column, LoHa, LoKr, Tucker LoRA or enlarging LoRA."""
    if any(name.startswith("hada_") for name in layer):
        return "LoHa"
    if any(name.startswith("lokr_") for name in layer):
        return "LoKr"
    if "lora_mid.weight" in layer:
        return "Tucker LoRA"
    if "reshape_weight" in layer:
        return "enlarging LoRA"
    if DORA not in layer:
        return "LoRA"
    per_row = B not in layer or layer[B].shape[0] == layer[DORA].shape[0] == layer[DORA].numel()
    return "DoRA" if per_row else PER_COLUMN


def _times(up: Tensor, factor: float) -> Tensor:
    return up if factor == 1.0 else (up.float() * factor).to(up.dtype)


def _two_outputs(layer: Layer) -> bool:
    return layer[B].shape[0] == 2 * layer[A].shape[1]


def _swapped(layer: Layer) -> dict[str, Tensor]:
    """The layer with the halves of its rows exchanged."""
    rows = layer[B].shape[0]
    turned = {key: value for key, value in layer.items() if key in (B, DORA) and value.shape[0] == rows}
    return {**layer, **{key: torch.cat(value.chunk(2)[::-1]) for key, value in turned.items()}}


def _shares(rule: Rule) -> tuple[int, ...]:
    return rule.shares or (1,) * len(rule.diffusers)


def _rows(total: int, rule: Rule, name: str) -> list[int]:
    shares = _shares(rule)
    if total % sum(shares):
        raise ValueError(f"layer {name} has {total} outputs, which do not split as {':'.join(map(str, shares))}")
    return [total // sum(shares) * share for share in shares]


def _all_rows(parts: Mapping[int, Layer], rule: Rule) -> list[Tensor]:
    """B of every diffusers layer of the rule, zeros for those that are missing (with the first one's rank)."""
    shares = _shares(rule)
    units = {layer[B].shape[0] / shares[number] for number, layer in parts.items()}
    if len(units) > 1 or not units.copy().pop().is_integer():
        sizes = {rule.diffusers[number]: layer[B].shape[0] for number, layer in parts.items()}
        raise ValueError(f"the layers of {rule.native} have outputs {sizes}, not as {':'.join(map(str, shares))}")
    unit, first = int(units.pop()), next(iter(parts.values()))[B]
    return [
        parts[number][B] if number in parts else first.new_zeros((unit * share, *first.shape[1:]))
        for number, share in enumerate(shares)
    ]


def _block_diagonal(parts: Mapping[int, Layer], ups: list[Tensor]) -> Tensor:
    """(all outputs, sum of ranks): each part's B in its own rows and columns."""
    ranks = [parts[number][A].shape[0] if number in parts else 0 for number in range(len(ups))]
    merged = next(iter(parts.values()))[B].new_zeros(sum(up.shape[0] for up in ups), sum(ranks))
    row = column = 0
    for up, rank in zip(ups, ranks, strict=True):
        if rank:
            merged[row : row + up.shape[0], column : column + rank] = up
        row, column = row + up.shape[0], column + rank
    return merged


def _without_idle_ranks(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out ranks whose column of B is zero, as after a merge, unless that is all of them."""
    used = layer[B].any(dim=0)
    if not used.any() or used.all():
        # Copies, because a file has no two tensors in the same memory, and parts share A.
        return {key: value.clone() for key, value in layer.items()}
    return {**layer, A: layer[A][used].contiguous(), B: layer[B][:, used].contiguous()}
