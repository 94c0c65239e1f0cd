"""Token ids -> compressed ids -> windows -> row ids: integers only, exact everywhere.

A window holds the `max_ngram_size` compressed ids an n-gram may use, NEWEST FIRST: the token's
own, then its look-back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engram_core.errors import BadTensor, Gap, TokenOutOfRange, TooManyPositions
from engram_core.geometry import EngramHashTables

DEAD = -1
"""Compressed id of a position that takes part in no n-gram."""


def compress(
    token_ids: NDArray[np.int64],
    mask: NDArray[np.bool_] | None,
    tables: EngramHashTables,
    *,
    name: str = "token_ids",
) -> NDArray[np.int32]:
    """Map token ids to compressed ids.

    token_ids: int64 [T]; mask: bool [T]  False = dead, its id is not read
    name: what the ids are called in a refusal
    Returns: int32 [T], DEAD where the mask is False

    Raises: TokenOutOfRange naming the first bad index and its value; BadTensor.
    """
    token_ids = np.asarray(token_ids)
    if token_ids.ndim != 1 or (token_ids.size and token_ids.dtype.kind not in "iu"):
        got = f"{token_ids.dtype} {list(token_ids.shape)}"
        raise BadTensor(f"{name}: expected int64 [T], got {got}", expected="int64 [T]", got=got)
    if mask is not None and (mask.shape != token_ids.shape or mask.dtype != np.bool_):
        got = f"{mask.dtype} {list(mask.shape)}"
        want = f"bool {list(token_ids.shape)}"
        raise BadTensor(f"mask: expected {want}, got {got}", expected=want, got=got)
    # Seen as unsigned, a negative id is a huge one: it never indexes the map from its end.
    ids = token_ids.astype(np.int64)
    bad = ids.view(np.uint64) >= tables.vocab_size
    if mask is not None:
        bad &= mask
    if bad.any():
        index = int(bad.argmax())
        value = int(token_ids[index])
        highest = tables.vocab_size - 1
        raise TokenOutOfRange(
            f"{name}[{index}]: expected 0..{highest}, got {value}",
            expected=f"0..{highest}",
            got=value,
            index=index,
        )
    if mask is None:
        return tables.token_map[ids]
    compressed = np.full(ids.shape, DEAD, dtype=np.int32)
    compressed[mask] = tables.token_map[ids[mask]]
    return compressed


def block(ids: NDArray[np.int32], pad_id: int) -> NDArray[np.int32]:
    """Turn raw look-back into windows: from the first DEAD on, everything older is pad_id.

    Blocking is sticky: an n-gram never crosses a dead position or the start of the sequence. A
    live token that happens to be pad_id does not block.

    ids: int32 [T, max_ngram_size]  newest first; DEAD = dead, or before the start
    Returns: int32 [T, max_ngram_size]; all pad_id where the token itself is dead
    """
    windows = np.array(ids, dtype=np.int32)
    blocked = np.zeros(len(windows), dtype=np.bool_)
    for shift in range(windows.shape[1]):
        blocked |= windows[:, shift] == DEAD
        windows[blocked, shift] = pad_id
    return windows


def hash_windows(
    windows: NDArray[np.int32],
    tables: EngramHashTables,
    layer_indices: Sequence[int] | None = None,
) -> NDArray[np.int64]:
    """Hash windows to row ids.

    r = t[0]*m[0] ^ ... ^ t[i]*m[i] (wrapping int64); id = floor-remainder of r by the bucket size
    of (layer, order i+1, head) + the bucket's first row.

    windows: int32 [T, max_ngram_size]  newest first, after blocking
    layer_indices: positions in tables.layer_ids; None = all, in order
    Returns: int64 [T, len(layer_indices), n_hash_cols]  all 2-gram heads, then 3-gram heads ...

    Source: engram-format 2.5.
    """
    layers = list(range(tables.num_layers) if layer_indices is None else layer_indices)
    orders, heads = tables.max_ngram_size - 1, tables.num_heads
    out = np.empty((len(windows), len(layers), orders, heads), dtype=np.int64)
    ids = windows.T.astype(np.int64)
    for place, layer in enumerate(layers):
        mixed = ids[0] * tables.multipliers[layer, 0]
        for order, primes in enumerate(tables.primes[layer], start=1):
            mixed ^= ids[order] * tables.multipliers[layer, order]
            # numpy's remainder floors, as torch's does and C's does not.
            np.remainder(mixed[:, None], primes, out=out[:, place, order - 1])
    columns = out.reshape(len(windows), len(layers), orders * heads)
    columns += tables.offsets[layers]
    return columns


class EngramHasher:
    """The hash of one sequence: keeps the compressed id of every position.

    `hash` at a position already held overwrites it and all that follow, so the sequence always
    ends at position + T. Nothing is changed by a refused call.

    Source: `EngramHasher` of the reference modules; unlike theirs it refuses a gap instead of
    reading positions nobody wrote.
    """

    def __init__(self, tables: EngramHashTables, max_positions: int) -> None:
        self.tables = tables
        self.max_positions = max_positions
        self._num_before = tables.max_ngram_size - 1
        # Positions before the start are DEAD, so that every window is a plain slice.
        self._ids = np.full(self._num_before + max_positions, DEAD, dtype=np.int32)
        self._length = 0

    @property
    def length(self) -> int:
        """How many positions are held."""
        return self._length

    def reset(self) -> None:
        """Forget every position."""
        self._length = 0

    def hash(
        self,
        token_ids: NDArray[np.int64],
        position: int,
        mask: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.int64]:
        """Hold token ids from `position` on and hash them.

        token_ids: int64 [T]; mask: bool [T]  False = dead
        Returns: int64 [T, num_layers, n_hash_cols]

        Raises: TokenOutOfRange, BadTensor, Gap, TooManyPositions; nothing is changed then.
        """
        if not 0 <= position <= self._length:
            raise Gap(
                f"position {position}: expected 0..{self._length}, the positions held",
                expected=self._length,
                got=position,
                length=self._length,
            )
        end = position + len(token_ids)
        if end > self.max_positions:
            raise TooManyPositions(
                f"{end} positions: expected at most {self.max_positions}",
                expected=self.max_positions,
                got=end,
            )
        compressed = compress(token_ids, mask, self.tables)
        first, last = self._num_before + position, self._num_before + end
        self._ids[first:last] = compressed
        self._length = end
        shifts = range(self.tables.max_ngram_size)
        newest_first = np.stack([self._ids[first - s : last - s] for s in shifts], axis=1)
        return hash_windows(block(newest_first, self.tables.pad_id), self.tables)
