"""Sizes of the Engram layers, and the constants of their hash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engram_core.errors import UnknownLayer
from engram_core.hash_constants import (
    INT64_MAX,
    check_orders,
    check_token_map,
    compressed_pad,
    derive_multipliers,
    integers,
    require,
    smallest_primes,
)

MAX_HC_MULT = 4


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
        check_orders(self.layer_ids, self.max_ngram_size, self.num_heads)
        for name in ("head_dim", "dim"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        require(1 <= self.hc_mult <= MAX_HC_MULT, "hc_mult", f"1..{MAX_HC_MULT}", self.hc_mult)
        require(0.0 <= self.eps < 1.0, "eps", "a number in [0, 1)", self.eps)
        num_tables = len(self.table_rows)
        require(num_tables == self.num_layers, "table_rows", f"{self.num_layers} sizes", num_tables)
        require(min(self.table_rows) >= 1, "table_rows", "at least 1 each", self.table_rows)

    @property
    def num_layers(self) -> int:
        """How many layers have an Engram."""
        return len(self.layer_ids)

    @property
    def n_hash_cols(self) -> int:
        """Rows gathered for one token of one layer."""
        return (self.max_ngram_size - 1) * self.num_heads

    @property
    def in_features(self) -> int:
        """Values that wkv takes: the rows of one token, end to end."""
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
            require(array.shape == shape, name, f"shape {list(shape)}", list(array.shape))
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
        check_orders(layer_ids, max_ngram_size, num_heads)
        compressed_vocab_size = int(check_token_map(token_map).max()) + 1
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
        check_orders(layer_ids, max_ngram_size, num_heads)
        ids = check_token_map(token_map)
        compressed_vocab_size = int(ids.max()) + 1
        num_layers, cols = len(layer_ids), (max_ngram_size - 1) * num_heads
        mult = integers("multipliers", multipliers, num_layers * max_ngram_size)
        # 2 * bound - 1 of `derive_multipliers` never exceeds this, so no product overflows int64.
        highest = INT64_MAX // compressed_vocab_size
        for value in mult.tolist():
            legal = value % 2 == 1 and 0 < value <= highest
            require(legal, "multipliers", f"odd numbers in 1..{highest}", value)
        buckets = integers("primes", primes, num_layers * cols).reshape(num_layers, cols)
        require(int(buckets.min()) >= 1, "primes", "at least 1 each", int(buckets.min()))
        rows = max(sum(layer) for layer in buckets.tolist())
        require(rows <= INT64_MAX, "primes", "a sum inside int64", rows)
        starts = np.cumsum(buckets, axis=1) - buckets
        if offsets is not None:
            given = integers("offsets", offsets, starts.size).reshape(starts.shape)
            for column in np.argwhere(given != starts)[:1].tolist():
                where = f"offsets{column}"
                expected = f"{starts[tuple(column)]} (sum of the primes before it)"
                require(False, where, expected, int(given[tuple(column)]))
        return cls(
            layer_ids=tuple(layer_ids),
            max_ngram_size=max_ngram_size,
            num_heads=num_heads,
            token_map=ids,
            multipliers=mult.reshape(num_layers, max_ngram_size),
            primes=buckets.reshape(num_layers, max_ngram_size - 1, num_heads),
            offsets=starts,
            pad_id=compressed_pad(ids, pad_id, pad_token_id),
        )

    @property
    def num_layers(self) -> int:
        """How many layers have an Engram."""
        return len(self.layer_ids)

    @property
    def n_hash_cols(self) -> int:
        """How many rows a token has in a layer: n-gram lengths times heads."""
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
            require(ok, "compressed_vocab_size", compressed_vocab_size, got)
        if table_rows is not None:
            require(self.table_rows == tuple(table_rows), "rows", self.table_rows, table_rows)
