"""LoRA files: one form in memory (``file``), the names of layers in each program (``keys``), header and loaders."""

from .adapter import file_of, lora_tensors, metadata, write_lora
from .endings import Format
from .file import FORMATS, LoraFile, read_lora
from .safe import read_header
from .writing import to_tensors, write

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
