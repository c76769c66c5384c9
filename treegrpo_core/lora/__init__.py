"""LoRA files: one form in memory (``file``), the names of layers in each program (``keys``), header and loaders."""

from .adapter import file_of, lora_tensors, metadata, write_lora
from .file import FORMATS, Format, LoraFile, read_lora, to_tensors, write
from .safe import read_header

__all__ = [
    "FORMATS",
    "Format",
    "LoraFile",
    "file_of",
    "lora_tensors",
    "metadata",
    "read_header",
    "read_lora",
    "to_tensors",
    "write",
    "write_lora",
]
