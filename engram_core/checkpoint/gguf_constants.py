"""The hash constants of a GGUF file, in any known spelling and any integer type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_core.checkpoint.assemble import Constants
from engram_core.checkpoint.config import Config, check_counts, read_config
from engram_core.checkpoint.files import RegularFile, naming, refusal, shown, tensor_refusal
from engram_core.checkpoint.gguf import GgufTensor, Skipped, Value
from engram_core.checkpoint.gguf_split import GgufSet
from engram_core.checkpoint.layouts import (
    EPS_KEYS,
    GGUF_CONSTANT,
    GGUF_KEYS,
    GGUF_PREFIXES,
    GGUF_UNUSED,
    ROW_ENCODINGS,
    gguf_layout,
    nearest,
)
from engram_core.geometry import EngramHashTables
from engram_core.hash_constants import derive_multipliers, smallest_primes
from engram_core.quant import row_format
from engram_core.token_map import token_map_from_tokenizer

_TEXTS = ("encoding", "identity")
_ARRAYS = ("layer_ids", "multipliers", "primes", "offsets", "token_map", "table_rows")
_INTEGER_TENSORS = {26: "<i4", 27: "<i8"}
_MAX_CONSTANT_BYTES = 64 << 20

_Values = dict[str, Any]
"""Meaning (right side of GGUF_KEYS) -> int, str, or a flat integer array."""


@dataclass(frozen=True)
class GgufConstants:
    """constants, whose spelling they are in, and the row format of I8 tables if one is named.

    table_rows, identity: what the file says of its tables, None where it is silent
    """

    constants: Constants
    layout: str
    encoding: str | None
    table_rows: tuple[int, ...] | None
    identity: str | None


def read_constants(files: GgufSet, table_width: int | None) -> GgufConstants:
    """Read, complete and check the constants.

    Values that the file lacks are taken from a config.json and a tokenizer.json beside it.
    table_width: values (or, packed, bytes) of a table row; says head_dim where no key does

    Raises: CheckpointError naming every key that is missing, or the first that is wrong.
    """
    prefix, spelled = _engram_keys(files)
    values = _by_meaning(files.path, prefix, spelled)
    _add_constant_tensors(files, values)
    encoding = _encoding(files.path, values)
    eps = _eps(files)
    config_path = files.path.with_name("config.json")
    config = read_config(config_path) if config_path.exists() else None
    if config is not None:
        _fill(files.path, values, config)
        eps = config.eps if eps is None else eps
    _read_token_map_beside(files.path, values)
    _count_from_lengths(values)
    if table_width is not None:
        values.setdefault("head_dim", _values_of(table_width, encoding))
    _require(files, values, eps)
    assert eps is not None
    tables = _hash_tables(files.path, values)
    rows = values.get("table_rows")
    return GgufConstants(
        constants=Constants(
            hash_tables=tables,
            head_dim=values["head_dim"],
            eps=eps,
            dim=config.dim if config else None,
            hc_mult=config.hc_mult if config else None,
            image_token_id=_image_token_id(values, config),
        ),
        layout=gguf_layout(spelled),
        encoding=encoding,
        table_rows=None if rows is None else tuple(int(count) for count in rows),
        identity=values.get("identity"),
    )


def _values_of(table_width: int, encoding: str | None) -> int:
    """Values of a row, from its width: packed rows are as wide as their bytes."""
    if encoding is None:
        return table_width
    form = row_format(encoding)
    return table_width * form.block_values // form.block_bytes


def _image_token_id(values: _Values, config: Config | None) -> int | None:
    said: int | None = values.get("image_token_id")
    return config.image_token_id if said is None and config is not None else said


def _engram_keys(files: GgufSet) -> tuple[str, dict[str, Value]]:
    """Find the prefix, and the keys behind it as they are spelled."""
    arch = files.metadata.get("general.architecture")
    prefixes = dict.fromkeys(prefix.format(arch=arch) for prefix in GGUF_PREFIXES)
    of_the_gate = [form.format(arch=arch) for form in EPS_KEYS]
    keys = [key for key in files.metadata if "engram" in key and key not in of_the_gate]
    used = [prefix for prefix in prefixes if any(key.startswith(prefix) for key in keys)]
    if len(used) != 1:
        expected = " or ".join(f"{prefix}*" for prefix in prefixes)
        got = f"keys under {' and '.join(used)}" if used else "no Engram key"
        if keys and not used:
            got = f"{shown(keys[0])}, spelled in no known way"
        raise refusal(files.path, "keys", expected=expected, got=got)
    spelled = {}
    for key in keys:
        name = key.removeprefix(used[0])
        if name in GGUF_UNUSED:
            continue
        if not key.startswith(used[0]) or name not in GGUF_KEYS:
            where, advice = f"key {shown(key)}", nearest(name, GGUF_KEYS)
            raise refusal(files.path, where, expected="a known key", got=name, advice=advice)
        spelled[name] = files.metadata[key]
    return used[0], spelled


def _by_meaning(path: Path, prefix: str, spelled: Mapping[str, Value]) -> _Values:
    values: _Values = {}
    for name, value in spelled.items():
        meaning, where = GGUF_KEYS[name], f"key {prefix + name!r}"
        if meaning in values:
            raise refusal(path, where, expected="one spelling", got=f"a second {meaning}")
        values[meaning] = _checked(path, where, meaning, value)
    return values


def _checked(path: Path, where: str, meaning: str, value: Value) -> object:
    if meaning in _TEXTS:
        if not isinstance(value, str):
            raise refusal(path, where, expected="a string", got=_described(value))
        return value
    if meaning in _ARRAYS:
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or not value.size:
            raise refusal(path, where, expected="an array of integers", got=_described(value))
    elif type(value) is not int or value < 0:
        raise refusal(path, where, expected="an integer >= 0", got=_described(value))
    return value


def _described(value: Value) -> str:
    if isinstance(value, Skipped):
        return value.text
    if isinstance(value, np.ndarray):
        return f"an array of {value.size} {value.dtype.name}"
    return shown(value)


def _add_constant_tensors(files: GgufSet, values: _Values) -> None:
    """Read constants that are kept as tensors (G)."""
    for name, tensor in files.tensors.items():
        match = GGUF_CONSTANT.fullmatch(name)
        meaning = GGUF_KEYS.get(match[1]) if match else None
        if meaning not in _ARRAYS:
            continue  # what is no constant is refused with the other tensors
        if meaning in values:
            raise tensor_refusal(tensor, expected="one spelling", got=f"a second {meaning}")
        values[meaning] = _read_integers(tensor)


def _read_integers(tensor: GgufTensor) -> NDArray[Any]:
    where = f"tensor {shown(tensor.name)}"
    dtype = _INTEGER_TENSORS.get(tensor.type_id)
    if dtype is None:
        raise tensor_refusal(tensor, expected="type I32 or I64", got=tensor.type_name)
    num_bytes = tensor.num_bytes or 0
    if num_bytes > _MAX_CONSTANT_BYTES:
        expected = f"at most {_MAX_CONSTANT_BYTES} bytes"
        raise tensor_refusal(tensor, expected=expected, got=num_bytes)
    with RegularFile(tensor.path) as file:
        return np.frombuffer(file.read(tensor.offset, num_bytes, where), dtype)


def _encoding(path: Path, values: _Values) -> str | None:
    name = values.get("encoding")
    if name is None:
        return None
    if name not in ROW_ENCODINGS:
        expected = " or ".join(ROW_ENCODINGS)
        raise refusal(path, "key 'encoding'", expected=expected, got=_described(name))
    return ROW_ENCODINGS[name]


def _eps(files: GgufSet) -> float | None:
    """Read eps: float32 in the file; its shortest decimal here, so that 1e-20 is 1e-20."""
    arch = files.metadata.get("general.architecture")
    for key in (form.format(arch=arch) for form in EPS_KEYS):
        value = files.metadata.get(key)
        if value is None:
            continue
        if type(value) is not float or not 0.0 <= value < 1.0:
            where, got = f"key {key!r}", _described(value)
            raise refusal(files.path, where, expected="a float in [0, 1)", got=got)
        return float(str(np.float32(value)))
    return None


def _fill(path: Path, values: _Values, config: Config) -> None:
    """Take from config.json what the file does not say; what both say must agree."""
    names = ["layer_ids", "table_rows", "max_ngram_size", "num_heads", "head_dim", "base_size"]
    names += ["compressed_vocab_size"] + ["pad_token_id"] * ("pad_id" not in values)
    for name in names:
        said = getattr(config, name)
        if said is None:
            continue
        value = np.asarray(said) if isinstance(said, tuple) else said
        held = values.setdefault(name, value)
        if np.asarray(held).tolist() != np.asarray(value).tolist():
            got = f"{np.asarray(held).tolist()} in {path.name}"
            raise refusal(config.path, f"constant {name}", expected=said, got=got)


def _read_token_map_beside(path: Path, values: _Values) -> None:
    tokenizer = path.with_name("tokenizer.json")
    if "token_map" not in values and tokenizer.exists():
        with RegularFile(tokenizer):  # a FIFO must not be waited for
            values["token_map"] = token_map_from_tokenizer(tokenizer)


def _count_from_lengths(values: _Values) -> None:
    """Layouts that do not say the n-gram size or the heads: the lengths of their arrays do (B)."""
    if "layer_ids" not in values:
        return
    num_layers = len(values["layer_ids"])
    if "multipliers" in values:
        values.setdefault("max_ngram_size", len(values["multipliers"]) // num_layers)
    if "primes" in values and values.get("max_ngram_size", 0) > 1:
        columns = len(values["primes"]) // num_layers
        values.setdefault("num_heads", columns // (values["max_ngram_size"] - 1))


def _require(files: GgufSet, values: _Values, eps: float | None) -> None:
    """Refuse a file that lacks constants, naming all of them at once."""
    needed = ["layer_ids", "max_ngram_size", "num_heads", "head_dim", "token_map"]
    derivable = {"base_size", "compressed_vocab_size"} <= set(values)
    missing = [name for name in needed if name not in values]
    missing += [n for n in ("multipliers", "primes") if n not in values and not derivable]
    if not {"pad_id", "pad_token_id"} & set(values):
        missing.append("pad_id")
    if eps is None:
        arch = files.metadata.get("general.architecture")
        missing.append(EPS_KEYS[0].format(arch=arch))
    if missing:
        advice = "or put the model's config.json and tokenizer.json beside the file"
        expected = ", ".join(missing)
        raise refusal(files.path, "keys", expected=expected, got="none of these", advice=advice)
    check_counts(
        files.path, len(values["layer_ids"]), values["max_ngram_size"], values["num_heads"]
    )
    orders = values["max_ngram_size"] - 1
    if values.get("num_orders", orders) != orders:
        got = values["num_orders"]
        raise refusal(files.path, "key 'ngram_count'", expected=orders, got=got)


def _hash_tables(path: Path, values: _Values) -> EngramHashTables:
    """Check the constants; derive what is missing from the sizes of vocabulary and buckets."""
    layer_ids = [int(layer_id) for layer_id in values["layer_ids"]]
    max_ngram_size, num_heads = values["max_ngram_size"], values["num_heads"]
    with naming(path):
        if "multipliers" not in values:
            vocab = values["compressed_vocab_size"]
            drawn = [derive_multipliers(i, max_ngram_size, vocab) for i in layer_ids]
            values["multipliers"] = np.concatenate(drawn)
        if "primes" not in values:
            count = len(layer_ids) * (max_ngram_size - 1) * num_heads
            values["primes"] = np.array(smallest_primes(values["base_size"], count))
        tables = EngramHashTables.from_flat(
            layer_ids,
            max_ngram_size,
            num_heads,
            token_map=values["token_map"],
            multipliers=values["multipliers"],
            primes=values["primes"],
            offsets=values.get("offsets"),
            pad_id=values.get("pad_id"),
            pad_token_id=None if "pad_id" in values else values["pad_token_id"],
        )
        tables.require(compressed_vocab_size=values.get("compressed_vocab_size"))
    _check_both_pads(path, tables, values)
    return tables


def _check_both_pads(path: Path, tables: EngramHashTables, values: _Values) -> None:
    """A file that says the pad in both spaces must mean one (G)."""
    pad_token_id = values.get("pad_token_id")
    if pad_token_id is None or "pad_id" not in values:
        return
    mapped = tables.token_map[pad_token_id : pad_token_id + 1].tolist()
    if mapped != [tables.pad_id]:
        expected = f"a token of compressed id {tables.pad_id}"
        got = f"{pad_token_id}, of compressed id {mapped or 'none'}"
        raise refusal(path, "key 'pad_token_id'", expected=expected, got=got)
