"""Tensors on a device as buffers: copied late, straight to where they are sent from.

Over a socket a tensor passes through pinned memory; where the connection has shared memory the
device copies to and from that, and no CPU touches a byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor
else:
    Tensor = Any


class FarBuffer:
    """The bytes of a tensor on a device, as much of a memoryview as a request needs.

    flat: uint8 [n]  the tensor's own memory
    """

    readonly = False

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._staged: Tensor | None = None
        self._parts: list[FarBuffer] = []

    def __len__(self) -> int:
        return self.nbytes

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self._flat.numel()

    def __getitem__(self, part: slice) -> FarBuffer:
        found = FarBuffer(self._flat[part])
        self._parts.append(found)
        return found

    def copy_to(self, memory: memoryview) -> None:
        """Copy the tensor to memory of the host; it is there when this returns."""
        if len(memory):
            _tensor(memory).copy_(self._flat)

    def copy_from(self, memory: memoryview) -> None:
        """Copy memory of the host to the tensor; it has been read when this returns."""
        if len(memory):
            self._flat.copy_(_tensor(memory))

    def read(self) -> memoryview:
        """Return a copy of the bytes in memory of the host."""
        staged = self._stage()
        staged.copy_(self._flat)
        return staged.numpy().data

    def landing(self) -> memoryview:
        """Return memory of the host whose bytes `flush` copies to the tensor."""
        self._staged = self._stage() if self._staged is None else self._staged
        return self._staged.numpy().data

    def flush(self) -> None:
        """Copy what has landed, here and in parts of this."""
        if self._staged is not None:
            self._flat.copy_(self._staged)
            self._staged = None
        for part in self._parts:
            part.flush()
        self._parts.clear()

    def _stage(self) -> Tensor:
        import torch

        return torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self._flat.is_cuda)


def is_far(value: Any) -> bool:
    """Tell whether a torch tensor lies on a device."""
    return bool(value.device.type != "cpu")


def far_buffer(tensor: Tensor) -> FarBuffer:
    """Return a contiguous tensor's bytes."""
    import torch

    return FarBuffer(tensor.detach().view(-1).view(torch.uint8))


def near(buffer: bytes | memoryview | FarBuffer) -> bytes | memoryview:
    """Return bytes that a socket can send."""
    return buffer.read() if isinstance(buffer, FarBuffer) else buffer


def _tensor(memory: memoryview) -> Tensor:
    import torch

    return torch.frombuffer(memory, dtype=torch.uint8)
