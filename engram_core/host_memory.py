"""Host memory of bodies and answers: where a backend wants what it reads and writes to lie.

A CPU takes any memory. A GPU works in pinned memory in place, and copies to and from it without a
CPU's help; such memory is made once, before the service is ready, and handed out in pieces.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.errors import Overloaded

PAGE_BYTES = 4096
"""Pieces begin at a multiple of this; smaller ones are not pinned: no GPU reads ids from them."""

WARM_BYTES = 4 << 20
"""From here on plain memory is worth keeping: below, malloc keeps it."""

_LARGE_BYTES = 1 << 20
"""From here on pieces are cut from the end, so that short-lived small ones leave no gaps there."""


class HostMemory(Protocol):
    """Where bodies and answers lie. What it gives lives as long as anything refers to it."""

    def buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return memory of its own for a body: uint8 [num_bytes]. Raises Overloaded."""

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory of its own for an answer, contiguous. Raises Overloaded."""

    def register(self, memory: NDArray[np.uint8]) -> bool:
        """Have the backend work in memory made by somebody else, until `unregister`.

        False: it cannot, and copies what lies there once.
        """

    def unregister(self, address: int) -> None:
        """Forget what was registered at an address, before it is unmapped."""


class PlainMemory:
    """Memory as the C library gives it: what every CPU takes."""

    def buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return new memory: uint8 [num_bytes]."""
        return np.empty(num_bytes, np.uint8)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor, contiguous."""
        return torch.empty(shape, dtype=dtype)

    def register(self, memory: NDArray[np.uint8]) -> bool:
        """True: a CPU works in any memory."""
        return True

    def unregister(self, address: int) -> None:
        """Nothing: nothing was kept of it."""
        return


class Pieces:
    """One block of memory, handed out in pieces; for any thread.

    A piece is free again when nothing refers to it any more: neither a request, nor a socket that
    receives into it or sends from it, nor a batch that a device is still writing. So a request
    that was cancelled gives its memory back no earlier than its last user does.
    """

    def __init__(self, block: NDArray[np.uint8]) -> None:
        self.num_bytes = len(block) // PAGE_BYTES * PAGE_BYTES
        self._memory = block.data
        self._holes = [(0, self.num_bytes)] if self.num_bytes else []  # (start, size), ascending
        self._taken: dict[int, weakref.ref[NDArray[np.uint8]]] = {}
        # What nobody refers to any more. A reference may end in the middle of `take`, in its own
        # thread (a garbage collection): so no lock here, only an append that nothing interrupts.
        self._returned: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of the pieces that something refers to, in whole pages."""
        with self._lock:
            self._take_back()
            return self.num_bytes - sum(size for _, size in self._holes)

    def take(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """Return a piece: uint8 [num_bytes], or None if no hole is large enough."""
        size = max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES
        with self._lock:
            self._take_back()
            start = self._cut(size)
            if start is None:
                return None
            # Over a memoryview, so that numpy's views of views refer to this array, not past it.
            piece = np.frombuffer(self._memory[start : start + num_bytes], np.uint8)
            self._taken[start] = weakref.ref(piece, partial(self._gone, start, size))
            return piece

    def _gone(self, start: int, size: int, _: object) -> None:
        self._returned.append((start, size))

    def _cut(self, size: int) -> int | None:
        """Take a range out of the first hole that fits, of the last for large ones."""
        is_large = size >= _LARGE_BYTES
        places = range(len(self._holes))
        for place in reversed(places) if is_large else places:
            start, there = self._holes[place]
            if there < size:
                continue
            if there == size:
                del self._holes[place]
            elif is_large:
                self._holes[place] = (start, there - size)
                return start + there - size
            else:
                self._holes[place] = (start + size, there - size)
            return start
        return None

    def _take_back(self) -> None:
        """Make holes of what has returned, one with their neighbours."""
        while self._returned:
            start, size = self._returned.popleft()
            del self._taken[start]
            place = bisect_left(self._holes, (start, 0))
            if place < len(self._holes) and self._holes[place][0] == start + size:
                size += self._holes.pop(place)[1]
            if place and sum(self._holes[place - 1]) == start:
                before = self._holes.pop(place - 1)
                start, size = before[0], before[1] + size
            insort(self._holes, (start, size))


class WarmMemory(PlainMemory):
    """Plain memory that keeps the pages of large bodies as long as such bodies come.

    From `WARM_BYTES` on the service has malloc map every block anew and give it back (see
    service/heap.py), which costs a millisecond of page faults a body. For one thread.

    num_bytes: most that is kept; larger bodies, and those that find no room, are plain
    """

    def __init__(self, num_bytes: int = 64 << 20) -> None:
        # Pages are there once they are written.
        self._mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.pieces = Pieces(np.frombuffer(self._mapped, np.uint8))
        self._is_asked = self._is_warm = False

    def buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return uint8 [num_bytes], from `WARM_BYTES` on of pages that are there already."""
        if num_bytes < WARM_BYTES:
            return np.empty(num_bytes, np.uint8)
        self._is_asked = self._is_warm = True
        piece = self.pieces.take(num_bytes)
        return np.empty(num_bytes, np.uint8) if piece is None else piece

    def rest(self) -> None:
        """Give all pages back if nothing large was asked for since the last call, or lives."""
        is_idle, self._is_asked = not self._is_asked, False
        if is_idle and self._is_warm and not self.pieces.used_bytes:
            self._mapped.madvise(mmap.MADV_DONTNEED)
            self._is_warm = False


class PooledMemory:
    """Pieces of one block for what a device touches; what is smaller than a page is plain."""

    def __init__(self, block: NDArray[np.uint8]) -> None:
        self.pieces = Pieces(block)

    def buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return uint8 [num_bytes]. Raises Overloaded: no piece is so large now."""
        if num_bytes < PAGE_BYTES:
            return np.empty(num_bytes, np.uint8)
        piece = self.pieces.take(num_bytes)
        if piece is None:
            raise Overloaded(
                f"no {num_bytes} bytes in one piece for a body or an answer now; try again",
                expected="a piece that is free",
                got=num_bytes,
            )
        return piece

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As `buffer`, of a shape."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < PAGE_BYTES:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(self.buffer(num_bytes)).view(dtype).view(shape)

    def register(self, memory: NDArray[np.uint8]) -> bool:
        """False: this pool alone is pinned."""
        return False

    def unregister(self, address: int) -> None:
        """Nothing: nothing was registered."""
        return
