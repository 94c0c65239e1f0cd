"""Shared memory of connections on the Unix socket: made and sealed here, used in place.

A region belongs to one connection and one key and ends with the connection, or with the last call
that still works in it. It is made by us, with a size nobody can change (a client that shrank it
would end this process by SIGBUS). What lies in it changes under our hands: what is used as an
index or a length is copied out first (`steps.decode`), residuals and answers are used in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from starlette.types import Scope

from engram_client import wire
from engram_core.errors import BadRequest, EngramError, Overloaded, SchemaError
from engram_core.host_memory import HostMemory
from service.bodies import CONNECTION, Buffer, Peer
from service.problems import NotFound

PAGE_BYTES = mmap.PAGESIZE
MIN_CONNECTIONS = 4
"""No region is larger than the whole divided by this."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Memory = NDArray[np.uint8]
Later = Callable[[Callable[[], None]], object]


def later_on(loop: asyncio.AbstractEventLoop) -> Later:
    """Return what runs a function in a thread beside a loop, called from any thread."""

    def later(end: Callable[[], None]) -> None:
        if not loop.is_closed():  # else the process ends, and its memory with it
            loop.call_soon_threadsafe(loop.run_in_executor, None, end)

    return later


@dataclass(frozen=True, eq=False)
class Region:
    """Of one connection. tenant: the key's name; memory: uint8 [num_bytes], what all use of it
    refers to; descriptor: to be passed once."""

    tenant: str
    memory: Memory
    descriptor: int

    @property
    def num_bytes(self) -> int:
        """Its size, for good."""
        return self.memory.size

    def part(self, text: str, name: str) -> Memory:
        """Return the bytes that a header names: `offset,bytes`. Raises SchemaError."""
        try:
            offset, num_bytes = wire.parse_shape(text)
        except ValueError:
            raise SchemaError(f"{name}", expected="offset,bytes", got=text[:80]) from None
        if offset % wire.ALIGNMENT or offset + num_bytes > self.num_bytes:
            raise SchemaError(
                f"{name}: outside the connection's shared memory, or unaligned",
                expected=f"a multiple of {wire.ALIGNMENT}, an end <= {self.num_bytes}",
                got=text[:80],
            )
        return self.memory[offset : offset + num_bytes]


class Connection(Peer, Protocol):
    """A connection, for those who answer on it.

    tenant: the name of the key that asked last; region: its shared memory
    """

    tenant: str | None
    region: Region | None

    @property
    def is_gone(self) -> bool:
        """Whether nothing can be sent on it any more."""

    def abort(self) -> None:
        """Cut it at once."""

    def check_sharing(self) -> None:
        """See that a region can be given. Raises NotFound, BadRequest, ClientGoneError."""

    def share(self, region: Region) -> None:
        """Give it a region, and pass the descriptor. Raises as `check_sharing`."""


def connection_of(scope: Scope) -> Connection | None:
    """Return the connection of a request; None under a server that does not tell."""
    extensions = scope.get("extensions") or {}
    connection: Connection | None = extensions.get(CONNECTION, {}).get("connection")
    return connection


class Regions:
    """What all connections have of `shared_memory_bytes`.

    total_bytes: 0 = off; later: runs what ends a region (`later_on`): that takes milliseconds
    """

    def __init__(self, total_bytes: int, memory: HostMemory) -> None:
        self.total_bytes = total_bytes // PAGE_BYTES * PAGE_BYTES
        self.later: Later = lambda end: end()
        self._memory = memory
        self._used_bytes = 0
        self._lock = threading.Lock()
        self.is_in_place = bool(self.total_bytes) and self._probe()

    @property
    def used_bytes(self) -> int:
        """Bytes of the regions there are."""
        return self._used_bytes

    @property
    def mode(self) -> str:
        """How the backend uses them, for info."""
        if not self.total_bytes:
            return "off"
        return "in place" if self.is_in_place else "copied once"

    def open(self, tenant: str, num_bytes: int) -> Region:
        """Make a region, of fewer bytes where more were asked for than one may have.

        Takes milliseconds: pages are made and pinned. Raises NotFound: it is off; Overloaded.
        """
        most = self.total_bytes // MIN_CONNECTIONS // PAGE_BYTES * PAGE_BYTES
        size = min(-(-num_bytes // PAGE_BYTES) * PAGE_BYTES, most)
        if size <= 0:
            raise NotFound("shared memory is not offered", expected="shared_memory_bytes > 0")
        self._take(size)
        try:
            return self._make(tenant, size)
        except BaseException:
            self._give(size)
            raise

    def _make(self, tenant: str, size: int) -> Region:
        try:
            descriptor, mapped = _map_sealed(size)
        except OSError as error:
            raise Overloaded(
                f"no {size} bytes of shared memory now: {error.strerror}", got=size
            ) from None
        memory = np.frombuffer(mapped, np.uint8)
        address: int = memory.__array_interface__["data"][0]
        self._memory.register(memory)
        # Called before `memory` lets go of `mapped`, which unmaps it.
        weakref.finalize(memory, self._ended, mapped, address).atexit = False
        return Region(tenant, memory, descriptor)

    def _ended(self, mapped: mmap.mmap, address: int) -> None:
        """Nothing refers to a region any more: any thread comes here, in the middle of anything."""
        self.later(partial(self._close, mapped, address))

    def _close(self, mapped: mmap.mmap, address: int) -> None:
        size = len(mapped)
        with contextlib.suppress(EngramError):  # of a device that has failed or is closed
            self._memory.unregister(address)
        # Its pages, too, where the client keeps the descriptor: they would be in nobody's budget.
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_REMOVE)
        self._give(size)

    def _probe(self) -> bool:
        """Find out whether the backend works in such memory."""
        descriptor, mapped = _map_sealed(PAGE_BYTES)
        os.close(descriptor)
        memory = np.frombuffer(mapped, np.uint8)
        is_in_place = self._memory.register(memory)
        self._memory.unregister(memory.__array_interface__["data"][0])
        return is_in_place

    def _take(self, size: int) -> None:
        with self._lock:
            if self._used_bytes + size > self.total_bytes:
                raise Overloaded(
                    "no room for more shared memory; the socket serves as well",
                    expected=f"<= {self.total_bytes - self._used_bytes} bytes",
                    got=size,
                )
            self._used_bytes += size

    def _give(self, size: int) -> None:
        with self._lock:
            self._used_bytes -= size


def _map_sealed(size: int) -> tuple[int, mmap.mmap]:
    """Return a descriptor and a mapping of new memory whose size is fixed. Raises OSError."""
    descriptor = os.memfd_create("engram", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # All pages now: one that cannot be had later would end the process.
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor, mmap.mmap(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise


class Shared:
    """What one request names of its connection's region.

    body: where its body lies; None: it comes over the socket
    """

    def __init__(self, region: Region, body: str | None, answer: str | None) -> None:
        """Check what the headers say. Raises SchemaError."""
        self._region = region
        self._answer = None if answer is None else region.part(answer, wire.SHARED_ANSWER)
        self.body = None if body is None else region.part(body, wire.SHARED_BODY).data
        self._body_offset = "" if body is None else body.partition(",")[0]

    def answer_memory(self, otherwise: HostMemory) -> HostMemory:
        """Return where answers are made: in the place named as long as it lasts."""
        return otherwise if self._answer is None else _AnswerMemory(self._answer, otherwise)

    def leave(self, buffers: Sequence[Buffer]) -> tuple[str, list[Buffer]]:
        """Return what of an answer lies in the region, as the header tells it ("" for nothing),
        and the buffers that are sent: one range is left out."""
        if self._answer is None:
            return "", list(buffers)
        if len(buffers) == 1 and buffers[0] is self.body:  # a residual, updated where it lay
            return f"{self._body_offset},{len(self.body)},0", []
        start, sent = self._region.memory.__array_interface__["data"][0], list[Buffer]()
        offset, num_bytes, at = -1, 0, 0
        for buffer in buffers:
            place = _address(buffer) - start
            is_inside = place >= 0 and place + len(buffer) <= self._region.num_bytes
            if is_inside and offset < 0:
                offset, num_bytes, at = place, len(buffer), sum(map(len, sent))
            elif is_inside and place == offset + num_bytes and at == sum(map(len, sent)):
                num_bytes += len(buffer)
            else:
                sent.append(buffer)
        return ("" if offset < 0 else f"{offset},{num_bytes},{at}"), sent


class _AnswerMemory:
    """Tensors of one answer, one behind the other in a region, then elsewhere."""

    def __init__(self, memory: Memory, otherwise: HostMemory) -> None:
        self._memory, self._otherwise, self._end = memory, otherwise, 0

    def buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        return self._otherwise.buffer(num_bytes)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        begin, end = self._end, self._end + num_bytes
        if not num_bytes or end > self._memory.size or begin % dtype.itemsize:
            return self._otherwise.tensor(shape, dtype)
        self._end = end
        return torch.from_numpy(self._memory[begin:end]).view(dtype).view(shape)

    def register(self, memory: NDArray[np.uint8]) -> bool:
        return self._otherwise.register(memory)

    def unregister(self, address: int) -> None:
        self._otherwise.unregister(address)


def shared_of(region: Region | None, tenant: str, body: str | None, answer: str | None) -> Shared:
    """Return what a request's headers name. region: of its connection

    Raises BadRequest: there is none, or another key's; SchemaError.
    """
    if region is None or region.tenant != tenant:
        raise BadRequest(
            "this connection and key have no shared memory", expected="POST /v1/memory before"
        )
    return Shared(region, body, answer)


def _address(buffer: Buffer) -> int:
    if not len(buffer):
        return 0
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address
