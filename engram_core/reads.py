"""From the three sources of a step to what a read depends on (`jobs.Read`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engram_core.engine_types import MAX_POSITIONS, Segments
from engram_core.errors import (
    BadRequest,
    EngramError,
    RowOutOfRange,
    StepRefused,
    TokenOutOfRange,
    TooManyPositions,
)
from engram_core.geometry import EngramHashTables
from engram_core.hashing import DEAD, block, compress
from engram_core.jobs import Read
from engram_core.pages import spread


def read_history(ids: NDArray[np.int32], tables: EngramHashTables) -> Read:
    """Read positions of sessions. ids: int32 [T, max_ngram_size] of `SessionPool.windows`."""
    return Read(dead=ids[:, 0] == DEAD, windows=block(ids, tables.pad_id))


def read_lookback(segments: Segments, tables: EngramHashTables) -> Read:
    """Read token ids that have their look-back beside them; no session is involved.

    Raises: TokenOutOfRange; StepRefused of BadRequest (an id before the start), TokenOutOfRange (in
        the look-back), TooManyPositions.
    """
    lookback, token_ids = segments.lookback, segments.token_ids
    assert lookback is not None
    assert token_ids is not None
    _check_lookback(segments, tables)
    before = compress(lookback.ravel().astype(np.int64), lookback.ravel() != DEAD, tables)
    num_before = lookback.shape[1]
    count = segments.count.astype(np.int64)
    # Segment after segment: its look-back, then its ids.
    ids = np.empty(before.size + len(token_ids), dtype=np.int32)
    starts = np.cumsum(count + num_before) - count
    own = spread(starts, count)
    ids[own] = compress(token_ids, segments.mask, tables)
    ids[spread(starts - num_before, np.full_like(count, num_before))] = before
    return read_history(ids[own[:, None] - np.arange(num_before + 1)], tables)


def read_hash_ids(segments: Segments, layers: Sequence[int], tables: EngramHashTables) -> Read:
    """Read row ids as they are, each inside the bucket of its column.

    Raises: RowOutOfRange naming the first one that is not.
    """
    hash_ids = segments.hash_ids
    assert hash_ids is not None
    first = tables.offsets[list(layers)]
    size = tables.primes.reshape(tables.offsets.shape)[list(layers)]
    outside = (hash_ids < first) | (hash_ids >= first + size)
    if outside.any():
        token, place, column = (int(i) for i in np.argwhere(outside)[0])
        low, high = int(first[place, column]), int((first + size)[place, column]) - 1
        got = int(hash_ids[token, place, column])
        raise RowOutOfRange(
            f"hash_ids[{token}, {place}, {column}]: expected {low}..{high}, the bucket of that"
            f" column of layer {tables.layer_ids[layers[place]]}, got {got}",
            expected=f"{low}..{high}",
            got=got,
            token=token,
            column=column,
        )
    dead = np.zeros(len(hash_ids), dtype=np.bool_) if segments.mask is None else ~segments.mask
    return Read(dead=dead, hash_ids=hash_ids)


def _check_lookback(segments: Segments, tables: EngramHashTables) -> None:
    lookback = segments.lookback
    assert lookback is not None
    num_before = lookback.shape[1]
    position = np.minimum(segments.position, MAX_POSITIONS + 1)
    before_start = position[:, None] + np.arange(-num_before, 0) < 0
    early = before_start & (lookback != DEAD)
    unknown = (lookback < DEAD) | (lookback >= tables.vocab_size)
    end = position + segments.count
    failing = early.any(axis=1) | unknown.any(axis=1) | (end > MAX_POSITIONS)
    errors: list[tuple[int, EngramError]] = []
    for i in np.flatnonzero(failing).tolist():
        if end[i] > MAX_POSITIONS:
            error: EngramError = TooManyPositions(
                f"{end[i]} positions: expected at most {MAX_POSITIONS}", got=int(end[i])
            )
        elif early[i].any():
            column = int(np.argmax(early[i]))
            error = BadRequest(
                f"lookback[{i}, {column}]: expected -1, that is before the start of a sequence at"
                f" position {position[i]}, got {lookback[i, column]}"
            )
        else:
            column = int(np.argmax(unknown[i]))
            error = TokenOutOfRange(
                f"lookback[{i}, {column}]: expected -1 (dead) or 0..{tables.vocab_size - 1}, got"
                f" {lookback[i, column]}",
                expected=f"-1 or 0..{tables.vocab_size - 1}",
                got=int(lookback[i, column]),
            )
        errors.append((i, error))
    if errors:
        raise StepRefused(errors)
