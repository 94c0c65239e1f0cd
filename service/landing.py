"""Where packets land: one piece of the backend's memory at a time, whatever connection they are of.

Between a read of an event loop and the look at what it brought nothing else is read, so one piece
serves all connections. A large body is received where it landed: its piece is left to it, and the
next packet lands in another.
"""

from __future__ import annotations

from contextlib import suppress
from ctypes import addressof, c_char

import numpy as np

from engram_core.errors import EngramError
from service.bodies import Buffer
from service.state import ServiceState

LANDING_BYTES = 512 << 10
"""Of a piece: what a read brings at most, and the largest body that is received where it landed."""

ALIGNMENT = 64


class Landing:
    """One for an app."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state
        self._piece: memoryview | None = None
        self._address = 0
        self._is_kept = False  # whether anybody has wanted to keep a piece

    def space(self, pad: int) -> memoryview:
        """Return where the next packet goes. pad: bytes left out, so that its body is aligned"""
        if self._piece is None:
            self._piece = self._new()
            self._address = addressof(c_char.from_buffer(self._piece))
        return self._piece[pad:]

    def landed(self, pad: int, num_bytes: int) -> memoryview:
        """Return what came into the space given last. pad: as it was then

        The space itself is nobody's to keep: a connection that read nothing would hold its piece.
        """
        assert self._piece is not None
        return self._piece[pad : pad + num_bytes]

    def keep(self, data: Buffer, begin: int, num_bytes: int) -> memoryview | None:
        """Leave a piece to the body that begins in what landed: the body's place, whole.

        None: it did not land here, or is too long, or lies askew.
        """
        piece = self._piece
        if piece is None or not isinstance(data, memoryview) or data.obj is not piece.obj:
            return None
        if not self._is_kept:
            self._is_kept, self._piece = True, None
            return None
        start = addressof(c_char.from_buffer(data)) - self._address + begin
        if start % ALIGNMENT or start + num_bytes > len(piece):
            return None
        self._piece = None
        return piece[start : start + num_bytes]

    def _new(self) -> memoryview:
        """Where the backend wants bodies, once somebody wants to keep one, and if there is room."""
        if self._is_kept:
            with suppress(EngramError):
                return self._state.pool.memory.buffer(LANDING_BYTES).data
        return np.empty(LANDING_BYTES, np.uint8).data
