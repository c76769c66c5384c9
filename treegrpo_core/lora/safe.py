"""Reading a safetensors file, or saying clearly why not."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

PICKLES = (b"PK\x03\x04", b"\x80")
"""How PyTorch's own files begin: a zip archive with a pickle in it, or a bare pickle."""


def read_header(path: Path) -> dict[str, str]:
    """Metadata of a safetensors file; ValueError if it is damaged or none."""
    from safetensors import SafetensorError, safe_open

    _refuse_pickle(path)
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({error}); move it away or restore a copy"
        ) from None


def read_tensors(path: Path, unchecked: str) -> dict[str, Tensor]:
    """All tensors of a safetensors file; those whose names begin with ``unchecked`` may hold anything.

    Raises ValueError for a pickle, a damaged file or a number that is none, FileNotFoundError for no file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _refuse_pickle(path)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path.name} is not a complete safetensors file ({error}); export or download it again"
        ) from None
    for name, value in tensors.items():
        if name.startswith(unchecked):
            continue
        if not value.is_floating_point() and not name.endswith((".alpha", ".reshape_weight")):
            raise ValueError(f"{path.name}: {name} holds {value.dtype}, which are no weights of an adapter")
        if not value.float().isfinite().all():  # float: of 8-bit numbers torch cannot tell
            raise ValueError(f"{path.name}: {name} holds NaN or infinity; the file is spoilt, use an earlier one")
        if name.endswith(".alpha") and value.numel() != 1:
            raise ValueError(f"{path.name}: {name} has {value.numel()} numbers, and alpha is one")
    return tensors


def _refuse_pickle(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(9)
        # Safetensors begin with eight bytes of any number and then a brace.
        if start.startswith(PICKLES) and start[8:] != b"{":
            raise ValueError(
                f"{path.name} is a pickle (a PyTorch file), not safetensors. Opening a pickle can run any program "
                "in it, so it is never opened; ask for the file as safetensors"
            )
