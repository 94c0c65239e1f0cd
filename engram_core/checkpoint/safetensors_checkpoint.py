"""A folder of config.json, tokenizer.json and safetensors shards as a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from engram_core.checkpoint.assemble import (
    Constants,
    check_layers,
    expect_shape,
    finish,
    geometry_from,
)
from engram_core.checkpoint.config import derive_hash_tables, read_config
from engram_core.checkpoint.files import RegularFile, inside, refusal, shown, tensor_refusal
from engram_core.checkpoint.layouts import (
    SAFETENSORS_TENSOR,
    SAFETENSORS_TENSORS,
    nearest,
)
from engram_core.checkpoint.safetensors import SafeTensor, read_json, read_safetensors
from engram_core.checkpoint.sources import Checkpoint, LayerSource, TensorSource
from engram_core.quant import QUANT_GROUP, ROW264, ROW288
from engram_core.tables import Part, TableSource

INDEX_NAME = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 16 << 20
_MAX_SHARDS = 4_096
_PLAIN = ("BF16", "F16", "F32")
_SCALE_BYTES = {"F8_E8M0": 1, "U8": 1, "F32": 4}

_Roles = Mapping[str, SafeTensor]


def open_safetensors(folder: Path) -> Checkpoint:
    """Open a folder of safetensors. Only the shards that hold Engram tensors need to be there.

    Raises: CheckpointError.
    """
    config = read_config(folder / "config.json")
    config.require()
    roles = _engram_tensors(_read_needed(folder))
    with RegularFile(folder / "tokenizer.json"):  # a FIFO must not be waited for
        tables = derive_hash_tables(config, folder / "tokenizer.json")
    assert config.head_dim is not None
    assert config.eps is not None
    constants = Constants(
        tables, config.head_dim, config.eps, config.dim, config.hc_mult, config.image_token_id
    )
    check_layers(folder, tables.layer_ids, roles)
    geometry = geometry_from(constants, roles[tables.layer_ids[0]]["q"])
    layers = tuple(
        LayerSource(
            layer_id=layer_id,
            table=_table(roles[layer_id], geometry.table_rows[index], geometry.head_dim),
            wkv=_wkv(roles[layer_id], geometry.out_features, geometry.in_features),
            q=_plain(roles[layer_id]["q"], geometry.hc_mult, geometry.dim),
            k=_plain(roles[layer_id]["k"], geometry.hc_mult, geometry.dim),
        )
        for index, layer_id in enumerate(tables.layer_ids)
    )
    return finish(folder, "safetensors", "official names", constants, geometry, layers)


def _read_needed(folder: Path) -> list[SafeTensor]:
    """Read the headers of the shards the index names for Engram tensors, or of every shard."""
    index = folder / INDEX_NAME
    if index.exists():
        return _read_indexed(folder, index)
    shards = sorted(folder.glob("*.safetensors"))
    if not 0 < len(shards) <= _MAX_SHARDS:
        expected = f"1 to {_MAX_SHARDS} safetensors files"
        raise refusal(folder, "folder", expected=expected, got=len(shards))
    return [tensor for shard in shards for tensor in _engram_in(read_safetensors(shard))]


def _read_indexed(folder: Path, index: Path) -> list[SafeTensor]:
    weight_map = read_json(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict):
        got = type(weight_map).__name__
        raise refusal(index, "key 'weight_map'", expected="an object", got=got)
    needed: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if "engram" in name:
            needed.setdefault(str(inside(folder, shard)), []).append(name)
    tensors = []
    for shard, names in needed.items():
        held = read_safetensors(Path(shard))
        for name in names:
            if name not in held:
                where = f"tensor {shown(name)}"
                got = "a shard without it"
                raise refusal(Path(shard), where, expected=f"it, as in {INDEX_NAME}", got=got)
        tensors += _engram_in(held)
    return tensors


def _engram_in(tensors: Mapping[str, SafeTensor]) -> list[SafeTensor]:
    return [tensor for name, tensor in tensors.items() if "engram" in name]


def _engram_tensors(tensors: Iterable[SafeTensor]) -> dict[int, dict[str, SafeTensor]]:
    """Sort the Engram tensors by layer and role; one that fits nowhere is refused."""
    roles: dict[int, dict[str, SafeTensor]] = {}
    for tensor in tensors:
        match = SAFETENSORS_TENSOR.fullmatch(tensor.name)
        if match is None or match[2] not in SAFETENSORS_TENSORS:
            advice = nearest(match[2] if match else tensor.name, SAFETENSORS_TENSORS)
            expected = "an Engram tensor with a known name"
            got = shown(tensor.name)
            raise tensor_refusal(tensor, expected=expected, got=got, advice=advice)
        layer, role = roles.setdefault(int(match[1]), {}), SAFETENSORS_TENSORS[match[2]]
        if role in layer:
            got = f"a second one beside {shown(layer[role].name)} in {layer[role].path.name}"
            raise tensor_refusal(tensor, expected=f"one {role}", got=got)
        layer[role] = tensor
    return roles


def _table(roles: _Roles, num_rows: int, head_dim: int) -> TableSource:
    table, scale = roles["table"], roles.get("table_scale")
    expect_shape(table, num_rows, head_dim)
    row_bytes = table.num_bytes // num_rows
    codes = Part(table.path, table.offset, row_bytes)
    if not _is_scaled(table, scale):
        return TableSource(table.dtype, num_rows, row_bytes, (codes,))
    assert scale is not None
    num_groups = head_dim // QUANT_GROUP
    expect_shape(scale, num_rows, num_groups)
    scale_bytes = num_groups * _SCALE_BYTES[scale.dtype]
    parts = (codes, Part(scale.path, scale.offset, scale_bytes))
    encoding = ROW288 if scale.dtype == "F32" else ROW264
    return TableSource(encoding, num_rows, row_bytes + scale_bytes, parts)


def _wkv(roles: _Roles, num_rows: int, num_columns: int) -> TensorSource:
    wkv, scale = roles["wkv"], roles.get("wkv_scale")
    expect_shape(wkv, num_rows, num_columns)
    if not _is_scaled(wkv, scale):
        return _source(wkv)
    assert scale is not None
    expect_shape(scale, -(-num_rows // QUANT_GROUP), -(-num_columns // QUANT_GROUP))
    return _source(wkv, _source(scale, kind="F32" if scale.dtype == "F32" else "F8_E8M0"))


def _plain(tensor: SafeTensor, num_rows: int, num_columns: int) -> TensorSource:
    expect_shape(tensor, num_rows, num_columns)
    if tensor.dtype not in _PLAIN:
        raise tensor_refusal(tensor, expected=" or ".join(_PLAIN), got=shown(tensor.dtype))
    return TensorSource(
        tensor.name,
        tensor.path,
        tensor.offset,
        tensor.num_bytes,
        (num_rows, num_columns),
        tensor.dtype,
    )


def _source(
    tensor: SafeTensor, scale: TensorSource | None = None, kind: str | None = None
) -> TensorSource:
    return TensorSource(
        tensor.name,
        tensor.path,
        tensor.offset,
        tensor.num_bytes,
        tensor.shape,
        kind or tensor.dtype,
        scale,
    )


def _is_scaled(tensor: SafeTensor, scale: SafeTensor | None) -> bool:
    """Tell FP8 with scales from plain values; every other combination is refused."""
    if tensor.dtype in _PLAIN and scale is None:
        return False
    if tensor.dtype in _PLAIN:
        got = f"scales {shown(scale.name if scale else '')}"
        raise tensor_refusal(tensor, expected=f"no scales beside {tensor.dtype}", got=got)
    if tensor.dtype != "F8_E4M3":
        expected = f"F8_E4M3, {', '.join(_PLAIN)}"
        raise tensor_refusal(tensor, expected=expected, got=shown(tensor.dtype))
    if scale is None:
        raise tensor_refusal(tensor, expected="scales beside F8_E4M3", got="none")
    if scale.dtype not in _SCALE_BYTES:
        expected = f"scales of type {', '.join(_SCALE_BYTES)}"
        raise tensor_refusal(scale, expected=expected, got=shown(scale.dtype))
    return True
