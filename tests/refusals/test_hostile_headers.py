"""Headers made to hurt: mutated at random, and built to be as costly as their bytes allow.

Each is opened or refused; nothing crashes, hangs, or allocates more than 100 MB. FUZZ_SEEDS sets
how many mutants there are of each kind of file.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from engram_core.checkpoint import open_checkpoint
from engram_core.checkpoint.manifest import check_manifest
from engram_core.errors import CheckpointError
from engram_core.tools.extract import extract
from tests.gguf_bytes import Gguf, Tensor, toy
from tests.layout_files import LAYOUTS

SEEDS = int(os.environ.get("FUZZ_SEEDS", "250"))
MOST_BYTES = 100 << 20
HANG_S = 20.0
HOSTILE = [0, 1, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]


@contextmanager
def bounded() -> Iterator[None]:
    """Fail when the block hangs or allocates too much."""

    def hang(*_: object) -> None:
        raise TimeoutError(f"more than {HANG_S} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
        assert peak < MOST_BYTES, f"{peak} bytes"
    finally:
        tracemalloc.stop()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def open_or_refuse(path: Path) -> None:
    with bounded(), suppress(CheckpointError):
        open_checkpoint(path)
        if not path.is_dir():
            check_manifest(path)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of small files are written."""
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=where) as folder:
        yield Path(folder)


def flip_bytes(rng: np.random.Generator, raw: bytearray, end: int) -> None:
    for at in rng.integers(0, end, rng.integers(1, 8)):
        raw[at] = rng.integers(0, 256)


def put_number(rng: np.random.Generator, raw: bytearray, end: int) -> None:
    """Write a hostile number over 4 or 8 bytes: a count, a length, a type or an offset."""
    size = int(rng.choice([4, 8]))
    at = int(rng.integers(4, end - size))
    value = HOSTILE[rng.integers(len(HOSTILE))] % (1 << 8 * size)
    raw[at : at + size] = value.to_bytes(size, "little")


def cut_short(rng: np.random.Generator, raw: bytearray, end: int) -> None:
    del raw[int(rng.integers(0, end)) :]


def drop_slice(rng: np.random.Generator, raw: bytearray, end: int) -> None:
    at = int(rng.integers(0, end))
    del raw[at : at + int(rng.integers(1, 64))]


def repeat_slice(rng: np.random.Generator, raw: bytearray, end: int) -> None:
    at, size = int(rng.integers(0, end)), int(rng.integers(1, 256))
    raw[at:at] = raw[at : at + size]


def put_text_number(rng: np.random.Generator, raw: bytearray, end: int) -> None:
    """Write a hostile number in the place of one of JSON's, or another mark in that of a mark."""
    digits = [i for i in range(8, end) if chr(raw[i]).isdigit()]
    if digits:
        at = digits[rng.integers(len(digits))]
        options = [str(n).encode() for n in HOSTILE] + [b"-1", b"1e9", b"NaN", b"[]", b"{}", b'"x"']
        raw[at : at + 1] = options[rng.integers(len(options))]


MUTATIONS = (flip_bytes, put_number, put_number, cut_short, drop_slice, repeat_slice)
GGUF_NAMES = ("A", "B", "F", "G", "extracted")


@pytest.mark.parametrize("name", GGUF_NAMES)
def test_mutated_gguf_is_opened_or_refused(scratch: Path, name: str) -> None:
    if name == "extracted":
        path = extract(LAYOUTS["C"](scratch / "c"), scratch / "out.gguf").path
    else:
        path = LAYOUTS[name](scratch / "c")
    whole = path.read_bytes()
    end = whole.index(b"engram_k") if b"engram_k" in whole else whole.index(b"k_weight")
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        raw = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            mutation = MUTATIONS[rng.integers(len(MUTATIONS))]
            if len(raw) > 16:
                mutation(rng, raw, min(end, len(raw)))
        path.write_bytes(raw)
        open_or_refuse(path)


def test_mutated_safetensors_is_opened_or_refused(scratch: Path) -> None:
    folder = LAYOUTS["official"](scratch / "c")
    shard = sorted(folder.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        header, data = bytearray(whole[:end]), whole[end:]
        for _ in range(rng.integers(1, 4)):
            options = (*MUTATIONS, put_text_number, put_text_number)
            if len(header) > 16:
                options[rng.integers(len(options))](rng, header, len(header))
        if rng.random() < 0.7:  # mostly a length that fits, so that the JSON itself is met
            header[:8] = max(0, len(header) - 8).to_bytes(8, "little")
        shard.write_bytes(bytes(header) + data)
        open_or_refuse(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_mutated_json_beside_is_opened_or_refused(scratch: Path, name: str) -> None:
    folder = LAYOUTS["official"](scratch / "c")
    whole = (folder / name).read_bytes()
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        raw = bytearray(b" " * 8 + whole)
        for _ in range(rng.integers(1, 4)):
            options = (flip_bytes, cut_short, drop_slice, repeat_slice, put_text_number)
            if len(raw) > 16:
                options[rng.integers(len(options))](rng, raw, len(raw))
        (folder / name).write_bytes(raw[8:])
        open_or_refuse(folder)


# ----------------------------------------------------------- as costly as their bytes allow


def gguf_of_empty_strings(path: Path) -> None:
    """As many strings without a character as are allowed, over and over."""
    count = 1 << 21
    file = Gguf(keys=[("tokenizer.ggml.tokens", "[str]", [])])
    raw = bytearray(file.header())
    raw[-8:] = struct.pack("<Q", count)
    path.write_bytes(bytes(raw) + bytes(8 * count))


def gguf_of_short_keys(path: Path) -> None:
    """As many keys as are allowed."""
    keys = [struct.pack("<Q5sIB", 5, b"%05d" % i, 0, 0) for i in range(16_384)]
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + b"".join(keys))


def gguf_of_tensors(path: Path) -> None:
    """As many tensors as are allowed, all in one place."""
    info = [struct.pack("<Q5sIQIQ", 5, b"%05d" % i, 1, 1, 0, 0) for i in range(32_768)]
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, len(info), 0) + b"".join(info) + bytes(64))


def gguf_of_engram_arrays(path: Path) -> None:
    """Arrays that are kept, of the largest size, until the header ends."""
    file = toy()
    for i in range(8):
        file.keys.append((f"deepseek41.engram.x{i}", "[u8]", []))
    raw = bytearray(file.header())
    for i in range(8):
        at = raw.index(b"engram.x%d" % i) + 9 + 8
        raw[at : at + 8] = struct.pack("<Q", 1 << 22)
        raw[at + 8 : at + 8] = bytes(1 << 22)
    path.write_bytes(raw)


def gguf_of_a_huge_vocabulary(path: Path) -> None:
    """A token map of 4 million entries, each its own compressed id."""
    file = toy()
    file.set("deepseek41.engram.token_map", "[i32]", [])
    raw = bytearray(file.header())
    at = raw.index(b"engram.token_map") + 16 + 8
    raw[at : at + 8] = struct.pack("<Q", 1 << 22)
    raw[at + 8 : at + 8] = np.arange(1 << 22, dtype="<i4").tobytes()
    path.write_bytes(raw)


def many_layers(path: Path) -> None:
    """Layers and heads whose product of primes to derive is huge."""
    file = toy()
    for name in ("primes", "offsets", "multipliers"):
        file.drop(f"deepseek41.engram.{name}")
    file.set("deepseek41.engram.layer_ids", "[u32]", list(range(256)))
    file.set("deepseek41.engram.head_count", "u32", 2**31)
    file.set("deepseek41.engram.max_ngram_size", "u32", 2**31)
    file.set("deepseek41.engram.vocab_size", "u32", 2**31)
    file.set("deepseek41.engram.compressed_vocab_size", "u32", 8)
    file.write(path)


def large_constant_tensor(path: Path) -> None:
    """A constant kept as a tensor of 2^40 values in a sparse file."""
    file = toy()
    file.drop("deepseek41.engram.token_map")
    file.tensors.append(("engram.token_map", Tensor((1 << 30,), 26, b"")))
    file.write(path)
    os.truncate(path, 5 << 30)


@pytest.mark.parametrize(
    "make",
    [
        gguf_of_empty_strings,
        gguf_of_short_keys,
        gguf_of_tensors,
        gguf_of_engram_arrays,
        gguf_of_a_huge_vocabulary,
        many_layers,
        large_constant_tensor,
    ],
)
def test_costly_gguf_is_refused_in_bounds(scratch: Path, make: Callable[[Path], None]) -> None:
    make(scratch / "bad.gguf")
    with bounded(), pytest.raises(CheckpointError):
        open_checkpoint(scratch / "bad.gguf")


def test_later_shards_full_of_arrays_are_not_kept(scratch: Path) -> None:
    whole = toy()
    for i in range(6):
        file = Gguf(keys=list(whole.keys), tensors=whole.tensors) if i == 0 else Gguf()
        for key, value in (("no", i), ("count", 6)):
            file.set(f"split.{key}", "u16", value)
        for j in range(0 if i == 0 else 6):
            file.keys.append((f"engram.x{j}", "[u8]", []))
        raw = bytearray(file.header() if i else file.write(scratch / "x").read_bytes())
        for j in range(0 if i == 0 else 6):
            at = raw.index(b"engram.x%d" % j) + 9 + 8
            raw[at : at + 8] = struct.pack("<Q", 1 << 22)
            raw[at + 8 : at + 8] = bytes(1 << 22)
        (scratch / f"m-{i + 1:05d}-of-00006.gguf").write_bytes(raw)
    with bounded():
        assert open_checkpoint(scratch / "m-00001-of-00006.gguf").layout == "GGUF A"


SIXTEEN_MIB = 16 << 20
COSTLY_JSON = {
    "objects": b'{"a": [' + b"{}," * (SIXTEEN_MIB // 3 - 8) + b"{}]}",
    "lists": b'{"a": ' + b"[" * (1 << 19) + b"]" * (1 << 19) + b"}",
    "numbers": b'{"a": [' + b"7," * (SIXTEEN_MIB // 2 - 8) + b"7]}",
    "one_wide_character": b'{"a": "' + b"x" * (15 << 20) + "\U0001f600".encode() + b'"}',
    "digits": b'{"a": ' + b"9" * (1 << 20) + b"}",
    "keys": json.dumps({str(i): 0 for i in range(399_999)}).encode(),
    "escapes": b'{"a": "' + b"\\u00e9" * (1 << 20) + b'"}',
}


@pytest.mark.parametrize("kind", COSTLY_JSON)
@pytest.mark.parametrize("where", ["shard", "index", "config"])
def test_costly_json_is_refused_in_bounds(scratch: Path, where: str, kind: str) -> None:
    folder = LAYOUTS["official"](scratch / "c")
    shard = sorted(folder.glob("*.safetensors"))[1]
    raw = COSTLY_JSON[kind]
    if where == "shard":
        shard.write_bytes(len(raw).to_bytes(8, "little") + raw)
    else:
        name = {"index": "model.safetensors.index.json", "config": "config.json"}[where]
        (folder / name).write_bytes(raw)
    with bounded(), pytest.raises(CheckpointError):
        open_checkpoint(folder)
    shutil.rmtree(folder)
