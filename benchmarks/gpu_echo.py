"""The floor of a call from GPU to GPU: bare echoes whose bytes pass through this process's GPU.

`python gpu_echo.py SOCKET [cpu]` says `ready URL` for a free TCP port and the Unix socket SOCKET,
where 8 bytes of length and as many bytes are received into pinned memory, copied to the GPU and
back, and sent; and for SOCKET.shared, where a region comes first (SCM_RIGHTS) and then only lengths
of what lies in it. Checks nothing: not a server, a yardstick.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import struct
import sys
import threading
from pathlib import Path

import numpy as np
import torch
import uvloop

from service.listeners import bind_tcp, bind_unix

CAPACITY = 64 << 20
DEVICE = "cpu" if "cpu" in sys.argv[2:] else "cuda"
LENGTH = struct.Struct("<q")


class Passage:
    """Copies between host memory and a device buffer of its own."""

    def __init__(self) -> None:
        self._far = torch.empty(CAPACITY, dtype=torch.uint8, device=DEVICE)

    def through(self, host: torch.Tensor) -> None:
        """To the device and back, in place."""
        far = self._far[: len(host)]
        far.copy_(host, non_blocking=True)
        host.copy_(far, non_blocking=True)
        if DEVICE == "cuda":
            torch.cuda.current_stream().synchronize()


class Echo(asyncio.BufferedProtocol):
    """One connection, one message at a time."""

    def __init__(self) -> None:
        self._host = torch.empty(CAPACITY, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
        self._buffer = self._host.numpy().data
        self._passage = Passage()
        self._end = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        if self._end < 8 or self._end < 8 + LENGTH.unpack_from(self._buffer)[0]:
            return
        self._passage.through(self._host[8 : self._end])
        self._transport.write(self._buffer[: self._end])
        self._end = 0


def share(listener: socket.socket) -> None:
    """Serve one connection after the other through a region of each."""
    while True:
        line, _ = listener.accept()
        with line:
            _, (descriptor,), _, _ = socket.recv_fds(line, 1, 1)
            memory = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
            os.close(descriptor)
            if DEVICE == "cuda":
                torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.size, 0)
            host, passage = torch.from_numpy(memory), Passage()
            while message := line.recv(8):
                passage.through(host[: LENGTH.unpack(message)[0]])
                line.sendall(message)
            if DEVICE == "cuda":
                torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)


async def main() -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    path = Path(sys.argv[1])
    shared = bind_unix(path.with_suffix(".shared"))
    threading.Thread(target=share, args=(shared.sock,), daemon=True).start()
    for listener in (bind_tcp("127.0.0.1", 0), bind_unix(path)):
        create = loop.create_server if listener.path is None else loop.create_unix_server
        await create(Echo, sock=listener.sock)
        print(f"ready {listener.url}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
