"""Rows on the device: every format by bits, ids and windows, ends of tables beyond 2^32 bytes."""

from __future__ import annotations

from ctypes import byref, pointer

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engram_core.backends import native as abi
from engram_core.backends.engram_v41 import hash_constants
from engram_core.errors import BadTensor
from engram_core.geometry import EngramHashTables
from engram_core.hashing import hash_windows
from engram_core.quant import requantize, row_format, to_bf16
from tests.gpu import counted
from tests.gpu.arrays import Arrays, same_bits
from tests.gpu.layers import hash_tables, random_windows

NAMES = sorted(abi.FORMATS)
FP8 = "E4M3_E8M0_32"


def table_of(arrays: Arrays, name: str, rows: NDArray[np.uint8], *, is_split: bool) -> abi.Table:
    head_dim = len(row_format(name).dequantize(rows[:1])[0])
    table = abi.Table(format=abi.FORMATS[name], head_dim=head_dim, num_rows=len(rows))
    if is_split:
        table.codes = arrays.up(np.ascontiguousarray(rows[:, :head_dim])).address
        table.scales = arrays.up(np.ascontiguousarray(rows[:, head_dim:])).address
    else:
        table.codes = arrays.up(rows).address
    return table


def gather(
    arrays: Arrays,
    table: abi.Table,
    ids: NDArray[np.int64],
    *,
    output: int = abi.OUT_BF16,
    row_bytes: int | None = None,
) -> torch.Tensor:
    width = row_bytes or table.head_dim * 2
    out = arrays.empty(ids.size * width)
    params = abi.Gather(
        table=pointer(table),
        hash_ids=arrays.up(ids).address,
        num_tokens=len(ids),
        num_cols=ids.shape[1],
        output=output,
        out=out.address,
        stream=arrays.stream.handle,
    )
    arrays.native.gather(byref(params))
    dtype = torch.uint8 if row_bytes else torch.bfloat16
    return arrays.down(out, dtype, (*ids.shape, width // dtype.itemsize))


def random_rows(name: str, count: int, head_dim: int, seed: int) -> NDArray[np.uint8]:
    width = row_format(name).row_bytes(head_dim)
    return np.random.default_rng(seed).integers(0, 256, (count, width), dtype=np.uint8)


def expected(name: str, rows: NDArray[np.uint8], ids: NDArray[np.int64]) -> torch.Tensor:
    values = to_bf16(row_format(name).dequantize(rows[ids.reshape(-1)]))
    return values.view(*ids.shape, -1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_rows_have_the_bits_of_the_definition(arrays: Arrays, name: str, num_tokens: int) -> None:
    rows = random_rows(name, 1001, 256, seed=num_tokens)
    ids = np.random.default_rng(1).integers(0, 1001, (num_tokens, 24))
    ids[0, :2], ids[-1, -1] = (0, 1000), 1000
    table = table_of(arrays, name, rows, is_split=False)
    assert same_bits(gather(arrays, table, ids), expected(name, rows, ids))


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [(n, d) for n in NAMES for d in (512, 64) if d % row_format(n).block_values == 0],
)
def test_other_row_lengths(arrays: Arrays, name: str, head_dim: int) -> None:
    rows = random_rows(name, 99, head_dim, seed=2)
    ids = np.random.default_rng(1).integers(0, 99, (40, 6))
    table = table_of(arrays, name, rows, is_split=False)
    assert same_bits(gather(arrays, table, ids), expected(name, rows, ids))


@pytest.mark.parametrize("name", [FP8, "E4M3_F32_32"])
@pytest.mark.parametrize("num_tokens", [3, 300])
def test_scales_apart_from_codes_give_the_same_rows(
    arrays: Arrays, name: str, num_tokens: int
) -> None:
    rows = random_rows(name, 500, 256, seed=3)
    ids = np.random.default_rng(1).integers(0, 500, (num_tokens, 24))
    table = table_of(arrays, name, rows, is_split=True)
    assert same_bits(gather(arrays, table, ids), expected(name, rows, ids))
    stored = gather(arrays, table, ids, output=abi.OUT_STORED, row_bytes=rows.shape[1])
    assert np.array_equal(stored.numpy(), rows[ids])


@pytest.mark.parametrize("name", NAMES)
def test_stored_rows_are_the_bytes_of_the_table(arrays: Arrays, name: str) -> None:
    rows = random_rows(name, 301, 256, seed=4)
    ids = np.random.default_rng(1).integers(0, 301, (17, 24))
    table = table_of(arrays, name, rows, is_split=False)
    got = gather(arrays, table, ids, output=abi.OUT_STORED, row_bytes=rows.shape[1])
    assert np.array_equal(got.numpy(), rows[ids])


def test_every_e4m3_code_meets_every_scale(arrays: Arrays) -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    rows = np.concatenate([codes, scales], axis=1)
    ids = np.arange(256)[:, None]
    table = table_of(arrays, FP8, rows, is_split=False)
    assert same_bits(gather(arrays, table, ids), expected(FP8, rows, ids))


@pytest.mark.parametrize("name", ["BF16", FP8, "Q2_K"])
@pytest.mark.parametrize("num_tokens", [2, 300])
def test_rows_are_requantised_as_the_official_model_does(
    arrays: Arrays, name: str, num_tokens: int
) -> None:
    rows = random_rows(name, 700, 256, seed=5)
    ids = np.random.default_rng(1).integers(0, 700, (num_tokens, 24))
    table = table_of(arrays, name, rows, is_split=False)
    got = gather(arrays, table, ids, output=abi.OUT_REQUANTIZED)
    assert same_bits(got, requantize(expected(name, rows, ids)))


@pytest.mark.parametrize("num_tokens", [1, 64, 65, 1000])
def test_windows_read_the_rows_their_hash_names(arrays: Arrays, num_tokens: int) -> None:
    tables = hash_tables(1000)
    windows = random_windows(num_tokens, seed=6)
    ids = hash_windows(windows, tables, [0])[:, 0]
    rows = random_rows("Q2_K", tables.table_rows[0], 256, seed=7)
    table = table_of(arrays, "Q2_K", rows, is_split=False)
    got = gather_windows(arrays, table, tables, windows)
    assert same_bits(got, expected("Q2_K", rows, ids))


def gather_windows(
    arrays: Arrays, table: abi.Table, tables: EngramHashTables, windows: NDArray[np.int32]
) -> torch.Tensor:
    constants = hash_constants(tables, 0)
    arrays.native.hash_prepare(byref(constants), table.num_rows)
    count, columns = len(windows), tables.n_hash_cols
    out = arrays.empty(count * columns * table.head_dim * 2)
    is_inline = count <= abi.INLINE_TOKENS
    params = abi.Gather(
        table=pointer(table),
        hash=pointer(constants),
        windows=windows.ctypes.data if is_inline else arrays.up(windows).address,
        num_tokens=count,
        num_cols=columns,
        out=out.address,
        stream=arrays.stream.handle,
    )
    arrays.native.gather(byref(params))
    return arrays.down(out, torch.bfloat16, (count, columns, table.head_dim))


@pytest.mark.parametrize("name", ["Q2_K", FP8, "Q3_K", "BF16"])
def test_rows_beyond_every_32_bit_bound(arrays: Arrays, name: str) -> None:
    """A whole table from a counter: every row asked for is recomputed on the CPU."""
    width = row_format(name).row_bytes(256)
    num_rows = (1 << 33) // width + 1000 if name != "Q2_K" else 384_006_168
    table_bytes = counted.on_device(num_rows * width)
    rng = np.random.default_rng(8)
    ids = {0, 1, num_rows - 2, num_rows - 1, *rng.integers(0, num_rows, 2000).tolist()}
    for bound in (1 << 31, 1 << 32, 1 << 33):
        ids |= {i for i in range(bound // width - 2, bound // width + 3) if i < num_rows}
    places = np.array(sorted(ids), dtype=np.int64)
    rows = counted.rows_on_host(places, width)
    table = abi.Table(
        format=abi.FORMATS[name], head_dim=256, num_rows=num_rows, codes=table_bytes.data_ptr()
    )
    got = gather(arrays, table, places[:, None])
    assert same_bits(got, expected(name, rows, np.arange(len(places))[:, None]))
    stored = gather(arrays, table, places[:, None], output=abi.OUT_STORED, row_bytes=width)
    assert np.array_equal(stored.numpy()[:, 0], rows)
    del table_bytes
    torch.cuda.empty_cache()


def test_an_output_beyond_2_to_the_32_bytes(arrays: Arrays) -> None:
    rows = random_rows("BF16", 64, 256, seed=9)
    count = ((1 << 32) // 512 + 4096) // 24
    ids = np.random.default_rng(1).integers(0, 64, (count, 24))
    table = table_of(arrays, "BF16", rows, is_split=False)
    out = arrays.empty(count * 24 * 512)
    params = abi.Gather(
        table=pointer(table),
        hash_ids=arrays.up(ids).address,
        num_tokens=count,
        num_cols=24,
        out=out.address,
        stream=arrays.stream.handle,
    )
    arrays.native.gather(byref(params))
    tail = arrays.down(out.address + (count - 100) * 24 * 512, torch.bfloat16, (100, 24, 256))
    assert same_bits(tail, expected("BF16", rows, ids[-100:]))


def test_no_tokens_are_no_launch(arrays: Arrays) -> None:
    table = table_of(arrays, "BF16", random_rows("BF16", 4, 256, seed=1), is_split=False)
    assert gather(arrays, table, np.empty((0, 24), np.int64)).shape == (0, 24, 256)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("an unknown format", {"format": 99}),
        ("half a quant block", {"format": abi.FORMATS["Q2_K"], "head_dim": 128}),
        ("scales of a format that has none", {"scales": 16}),
    ],
)
def test_a_table_that_cannot_be_is_refused(
    arrays: Arrays, name: str, change: dict[str, int]
) -> None:
    table = table_of(arrays, "BF16", random_rows("BF16", 4, 256, seed=1), is_split=False)
    for field, value in change.items():
        setattr(table, field, value)
    with pytest.raises(BadTensor, match="gather: expected"):
        gather(arrays, table, np.zeros((1, 24), np.int64))


def test_a_bucket_outside_the_table_is_refused(arrays: Arrays) -> None:
    constants = hash_constants(hash_tables(1000), 0)
    with pytest.raises(BadTensor, match="bucket of column 23"):
        arrays.native.hash_prepare(byref(constants), hash_tables(1000).table_rows[0] - 1)
