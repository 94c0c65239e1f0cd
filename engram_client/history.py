"""A client's own copy of the token ids of one session, by absolute position."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_client.wire import is_torch

DEAD = -1
"""Stands in a copy for the id of a dead position, which nobody reads."""


def integers(values: Any, name: str) -> NDArray[np.int64]:
    """Return ids as int64 [T]. Raises ValueError: not one-dimensional, not integers."""
    ids = np.asarray(values.detach().cpu().numpy() if is_torch(values) else values)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        got = f"{ids.dtype} {list(ids.shape)}"
        raise ValueError(f"{name}: expected integers [T], got {got}")
    return ids.astype(np.int64, copy=False)


def joined_ids(rows: Sequence[Any]) -> tuple[NDArray[np.int64], list[int]]:
    """Return rows of ids one after the other, int64 [T], and the length of each.

    Raises ValueError: a row that `integers` refuses.
    """
    if set(map(type, rows)) <= {list, tuple}:
        flat = list(chain.from_iterable(rows))
        if set(map(type, flat)) <= {int}:  # one array for all: one a row is 1 us a segment
            return integers(flat, "token_ids"), list(map(len, rows))
    arrays = [integers(row, "token_ids") for row in rows]
    return np.concatenate(arrays, dtype=np.int64), list(map(len, arrays))


def flags(values: Any, count: int) -> NDArray[np.bool_]:
    """Return a mask as bool [count]. Raises ValueError."""
    mask = np.asarray(values.detach().cpu().numpy() if is_torch(values) else values)
    if mask.shape != (count,) or (mask.dtype != np.bool_ and count):
        got = f"{mask.dtype} {list(mask.shape)}"
        raise ValueError(f"mask: expected bool [{count}], got {got}")
    return mask.astype(np.bool_, copy=False)


def masked(ids: NDArray[np.int64], mask: NDArray[np.bool_] | None) -> list[int]:
    """Return ids as a history keeps them, DEAD where masked."""
    kept: list[int] = (ids if mask is None else np.where(mask, ids, DEAD)).tolist()
    return kept


class History:
    """Raw token ids of positions `origin` .. `length` - 1, DEAD where masked.

    Made for a step that gives 256 sessions one id each: an `array` takes it in a third of the time
    of numpy, and the length is an attribute.
    """

    def __init__(self, origin: int, ids: Iterable[int]) -> None:
        self.origin = origin
        self._ids = array("i", ids)
        self.length = origin + len(self._ids)

    def write(self, position: int, ids: list[int]) -> None:
        """Put ids, DEAD where masked, at a position <= length; what lies behind them stays."""
        begin = position - self.origin
        if begin < 0 or position > self.length:
            raise IndexError(f"position {position}: expected {self.origin}..{self.length}")
        if begin == len(self._ids):
            self._ids.extend(ids)
        else:
            self._ids[begin : begin + len(ids)] = array("i", ids)
        self.length = self.origin + len(self._ids)

    def cut(self, length: int) -> None:
        """Forget everything from position `length` on."""
        del self._ids[max(length - self.origin, 0) :]
        self.length = self.origin + len(self._ids)

    def read(self, begin: int, end: int) -> NDArray[np.int32]:
        """Return a copy of the ids of positions begin .. end - 1."""
        return np.array(self._ids[begin - self.origin : end - self.origin], np.int32)

    def copy(self, length: int) -> History:
        """Return a copy of what lies before position `length`."""
        return History(self.origin, self._ids[: length - self.origin])
