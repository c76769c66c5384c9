"""Texts are encoded once: a run meets its prompts again in every epoch, and a text encoder is large to load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from . import host

LIMIT = 1 << 29
"""Bytes of encodings kept of each text encoder; those not used for the longest time go first."""

_KNOWN: WeakKeyDictionary[Any, OrderedDict[Hashable, Any]] = WeakKeyDictionary()


def encoded(clip: Any, text: str) -> Any:
    """Core's CONDITIONING of ``text``, from the encoder or as it was encoded before; not to be changed in place."""
    settings = host.encoder_settings(clip)
    if settings is None:
        return clip.encode_from_tokens_scheduled(clip.tokenize(text))
    known = _KNOWN.setdefault(clip.cond_stage_model, OrderedDict())
    found = known.pop((settings, text), None) or clip.encode_from_tokens_scheduled(clip.tokenize(text))
    known[settings, text] = found
    while sum(map(_size, known.values())) > LIMIT and len(known) > 1:
        known.popitem(last=False)
    return found


def _size(conditioning: Any) -> int:
    tensors = [value for entry in conditioning for value in (entry[0], *entry[1].values())]
    return sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor))
