"""Regular files only, read by position, never past their end; and the wording of refusals."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Protocol, Self

from engram_core.errors import CheckpointError

_CHUNK_BYTES = 1 << 20
_MAX_SHOWN = 120


def refusal(
    path: Path, where: str, *, expected: object, got: object, advice: str = ""
) -> CheckpointError:
    """Make the error for one fault: path, tensor or key, expected, got, and what to do."""
    text = f"{path}: {where}: expected {expected}, got {got}"
    return CheckpointError(
        f"{text}; {advice}" if advice else text,
        expected=expected,
        got=got,
        path=str(path),
        where=where,
    )


class Named(Protocol):
    """A tensor of either format, before its type is looked at."""

    @property
    def name(self) -> str:
        """As the file has it."""

    @property
    def path(self) -> Path:
        """Of the file it lies in."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Outermost dim first."""


def tensor_refusal(
    tensor: Named, *, expected: object, got: object, advice: str = ""
) -> CheckpointError:
    """Make the error for one fault of a tensor."""
    where = f"tensor {shown(tensor.name)}"
    return refusal(tensor.path, where, expected=expected, got=got, advice=advice)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to a refusal of values that were read from it."""
    try:
        yield
    except CheckpointError as error:
        if "path" in error.details:
            raise
        raise CheckpointError(
            f"{path}: {error.message}",
            expected=error.expected,
            got=error.got,
            path=str(path),
            **error.details,
        ) from None


def shown(name: object) -> str:
    """Quote a name that came from a file: no control characters, bounded length."""
    text = repr(name)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


class RegularFile:
    """A regular file open for reading by position. Links are followed; devices and FIFOs refused.

    The size is taken once, at open; every read is checked against it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # O_NONBLOCK: opening a FIFO must not wait for its writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise refusal(path, "file", expected="a readable file", got=reason) from None
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise refusal(path, "file", expected="a regular file", got=_kind(status.st_mode))
        self.size = status.st_size

    def read(self, offset: int, num_bytes: int, what: str) -> bytes:
        """Read exactly `num_bytes` at `offset`. Raises CheckpointError if the file ends before."""
        end = offset + num_bytes
        if offset < 0 or num_bytes < 0 or end > self.size:
            raise refusal(
                self.path, what, expected=f"{end} bytes", got=f"a file of {self.size} bytes"
            )
        pieces = []
        while offset < end:
            piece = os.pread(self._fd, end - offset, offset)
            if not piece:
                raise refusal(self.path, what, expected=f"{end} bytes", got="a file that shrank")
            pieces.append(piece)
            offset += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_into(self, offset: int, buffer: memoryview, what: str) -> None:
        """Fill `buffer` from `offset` on, and drop what was read from the page cache.

        For tables: the cached copy would compete with the resident one for the same memory.
        """
        begin, end = offset, offset + len(buffer)
        while buffer:
            count = os.preadv(self._fd, [buffer], offset)
            if count == 0:
                got = f"a file that ends at {offset}"
                raise refusal(self.path, what, expected=f"{end} bytes", got=got)
            buffer, offset = buffer[count:], offset + count
        os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_DONTNEED)

    def read_all(self, limit: int) -> bytes:
        """Read the whole file. Raises CheckpointError above `limit` bytes."""
        if self.size > limit:
            expected = f"at most {limit} bytes"
            raise refusal(self.path, "file size", expected=expected, got=self.size)
        return self.read(0, self.size, "file size")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)


class Cursor:
    """Little-endian reads in order from the start of a file, through a buffer of 1 MiB.

    `limit` bounds how far it may go, whatever the counts in the file say.
    """

    def __init__(self, file: RegularFile, limit: int) -> None:
        self._file = file
        self._limit = min(limit, file.size)
        self._truncated = file.size <= limit
        self._start = 0  # of the buffer, in the file
        self._at = 0  # in the buffer
        self._buffer = b""
        self.num_skipped = 0  # strings, in all

    @property
    def position(self) -> int:
        """Offset in the file of the next byte."""
        return self._start + self._at

    def take(self, num_bytes: int) -> bytes:
        """Read the next `num_bytes`."""
        self._fill(num_bytes)
        piece = self._buffer[self._at : self._at + num_bytes]
        self._at += num_bytes
        return piece

    def u32(self) -> int:
        """Read an unsigned 32-bit integer."""
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        """Read an unsigned 64-bit integer."""
        return int.from_bytes(self.take(8), "little")

    def skip(self, num_bytes: int) -> None:
        """Step over `num_bytes` without reading them."""
        self._check(num_bytes)
        if self._at + num_bytes <= len(self._buffer):
            self._at += num_bytes
        else:
            self._start, self._at, self._buffer = self.position + num_bytes, 0, b""

    def skip_strings(self, count: int) -> None:
        """Step over `count` strings (u64 length, bytes): a tokenizer holds 129,280 of them."""
        self.num_skipped += count
        length_at = struct.Struct("<Q").unpack_from
        while count:
            self._fill(8)
            buffer, at = self._buffer, self._at
            last = len(buffer) - 8
            while count and at <= last:  # the hot loop: whole buffer, no calls of ours
                at += 8 + length_at(buffer, at)[0]
                count -= 1
            beyond = at - len(buffer)
            self._at = min(at, len(buffer))
            if beyond > 0:
                self.skip(beyond)

    def _fill(self, num_bytes: int) -> None:
        """Have `num_bytes` in the buffer."""
        if self._at + num_bytes <= len(self._buffer):
            return
        self._check(num_bytes)
        start = self.position
        length = min(max(num_bytes, _CHUNK_BYTES), self._limit - start)
        self._buffer = self._file.read(start, length, "header")
        self._start, self._at = start, 0

    def _check(self, num_bytes: int) -> None:
        end = self.position + num_bytes
        if end <= self._limit:
            return
        if self._truncated:
            got = f"a file of {self._file.size} bytes that ends inside its header"
            raise refusal(self._file.path, "header", expected=f"{end} bytes", got=got)
        raise refusal(
            self._file.path, "header", expected=f"at most {self._limit} bytes", got=f"{end} or more"
        )


def inside(folder: Path, name: object) -> Path:
    """Resolve a file name that came out of a file: it stays in `folder`, one level deep.

    The file itself may be a link (a download cache stores shards that way).
    """
    plain = (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and "\0" not in name
        and "\\" not in name
        and PurePosixPath(name).name == name
    )
    if not plain:
        raise refusal(folder, "file name", expected="a plain file name", got=shown(name))
    return folder / str(name)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")
