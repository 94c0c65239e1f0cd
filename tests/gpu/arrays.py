"""Arrays on the device for tests: up, down, and freed together."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.backends.device import DeviceBuffer, Event, PinnedBuffer, Stream
from engram_core.backends.native import Native

STAGE_BYTES = 64 << 20


class Arrays:
    """Owner of device memory, one stream and a stage."""

    def __init__(self, native: Native) -> None:
        self.native = native
        self._owned = ExitStack()
        self.stream = Stream(native)
        self._owned.callback(self.stream.close)
        self._end = Event(native)
        self._owned.callback(self._end.close)
        self._stage = PinnedBuffer(native, STAGE_BYTES)
        self._owned.callback(self._stage.close)

    def empty(self, num_bytes: int, fill: int = 0xA5) -> DeviceBuffer:
        """Poisoned memory: what nobody wrote shows."""
        buffer = DeviceBuffer(self.native, num_bytes)
        self._owned.callback(buffer.close)
        self.native.fill(buffer.address, fill, num_bytes, self.stream.handle)
        return buffer

    def up(self, array: NDArray[Any] | torch.Tensor) -> DeviceBuffer:
        """A device copy."""
        data = _bytes(array)
        buffer = self.empty(data.size)
        self.write(buffer.address, data)
        return buffer

    def write(self, address: int, array: NDArray[Any] | torch.Tensor) -> None:
        """Copy to an address."""
        data = _bytes(array)
        for start in range(0, data.size, STAGE_BYTES):
            piece = data[start : start + STAGE_BYTES]
            self._stage.bytes[: piece.size] = piece
            self.native.copy(address + start, self._stage.address, piece.size, self.stream.handle)
            self.wait()

    def down(
        self, buffer: DeviceBuffer | int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """A host copy."""
        address = buffer if isinstance(buffer, int) else buffer.address
        out = np.empty(int(np.prod(shape)) * dtype.itemsize, np.uint8)
        for start in range(0, out.size, STAGE_BYTES):
            count = min(STAGE_BYTES, out.size - start)
            self.native.copy(self._stage.address, address + start, count, self.stream.handle)
            self.wait()
            out[start : start + count] = self._stage.bytes[:count]
        if not out.size:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(out).view(dtype).reshape(shape)

    def pinned(self, num_bytes: int) -> PinnedBuffer:
        buffer = PinnedBuffer(self.native, num_bytes)
        self._owned.callback(buffer.close)
        return buffer

    def wait(self) -> None:
        self._end.record(self.stream)
        self._end.wait()

    def close(self) -> None:
        self.wait()
        self._owned.close()


def _bytes(array: NDArray[Any] | torch.Tensor) -> NDArray[np.uint8]:
    if isinstance(array, torch.Tensor):
        if not array.numel():
            return np.empty(0, np.uint8)
        return array.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bits; a NaN equals any NaN."""
    kind = {2: torch.int16, 4: torch.int32}[got.element_size()]
    both_nan = got.isnan() & want.isnan()
    return bool(((got.view(kind) == want.view(kind)) | both_nan).all())
