"""Sizes of the Engram layers, and the constants of their hash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engram_core.errors import CheckpointError, UnknownLayer

INT64_MAX = 2**63 - 1
MAX_HC_MULT = 4
MAX_BASE_SIZE = 2**31
"""Largest bucket size primes are searched from: bounds the sieve a hostile config can ask for."""


@dataclass(frozen=True)
class Geometry:
    """The sizes every module agrees on.

    layer_ids: the model's ids of the layers with an Engram, in hash order
    num_heads: hash heads of one n-gram order (orders are 2..max_ngram_size)
    head_dim: values of a table row; dim: values of one stream; hc_mult: streams, 1..4
    eps: of the gate's means (1e-20 in V4.1); table_rows: rows of each layer's table

    Raises: CheckpointError for sizes no checkpoint can have.
    """

    layer_ids: tuple[int, ...]
    max_ngram_size: int
    num_heads: int
    head_dim: int
    dim: int
    hc_mult: int
    eps: float
    table_rows: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_orders(self.layer_ids, self.max_ngram_size, self.num_heads)
        for name in ("head_dim", "dim"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        _require(1 <= self.hc_mult <= MAX_HC_MULT, "hc_mult", f"1..{MAX_HC_MULT}", self.hc_mult)
        _require(0.0 <= self.eps < 1.0, "eps", "a number in [0, 1)", self.eps)
        num_tables = len(self.table_rows)
        _require(
            num_tables == self.num_layers, "table_rows", f"{self.num_layers} sizes", num_tables
        )
        _require(min(self.table_rows) >= 1, "table_rows", "at least 1 each", self.table_rows)

    @property
    def num_layers(self) -> int:
        return len(self.layer_ids)

    @property
    def n_hash_cols(self) -> int:
        """Rows gathered for one token of one layer."""
        return (self.max_ngram_size - 1) * self.num_heads

    @property
    def in_features(self) -> int:
        return self.n_hash_cols * self.head_dim

    @property
    def out_features(self) -> int:
        """hc_mult keys, then the value."""
        return (self.hc_mult + 1) * self.dim

    @property
    def kv_bytes(self) -> int:
        """Bytes of one kv slot (bfloat16)."""
        return self.out_features * 2

    def layer_index(self, layer_id: int) -> int:
        """Position of a layer in hash order. Raises: UnknownLayer."""
        if layer_id not in self.layer_ids:
            known = ", ".join(map(str, self.layer_ids))
            raise UnknownLayer(
                f"layer {layer_id} has no Engram; layers with one: {known}",
                expected=list(self.layer_ids),
                got=layer_id,
            )
        return self.layer_ids.index(layer_id)


@dataclass(frozen=True, eq=False)
class EngramHashTables:
    """The constants of the hash; arrays are read-only.

    layer_ids: the model's ids, in hash order
    token_map: int32 [vocab]  token id -> compressed id
    multipliers: int64 [num_layers, max_ngram_size]  index 0 multiplies the newest token
    primes: int64 [num_layers, max_ngram_size-1, num_heads]  bucket sizes; order n at index n-2
    offsets: int64 [num_layers, n_hash_cols]  first row of each bucket
    pad_id: COMPRESSED id that fills blocked look-back

    Source: `inference/engram.py` of DeepSeek-V4.1-Flash; engram-format 2. The constructor checks
    shapes only; `derive` and `from_flat` refuse values no checkpoint can have.
    """

    layer_ids: tuple[int, ...]
    max_ngram_size: int
    num_heads: int
    token_map: NDArray[np.int32]
    multipliers: NDArray[np.int64]
    primes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    pad_id: int

    def __post_init__(self) -> None:
        num_layers, orders = len(self.layer_ids), self.max_ngram_size - 1
        shapes: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
            "token_map": (np.int32, (self.token_map.size,)),
            "multipliers": (np.int64, (num_layers, self.max_ngram_size)),
            "primes": (np.int64, (num_layers, orders, self.num_heads)),
            "offsets": (np.int64, (num_layers, orders * self.num_heads)),
        }
        for name, (dtype, shape) in shapes.items():
            array = np.array(getattr(self, name), dtype=dtype)
            _require(array.shape == shape, name, f"shape {list(shape)}", list(array.shape))
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @classmethod
    def derive(
        cls,
        layer_ids: Sequence[int],
        max_ngram_size: int,
        num_heads: int,
        base_size: int,
        token_map: ArrayLike,
        pad_token_id: int,
    ) -> EngramHashTables:
        """Derive every constant from the config and the token map, as the model does.

        base_size: `engram_vocab_size`, where the search for primes starts
        pad_token_id: in TOKEN space; mapped through token_map

        Raises: CheckpointError.
        """
        _check_orders(layer_ids, max_ngram_size, num_heads)
        compressed_vocab_size = int(_check_token_map(token_map).max()) + 1
        count = len(layer_ids) * (max_ngram_size - 1) * num_heads
        return cls.from_flat(
            layer_ids,
            max_ngram_size,
            num_heads,
            token_map=token_map,
            multipliers=np.concatenate(
                [derive_multipliers(i, max_ngram_size, compressed_vocab_size) for i in layer_ids]
            ),
            primes=smallest_primes(base_size, count),
            pad_token_id=pad_token_id,
        )

    @classmethod
    def from_flat(
        cls,
        layer_ids: Sequence[int],
        max_ngram_size: int,
        num_heads: int,
        *,
        token_map: ArrayLike,
        multipliers: ArrayLike,
        primes: ArrayLike,
        offsets: ArrayLike | None = None,
        pad_id: int | None = None,
        pad_token_id: int | None = None,
    ) -> EngramHashTables:
        """Check the flat arrays of a checkpoint. Any integer type is read by value.

        token_map: [vocab]; multipliers: [num_layers * max_ngram_size]
        primes: [num_layers * (max_ngram_size-1) * num_heads]; offsets: as primes, None = derived
        pad_id: already COMPRESSED; pad_token_id: in TOKEN space. Exactly one: for V4.1 both are 2
            and mapping twice goes unseen, on other maps it does not.

        Raises: CheckpointError naming the value, expected and got.
        """
        _check_orders(layer_ids, max_ngram_size, num_heads)
        ids = _check_token_map(token_map)
        compressed_vocab_size = int(ids.max()) + 1
        num_layers, cols = len(layer_ids), (max_ngram_size - 1) * num_heads
        mult = _integers("multipliers", multipliers, num_layers * max_ngram_size)
        # 2 * bound - 1 of `derive_multipliers` never exceeds this, so no product overflows int64.
        highest = INT64_MAX // compressed_vocab_size
        for value in mult.tolist():
            legal = value % 2 == 1 and 0 < value <= highest
            _require(legal, "multipliers", f"odd numbers in 1..{highest}", value)
        buckets = _integers("primes", primes, num_layers * cols).reshape(num_layers, cols)
        _require(int(buckets.min()) >= 1, "primes", "at least 1 each", int(buckets.min()))
        rows = max(sum(layer) for layer in buckets.tolist())
        _require(rows <= INT64_MAX, "primes", "a sum inside int64", rows)
        starts = np.cumsum(buckets, axis=1) - buckets
        if offsets is not None:
            given = _integers("offsets", offsets, starts.size).reshape(starts.shape)
            for column in np.argwhere(given != starts)[:1].tolist():
                where = f"offsets{column}"
                expected = f"{starts[tuple(column)]} (sum of the primes before it)"
                _require(False, where, expected, int(given[tuple(column)]))
        return cls(
            layer_ids=tuple(layer_ids),
            max_ngram_size=max_ngram_size,
            num_heads=num_heads,
            token_map=ids,
            multipliers=mult.reshape(num_layers, max_ngram_size),
            primes=buckets.reshape(num_layers, max_ngram_size - 1, num_heads),
            offsets=starts,
            pad_id=_compressed_pad(ids, pad_id, pad_token_id),
        )

    @property
    def num_layers(self) -> int:
        return len(self.layer_ids)

    @property
    def n_hash_cols(self) -> int:
        return (self.max_ngram_size - 1) * self.num_heads

    @property
    def vocab_size(self) -> int:
        """How many token ids there are."""
        return self.token_map.size

    @property
    def compressed_vocab_size(self) -> int:
        """One more than the largest compressed id; every multiplier derives from it."""
        return int(self.token_map.max()) + 1

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows the buckets of each layer span."""
        return tuple(int(rows) for rows in self.primes.sum(axis=(1, 2)))

    def require(
        self,
        *,
        table_rows: Sequence[int] | None = None,
        compressed_vocab_size: int | None = None,
    ) -> None:
        """Refuse tables that are not those of the checkpoint.

        A map with one entry more, or primes restarted for each layer, runs and reads wrong rows.

        Raises: CheckpointError.
        """
        if compressed_vocab_size is not None:
            got = self.compressed_vocab_size
            ok = got == compressed_vocab_size
            _require(ok, "compressed_vocab_size", compressed_vocab_size, got)
        if table_rows is not None:
            _require(self.table_rows == tuple(table_rows), "rows", self.table_rows, table_rows)


def derive_multipliers(
    layer_id: int, max_ngram_size: int, compressed_vocab_size: int
) -> NDArray[np.int64]:
    """Draw a layer's odd multipliers: int64 [max_ngram_size], index 0 for the newest token.

    Source: engram-format 2.3. The bound keeps id * multiplier inside int64.
    """
    bound = max(1, INT64_MAX // compressed_vocab_size // 2)
    rng = np.random.default_rng(10007 * layer_id)
    return rng.integers(0, bound, size=max_ngram_size, dtype=np.int64) * 2 + 1


def smallest_primes(base_size: int, count: int) -> list[int]:
    """List the `count` smallest primes >= base_size, ascending.

    The model restarts its search at base_size for every (layer, order) but never takes a prime
    twice, over all layers: in (layer, order, head) order that is this list.

    Raises: CheckpointError for a base_size outside 1..2**31.
    """
    _require(1 <= base_size <= MAX_BASE_SIZE, "base_size", f"1..{MAX_BASE_SIZE}", base_size)
    found: list[int] = []
    start, width = base_size, 4096
    while len(found) < count:
        found += _primes_between(start, start + width)
        start += width
    return found[:count]


def _primes_between(start: int, stop: int) -> list[int]:
    """Sieve start..stop-1."""
    divisors = np.ones(isqrt(stop) + 1, dtype=np.bool_)
    divisors[:2] = False
    for i in range(2, isqrt(divisors.size) + 1):
        if divisors[i]:
            divisors[i * i :: i] = False
    is_prime = np.ones(stop - start, dtype=np.bool_)
    is_prime[: max(0, 2 - start)] = False
    for divisor in np.flatnonzero(divisors).tolist():
        first = max(divisor * divisor, -(-start // divisor) * divisor)
        is_prime[first - start :: divisor] = False
    return [start + int(i) for i in np.flatnonzero(is_prime)]


def _require(ok: bool, name: str, expected: object, got: object) -> None:
    if not ok:
        raise CheckpointError(f"{name}: expected {expected}, got {got}", expected=expected, got=got)


def _check_orders(layer_ids: Sequence[int], max_ngram_size: int, num_heads: int) -> None:
    legal = len(layer_ids) > 0 and min(layer_ids) >= 0 and len(set(layer_ids)) == len(layer_ids)
    _require(legal, "layer_ids", "one or more distinct ids >= 0", list(layer_ids))
    _require(2 <= max_ngram_size <= 64, "max_ngram_size", "2..64", max_ngram_size)
    _require(1 <= num_heads <= 1024, "num_heads", "1..1024", num_heads)


def _integers(name: str, values: ArrayLike, count: int | None = None) -> NDArray[np.int64]:
    """Read integers of any type by value into a flat int64 array."""
    array: NDArray[Any] = np.asarray(values)
    _require(array.dtype.kind in "iu", name, "integers", array.dtype.name)
    if count is not None:
        _require(array.size == count, name, f"{count} values", array.size)
    _require(array.size > 0, name, "at least one value", 0)
    _require(int(array.max()) <= INT64_MAX, name, f"at most {INT64_MAX}", int(array.max()))
    return array.reshape(-1).astype(np.int64)


def _check_token_map(values: ArrayLike) -> NDArray[np.int32]:
    array = _integers("token_map", values)
    # The seed project reads -1 as "unmapped"; the real map holds none, so one is a broken file.
    for index in np.flatnonzero((array < 0) | (array > 2**31 - 2))[:1].tolist():
        _require(False, f"token_map[{index}]", "0..2147483646", int(array[index]))
    return array.astype(np.int32)


def _compressed_pad(
    token_map: NDArray[np.int32], pad_id: int | None, pad_token_id: int | None
) -> int:
    if (pad_id is None) == (pad_token_id is None):
        raise CheckpointError("give exactly one of pad_id (compressed) and pad_token_id (token)")
    if pad_token_id is not None:
        size = token_map.size
        _require(0 <= pad_token_id < size, "pad_token_id", f"0..{size - 1}", pad_token_id)
        return int(token_map[pad_token_id])
    assert pad_id is not None
    highest = int(token_map.max())
    _require(0 <= pad_id <= highest, "pad_id", f"0..{highest}", pad_id)
    return pad_id
