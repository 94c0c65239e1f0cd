"""The numbers behind the hash: how they derive from a config, and what a file may say they are."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engram_core.errors import CheckpointError

INT64_MAX = 2**63 - 1
MAX_BASE_SIZE = 2**31
"""Largest bucket size primes are searched from: bounds the sieve a hostile config can ask for."""


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
    require(1 <= base_size <= MAX_BASE_SIZE, "base_size", f"1..{MAX_BASE_SIZE}", base_size)
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


def require(ok: bool, name: str, expected: object, got: object) -> None:
    """Refuse a value of a checkpoint unless `ok`. Raises: CheckpointError."""
    if not ok:
        raise CheckpointError(f"{name}: expected {expected}, got {got}", expected=expected, got=got)


def check_orders(layer_ids: Sequence[int], max_ngram_size: int, num_heads: int) -> None:
    """Refuse layers, orders and heads no model has. Raises: CheckpointError."""
    legal = len(layer_ids) > 0 and min(layer_ids) >= 0 and len(set(layer_ids)) == len(layer_ids)
    require(legal, "layer_ids", "one or more distinct ids >= 0", list(layer_ids))
    require(2 <= max_ngram_size <= 64, "max_ngram_size", "2..64", max_ngram_size)
    require(1 <= num_heads <= 1024, "num_heads", "1..1024", num_heads)


def integers(name: str, values: ArrayLike, count: int | None = None) -> NDArray[np.int64]:
    """Read integers of any type by value: flat int64, `count` of them. Raises: CheckpointError."""
    array: NDArray[Any] = np.asarray(values)
    require(array.dtype.kind in "iu", name, "integers", array.dtype.name)
    if count is not None:
        require(array.size == count, name, f"{count} values", array.size)
    require(array.size > 0, name, "at least one value", 0)
    require(int(array.max()) <= INT64_MAX, name, f"at most {INT64_MAX}", int(array.max()))
    return array.reshape(-1).astype(np.int64)


def check_token_map(values: ArrayLike) -> NDArray[np.int32]:
    """Read a token map: int32 [vocab], no entry negative. Raises: CheckpointError."""
    array = integers("token_map", values)
    # The seed project reads -1 as "unmapped"; the real map holds none, so one is a broken file.
    for index in np.flatnonzero((array < 0) | (array > 2**31 - 2))[:1].tolist():
        require(False, f"token_map[{index}]", "0..2147483646", int(array[index]))
    return array.astype(np.int32)


def compressed_pad(
    token_map: NDArray[np.int32], pad_id: int | None, pad_token_id: int | None
) -> int:
    """Take the pad in COMPRESSED space from whichever of the two is given.

    Raises: CheckpointError.
    """
    if (pad_id is None) == (pad_token_id is None):
        raise CheckpointError("give exactly one of pad_id (compressed) and pad_token_id (token)")
    if pad_token_id is not None:
        size = token_map.size
        require(0 <= pad_token_id < size, "pad_token_id", f"0..{size - 1}", pad_token_id)
        return int(token_map[pad_token_id])
    assert pad_id is not None
    highest = int(token_map.max())
    require(0 <= pad_id <= highest, "pad_id", f"0..{highest}", pad_id)
    return pad_id
