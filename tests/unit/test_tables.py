"""Tables: the right bytes at any offset, out-of-range ids refused before anything is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engram_core.errors import BadTensor, CheckpointError, RowOutOfRange
from engram_core.quant import ROW264, row_format, to_bf16
from engram_core.tables import (
    DiskTable,
    HostTable,
    ParallelEngramEmbedding,
    Part,
    Table,
    TableSource,
    shard_range,
)

RNG = np.random.default_rng(0)
STORED = RNG.integers(0, 256, (864, 264), dtype=np.uint8)
SIGNED_ZEROS = np.concatenate([np.full(256, 0x80), np.full(8, 127)]).astype(np.uint8)


def host(rows: NDArray[np.uint8] = STORED) -> HostTable:
    return HostTable(ROW264, 256, [rows[:, :256], rows[:, 256:]])


def on_disk(folder: Path, rows: NDArray[np.uint8] = STORED) -> TableSource:
    """Codes and scales in one file, at odd offsets, like the official shards."""
    path = folder / "table"
    codes, scales = rows[:, :256].tobytes(), rows[:, 256:].tobytes()
    path.write_bytes(b"head" + codes + b"between" + scales)
    parts = (Part(path, 4, 256), Part(path, 4 + len(codes) + 7, 8))
    return TableSource(ROW264, len(rows), 264, parts)


@pytest.fixture(params=["host", "disk"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    opened = host() if request.param == "host" else DiskTable(on_disk(tmp_path), 256)
    yield opened
    opened.close()


IDS = [
    np.array([], dtype=np.int64),
    np.array([0]),
    np.array([863]),
    np.array([5, 5, 863, 0, 5]),
    np.arange(864),
    np.arange(863, -1, -1),
    RNG.integers(0, 864, 5000),
]


@pytest.mark.parametrize("ids", IDS, ids=len)
def test_rows_come_as_stored_in_the_order_asked_for(table: Table, ids: Any) -> None:
    assert (table.gather_stored(ids) == STORED[ids]).all()
    assert table.gather_stored(ids).shape == (len(ids), 264)


@pytest.mark.parametrize("ids", IDS, ids=len)
def test_rows_come_dequantised_and_rounded(table: Table, ids: Any) -> None:
    expected = to_bf16(row_format(ROW264).dequantize(STORED[ids]))
    assert torch.equal(table.gather(ids).view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("bad", [-1, 864, 2**31, 2**63 - 1, -(2**63)])
def test_an_id_outside_the_table_is_refused_by_index_and_value(table: Table, bad: int) -> None:
    for gather in (table.gather, table.gather_stored):
        with pytest.raises(RowOutOfRange, match=rf"row id {bad} \(index 1\): expected 0\.\.863"):
            gather(np.array([0, bad]))


def test_a_refused_gather_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = DiskTable(on_disk(tmp_path), 256)
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("read"))
    with pytest.raises(RowOutOfRange):
        table.gather(np.array([0, 864]))
    table.close()


@pytest.mark.parametrize("ids", [np.zeros((2, 2), np.int64), np.zeros(2, np.int32), np.zeros(2)])
def test_ids_of_another_form_are_refused(table: Table, ids: Any) -> None:
    with pytest.raises(BadTensor, match="row ids: expected int64"):
        table.gather(ids)


@pytest.mark.parametrize(
    ("encoding", "edge"), [("Q2_K", 25_565_281), ("Q3_K", 19_522_578), (ROW264, 8_388_607)]
)
@pytest.mark.parametrize("power", [31, 32, 33])
def test_rows_around_multiples_of_2_to_the_31_are_read_whole(
    tmp_path: Path, encoding: str, edge: int, power: int
) -> None:
    width = row_format(encoding).row_bytes(256)
    first = 2**power // width - 1
    if power == 31 and encoding != ROW264:
        assert first <= edge <= first + 2
    stored = RNG.integers(0, 256, (4, width), dtype=np.uint8)
    with open(tmp_path / "table", "wb") as file:  # sparse: only these rows take space
        file.seek(first * width)
        file.write(stored.tobytes())
    source = TableSource(encoding, first + 4, width, (Part(tmp_path / "table", 0, width),))
    table = DiskTable(source, 256)
    assert (table.gather_stored(np.arange(first, first + 4)) == stored).all()
    assert (table.gather_stored(np.array([first + 3, 0])) == [stored[3], 0 * stored[0]]).all()
    table.close()


@pytest.mark.parametrize("missing", [1, 8, 8 * 864])
def test_a_file_shorter_than_its_table_is_refused_at_open(tmp_path: Path, missing: int) -> None:
    source = on_disk(tmp_path)
    path = source.parts[0].path
    os.truncate(path, path.stat().st_size - missing)
    with pytest.raises(CheckpointError, match=r"table: 864 rows end at byte \d+, the file has"):
        DiskTable(source, 256)


@pytest.mark.parametrize("num_ids", [1, 400])
def test_a_file_that_shrinks_later_is_an_error_naming_the_offset(
    tmp_path: Path, num_ids: int
) -> None:
    source = on_disk(tmp_path)
    table = DiskTable(source, 256)
    os.truncate(source.parts[0].path, 4 + 256 * 100)
    with pytest.raises(CheckpointError, match=r"table: expected 256 more bytes at offset \d+"):
        table.gather(np.arange(863, 863 - 2 * num_ids, -2))
    table.close()


def test_a_short_read_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, preadv = DiskTable(on_disk(tmp_path), 256), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, b, at: preadv(file, [b[0][:100]], at))
    assert (table.gather_stored(np.arange(10)) == STORED[:10]).all()
    table.close()


def test_neighbours_are_read_with_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, preadv, calls = DiskTable(on_disk(tmp_path), 256), os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda *a: calls.append(a) or preadv(*a))
    table.gather_stored(np.array([12, 10, 11, 40, 11]))
    assert len(calls) == 2 * 2  # two runs, codes and scales
    table.close()


def test_parts_that_do_not_make_up_a_row_are_refused(tmp_path: Path) -> None:
    source = on_disk(tmp_path)
    with pytest.raises(CheckpointError, match=r"expected 264 bytes, got parts of \[256\]"):
        DiskTable(TableSource(ROW264, 864, 264, source.parts[:1]), 256)
    with pytest.raises(BadTensor, match="expected uint8"):
        HostTable(ROW264, 256, [STORED[:, :256]])


def test_closing_a_table_closes_its_files(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    DiskTable(on_disk(tmp_path), 256).close()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("rows", "world"), [(384_016_682, n) for n in (1, 2, 3, 4, 8)] + [(864, 5)]
)
def test_shards_cover_every_row_once(rows: int, world: int) -> None:
    shards = [shard_range(rows, rank, world) for rank in range(world)]
    assert [s.start for s in shards[1:]] == [s.stop for s in shards[:-1]]
    assert (shards[0].start, shards[-1].stop) == (0, rows)
    assert {len(s) for s in shards[:-1]} <= {-(-rows // world)}


@pytest.mark.parametrize(
    ("rows", "rank", "world"), [(5, 0, 4), (5, 0, 6), (5, 2, 2), (5, -1, 2), (5, 0, 0)]
)
def test_a_rank_without_rows_is_refused(rows: int, rank: int, world: int) -> None:
    with pytest.raises(BadTensor, match="rows cannot be sharded"):
        shard_range(rows, rank, world)


def sharded(rows: NDArray[np.uint8], world: int, ids: torch.Tensor) -> torch.Tensor:
    """Run every rank and sum the bytes, as the collective does."""
    total = torch.zeros((*ids.shape, 256), dtype=torch.bfloat16)
    for rank in range(world):
        part = shard_range(len(rows), rank, world)
        shard = ParallelEngramEmbedding(host(rows[part.start : part.stop]), len(rows), rank, world)
        total.view(torch.uint8).add_(shard(ids).view(torch.uint8))
    return total


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_sharded_table_answers_like_a_whole_one(world: int) -> None:
    ids = torch.tensor([[172, 173, 345], [346, 863, 0]])
    whole = host().gather(ids.reshape(-1).numpy()).reshape(2, 3, 256)
    assert torch.equal(sharded(STORED, world, ids).view(torch.int16), whole.view(torch.int16))


def test_a_sharded_table_keeps_negative_zeros() -> None:
    rows = np.tile(SIGNED_ZEROS, (4, 1))
    assert sharded(rows, 2, torch.tensor([0, 3])).signbit().all()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("bad", [864, -1])
def test_an_id_outside_the_whole_table_is_refused_at_every_world_size(world: int, bad: int) -> None:
    part = shard_range(864, 0, world)
    shard = ParallelEngramEmbedding(host(STORED[: part.stop]), 864, 0, world)
    with pytest.raises(RowOutOfRange, match=r"expected 0\.\.863"):
        shard(torch.tensor([0, bad]))


def test_rows_of_other_ranks_are_zero_until_they_are_summed() -> None:
    seen: list[torch.Tensor] = []
    reduce: Callable[[torch.Tensor], object] = seen.append
    shard = ParallelEngramEmbedding(host(STORED[432:]), 864, 1, 2, reduce)
    values = shard(torch.tensor([0, 432]))
    assert not values[0].any()
    assert values[1].view(torch.int16).any()
    assert [(t.dtype, t.data_ptr()) for t in seen] == [(torch.uint8, values.data_ptr())]


def test_a_shard_of_another_size_is_refused() -> None:
    with pytest.raises(BadTensor, match="rank 1 of 2: expected 432 rows, got 864"):
        ParallelEngramEmbedding(host(), 864, 1, 2)


def test_no_ids_give_no_rows() -> None:
    ids = torch.empty((0, 24), dtype=torch.int64)
    assert ParallelEngramEmbedding(host(), 864)(ids).shape == (0, 24, 256)
