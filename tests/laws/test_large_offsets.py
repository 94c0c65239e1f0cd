"""Rows at both sides of every edge where a 32-bit product would break, by an independent read.

The files are sparse: gigabytes long, kilobytes on disk.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from engram_core.errors import CheckpointError, RowOutOfRange
from engram_core.tables import DiskTable, Part, TableSource

START = 4096


def edges(row_bytes: int, num_rows: int) -> list[int]:
    """Rows below, across and above each multiple of 2^31 bytes, and both ends of the table."""
    rows = {0, 1, num_rows - 2, num_rows - 1}
    for edge in range(2**31, num_rows * row_bytes, 2**31):
        rows |= {(edge - START * k) // row_bytes + d for k in (0, 1) for d in (-1, 0, 1)}
    return sorted(r for r in rows if 0 <= r < num_rows)


def row_of(index: int, row_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(index).integers(1, 256, row_bytes, np.uint8)


@pytest.mark.parametrize(
    ("encoding", "head_dim", "widths"),
    [("Q2_K", 256, (84,)), ("Q3_K", 256, (110,)), ("E4M3_E8M0_32", 256, (256, 8))],
)
def test_rows_beyond_32_bits(
    tmp_path: Path, encoding: str, head_dim: int, widths: tuple[int, ...]
) -> None:
    num_rows = (5 * 2**31) // widths[0]
    ids = np.array(edges(widths[0], num_rows))
    parts = []
    for i, width in enumerate(widths):
        path = tmp_path / f"part-{i}"
        with path.open("wb") as file:
            for row in ids.tolist():
                os.pwrite(file.fileno(), row_of(row * 8 + i, width).tobytes(), START + row * width)
            os.truncate(file.fileno(), START + num_rows * width)
        parts.append(Part(path, START, width))
    table = DiskTable(TableSource(encoding, num_rows, sum(widths), tuple(parts)), head_dim)
    stored = table.gather_stored(ids)
    for row, got in zip(ids.tolist(), stored, strict=True):
        expected = [row_of(row * 8 + i, width) for i, width in enumerate(widths)]
        assert np.array_equal(got, np.concatenate(expected)), row
    assert len(ids) >= 16
    with pytest.raises(RowOutOfRange):
        table.gather_stored(np.array([num_rows]))
    table.close()


def test_file_one_byte_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"")
    os.truncate(path, START + 84 * 10 - 1)
    source = TableSource("Q2_K", 10, 84, (Part(path, START, 84),))
    with pytest.raises(CheckpointError):
        DiskTable(source, 256)


def test_file_that_shrinks_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "shrinks"
    path.write_bytes(bytes(START + 84 * 10))
    source = TableSource("Q2_K", 10, 84, (Part(path, START, 84),))
    table = DiskTable(source, 256)
    os.truncate(path, START + 84 * 5)
    with pytest.raises(CheckpointError):
        table.gather_stored(np.array([7]))
    assert table.gather_stored(np.array([4])).shape == (1, 84)
    table.close()
