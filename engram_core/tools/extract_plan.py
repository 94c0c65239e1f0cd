"""What an extracted file will hold, and where: decided before a byte of it is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engram_core.checkpoint import Checkpoint, LayerSource
from engram_core.checkpoint.dense import read_stored_rows
from engram_core.checkpoint.files import RegularFile
from engram_core.checkpoint.gguf_header import GgufHeader, GgufValue, gguf_header
from engram_core.checkpoint.identity import identity_of
from engram_core.checkpoint.layouts import GGUF_MANIFEST, ROW_ENCODINGS
from engram_core.checkpoint.manifest import DIGEST_BYTES, num_pieces
from engram_core.checkpoint.sources import NewTensor
from engram_core.errors import CheckpointError
from engram_core.quant import row_format
from engram_core.tables import Part, TableSource
from engram_core.tools.encode import QUANTS, Encode, encoder
from engram_core.tools.layout_a import ARCH, PREFIX, layout_a_keys, tensor_name
from engram_core.tools.row_stream import EncodedRows, RowStream, StoredRows

_SPELLED = {encoding: spelling for spelling, encoding in ROW_ENCODINGS.items()}
"""Row formats that GGUF has no type for: I8 rows, named by the key `encoding`."""


@dataclass(frozen=True)
class PlannedLayer:
    """One layer as it will be. encoding: of its table; encode: None keeps rows as stored."""

    source: LayerSource
    encoding: str
    encode: Encode | None


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the file, and the rows it is made of."""

    new: NewTensor
    stream: RowStream


@dataclass(frozen=True)
class FilePlan:
    """The file to be written, in pieces up to `end`, where the manifest begins."""

    header: GgufHeader
    tensors: tuple[PlannedTensor, ...]
    piece_bytes: int
    end: int


def plan_layer(layer: LayerSource, quant: str | None) -> PlannedLayer:
    """Decide what a layer's table becomes. quant: a name of `encode.QUANTS`; None keeps it.

    Raises: SchemaError, CheckpointError for a type that is not known or cannot be made here.
    """
    encode = encoder(quant) if quant else None  # an unknown or missing one is refused first
    encoding = QUANTS[quant] if quant else layer.table.encoding
    if encoding == layer.table.encoding:
        return PlannedLayer(layer, encoding, None)
    return PlannedLayer(layer, encoding, encode)


def plan_file(
    checkpoint: Checkpoint, layers: Sequence[PlannedLayer], opened: ExitStack, piece_bytes: int
) -> FilePlan:
    """Lay the file out. opened: closes the source's files.

    Raises: CheckpointError for tables that cannot stand in one file.
    """
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
        tensors.append(PlannedTensor(_new_table(layer, head_dim), rows))
        tensors += [PlannedTensor(new, stored(part)) for new, part in _dense(layer.source)]
    data = [tensor.new for tensor in tensors]
    # The size of the manifest follows from where it begins, which does not depend on its size.
    empty = NewTensor(GGUF_MANIFEST, "I8", (1, DIGEST_BYTES), DIGEST_BYTES)
    metadata = _metadata(checkpoint, layers, piece_bytes)
    end = gguf_header(ARCH, metadata, [*data, empty]).offsets[GGUF_MANIFEST]
    count = num_pieces(end, piece_bytes)
    manifest = NewTensor(GGUF_MANIFEST, "I8", (count, DIGEST_BYTES), count * DIGEST_BYTES)
    header = gguf_header(ARCH, metadata, [*data, manifest])
    return FilePlan(header, tuple(tensors), piece_bytes, end)


def _new_table(layer: PlannedLayer, head_dim: int) -> NewTensor:
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
    checkpoint: Checkpoint, layers: Sequence[PlannedLayer], piece_bytes: int
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


def _identity(checkpoint: Checkpoint, layers: Sequence[PlannedLayer]) -> str:
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
