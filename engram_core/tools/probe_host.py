"""Probes of the host: random rows from each kind of memory, copies, a pass over wkv, the disk."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.meminfo import host_available_bytes
from engram_core.tools.probe import (
    IN_FEATURES,
    ROW_FORMATS,
    ROWS_PER_TOKEN,
    Reading,
    Sizes,
    rate,
    reading,
)

_TOKENS = 256
_PAGE_BYTES = 4096
_BLOCK_BYTES, _CHUNK_BYTES = 4096, 4 << 20
_READERS = {"random 4 KiB": 16, "stream": 4}
"""Reads in flight; rows are read by 16 (see `tables.DiskTable`)."""

Bytes = NDArray[np.uint8]


def probe_memory(sizes: Sizes, seconds: float) -> Iterator[Reading]:
    """Gather rows from plain memory and from huge pages; copy. One reading takes `seconds`."""
    num_bytes = min(sizes.host_bytes, host_available_bytes() // 8)
    yield from gathers("plain memory", lambda: _touched(np.empty(num_bytes, np.uint8)), seconds)
    yield from gathers("huge pages", lambda: _huge_pages(num_bytes), seconds)
    yield from _copies(min(sizes.copy_bytes, num_bytes), seconds)


def gathers(kind: str, allocate: Callable[[], Bytes], seconds: float) -> Iterator[Reading]:
    """Read random rows of both published sizes, one thread, rows of 256 tokens a call."""
    try:
        memory: Bytes | None = allocate()
    except (OSError, ValueError, MemoryError):
        memory = None
    for name, row_bytes in ROW_FORMATS.items():
        yield reading(
            f"gather {name}, {kind}", "rows/s", partial(_gather, memory, row_bytes, seconds)
        )


def _gather(memory: Bytes | None, row_bytes: int, seconds: float) -> float:
    if memory is None:
        raise OSError("there is no such memory here")
    rows = memory[: memory.size // row_bytes * row_bytes].reshape(-1, row_bytes)
    rng = np.random.default_rng(0)
    out = np.empty((_TOKENS * ROWS_PER_TOKEN, row_bytes), np.uint8)

    def work() -> float:
        np.take(rows, rng.integers(0, len(rows), len(out)), axis=0, out=out, mode="clip")
        return float(len(out))

    return rate(work, seconds)


def _touched(memory: Bytes) -> Bytes:
    """Give every page a frame: pages never written all share one of zeros."""
    memory[::_PAGE_BYTES] = 1
    return memory


def _huge_pages(num_bytes: int) -> Bytes:
    mapping = mmap.mmap(-1, num_bytes)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return _touched(np.frombuffer(mapping, np.uint8))


def _copies(num_bytes: int, seconds: float) -> Iterator[Reading]:
    """Copy memory by one thread and by torch's; bytes read and written both count."""
    source, target = (_touched(np.empty(num_bytes, np.uint8)) for _ in range(2))

    def by_one() -> float:
        np.copyto(target, source)
        return 2e-9 * num_bytes

    def by_all() -> float:
        torch.from_numpy(target).copy_(torch.from_numpy(source))
        return 2e-9 * num_bytes

    how = "bytes read and written"
    yield reading("copy, one thread", "GB/s", lambda: rate(by_one, seconds), how)
    threads = torch.get_num_threads()
    yield reading(f"copy, {threads} threads", "GB/s", lambda: rate(by_all, seconds), how)


class WkvPass:
    """One pass of 16 tokens over wkv in bfloat16 by torch, as the reference backend does it."""

    def __init__(self, num_outputs: int) -> None:
        block = torch.randn((min(512, num_outputs), IN_FEATURES)).to(torch.bfloat16)
        self._wkv = block.repeat(-(-num_outputs // len(block)), 1)[:num_outputs]
        self._rows = block[:16].clone()

    def __call__(self) -> float:
        """Run it; return 1."""
        torch.nn.functional.linear(self._rows, self._wkv)
        return 1.0


# ---- disk


def probe_disk(folder: Path, sizes: Sizes, seconds: float) -> Iterator[Reading]:
    """Write a scratch file, map it, read it past the page cache; the file is removed."""
    with _scratch(folder) as path:
        yield reading("disk write", "GB/s", lambda: _write(path, sizes.disk_bytes, 4 * seconds))
        if path.stat().st_size < _CHUNK_BYTES:
            return
        yield from gathers("file mapping", lambda: np.memmap(path, np.uint8, mode="r"), seconds)
        file, note = _open_direct(path)
        try:
            for pattern, readers in _READERS.items():
                unit = "reads/s" if pattern.startswith("random") else "GB/s"
                how = f"{note}, {readers} at a time"
                yield reading(f"disk {pattern}", unit, partial(_read, file, pattern, seconds), how)
        finally:
            os.close(file)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    handle, name = tempfile.mkstemp(prefix="engram-doctor-", dir=folder)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        os.unlink(name)


def _write(path: Path, most_bytes: int, seconds: float) -> float:
    """Write until the file is full or time is up; return GB/s, the flush counted."""
    room = os.statvfs(path)
    most_bytes = min(most_bytes, room.f_bavail * room.f_frsize // 4)
    piece = np.random.default_rng(0).integers(0, 256, _CHUNK_BYTES, np.uint8)
    begin, done = time.perf_counter(), 0
    with path.open("wb") as file:
        while done + len(piece) <= most_bytes and time.perf_counter() - begin < seconds:
            piece[:8] = np.frombuffer(done.to_bytes(8, "little"), np.uint8)  # no two alike
            done += file.write(piece.data)
        file.flush()
        os.fsync(file.fileno())
    return 1e-9 * done / (time.perf_counter() - begin)


def _open_direct(path: Path) -> tuple[int, str]:
    """Open past the page cache, or empty the cache where that is refused; say which."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        file = os.open(path, flags | os.O_DIRECT)
        os.preadv(file, [mmap.mmap(-1, _BLOCK_BYTES)], 0)
    except OSError:
        file = os.open(path, flags)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return file, "O_DIRECT refused; page cache dropped first"
    return file, "O_DIRECT"


def _read(file: int, pattern: str, seconds: float) -> float:
    """Read by several threads for so long; random blocks a second, or GB/s of a stream."""
    is_random = pattern.startswith("random")
    size = _BLOCK_BYTES if is_random else _CHUNK_BYTES
    num_blocks, readers = os.fstat(file).st_size // size, _READERS[pattern]
    end = time.perf_counter() + seconds

    def read(reader: int) -> int:
        rng, buffer, count = np.random.default_rng(reader), mmap.mmap(-1, size), 0
        while time.perf_counter() < end:
            block = int(rng.integers(num_blocks)) if is_random else count * readers + reader
            os.preadv(file, [buffer], block % num_blocks * size)
            count += 1
        return count

    begin = time.perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        count = sum(pool.map(read, range(readers)))
    elapsed = time.perf_counter() - begin
    return count / elapsed if is_random else 1e-9 * count * size / elapsed
