"""SHA-256 of a file by pieces, kept in the file itself: its last tensor covers all before it.

The tensor `engram.manifest` is I8 [32, n]: row i is the digest of the i-th piece of
`engram.manifest_bytes` bytes from the start of the file; the last piece ends where the tensor
begins. So header, data and padding are all covered, and nothing but the file is needed.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from engram_core.checkpoint.files import RegularFile, refusal
from engram_core.checkpoint.gguf import GgufTensor, read_gguf
from engram_core.checkpoint.layouts import GGUF_MANIFEST
from engram_core.progress import Progress

PIECE_BYTES = 64 << 20
"""Size of a piece: large enough to read at full speed, small enough to say where."""

DIGEST_BYTES = 32
_LEAST_PIECE, _LARGEST_PIECE = 4_096, 1 << 30
_READ_BYTES = 4 << 20
_I8 = 24


@dataclass(frozen=True)
class ManifestCheck:
    """num_pieces: how many were compared; bad: which of them differ; piece_bytes: of each."""

    num_pieces: int
    piece_bytes: int
    bad: tuple[int, ...]


def num_pieces(num_bytes: int, piece_bytes: int) -> int:
    """How many pieces cover `num_bytes`."""
    return -(-num_bytes // piece_bytes)


def check_manifest(path: Path, progress: Progress | None = None) -> ManifestCheck | None:
    """Hash a file on all cores and compare it with its manifest; None if it has none.

    Raises: CheckpointError for a manifest that does not fit the file.
    """
    file = read_gguf(path)
    tensor = file.tensors.get(GGUF_MANIFEST)
    if tensor is None:
        return None
    sizes = [v for key, v in file.metadata.items() if key.endswith("engram.manifest_bytes")]
    count, piece_bytes = _checked(path, tensor, sizes[0] if len(sizes) == 1 else None)
    report = progress or (lambda *_: None)
    with RegularFile(path) as source, ThreadPoolExecutor(os.cpu_count()) as pool:
        expected = source.read(tensor.offset, count * DIGEST_BYTES, GGUF_MANIFEST)

        def is_bad(piece: int) -> bool:
            begin = piece * piece_bytes
            digest = _digest(source, begin, min(begin + piece_bytes, tensor.offset))
            return digest != expected[piece * DIGEST_BYTES : (piece + 1) * DIGEST_BYTES]

        bad = []
        for piece, differs in enumerate(pool.map(is_bad, range(count))):
            report("manifest", min((piece + 1) * piece_bytes, tensor.offset), tensor.offset)
            bad += [piece] * differs
    return ManifestCheck(count, piece_bytes, tuple(bad))


def _checked(path: Path, tensor: GgufTensor, piece_bytes: object) -> tuple[int, int]:
    """Number and size of the pieces, once they fit the file."""
    valid = type(piece_bytes) is int and _LEAST_PIECE <= piece_bytes <= _LARGEST_PIECE
    if not valid:
        expected = f"{_LEAST_PIECE} to {_LARGEST_PIECE} bytes"
        raise refusal(path, "key 'engram.manifest_bytes'", expected=expected, got=piece_bytes)
    count = num_pieces(tensor.offset, int(piece_bytes))  # type: ignore[call-overload]
    if tensor.type_id != _I8 or tensor.shape != (count, DIGEST_BYTES):
        where, expected = f"tensor {GGUF_MANIFEST!r}", f"I8 [{count}, {DIGEST_BYTES}]"
        got = f"{tensor.type_name} {list(tensor.shape)}"
        raise refusal(path, where, expected=expected, got=got)
    return count, int(piece_bytes)  # type: ignore[call-overload]


def _digest(source: RegularFile, begin: int, end: int) -> bytes:
    digest = hashlib.sha256()
    for start in range(begin, end, _READ_BYTES):
        digest.update(source.read(start, min(_READ_BYTES, end - start), "manifest"))
    return digest.digest()
