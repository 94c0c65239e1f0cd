"""Memory, streams and events of one CUDA device, owned by objects that free them."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int32

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.backends.native import Native

WATCHDOG_MS = 30_000
"""A launch that takes longer has hung; the service stops rather than serve on a guess."""


class DeviceBuffer:
    """Device memory. address: of its first byte; num_bytes: asked for (16 more are readable)."""

    def __init__(self, native: Native, num_bytes: int) -> None:
        self._native = native
        self.num_bytes = num_bytes
        self.address = native.make("device_alloc", num_bytes)

    def close(self) -> None:
        """Free it (again: nothing)."""
        if self.address:
            self._native.device_free(self.address)
        self.address = 0


class PinnedBuffer:
    """Host memory that the device reads and writes in place, and copies to and from at full speed.

    bytes: uint8 [num_bytes]  the memory itself; valid until `close`
    """

    def __init__(self, native: Native, num_bytes: int) -> None:
        self._native = native
        self.num_bytes = num_bytes
        self.address = native.make("host_alloc", num_bytes)
        memory = (ctypes.c_uint8 * num_bytes).from_address(self.address)
        self.bytes: NDArray[np.uint8] = np.ctypeslib.as_array(memory)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        """View a part as a tensor."""
        count = int(np.prod(shape)) * dtype.itemsize
        return torch.from_numpy(self.bytes[offset : offset + count]).view(dtype).view(shape)

    def holds(self, address: int, num_bytes: int) -> bool:
        """Whether a range lies inside."""
        return self.address <= address and address + num_bytes <= self.address + self.num_bytes

    def close(self) -> None:
        """Free it (again: nothing)."""
        if self.address:
            self._native.host_free(self.address)
        self.address = 0


class Stream:
    """A queue of launches. is_urgent: its blocks go first when both queues have some waiting."""

    def __init__(self, native: Native, *, is_urgent: bool = False) -> None:
        self._native = native
        self.handle = native.make("stream_create", int(is_urgent))

    def wait(self, event: Event) -> None:
        """Hold what comes behind until the event."""
        self._native.stream_wait(self.handle, event.handle)

    def close(self) -> None:
        """Destroy it (again: nothing)."""
        if self.handle:
            self._native.stream_destroy(self.handle)
        self.handle = 0


class Event:
    """A mark in a stream."""

    def __init__(self, native: Native, *, is_timed: bool = False) -> None:
        self._native = native
        self.handle = native.make("event_create", int(is_timed))

    def record(self, stream: Stream) -> None:
        """Put the mark behind everything enqueued so far."""
        self._native.event_record(self.handle, stream.handle)

    def is_done(self) -> bool:
        """Whether the device has passed it. Raises: Internal after a failed launch.

        It takes a microsecond, so the interpreter's lock is kept.
        """
        answer = c_int32()
        self._native.held.event_is_done(self.handle, byref(answer))
        return bool(answer.value)

    def wait(self) -> None:
        """Wait on the host. Raises: Internal after a failed launch, or after 30 s."""
        self._native.event_wait(self.handle, WATCHDOG_MS)

    def us_until(self, end: Event) -> float:
        """GPU microseconds between two timed marks that have passed."""
        answer = c_float()
        self._native.event_elapsed_us(self.handle, end.handle, byref(answer))
        return float(answer.value)

    def close(self) -> None:
        """Destroy it (again: nothing)."""
        if self.handle:
            self._native.event_destroy(self.handle)
        self.handle = 0
