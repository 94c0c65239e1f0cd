"""Safetensors folders taken apart and put together again, so that every part can be wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def edit_json(path: Path) -> Iterator[dict[str, Any]]:
    """Change a JSON file in place."""
    value = json.loads(path.read_text())
    yield value
    path.write_text(json.dumps(value))


@contextmanager
def edit_header(path: Path) -> Iterator[dict[str, Any]]:
    """Change the header of a safetensors file; its data stays."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    yield header
    write_raw(path, json.dumps(header).encode(), raw[8 + length :])


def write_raw(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    """Write header bytes and data; length: another one than the header's."""
    size = len(header) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + header + data)


def renamed(folder: Path, suffixes: Mapping[str, str]) -> None:
    """Rename tensors by suffix, in the shards and in the index."""

    def new(name: str) -> str:
        for old, suffix in suffixes.items():
            if name.endswith(old):
                return name.removesuffix(old) + suffix
        return name

    for shard in folder.glob("*.safetensors"):
        with edit_header(shard) as header:
            entries = dict(header)
            header.clear()
            header.update({new(name): entry for name, entry in entries.items()})
    with edit_json(folder / "model.safetensors.index.json") as index:
        index["weight_map"] = {new(n): shard for n, shard in index["weight_map"].items()}
