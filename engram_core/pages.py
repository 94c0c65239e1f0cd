"""Compressed ids of many rows by absolute position, in pages of one array.

Position p of a row lies in page `p // PAGE` of that row. All rows share one pool of pages, so a
short session costs a page and a long one exactly what it holds; the arrays are committed by the
operating system page by page as they are first written.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engram_core.hashing import DEAD

Ints = NDArray[np.int64]

PAGE = 256
"""Positions of a page: 1 KiB."""

_SHIFT = PAGE.bit_length() - 1


def spread(starts: Ints, counts: Ints) -> Ints:
    """Concatenate `starts[i], starts[i] + 1, ... starts[i] + counts[i] - 1` over all i.

    starts, counts: int64 [S]; counts >= 0
    Returns: int64 [sum(counts)]
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - ends + counts, counts) + np.arange(total, dtype=np.int64)


def page_end(length: Ints) -> Ints:
    """One more than the index of the last page that positions below `length` need."""
    return (length + (PAGE - 1)) >> _SHIFT


def page_start(position: Ints) -> Ints:
    """Index of the page that holds a position."""
    return position >> _SHIFT


class PagedIds:
    """A ragged int32 array [rows, positions] over a fixed pool of pages.

    Pages are given and taken by index ranges; which positions of a page mean anything is the
    owner's business (`sessions.py`).
    """

    def __init__(self, num_rows: int, num_pages: int, max_positions: int) -> None:
        self.num_pages = num_pages
        self.pages_per_row = -(-max_positions // PAGE)
        self._ids = np.empty(num_pages * PAGE, dtype=np.int32)
        # First id of each page; 0 where there is none, so that a stray read stays inside _ids.
        self._starts = np.zeros(num_rows * self.pages_per_row, dtype=np.int64)
        self._free = np.arange(num_pages, dtype=np.int64)[::-1] * PAGE
        self._num_free = num_pages

    @property
    def num_used(self) -> int:
        """Pages in use."""
        return self.num_pages - self._num_free

    @property
    def address(self) -> int:
        """Where the ids begin: int32 [num_pages, PAGE]."""
        return self._ids.ctypes.data

    @property
    def starts_address(self) -> int:
        """Where the page tables begin: int64 [num_rows, pages_per_row], first id of each page."""
        return self._starts.ctypes.data

    def resize(self, rows: Ints, before: Ints, after: Ints) -> None:
        """Give rows pages [before, after), or take pages [after, before) back.

        rows: int64 [S] distinct; before, after: int64 [S]  page ends

        Raises: MemoryError if the pool is too small; nothing is changed then.
        """
        delta = after - before
        if not delta.any():
            return
        grown = np.maximum(delta, 0)
        shrunk = grown - delta
        if int(delta.sum()) > self._num_free:
            raise MemoryError(f"{int(delta.sum())} pages asked for, {self._num_free} free")
        taken = self._entries(rows, after, shrunk)
        self._free[self._num_free : self._num_free + len(taken)] = self._starts[taken]
        self._num_free += len(taken)
        given = self._entries(rows, before, grown)
        self._num_free -= len(given)
        self._starts[given] = self._free[self._num_free : self._num_free + len(given)]

    def read(self, rows: Ints, positions: Ints) -> NDArray[np.int32]:
        """Read ids; rows and positions broadcast."""
        return self._ids.take(self._addresses(rows, positions))

    def write(self, rows: Ints, positions: Ints, ids: NDArray[np.int32]) -> None:
        """Write ids: int32 [T] at rows, positions: int64 [T]."""
        self._ids[self._addresses(rows, positions)] = ids

    def copy(self, source: int, target: int, pages: range) -> None:
        """Copy whole pages of a row to the pages another row has at the same positions."""
        index = np.arange(pages.start, pages.stop, dtype=np.int64)
        by_page = self._ids.reshape(-1, PAGE)
        first, second = (
            self._starts[row * self.pages_per_row + index] >> _SHIFT for row in (source, target)
        )
        by_page[second] = by_page[first]

    # ---- on segments: ids int32 [T] lie segment after segment, T = sum(count)

    def look_back(
        self,
        rows: Ints,
        position: Ints,
        count: Ints,
        num_before: int,
    ) -> NDArray[np.int32]:
        """Read every position of the segments with the `num_before` ids before it.

        Returns: int32 [T, num_before + 1]  newest first, DEAD before the start
        """
        positions = spread(position, count)[:, None] - np.arange(num_before + 1)
        before_start = positions < 0
        positions[before_start] = 0
        ids = self.read(np.repeat(rows, count)[:, None], positions)
        ids[before_start] = DEAD
        return ids

    def leading_equal(
        self,
        rows: Ints,
        position: Ints,
        count: Ints,
        ids: NDArray[np.int32],
        *,
        held: Ints,
    ) -> Ints:
        """Count the leading ids of each segment that equal those of its row.

        held: int64 [S]  how many ids of each segment to compare
        Returns: int64 [S], <= held
        """
        if not held.any():
            return held
        within = spread(np.zeros_like(held), held)
        segment = np.repeat(np.arange(len(held)), held)
        starts = np.cumsum(count) - count
        present = self.read(rows[segment], position[segment] + within)
        differs = np.flatnonzero(present != ids[starts[segment] + within])
        same = held.copy()
        np.minimum.at(same, segment[differs], within[differs])
        return same

    def write_last(
        self,
        rows: Ints,
        position: Ints,
        count: Ints,
        ids: NDArray[np.int32],
        *,
        written: Ints,
    ) -> None:
        """Write the last `written` ids of each segment where they belong."""
        skipped = count - written
        if skipped.any():
            starts = np.cumsum(count) - count
            ids = ids[spread(starts + skipped, written)]
        self.write(np.repeat(rows, written), spread(position + skipped, written), ids)

    def _entries(self, rows: Ints, starts: Ints, counts: Ints) -> Ints:
        """Entries of the page table for `counts` pages from `starts` on, row after row."""
        return spread(rows * self.pages_per_row + starts, counts)

    def _addresses(self, rows: Ints, positions: Ints) -> Ints:
        entries = rows * self.pages_per_row + (positions >> _SHIFT)
        addresses: Ints = self._starts.take(entries)
        addresses += positions & (PAGE - 1)
        return addresses
