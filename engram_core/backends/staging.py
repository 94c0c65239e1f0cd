"""Pinned staging between the caller's memory and the device: rings of buffers with their events."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.backends.device import DeviceBuffer, Event, PinnedBuffer, Stream
from engram_core.backends.native import INLINE_TOKENS, Native
from engram_core.geometry import Geometry


class ControlRing:
    """Small control arrays (windows, ids, slots, dead flags) on their way to the device.

    Up to INLINE_TOKENS tokens travel inside the launch and need none of this. An entry is written
    again only after the launches that read it: the pinned side because the copy reads it late,
    the device side because the kernels do.
    """

    def __init__(self, native: Native, num_bytes: int, num_entries: int) -> None:
        self._native = native
        self.num_bytes = num_bytes
        self._host = [PinnedBuffer(native, num_bytes) for _ in range(num_entries)]
        self._device = [DeviceBuffer(native, num_bytes) for _ in range(num_entries)]
        self._read = [Event(native) for _ in range(num_entries)]
        self._turn = -1

    def send(self, stream: Stream, *arrays: NDArray[np.generic]) -> list[int]:
        """Copy arrays behind what the stream holds; returns their device addresses."""
        self._turn = (self._turn + 1) % len(self._host)
        self._read[self._turn].wait()
        host, device = self._host[self._turn], self._device[self._turn]
        addresses, offset = [], 0
        for array in arrays:
            data = array.reshape(-1).view(np.uint8)
            host.bytes[offset : offset + data.size] = data
            addresses.append(device.address + offset)
            offset += -(-data.size // 16) * 16
        self._native.copy(device.address, host.address, offset, stream.handle)
        return addresses

    def release(self, stream: Stream) -> None:
        """Say that every launch that reads the last `send` is enqueued."""
        self._read[self._turn].record(stream)

    def close(self) -> None:
        """Free its memory and events."""
        for host, device, read in zip(self._host, self._device, self._read, strict=True):
            host.close()
            device.close()
            read.close()


class Lane:
    """One piece of an answer on its way: pinned memory, and the event of its end."""

    def __init__(self, native: Native, num_bytes: int) -> None:
        self.host = PinnedBuffer(native, num_bytes)
        self._done = Event(native)
        self._result: tuple[torch.Tensor, torch.Tensor] | None = None
        self._is_busy = False

    def begin(self, out: torch.Tensor, *, in_place: bool) -> int:
        """Return the address where the device writes the next piece, once the last one is there.

        in_place: in `out` itself; else in pinned memory, and `finish` copies it
        """
        self.finish()
        self._result = None if in_place else (out, self.host.tensor(out.dtype, tuple(out.shape)))
        return out.data_ptr() if in_place else self.host.address

    def end(self, stream: Stream) -> None:
        """Say that the last launch of the piece is enqueued."""
        self._done.record(stream)
        self._is_busy = True

    def finish(self) -> None:
        """Wait for the end, and hand the result over where it is not in its place already."""
        if not self._is_busy:
            return
        self._done.wait()
        self._is_busy = False
        if self._result is not None:
            to, staged = self._result
            to.copy_(staged)
        self._result = None

    def close(self) -> None:
        """Free its memory and its event."""
        self.host.close()
        self._done.close()


def control_bytes_of(geometry: Geometry, num_tokens: int) -> int:
    """Bytes of the control arrays of so many tokens: ids or windows, slots, dead flags."""
    return num_tokens * (geometry.n_hash_cols * 8 + geometry.max_ngram_size * 4 + 8 + 1) + 64


def pieces(count: int, size: int) -> Iterator[slice]:
    """Cut 0..count into slices of at most `size`."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def fits_inline(num_tokens: int) -> bool:
    """Whether control arrays travel inside the launch."""
    return num_tokens <= INLINE_TOKENS


def address_of(array: NDArray[np.generic]) -> int:
    """Where a contiguous array lies."""
    address: int = array.__array_interface__["data"][0]  # `.ctypes.data` takes 3 times as long
    return address
