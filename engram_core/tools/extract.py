"""Extract the Engram of any checkpoint into one self-contained GGUF file.

The file is made by pieces of the file, not of a tensor: a worker fills 64 MiB, hashes them and
writes them at their place. A core holds one piece and a few MiB more, whatever the sizes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from engram_core.checkpoint import LayerSource, TensorSource, open_checkpoint
from engram_core.checkpoint.files import refusal
from engram_core.checkpoint.manifest import PIECE_BYTES, num_pieces
from engram_core.checkpoint.write import write_fully, written_aside
from engram_core.progress import Progress
from engram_core.tools.extract_plan import FilePlan, PlannedLayer, plan_file, plan_layer
from engram_core.tools.layout_a import tensor_name
from engram_core.tools.row_stream import RowErrors, fill


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
    layers = [plan_layer(layer, quant) for layer in checkpoint.layers]
    with ExitStack() as opened, written_aside(out) as aside:
        plan = plan_file(checkpoint, layers, opened, piece_bytes)
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


_Written = Future[tuple[bytes, dict[str, RowErrors]]]
"""A piece's digest, and what encoding changed, by name of the tensor."""


def _write(path: Path, plan: FilePlan, progress: Progress) -> dict[str, RowErrors]:
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


def _write_piece(file: int, plan: FilePlan, piece: int) -> tuple[bytes, dict[str, RowErrors]]:
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


def _table_error(layer: PlannedLayer, sums: dict[str, RowErrors]) -> TableError:
    sum_ = sums[tensor_name(layer.source.layer_id, "table")]
    rms = (sum_.error / max(sum_.count, 1)) ** 0.5
    relative = (sum_.error / sum_.power) ** 0.5 if sum_.power else 0.0
    source = layer.source
    return TableError(source.layer_id, source.table.encoding, layer.encoding, rms, relative)
