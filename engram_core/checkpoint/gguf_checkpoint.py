"""A GGUF file, or the shards of one, as a checkpoint. What is spelled how is in `layouts.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engram_core.checkpoint.assemble import (
    check_layers,
    expect_shape,
    finish,
    geometry_from,
)
from engram_core.checkpoint.files import naming, refusal, shown, tensor_refusal
from engram_core.checkpoint.gguf import GgufTensor
from engram_core.checkpoint.gguf_constants import GgufConstants, read_constants
from engram_core.checkpoint.gguf_split import GgufSet, read_gguf_set
from engram_core.checkpoint.layouts import (
    GGUF_CONSTANT,
    GGUF_KEYS,
    GGUF_MANIFEST,
    GGUF_TENSOR,
    GGUF_TENSORS,
    SAFETENSORS_TENSOR,
    SAFETENSORS_TENSORS,
    nearest,
)
from engram_core.checkpoint.sources import Checkpoint, LayerSource, TensorSource
from engram_core.errors import CheckpointError
from engram_core.geometry import Geometry
from engram_core.quant import QUANT_GROUP, ROW264, RowFormat, row_format, row_format_of_type
from engram_core.tables import Part, TableSource

_I8, _F32 = 24, 0

_Roles = Mapping[str, GgufTensor]


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF checkpoint.

    path: the file, any shard of a split one, or the folder that holds one

    Raises: CheckpointError.
    """
    files = read_gguf_set(path)
    roles = _engram_tensors(files)
    tables = [layer["table"] for layer in roles.values() if "table" in layer]
    read = read_constants(files, tables[0].shape[-1] if tables else None)
    layer_ids = read.constants.hash_tables.layer_ids
    check_layers(files.path, layer_ids, roles)
    geometry = geometry_from(read.constants, roles[layer_ids[0]]["q"])
    _check_said_rows(files.path, read, geometry)
    layers = tuple(
        LayerSource(
            layer_id=layer_id,
            table=_table(roles[layer_id], geometry.table_rows[index], read, geometry.head_dim),
            wkv=_wkv(roles[layer_id], geometry.out_features, geometry.in_features),
            q=_dense(roles[layer_id]["q"], geometry.hc_mult, geometry.dim),
            k=_dense(roles[layer_id]["k"], geometry.hc_mult, geometry.dim),
        )
        for index, layer_id in enumerate(layer_ids)
    )
    checkpoint = finish(path, "gguf", read.layout, read.constants, geometry, layers)
    if read.identity not in (None, checkpoint.identity):
        expected, got = checkpoint.identity, shown(read.identity)
        advice = "the file was changed after it was written: extract it again"
        raise refusal(files.path, "key 'identity'", expected=expected, got=got, advice=advice)
    return checkpoint


def _engram_tensors(files: GgufSet) -> dict[int, dict[str, GgufTensor]]:
    """Sort the Engram tensors by layer and role; one that fits nowhere is refused."""
    roles: dict[int, dict[str, GgufTensor]] = {}
    for name, tensor in files.tensors.items():
        constant = GGUF_CONSTANT.fullmatch(name)
        is_constant = constant is not None and constant[1] in GGUF_KEYS
        if "engram" not in name or is_constant or name == GGUF_MANIFEST:
            continue
        layer_id, role = _role(tensor)
        layer = roles.setdefault(layer_id, {})
        if role in layer:
            got = f"a second one beside {shown(layer[role].name)}"
            raise tensor_refusal(tensor, expected=f"one {role}", got=got)
        layer[role] = tensor
    return roles


def _role(tensor: GgufTensor) -> tuple[int, str]:
    """Look up layer and role by name: GGUF's, or the official ones (G)."""
    stems: Mapping[str, str] = GGUF_TENSORS
    match = GGUF_TENSOR.fullmatch(tensor.name)
    if match is None:
        match, stems = SAFETENSORS_TENSOR.fullmatch(tensor.name), SAFETENSORS_TENSORS
    if match is None or match[2] not in stems:
        name = tensor.name
        advice = nearest(match[2] if match else name, stems if match else GGUF_TENSORS)
        expected = "an Engram tensor with a known name"
        raise tensor_refusal(tensor, expected=expected, got=shown(name), advice=advice)
    return int(match[1]), stems[match[2]]


def _check_said_rows(path: Path, read: GgufConstants, geometry: Geometry) -> None:
    if read.table_rows not in (None, geometry.table_rows):
        expected = f"{list(geometry.table_rows)} (sums of the primes)"
        raise refusal(path, "row counts", expected=expected, got=list(read.table_rows or ()))


def _table(roles: _Roles, num_rows: int, read: GgufConstants, head_dim: int) -> TableSource:
    """Find out how the rows are stored: by type, packed FP8 rows (B), or codes and scales (C)."""
    table, scale = roles["table"], roles.get("table_scale")
    packed = table.type_id == _I8 and read.encoding is not None and scale is None
    split = table.type_id == _I8 and read.encoding is None and scale is not None
    encoding = ROW264
    if packed:
        assert read.encoding is not None
        encoding = read.encoding
        with naming(table.path):
            width = row_format(encoding).row_bytes(head_dim)
        expect_shape(table, num_rows, width)
        parts: tuple[Part, ...] = (Part(table.path, table.offset, width),)
    elif split:
        assert scale is not None
        expect_shape(table, num_rows, head_dim)
        expect_shape(scale, num_rows, head_dim // QUANT_GROUP)
        _expect_bytes(scale)
        codes = Part(table.path, table.offset, head_dim)
        parts = (codes, Part(scale.path, scale.offset, head_dim // QUANT_GROUP))
    else:
        return _plain_table(table, scale, num_rows, head_dim)
    return TableSource(encoding, num_rows, sum(part.row_bytes for part in parts), parts)


def _plain_table(
    table: GgufTensor, scale: GgufTensor | None, num_rows: int, head_dim: int
) -> TableSource:
    form = _row_format(table)
    if scale is not None:
        raise tensor_refusal(scale, expected="no scales", got=f"one beside a {form.name} table")
    expect_shape(table, num_rows, head_dim)
    row_bytes = form.row_bytes(head_dim)
    part = Part(table.path, table.offset, row_bytes)
    return TableSource(form.name, num_rows, row_bytes, (part,))


def _expect_bytes(tensor: GgufTensor) -> None:
    if tensor.type_id != _I8:
        raise tensor_refusal(tensor, expected="type I8", got=tensor.type_name)


def _wkv(roles: _Roles, num_rows: int, num_columns: int) -> TensorSource:
    """Read wkv as one tensor, or as FP8 codes and a scale for each 32 x 32 block (`extract`)."""
    wkv, scale = roles["wkv"], roles.get("wkv_scale")
    if scale is None:
        return _dense(wkv, num_rows, num_columns)
    _expect_bytes(wkv)
    expect_shape(wkv, num_rows, num_columns)
    shape = (-(-num_rows // QUANT_GROUP), -(-num_columns // QUANT_GROUP))
    expect_shape(scale, *shape)
    if scale.type_id not in (_I8, _F32):
        raise tensor_refusal(scale, expected="type I8 or F32", got=scale.type_name)
    kind, width = ("F32", 4) if scale.type_id == _F32 else ("F8_E8M0", 1)
    num_bytes = shape[0] * shape[1] * width
    scales = TensorSource(scale.name, scale.path, scale.offset, num_bytes, shape, kind)
    size = num_rows * num_columns
    shape = (num_rows, num_columns)
    return TensorSource(wkv.name, wkv.path, wkv.offset, size, shape, "F8_E4M3", scales)


def _dense(tensor: GgufTensor, num_rows: int, num_columns: int) -> TensorSource:
    form = _row_format(tensor)
    expect_shape(tensor, num_rows, num_columns)
    num_bytes = num_rows * form.row_bytes(num_columns)
    shape = (num_rows, num_columns)
    return TensorSource(tensor.name, tensor.path, tensor.offset, num_bytes, shape, form.name)


def _row_format(tensor: GgufTensor) -> RowFormat:
    """Look the type up; one that cannot be read is refused by name and number, never zeros."""
    try:
        return row_format_of_type(tensor.type_id)
    except CheckpointError as error:
        got = f"{tensor.type_name} ({tensor.type_id})"
        raise tensor_refusal(tensor, expected=error.expected, got=got) from None
