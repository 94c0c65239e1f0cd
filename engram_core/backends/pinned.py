"""Pinned memory for bodies and answers on a CUDA device: one block, and what others had pinned."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from engram_core.backends.device import PinnedBuffer
from engram_core.backends.native import Native, Unsupported
from engram_core.host_memory import PooledMemory

_ALIGNMENT = 16
"""Kernels read and write this many bytes at once."""


class PinnedMemory(PooledMemory):
    """Made before the service is ready; nothing is pinned afterwards but shared memory.

    Raises: Internal: the driver does not pin so much.
    """

    def __init__(self, native: Native, device_index: int, num_bytes: int) -> None:
        self._native, self._device_index = native, device_index
        self._buffer = PinnedBuffer(native, num_bytes)
        self._registered: dict[int, int] = {}  # address -> bytes; replaced as a whole
        self._lock = threading.Lock()
        super().__init__(self._buffer.bytes)

    def holds(self, address: int, num_bytes: int) -> bool:
        """Whether the device can work in a range itself."""
        if address % _ALIGNMENT:
            return False
        if self._buffer.holds(address, num_bytes):
            return True
        return any(
            start <= address and address + num_bytes <= start + size
            for start, size in self._registered.items()
        )

    def register(self, memory: NDArray[np.uint8]) -> bool:
        """Pin memory made by somebody else; False where the driver refuses."""
        address = memory.__array_interface__["data"][0]
        try:
            self._native.device_select(self._device_index)
            self._native.host_register(address, memory.size)
        except Unsupported:
            return False
        with self._lock:
            self._registered = {**self._registered, address: memory.size}
        return True

    def unregister(self, address: int) -> None:
        """Forget memory that was registered, if it was."""
        with self._lock:
            known = dict(self._registered)
            if known.pop(address, None) is None:
                return
            self._registered = known
        self._native.device_select(self._device_index)
        self._native.host_unregister(address)

    def close(self) -> None:
        """Free the block, unless something refers to a piece of it still."""
        if not self.pieces.used_bytes:
            self._buffer.close()
