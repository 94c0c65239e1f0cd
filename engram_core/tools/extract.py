"""Extract the Engram of any checkpoint into one self-contained GGUF file.

The file is made by pieces of the file, not of a tensor: a worker fills 64 MiB, hashes them and
writes them at their place. A core holds one piece and a few MiB more, whatever the sizes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_core.checkpoint import Checkpoint, LayerSource, TensorSource, open_checkpoint
from engram_core.checkpoint.dense import read_stored_rows
from engram_core.checkpoint.files import RegularFile, refusal
from engram_core.checkpoint.gguf_header import GgufHeader, GgufValue, gguf_header
from engram_core.checkpoint.identity import identity_of
from engram_core.checkpoint.layouts import GGUF_MANIFEST, ROW_ENCODINGS
from engram_core.checkpoint.manifest import DIGEST_BYTES, PIECE_BYTES, num_pieces
from engram_core.checkpoint.sources import NewTensor, Part, TableSource
from engram_core.checkpoint.write import write_fully, written_aside
from engram_core.errors import CheckpointError
from engram_core.quant import row_format
from engram_core.tools.encode import QUANTS, Encode, encoder
from engram_core.tools.layout_a import ARCH, PREFIX, layout_a_keys, tensor_name
from engram_core.tools.row_stream import EncodedRows, RowErrors, RowStream, StoredRows, fill

Progress = Callable[[str, int, int], None]

_SPELLED = {encoding: spelling for spelling, encoding in ROW_ENCODINGS.items()}
"""Row formats that GGUF has no type for: I8 rows, named by the key `encoding`."""


@dataclass(frozen=True)
class TableError:
    """What encoding one table changed. rms: of the error; relative: to the RMS of the values."""

    layer_id: int
    source: str
    target: str
    rms: float
    relative: float


@dataclass(frozen=True)
class Extraction:
    """identity: of what was written; source_bytes: read; errors: none where rows were kept."""

    path: Path
    identity: str
    num_bytes: int
    source_bytes: int
    seconds: float
    errors: tuple[TableError, ...]

    def as_json(self) -> dict[str, Any]:
        """Give everything as JSON-ready values."""
        errors = [vars(error) for error in self.errors]
        return {**vars(self), "path": str(self.path), "errors": errors}


@dataclass(frozen=True)
class _Layer:
    """One layer as it will be. encoding: of its table; encode: None keeps rows as stored."""

    source: LayerSource
    encoding: str
    encode: Encode | None


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file, and the rows it is made of."""

    new: NewTensor
    stream: RowStream


@dataclass(frozen=True)
class _Plan:
    """The file to be written, in pieces up to `end`, where the manifest begins."""

    header: GgufHeader
    tensors: tuple[_Tensor, ...]
    piece_bytes: int
    end: int


def extract(
    source: Path | str,
    out: Path,
    *,
    quant: str | None = None,
    piece_bytes: int = PIECE_BYTES,
    progress: Progress | None = None,
) -> Extraction:
    """Write tables, wkv, q, k, constants and identity of a checkpoint into one GGUF file.

    source: anything `open_checkpoint` opens; out: must not exist yet
    quant: a name of `encode.QUANTS`, for the tables; None keeps every value as it is stored
    piece_bytes: of the manifest; progress: called with "extract", bytes done and in all

    Raises: CheckpointError, SchemaError; then nothing is left at `out`.
    """
    started = monotonic()
    checkpoint = open_checkpoint(source)
    layers = [_planned(layer, quant) for layer in checkpoint.layers]
    with ExitStack() as opened, written_aside(out) as aside:
        plan = _plan(checkpoint, layers, opened, piece_bytes)
        _check_space(out, plan.header.file_bytes)
        sums = _write(aside, plan, progress or (lambda *_: None))
        identity = open_checkpoint(aside).identity  # refused if it is not what was planned
    return Extraction(
        path=out,
        identity=identity,
        num_bytes=plan.header.file_bytes,
        source_bytes=sum(_num_bytes(layer) for layer in checkpoint.layers),
        seconds=monotonic() - started,
        errors=tuple(_table_error(layer, sums) for layer in layers if layer.encode is not None),
    )


def _planned(layer: LayerSource, quant: str | None) -> _Layer:
    encode = encoder(quant) if quant else None  # an unknown or missing one is refused first
    encoding = QUANTS[quant] if quant else layer.table.encoding
    if encoding == layer.table.encoding:
        return _Layer(layer, encoding, None)
    return _Layer(layer, encoding, encode)


def _plan(
    checkpoint: Checkpoint, layers: Sequence[_Layer], opened: ExitStack, piece_bytes: int
) -> _Plan:
    files: dict[Path, RegularFile] = {}

    def stored(*parts: Part) -> StoredRows:
        for part in parts:
            if part.path not in files:
                files[part.path] = opened.enter_context(RegularFile(part.path))
        return StoredRows([(part, files[part.path]) for part in parts])

    head_dim = checkpoint.geometry.head_dim
    tensors = []
    for layer in layers:
        table = layer.source.table
        rows: RowStream = stored(*table.parts)
        if layer.encode is not None:
            kept = stored(*table.parts)
            rows = EncodedRows(kept, table.encoding, layer.encoding, head_dim, layer.encode)
        tensors.append(_Tensor(_new_table(layer, head_dim), rows))
        tensors += [_Tensor(new, stored(part)) for new, part in _dense(layer.source)]
    data = [tensor.new for tensor in tensors]
    # The size of the manifest follows from where it begins, which does not depend on its size.
    empty = NewTensor(GGUF_MANIFEST, "I8", (1, DIGEST_BYTES), DIGEST_BYTES)
    metadata = _metadata(checkpoint, layers, piece_bytes)
    end = gguf_header(ARCH, metadata, [*data, empty]).offsets[GGUF_MANIFEST]
    count = num_pieces(end, piece_bytes)
    manifest = NewTensor(GGUF_MANIFEST, "I8", (count, DIGEST_BYTES), count * DIGEST_BYTES)
    header = gguf_header(ARCH, metadata, [*data, manifest])
    return _Plan(header, tuple(tensors), piece_bytes, end)


def _new_table(layer: _Layer, head_dim: int) -> NewTensor:
    num_rows = layer.source.table.num_rows
    width = row_format(layer.encoding).row_bytes(head_dim)
    packed = layer.encoding in _SPELLED
    kind, columns = ("I8", width) if packed else (layer.encoding, head_dim)
    name = tensor_name(layer.source.layer_id, "table")
    return NewTensor(name, kind, (num_rows, columns), num_rows * width)


def _dense(layer: LayerSource) -> Iterator[tuple[NewTensor, Part]]:
    """Give wkv, its scales, q and k as they are stored, under GGUF's names."""
    wkv, scale = layer.wkv, layer.wkv.scale
    sources = {"wkv": wkv, "q": layer.q, "k": layer.k}
    for role, source in (sources if scale is None else {**sources, "wkv_scale": scale}).items():
        kind = "I8" if source.type in ("F8_E4M3", "F8_E8M0") else source.type
        name = tensor_name(layer.layer_id, role)
        new = NewTensor(name, kind, source.shape, source.num_bytes)
        yield new, Part(source.path, source.offset, source.num_bytes // source.shape[0])


def _metadata(
    checkpoint: Checkpoint, layers: Sequence[_Layer], piece_bytes: int
) -> dict[str, GgufValue]:
    geometry, tables = checkpoint.geometry, checkpoint.hash_tables
    sizes = {"head_dim": geometry.head_dim, "dim": geometry.dim}
    metadata = layout_a_keys(tables, **sizes, eps=geometry.eps)
    spelled = {_SPELLED.get(layer.encoding) for layer in layers}
    if len(spelled) > 1:
        raise CheckpointError(
            f"{checkpoint.path}: tables of {', '.join(layer.encoding for layer in layers)} cannot "
            "stand in one GGUF file; give them one type with --quant",
            expected="one encoding",
            got=[layer.encoding for layer in layers],
        )
    encoding = spelled.pop()
    if encoding is not None:
        metadata[f"{PREFIX}encoding"] = encoding
    if checkpoint.image_token_id is not None:
        metadata[f"{PREFIX}image_token_id"] = checkpoint.image_token_id
    metadata[f"{PREFIX}manifest_bytes"] = piece_bytes
    metadata[f"{PREFIX}identity"] = _identity(checkpoint, layers)
    return metadata


def _identity(checkpoint: Checkpoint, layers: Sequence[_Layer]) -> str:
    """Compute the identity of what will be written: the sampled rows are encoded for it."""
    planned, rows_of = [], {}
    for layer in layers:
        width = row_format(layer.encoding).row_bytes(checkpoint.geometry.head_dim)
        table = replace(layer.source.table, encoding=layer.encoding, row_bytes=width)
        planned.append(replace(layer.source, table=table))
        rows_of[table] = layer

    def read_rows(table: TableSource, row_ids: Sequence[int]) -> NDArray[np.uint8]:
        layer = rows_of[table]
        rows = read_stored_rows(layer.source.table, row_ids)
        if layer.encode is None:
            return rows
        return layer.encode(row_format(layer.source.table.encoding).dequantize(rows))

    return identity_of(checkpoint.geometry, checkpoint.hash_tables, planned, read_rows)


_Written = Future[tuple[bytes, dict[str, RowErrors]]]
"""A piece's digest, and what encoding changed, by name of the tensor."""


def _write(path: Path, plan: _Plan, progress: Progress) -> dict[str, RowErrors]:
    """Write every piece on all cores, then the manifest. Returns: what encoding changed, by name.

    Sums are added in the order of the pieces, so that they do not depend on the threads.
    """
    workers = os.cpu_count() or 1
    sums = {tensor.new.name: RowErrors() for tensor in plan.tensors}
    digests: list[bytes] = []
    waiting: deque[_Written] = deque()
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.truncate(file, plan.header.file_bytes)
        with ThreadPoolExecutor(workers, thread_name_prefix="engram-extract") as pool:
            count = num_pieces(plan.end, plan.piece_bytes)
            for piece in range(count + workers):
                if piece < count:
                    waiting.append(pool.submit(_write_piece, file, plan, piece))
                if len(waiting) > workers or piece >= count:
                    _collect(waiting, digests, sums)
                    progress("extract", min(len(digests) * plan.piece_bytes, plan.end), plan.end)
        write_fully(file, plan.end, b"".join(digests))
    finally:
        os.close(file)
    return sums


def _collect(
    waiting: deque[_Written],
    digests: list[bytes],
    sums: dict[str, RowErrors],
) -> None:
    if not waiting:
        return
    digest, errors = waiting.popleft().result()
    digests.append(digest)
    for name, error in errors.items():
        sums[name].add(error)


def _write_piece(file: int, plan: _Plan, piece: int) -> tuple[bytes, dict[str, RowErrors]]:
    """Fill one piece from header and tensors, write it, and give its digest."""
    begin = piece * plan.piece_bytes
    end = min(begin + plan.piece_bytes, plan.end)
    buffer = np.zeros(end - begin, np.uint8)
    head = plan.header.raw[begin:end]
    buffer[: len(head)] = np.frombuffer(head, np.uint8)
    errors = {}
    for tensor in plan.tensors:
        start = plan.header.offsets[tensor.new.name]
        first, last = max(begin, start), min(end, start + tensor.new.num_bytes)
        if first < last:
            out = buffer[first - begin : last - begin]
            errors[tensor.new.name] = fill(tensor.stream, out, first - start)
    write_fully(file, begin, buffer.data)
    return hashlib.sha256(buffer.data).digest(), errors


def _check_space(out: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(out.absolute().parent).free
    if free < num_bytes:
        raise refusal(out, "disk", expected=f"{num_bytes} bytes free", got=free)


def _num_bytes(layer: LayerSource) -> int:
    dense: tuple[TensorSource | None, ...] = (layer.wkv, layer.wkv.scale, layer.q, layer.k)
    table = layer.table.num_rows * layer.table.row_bytes
    return table + sum(source.num_bytes for source in dense if source is not None)


def _table_error(layer: _Layer, sums: dict[str, RowErrors]) -> TableError:
    sum_ = sums[tensor_name(layer.source.layer_id, "table")]
    rms = (sum_.error / max(sum_.count, 1)) ** 0.5
    relative = (sum_.error / sum_.power) ** 0.5 if sum_.power else 0.0
    source = layer.source
    return TableError(source.layer_id, source.table.encoding, layer.encoding, rms, relative)
