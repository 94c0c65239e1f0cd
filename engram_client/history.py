"""A client's own copy of the token ids of one session, by absolute position."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_client.wire import is_torch

DEAD = -1
"""Stands in a copy for the id of a dead position, which nobody reads."""


def integers(values: Any, name: str) -> NDArray[np.int64]:
    """Return ids as int64 [T]. Raises ValueError: not one-dimensional, not integers."""
    array = np.asarray(values.detach().cpu().numpy() if is_torch(values) else values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        got = f"{array.dtype} {list(array.shape)}"
        raise ValueError(f"{name}: expected integers [T], got {got}")
    return array.astype(np.int64, copy=False)


def joined_integers(rows: Sequence[Any], name: str) -> tuple[NDArray[np.int64], list[int]]:
    """Return rows of ids one after the other, int64 [T], and the length of each.

    Raises ValueError: a row that `integers` refuses.
    """
    if set(map(type, rows)) <= {list, tuple}:
        flat = list(chain.from_iterable(rows))
        if set(map(type, flat)) <= {int}:  # one array for all: one a row is 1 us a segment
            return integers(flat, name), list(map(len, rows))
    arrays = [integers(row, name) for row in rows]
    return np.concatenate(arrays, dtype=np.int64), list(map(len, arrays))


def flags(values: Any, count: int) -> NDArray[np.bool_]:
    """Return a mask as bool [count]. Raises ValueError."""
    array = np.asarray(values.detach().cpu().numpy() if is_torch(values) else values)
    if array.shape != (count,) or (array.dtype != np.bool_ and count):
        got = f"{array.dtype} {list(array.shape)}"
        raise ValueError(f"mask: expected bool [{count}], got {got}")
    return array.astype(np.bool_, copy=False)


class History:
    """Raw token ids of positions `origin` .. `length` - 1, DEAD where masked.

    length: an attribute, since a step asks 256 sessions for it several times
    """

    def __init__(self, origin: int = 0, ids: Sequence[int] | NDArray[np.int32] = ()) -> None:
        self.origin = origin
        self._ids = np.array(ids, np.int32)
        self.length = origin + len(self._ids)

    def write(self, position: int, ids: NDArray[np.int64], mask: NDArray[np.bool_] | None) -> None:
        """Put ids at a position <= length; what lies behind them stays."""
        begin = position - self.origin
        end = begin + len(ids)
        if begin < 0 or position > self.length:
            raise IndexError(f"position {position}: expected {self.origin}..{self.length}")
        if end > len(self._ids):
            held = self._ids[: self.length - self.origin]
            self._ids = np.concatenate([held, np.empty(max(64, end), np.int32)], dtype=np.int32)
        self._ids[begin:end] = ids if mask is None else np.where(mask, ids, DEAD)
        self.length = max(self.length, self.origin + end)

    def cut(self, length: int) -> None:
        """Forget everything from position `length` on."""
        self.length = min(self.length, length)

    def read(self, begin: int, end: int) -> NDArray[np.int32]:
        """Return the ids of positions begin .. end - 1."""
        return self._ids[begin - self.origin : min(end, self.length) - self.origin]

    def copy(self, length: int) -> History:
        """Return a copy of what lies before position `length`."""
        return History(self.origin, self.read(self.origin, length).copy())
