"""Checkpoints are written aside, synced and renamed; tensors are laid out before they are filled.

A file is created at its full size, so that what is never written stays a hole: a table of the
true size takes no disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engram_core.checkpoint.files import refusal
from engram_core.checkpoint.gguf_header import GgufValue, gguf_header
from engram_core.checkpoint.sources import NewTensor


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Give a path beside `path` to write a file or folder at; rename it once it is whole.

    Nothing is left behind when the body raises. Raises: CheckpointError if `path` exists.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        advice = "remove it or name another"
        raise refusal(path, "output", expected="a path not in use", got="one", advice=advice)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield aside
        for file in sorted(aside.rglob("*")) if aside.is_dir() else []:
            _sync(file)
        _sync(aside)
        os.replace(aside, path)
        _sync(path.parent)
    finally:
        if aside.is_dir():
            shutil.rmtree(aside)
        else:
            aside.unlink(missing_ok=True)


def create_gguf(
    path: Path, arch: str, metadata: Mapping[str, GgufValue], tensors: Sequence[NewTensor]
) -> dict[str, int]:
    """Write the header of a GGUF file and give it its full size.

    Returns: offset in the file of each tensor's data
    """
    header = gguf_header(arch, metadata, tensors)
    path.write_bytes(header.raw)
    os.truncate(path, header.file_bytes)
    return header.offsets


def create_safetensors(path: Path, tensors: Sequence[NewTensor]) -> dict[str, int]:
    """Write the header of a safetensors file and give it its full size.

    Returns: offset in the file of each tensor's data
    """
    header: dict[str, dict[str, object]] = {}
    offsets, end = {}, 0
    for tensor in tensors:
        offsets[tensor.name], begin = end, end
        end += tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.type,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    base = 8 + len(raw)
    os.truncate(path, base + end)
    return {name: base + offset for name, offset in offsets.items()}


def write_rows(file: int, offset: int, row_ids: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
    """Write rows [n, row_bytes] of ascending ids into a table at `offset`, runs with one call."""
    row_bytes = rows.shape[1]
    breaks = np.flatnonzero(np.diff(row_ids) != 1) + 1
    bounds = [0, *breaks.tolist(), len(row_ids)]
    for first, last in pairwise(bounds):
        write_fully(file, offset + int(row_ids[first]) * row_bytes, rows[first:last].tobytes())


def write_fully(file: int, offset: int, data: bytes | memoryview) -> None:
    """Write all of `data` at `offset`."""
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
