"""The constants of config.json, and the hash tables that follow from it and a tokenizer.json."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engram_core.checkpoint.files import naming, refusal, shown
from engram_core.checkpoint.layouts import CONFIG_KEYS
from engram_core.checkpoint.safetensors import read_json
from engram_core.geometry import EngramHashTables
from engram_core.token_map import token_map_from_tokenizer

_MAX_CONFIG_BYTES = 4 << 20
_MAX_LAYERS = 256
_MAX_COLUMNS = 4_096
_LISTS = ("layer_ids", "table_rows")


@dataclass(frozen=True)
class Config:
    """What config.json says; None where it says nothing. pad_token_id is a TOKEN id."""

    path: Path
    layer_ids: tuple[int, ...] | None
    table_rows: tuple[int, ...] | None
    max_ngram_size: int | None
    base_size: int | None
    num_heads: int | None
    head_dim: int | None
    pad_token_id: int | None
    compressed_vocab_size: int | None
    dim: int | None
    hc_mult: int | None
    eps: float | None
    image_token_id: int | None

    def require(self) -> None:
        """Refuse a file that lacks a constant, naming all that are missing."""
        missing = [
            " or ".join(CONFIG_KEYS[field.name])
            for field in fields(self)
            if getattr(self, field.name) is None and field.name != "image_token_id"
        ]
        if missing:
            raise refusal(self.path, "keys", expected=", ".join(missing), got="none of these")


def read_config(path: Path) -> Config:
    """Read config.json: every spelling, at the top or under `text_config`.

    Raises: CheckpointError for a value of the wrong type, or said twice and differently.
    """
    top = read_json(path, _MAX_CONFIG_BYTES)
    text = top.get("text_config", {})
    if not isinstance(text, dict):
        raise refusal(path, "key 'text_config'", expected="an object", got=type(text).__name__)
    values = {name: _find(path, name, (text, top)) for name in CONFIG_KEYS}
    return Config(path, **values)


def check_counts(path: Path, num_layers: int, max_ngram_size: int, num_heads: int) -> None:
    """Refuse more hash columns, over all layers, than any model has (V4.1: 48).

    A prime is searched for each of them. Raises: CheckpointError.
    """
    count = num_layers * max(max_ngram_size, 1) * max(num_heads, 1)
    if num_layers > _MAX_LAYERS or count > _MAX_COLUMNS:
        where = "layers, n-gram size and heads"
        expected = f"at most {_MAX_LAYERS} layers and {_MAX_COLUMNS} hash columns"
        got = [num_layers, max_ngram_size, num_heads]
        raise refusal(path, where, expected=expected, got=got)


def derive_hash_tables(config: Config, tokenizer: Path) -> EngramHashTables:
    """Derive the constants of the hash and hold them against what config.json says.

    Raises: CheckpointError when the compressed vocabulary or the row counts differ.
    """
    config.require()
    num_layers = len(config.layer_ids or ())
    check_counts(config.path, num_layers, config.max_ngram_size or 0, config.num_heads or 0)
    token_map = token_map_from_tokenizer(tokenizer)
    with naming(config.path):
        tables = EngramHashTables.derive(
            config.layer_ids or (),
            config.max_ngram_size or 0,
            config.num_heads or 0,
            config.base_size or 0,
            token_map,
            config.pad_token_id if config.pad_token_id is not None else -1,
        )
    got = tables.compressed_vocab_size
    if got != config.compressed_vocab_size:
        where = f"compressed vocabulary ({config.path.name} against {tokenizer.name})"
        advice = "this tokenizer.json is not the model's"
        said = config.compressed_vocab_size
        raise refusal(tokenizer, where, expected=said, got=got, advice=advice)
    if tables.table_rows != config.table_rows:
        where = f"key {CONFIG_KEYS['table_rows'][0]!r}"
        expected = f"{list(tables.table_rows)} (sums of the derived primes)"
        raise refusal(config.path, where, expected=expected, got=list(config.table_rows or ()))
    return tables


def _find(path: Path, name: str, objects: tuple[dict[str, Any], ...]) -> Any:
    """Look one constant up; the same value may be said more than once."""
    found = None
    for key in CONFIG_KEYS[name]:
        for holder in objects:
            if holder.get(key) is None:
                continue
            value = _checked(path, name, key, holder[key])
            if found is not None and value != found:
                where = f"key {key!r}"
                raise refusal(path, where, expected=f"{found}, as said elsewhere", got=value)
            found = value
    return found


def _checked(path: Path, name: str, key: str, value: object) -> object:
    where = f"key {key!r}"
    if name == "eps":
        if type(value) not in (int, float) or not 0 <= value < 1:  # type: ignore[operator]
            raise refusal(path, where, expected="a number in [0, 1)", got=shown(value))
        return float(value)  # type: ignore[arg-type]
    if name in _LISTS:
        if not isinstance(value, list) or not 0 < len(value) <= _MAX_LAYERS:
            raise refusal(path, where, expected=f"1 to {_MAX_LAYERS} integers", got=shown(value))
        return tuple(_integer(path, where, item) for item in value)
    return _integer(path, where, value)


def _integer(path: Path, where: str, value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise refusal(path, where, expected="an integer in [0, 2^63)", got=shown(value))
    return value
