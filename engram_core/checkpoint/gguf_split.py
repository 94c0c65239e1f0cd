"""Which GGUF files make one checkpoint: a single file, any shard of a split one, or a folder.

Source: llama.cpp's split files: `split.no` counts from 0 and names from 1, `split.tensors.count`
is the total over the shards, the metadata stands in the first one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engram_core.checkpoint.files import refusal, shown
from engram_core.checkpoint.gguf import GgufFile, GgufTensor, Value, read_gguf

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_SHARDS = 4_096


@dataclass(frozen=True)
class GgufSet:
    """All shards of one checkpoint. path: the first one, where the metadata stands."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]


def read_gguf_set(path: Path) -> GgufSet:
    """Read the headers of every shard that belongs to `path` (a file, or a folder of one set).

    Raises:
        CheckpointError: a shard missing, named and numbered differently, of another set, or a
            tensor in two of them; a folder that holds more than one checkpoint.
    """
    shards = _shards(_pick(path) if path.is_dir() else path)
    files = [_read_shard(shard, is_first=shard == shards[0]) for shard in shards]
    for index, file in enumerate(files):
        _check_numbers(file, index, len(files))
    tensors: dict[str, GgufTensor] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in tensors:
                got = f"a second one beside {tensors[name].path.name}"
                where = f"tensor {shown(name)}"
                raise refusal(file.path, where, expected="each tensor once", got=got)
            tensors[name] = tensor
    _check_total(files, len(tensors))
    return GgufSet(files[0].path, files[0].metadata, tensors)


def _read_shard(path: Path, *, is_first: bool) -> GgufFile:
    """Read one header; of a later shard only what says its place is kept."""
    file = read_gguf(path)
    if is_first:
        return file
    place = {key: value for key, value in file.metadata.items() if key.startswith("split.")}
    return replace(file, metadata=place)


def _pick(folder: Path) -> Path:
    """Choose the one checkpoint of a folder."""
    found: dict[tuple[str, str], Path] = {}
    for path in sorted(folder.glob("*.gguf")):
        match = _SHARD.fullmatch(path.name)
        key = (match[1], match[3]) if match else (path.name, "")
        found.setdefault(key, path)
    if len(found) != 1:
        got = ", ".join(shown(path.name) for path in found.values()) or "none"
        advice = "name the file to be opened"
        raise refusal(folder, "folder", expected="one GGUF checkpoint", got=got, advice=advice)
    return next(iter(found.values()))


def _shards(path: Path) -> list[Path]:
    """List the files of the set that `path` is one of, in order, by name."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    stem, number, count = match[1], int(match[2]), int(match[3])
    if not 1 <= number <= count <= _MAX_SHARDS:
        expected = f"a shard 1 to {count} of at most {_MAX_SHARDS}"
        raise refusal(path, "file name", expected=expected, got=number)
    shards = [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing:
        got = f"{len(missing)} missing: {', '.join(missing[:8])}"
        advice = "put all shards into one folder"
        raise refusal(path, "shards", expected=f"{count} files", got=got, advice=advice)
    return shards


def _check_numbers(file: GgufFile, index: int, count: int) -> None:
    expected = {"split.no": index, "split.count": count}
    for key, value in expected.items():
        # A file that was never split may lack the keys, and writers of one "shard" say 0 or 1.
        got = file.metadata.get(key)
        if count == 1 and got in (None, 0, value):
            continue
        if type(got) is not int or got != value:
            advice = "the name of a shard counts from 1, split.no from 0"
            raise refusal(file.path, f"key {key!r}", expected=value, got=got, advice=advice)


def _check_total(files: Sequence[GgufFile], num_tensors: int) -> None:
    for file in files:
        total = file.metadata.get("split.tensors.count")
        if total is not None and total != num_tensors:
            where = "key 'split.tensors.count'"
            got = f"{num_tensors} tensors in {len(files)} files"
            raise refusal(file.path, where, expected=shown(total), got=got)
