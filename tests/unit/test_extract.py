"""`extract`: bytes, manifest, errors measured, nothing left behind, memory bounded."""

from __future__ import annotations

import hashlib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from numpy.typing import NDArray

from engram_core.checkpoint import open_checkpoint
from engram_core.checkpoint.dense import read_stored_rows
from engram_core.checkpoint.manifest import check_manifest
from engram_core.errors import CheckpointError, SchemaError
from engram_core.quant import row_format
from engram_core.tools import extract as extract_module
from engram_core.tools.extract import extract
from engram_core.tools.row_stream import RowErrors, _errors, fill
from engram_core.tools.synth import FORMATS, synth
from engram_core.tools.verify import verify

ALL = [(fmt, quant) for fmt, quants in FORMATS.items() for quant in quants]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    synth(tmp_path / "c", preset="tiny", fmt="safetensors", quant="FP8", seed=1)
    return tmp_path / "c"


@pytest.mark.parametrize(("fmt", "quant"), ALL)
def test_every_type_is_kept_as_stored(tmp_path: Path, fmt: str, quant: str) -> None:
    synth(tmp_path / "c", preset="tiny", fmt=fmt, quant=quant, seed=1)
    made = extract(tmp_path / "c", tmp_path / "out.gguf", piece_bytes=5_000)
    assert made.identity == open_checkpoint(tmp_path / "c").identity
    assert made.errors == ()
    assert verify(tmp_path / "out.gguf", placement="disk").ok


def test_gguf_package_reads_what_is_written(tmp_path: Path, source: Path) -> None:
    reader = GGUFReader(extract(source, tmp_path / "out.gguf").path)
    names = [tensor.name for tensor in reader.tensors]
    stems = ("embd", "wkv", "q", "k", "wkv_scale")
    expected = [f"blk.{i}.engram_{stem}.weight" for i in (1, 14) for stem in stems]
    assert names == [*expected, "engram.manifest"]
    encoding = reader.get_field("deepseek41.engram.encoding")
    assert encoding is not None
    assert encoding.contents() == "e4m3_e8m0_32_row264"


@pytest.mark.parametrize("piece_bytes", [4_096, 10_007, 1 << 26])
def test_manifest_is_the_sha256_of_each_piece(
    tmp_path: Path, source: Path, piece_bytes: int
) -> None:
    path = extract(source, tmp_path / "out.gguf", piece_bytes=piece_bytes).path
    tensor = next(t for t in GGUFReader(path).tensors if t.name == "engram.manifest")
    raw = path.read_bytes()[: tensor.data_offset]
    pieces = [raw[i : i + piece_bytes] for i in range(0, len(raw), piece_bytes)]
    expected = b"".join(hashlib.sha256(piece).digest() for piece in pieces)
    assert tensor.data.tobytes() == expected
    found = check_manifest(path)
    assert found is not None
    assert (found.num_pieces, found.bad) == (len(pieces), ())


@pytest.mark.parametrize("where", [0.0, 0.3, 0.999])
def test_one_changed_bit_is_found_in_its_piece(tmp_path: Path, source: Path, where: float) -> None:
    path = extract(source, tmp_path / "out.gguf", piece_bytes=10_000).path
    raw = bytearray(path.read_bytes())
    end = next(t for t in GGUFReader(path).tensors if t.name == "engram.manifest").data_offset
    at = int(where * (end - 1)) or raw.index(b"embedding_length")  # a key nobody asks for
    raw[at] ^= 1
    path.write_bytes(raw)
    found = check_manifest(path)
    assert found is not None
    assert found.bad == (at // 10_000,)


def test_verify_says_that_a_byte_changed(tmp_path: Path, source: Path) -> None:
    path = extract(source, tmp_path / "out.gguf", piece_bytes=10_000).path
    part = open_checkpoint(path).layers[1].table.parts[0]
    with open(path, "r+b") as file:
        file.seek(part.offset + part.row_bytes + 3)  # row 1: the identity does not sample it
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 8]))
    result = verify(path, placement="disk")
    assert not result.ok
    assert not any(check.outside for check in result.checks)
    assert result.as_json()["manifest"]["bad"] == (part.offset // 10_000,)


def test_changed_row_that_is_sampled_is_refused_at_open(tmp_path: Path, source: Path) -> None:
    path = extract(source, tmp_path / "out.gguf").path
    part = open_checkpoint(path).layers[0].table.parts[0]
    with open(path, "r+b") as file:
        file.seek(part.offset)
        file.write(b"\x11\x22")
    with pytest.raises(CheckpointError, match=r"key 'identity'.*extract it again"):
        open_checkpoint(path)


@pytest.mark.parametrize("quant", ["FP8", "BF16", "Q8_0"])
def test_error_is_that_of_all_rows_whatever_the_pieces(tmp_path: Path, quant: str) -> None:
    synth(tmp_path / "c", preset="tiny", fmt="gguf", quant="F32", seed=1)
    found = [
        extract(tmp_path / "c", tmp_path / f"{size}.gguf", quant=quant, piece_bytes=size)
        for size in (4_096, 7_001, 1 << 26)
    ]
    tables = []
    for path in (tmp_path / "c", found[0].path):
        table = open_checkpoint(path).layers[1].table
        rows = read_stored_rows(table, range(table.num_rows))
        tables.append(row_format(table.encoding).dequantize(rows))
    expected = float(np.sqrt(np.square((tables[1] - tables[0]).astype(np.float64)).mean()))
    assert found[0].errors[1].rms == pytest.approx(expected, rel=1e-5)
    for made in found[1:]:
        assert made.errors[1].rms == pytest.approx(found[0].errors[1].rms, rel=1e-12)
    assert found[0].identity == found[1].identity == found[2].identity


def test_progress_rises_to_the_whole(tmp_path: Path, source: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    extract(
        source,
        tmp_path / "out.gguf",
        piece_bytes=50_000,
        progress=lambda *args: seen.append(args),
    )
    assert {what for what, _, _ in seen} == {"extract"}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == seen[-1][2]


def test_failure_leaves_nothing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(extract_module, "write_fully", fail)
    with pytest.raises(OSError, match="disk full"):
        extract(source, tmp_path / "new" / "out.gguf")
    assert list((tmp_path / "new").iterdir()) == []


def test_output_in_use_is_refused_and_kept(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out.gguf").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="a path not in use"):
        extract(source, tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == b"mine"


def test_disk_without_room_is_refused_before_writing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(CheckpointError, match="bytes free, got 1000"):
        extract(source, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_unknown_quant_is_refused(tmp_path: Path, source: Path) -> None:
    with pytest.raises(SchemaError, match="quant: expected FP8"):
        extract(source, tmp_path / "out.gguf", quant="Q9")


def test_memory_is_that_of_the_pieces(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker holds one piece; here 2 workers and pieces of 64 KiB of a file of 0.7 MB."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("engram_core.tools.row_stream._PIECE_BYTES", 16 << 10)
    peaks = []

    def progress(*_: object) -> None:
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()

    tracemalloc.start()
    try:
        extract(source, tmp_path / "out.gguf", piece_bytes=64 << 10, progress=progress)
    finally:
        tracemalloc.stop()
    assert max(peaks[1:]) - min(peaks[1:]) < 4 * (64 << 10)


class Numbered:
    """Rows whose bytes are their own offsets, modulo 251."""

    row_bytes = 7
    piece_rows = 3

    def read_into(self, out: NDArray[np.uint8], first: int) -> RowErrors:
        offsets = np.arange(first * 7, (first + len(out)) * 7) % 251
        out[:] = offsets.reshape(len(out), 7)
        return RowErrors(count=len(out))


def test_any_cut_of_a_tensor_is_filled_alike() -> None:
    whole = (np.arange(700) % 251).astype(np.uint8)
    for begin in (0, 1, 6, 7, 8, 693):
        for length in (0, 1, 2, 5, 6, 7, 8, 40):
            out = np.zeros(min(length, 700 - begin), np.uint8)
            fill(Numbered(), out, begin)
            assert np.array_equal(out, whole[begin : begin + len(out)])


def test_cut_rows_are_counted_once() -> None:
    counts = [
        sum(fill(Numbered(), np.zeros(min(size, 700 - at), np.uint8), at).count
            for at in range(0, 700, size))
        for size in (1, 5, 7, 10, 100, 699)
    ]  # fmt: skip
    assert counts == [100] * 6


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_what_is_not_finite_is_left_out_of_the_error(bad: float) -> None:
    values, encoded = np.ones((4, 32), np.float32), np.full((4, 32), 1.5, np.float32)
    values[1, 5] = encoded[1, 5] = bad
    errors = _errors(values, encoded)
    assert errors.error == pytest.approx(0.25 * 127)
    assert errors.count == (127 if not np.isfinite(bad) else 128)
