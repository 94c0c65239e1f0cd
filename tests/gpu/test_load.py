"""Loading: file -> stages -> device, by bytes; refusals."""

from __future__ import annotations

from ctypes import byref
from pathlib import Path

import numpy as np
import pytest
import torch

from engram_core.backends import native as abi
from engram_core.errors import CheckpointError, EngramError
from tests.gpu.arrays import Arrays

STAGE = 1 << 20


def load(
    arrays: Arrays, path: Path, offset: int, num_bytes: int, progress: object = None
) -> tuple[int, list[int]]:
    """Load a piece of a file; returns the address and what progress heard."""
    heard: list[int] = []

    def listen(_: object, done: int) -> int:
        heard.append(done)
        return int(progress is not None)

    out = arrays.empty(num_bytes)
    params = abi.Load(
        path=str(path).encode(),
        offset=offset,
        num_bytes=num_bytes,
        to=out.address,
        stages=arrays.pinned(2 * STAGE).address,
        stage_bytes=STAGE,
        num_threads=4,
        keep_pages=0,
        progress=abi.PROGRESS(listen),
        stream=arrays.stream.handle,
    )
    arrays.native.load(byref(params))
    return out.address, heard


@pytest.mark.parametrize("num_bytes", [0, 1, STAGE - 1, STAGE, STAGE + 1, 7 * STAGE + 13])
def test_a_piece_of_a_file_arrives_whole(arrays: Arrays, tmp_path: Path, num_bytes: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, 8 * STAGE, dtype=np.uint8)
    path = tmp_path / "file"
    path.write_bytes(data.tobytes())
    address, heard = load(arrays, path, 17, num_bytes)
    got = arrays.down(address, torch.uint8, (num_bytes,))
    assert np.array_equal(got.numpy(), data[17 : 17 + num_bytes])
    assert heard == [min(STAGE * (i + 1), num_bytes) for i in range(-(-num_bytes // STAGE))]


def test_a_file_that_ends_early_is_refused(arrays: Arrays, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"x" * STAGE)
    with pytest.raises(CheckpointError, match="ends early"):
        load(arrays, path, 1, STAGE)


def test_a_file_that_is_not_there_is_refused(arrays: Arrays, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        load(arrays, tmp_path / "none", 0, 1)


def test_progress_can_stop_a_load(arrays: Arrays, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (2 * STAGE))
    with pytest.raises(EngramError, match="cancelled after 1048576 bytes"):
        load(arrays, path, 0, 2 * STAGE, progress=True)


def test_a_copy_from_pageable_memory_is_refused(arrays: Arrays) -> None:
    data = np.zeros(16, np.uint8)
    to = arrays.empty(16)
    with pytest.raises(EngramError, match="pageable"):
        arrays.native.copy(to.address, data.ctypes.data, 16, arrays.stream.handle)
