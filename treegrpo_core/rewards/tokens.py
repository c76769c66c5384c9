"""Prompts as token ids, from vocabulary files that the pack does not ship."""

from __future__ import annotations

import html
import json
import unicodedata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CLIP_WINDOW = 77
_CLIP_MERGES = 48_894
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_QWEN_WORDS = 151_643
_QWEN_PARTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_STRAIGHT = dict.fromkeys(range(8216, 8220), "'") | dict.fromkeys(range(8220, 8224), '"')
"""Curly quotes."""


def tidy(text: str) -> str:
    """What open_clip's cleaning does to ordinary prompts.

    HTML entities are resolved, quotes straight, ligatures and full-width letters plain, spaces single. It is not the
    whole of ftfy, which open_clip uses: text that was decoded with a wrong encoding is not repaired.
    """
    plain = html.unescape(html.unescape(text)).translate(_STRAIGHT)
    wide = "".join(unicodedata.normalize("NFKC", each) if _has_plain_form(each) else each for each in plain)
    kept = "".join(each for each in wide if each.isspace() or unicodedata.category(each) != "Cc")
    return " ".join(unicodedata.normalize("NFC", kept).split())


def _has_plain_form(character: str) -> bool:
    """Latin ligatures, full-width and half-width forms."""
    return "\ufb00" <= character <= "\ufb06" or "\uff01" <= character <= "\uffef" or character == "\u3000"


class ClipTokenizer:
    """CLIP's byte-pair encoding (github.com/openai/CLIP), from its list of merges alone.

    The ids of the 49,408 tokens follow from the order of the list: bytes, bytes that end a word, merges, start, end.
    """

    def __init__(self, merges: Path) -> None:
        from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
        from tokenizers.models import BPE

        lines = merges.read_text(encoding="utf-8").split("\n")[1 : _CLIP_MERGES + 1]
        pairs = [(words[0], words[1]) for words in map(str.split, lines) if len(words) == 2]
        if len(pairs) != _CLIP_MERGES:
            raise ValueError(f"{merges.name} has {len(pairs)} merges, CLIP's has {_CLIP_MERGES}: download it again")
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        characters = [chr(byte) for byte in (*printable, *range(256, 512 - len(printable)))]
        words = [*characters, *(each + "</w>" for each in characters), *(first + second for first, second in pairs)]
        self.start, self.end = len(words), len(words) + 1
        model: Any = BPE({word: index for index, word in enumerate(words)}, pairs, end_of_word_suffix="</w>")
        self._tokenizer = Tokenizer(model)
        self._tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
        )
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    def __call__(self, prompts: list[str]) -> Tensor:
        """N texts -> (N, 77) token ids: start, words, end, zeros. What goes beyond the window is cut before the end."""
        rows = torch.zeros(len(prompts), CLIP_WINDOW, dtype=torch.long)
        for row, encoded in zip(rows, self._tokenizer.encode_batch(prompts), strict=True):
            ids = [self.start, *encoded.ids[: CLIP_WINDOW - 2], self.end]
            row[: len(ids)] = torch.tensor(ids)
        return rows


class QwenTokenizer:
    """Byte-pair encoding of Qwen2 (arXiv 2407.10671). Special words in a text are text like any other."""

    def __init__(self, vocabulary: Path, merges: Path) -> None:
        from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
        from tokenizers.models import BPE

        words = json.loads(vocabulary.read_text(encoding="utf-8"))
        lines = merges.read_text(encoding="utf-8").split("\n")
        cut = [line.split(" ") for line in lines if line and not line.startswith("#version")]
        pairs = [(parts[0], parts[1]) for parts in cut if len(parts) == 2]
        if len(words) != _QWEN_WORDS or len(pairs) != len(cut):
            raise ValueError(f"{vocabulary.name} and {merges.name} are not Qwen2's vocabulary: download them again")
        model: Any = BPE(words, pairs)
        self._tokenizer = Tokenizer(model)
        self._tokenizer.normalizer = normalizers.NFC()
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_QWEN_PARTS), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids


class BertTokenizer:
    """WordPiece as bert-base-uncased has it (arXiv 1810.04805)."""

    def __init__(self, vocabulary: Path) -> None:
        from tokenizers import Tokenizer, normalizers, pre_tokenizers
        from tokenizers.models import WordPiece

        words = vocabulary.read_text(encoding="utf-8").splitlines()
        known = {word: index for index, word in enumerate(words)}
        if not {"[PAD]", "[UNK]", "[CLS]", "[SEP]"} <= known.keys():
            raise ValueError(f"{vocabulary.name} is not BERT's vocabulary: it lacks [CLS] or [SEP]. Download it again")
        self.first, self.last, self.padding = known["[CLS]"], known["[SEP]"], known["[PAD]"]
        model: Any = WordPiece(known, unk_token="[UNK]", max_input_chars_per_word=100)  # noqa: S106 - no password
        self._tokenizer = Tokenizer(model)
        self._tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def __call__(self, prompts: list[str], window: int) -> tuple[Tensor, Tensor]:
        """N texts -> (N, window) token ids, cut before the last, and (N, window) bool: where there is text."""
        rows = torch.full((len(prompts), window), self.padding)
        there = torch.zeros(len(prompts), window, dtype=torch.bool)
        for row, mark, encoded in zip(rows, there, self._tokenizer.encode_batch(prompts), strict=True):
            ids = [self.first, *encoded.ids[: window - 2], self.last]
            row[: len(ids)] = torch.tensor(ids)
            mark[: len(ids)] = True
        return rows, there
