"""Shared memory with a service on the same host: a region of the connection, instead of its socket.

The service makes the region and passes it over the Unix socket; a request then says in a header
where in it its body lies and where its answer may be put (docs/shared_memory.md). One request at a
time uses a connection, so the whole region is that request's: body first, answer behind it.
"""

from __future__ import annotations

import array
import contextlib
import json
import mmap
import os
import re
import socket
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from engram_client import wire
from engram_client.far import FarBuffer
from engram_client.http1 import Request, Response, ResponseReader, format_head
from engram_client.problems import BadAnswer, ConnectionLost

if TYPE_CHECKING:
    import torch

REGION_BYTES = 64 << 20
"""What is asked for: 512 tokens' residual is 20 MiB, their kv 25."""

_TENSORS = re.compile(r"/v1/step\?|/v1/sessions/[0-9]+/layers/")
_DESCRIPTORS = socket.CMSG_SPACE(array.array("i").itemsize) if hasattr(socket, "CMSG_SPACE") else 0


def can_share(request: Request) -> bool:
    """Tell whether a request is one that shared memory is for."""
    return _TENSORS.match(request.target) is not None


class Region:
    """The memory of one connection."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Map it. Raises OSError, ValueError: it is not what was said."""
        if os.fstat(descriptor).st_size != num_bytes or num_bytes <= 0:
            raise ValueError(f"a region of {num_bytes} bytes that is none")
        self._array = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
        self.memory = self._array.data
        self._is_pinned = False

    def place(self, request: Request) -> Request | None:
        """Put a request's body here; None if it has no room. Returns what goes over the socket."""
        placed = self.head_of(request)
        if placed is None:
            return None
        at = 0
        for buffer in request.body:
            place = self.memory[at : at + len(buffer)]
            if isinstance(buffer, FarBuffer):
                self._pin()
                buffer.copy_to(place)
            else:
                place[:] = memoryview(buffer).cast("B")
            at += len(buffer)
        return placed[0]

    def head_of(self, request: Request) -> tuple[Request, int] | None:
        """Return what goes over the socket of a request whose body lies here, and where its answer
        may be put; None if there is no room."""
        num_bytes = request.body_bytes
        end = -(-num_bytes // wire.ALIGNMENT) * wire.ALIGNMENT
        room = len(self.memory) - end
        if room < 0:
            return None
        headers = [*request.headers, (wire.SHARED_ANSWER, f"{end},{room}")]
        if request.method == "POST":
            headers.append((wire.SHARED_BODY, f"0,{num_bytes}"))
        # The sink is filled from here; what comes over the socket is the answer's small parts.
        head = Request(
            request.method,
            request.target,
            headers,
            max_answer_bytes=request.max_answer_bytes,
            replica=request.replica,
        )
        return head, end

    @staticmethod
    def bare(request: Request) -> Request:
        """Return what the answer of a request that was placed here is read by."""
        return Request(request.method, request.target, max_answer_bytes=request.max_answer_bytes)

    def tensor(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return a part as a tensor of bytes, uint8 [num_bytes], for copies of a device."""
        self._pin()
        part: torch.Tensor = sys.modules["torch"].from_numpy(self._array)
        return part[offset : offset + num_bytes]

    def _pin(self) -> None:
        """Let this process's GPU copy here at full speed, where its driver does that."""
        if self._is_pinned:
            return
        self._is_pinned = True
        torch = sys.modules["torch"]
        if not torch.cuda.is_initialized():
            return
        driver, address = torch.cuda.cudart(), self._array.ctypes.data
        if int(driver.cudaHostRegister(address, self._array.size, 0)) == 0:
            # Before what it is a view of is unmapped.
            weakref.finalize(self._array, driver.cudaHostUnregister, address).atexit = False
            return
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # takes the error, which the next launch would find

    def collect(self, request: Request, response: Response) -> Response:
        """Put an answer together where `request` wants it. Raises BadAnswer."""
        if response.status != 200:
            return response
        parts = _insert(response, self.memory)
        total = sum(map(len, parts))
        if total > request.max_answer_bytes:
            raise BadAnswer(
                f"an answer of {total} bytes, expected at most {request.max_answer_bytes}"
            )
        if request.sink is None:
            response.body = np.empty(total, np.uint8).data
            _pour(parts, iter((response.body,)))
            return response
        try:
            _pour(parts, request.sink(total))
        except wire.WireError as error:
            raise BadAnswer(str(error)) from error
        response.body = memoryview(b"")
        return response


def _insert(response: Response, memory: memoryview) -> list[memoryview]:
    """Return an answer's bytes in order: those of the socket around those of the region."""
    text = response.headers.get(wire.SHARED_ANSWER.lower())
    if text is None:
        return [response.body]
    try:
        offset, num_bytes, at = wire.parse_shape(text)
    except ValueError as error:
        raise BadAnswer(f"{wire.SHARED_ANSWER}: expected offset,bytes,at, got {text!r}") from error
    if offset + num_bytes > len(memory) or at > len(response.body):
        raise BadAnswer(f"{wire.SHARED_ANSWER}: {text} is outside {len(memory)} bytes")
    return [response.body[:at], memory[offset : offset + num_bytes], response.body[at:]]


def _pour(parts: Iterable[memoryview], pieces: Iterator[memoryview | FarBuffer]) -> None:
    """Copy parts, in order, into the pieces of a sink. Raises BadAnswer: too many, or too few."""
    space: memoryview | FarBuffer = memoryview(b"")
    for part in parts:
        while part:
            while not space:
                found = next(pieces, None)
                if found is None:
                    raise BadAnswer(f"an answer's body is {len(part)} bytes too long")
                space = found
            count = min(len(space), len(part))
            if isinstance(space, FarBuffer):
                space[:count].copy_from(part[:count])
            else:
                space[:count] = part[:count]
            space, part = space[count:], part[count:]
    if space or any(len(piece) for piece in pieces):
        raise BadAnswer("an answer's body ends early")


def ask_for(sock: socket.socket, fixed: bytes, num_bytes: int) -> tuple[Region | None, bool]:
    """Ask the service for a region over a connected Unix socket that blocks.

    Returns the region, if there is one, and whether to ask again on another connection.

    Raises ConnectionLost, BadAnswer, OSError.
    """
    body = json.dumps({"num_bytes": num_bytes}).encode()
    request = Request("POST", "/v1/memory", [("Content-Type", wire.JSON_MEDIA)], [body])
    sock.sendall(format_head(request, fixed) + body)
    reader, descriptors = ResponseReader(request), array.array("i")
    try:
        while reader.response is None:
            count, messages, _, _ = sock.recvmsg_into([reader.buffer()], _DESCRIPTORS)
            for level, kind, data in messages:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
            reader.received(count)
        response = reader.response
        if not response.keep_alive:
            raise ConnectionLost("the service ended a connection that asked for shared memory")
        if response.status != 201 or len(descriptors) != 1:
            return None, response.status in (429, 503)
        return Region(descriptors[0], _num_bytes(response)), True
    except ValueError as error:
        raise BadAnswer(f"shared memory: {error}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _num_bytes(response: Response) -> int:
    document: Any = wire.load_json(bytes(response.body))
    number = document.get("num_bytes") if isinstance(document, dict) else None
    if type(number) is not int:
        raise ValueError(f"an answer without num_bytes: {document!r}")
    return number


IS_SUPPORTED = sys.platform == "linux"
