"""Prompts out of text boxes and files, and which of them an update takes."""

from __future__ import annotations

import codecs
import math
import random
import re
from functools import lru_cache

from .plan import derive_seed

_LINE_END = re.compile(r"\r\n|\r|\n")
_BYTE_ORDER_MARK = "\ufeff"
_ENCODINGS = (  # UTF-32 first: its mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""NUL, of which binary files and UTF-16 without its mark are full, and halves of a character, which nothing encodes."""


def decoded(data: bytes, name: str) -> str:
    """The text of a file: UTF-8 with or without a byte order mark, UTF-16 or UTF-32 with one.

    ValueError for anything else names ``name``, the line and the byte.
    """
    encoding = next((encoding for mark, encoding in _ENCODINGS if data.startswith(mark)), "utf-8")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = len(split_lines(data[: error.start].decode(encoding, errors="ignore")))
        raise ValueError(
            f"{name} is not text in {encoding.upper()}: line {line}, byte {error.start} is 0x{data[error.start]:02X}; "
            "open it in a text editor and save it as UTF-8"
        ) from error


def split_lines(text: str) -> list[str]:
    """Lines as text editors show them. Unlike ``str.splitlines``, which also ends them at form feeds and the like."""
    return _LINE_END.split(text)


def check_text(text: str, name: str) -> None:
    """ValueError names the line of a character that cannot be part of a prompt."""
    if found := _NO_TEXT.search(text):
        line = len(split_lines(text[: found.start()]))
        raise ValueError(
            f"{name}: line {line} has the character U+{ord(found[0]):04X}, which is no text; delete it (or save the "
            "file as UTF-8)"
        )


def prompt_lines(text: str, name: str) -> list[str]:
    """The prompts in a text, one per line, without empty lines and those that start with #.

    ValueError as :func:`check_text`.
    """
    check_text(text, name)
    lines = (line.strip() for line in split_lines(text.replace(_BYTE_ORDER_MARK, "")))
    return [line for line in lines if line and not line.startswith("#")]


def draw_prompts(lines: list[str], count: int, seed: int, step: int) -> list[str]:
    """``count`` different lines for one update, a function of (seed, step). ``count`` is at most ``len(lines)``.

    Every epoch is a permutation of all lines, cut into steps, so each is met equally often. An update that begins in
    one epoch and ends in the next has no line twice either.
    """
    places = (divmod(index, len(lines)) for index in range(step * count, (step + 1) * count))
    return [lines[_epoch(len(lines), count, seed, epoch)[place]] for epoch, place in places]


@lru_cache(maxsize=2)  # an update needs two epochs at most, and the next one mostly the same
def _epoch(total: int, count: int, seed: int, number: int) -> list[int]:
    """The order of an epoch's lines.

    An update that began in the epoch before takes its last lines from the start of this one: the first that it does
    not have yet. Those lie within the first ``count``. So the end of an epoch does not depend on the epoch before,
    unless it reaches into these; then all epochs are worked out since the last that began with an update.
    """
    period = count // math.gcd(total, count)
    since = number - (number % period if total < 2 * count else min(number, 1))
    order: list[int] = []
    for epoch in range(since, number + 1):
        missing = -epoch * total % count
        begun = set(order[missing - count :]) if missing else set()
        order = list(range(total))
        random.Random(derive_seed(seed, "prompts", epoch)).shuffle(order)
        first = [line for line in order[:count] if line not in begun][:missing]
        order = list(dict.fromkeys(first + order))
    return order
