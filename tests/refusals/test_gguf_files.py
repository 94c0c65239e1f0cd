"""One named refusal for every way a GGUF file can be wrong: path, what, expected, got."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_core.checkpoint import open_checkpoint
from engram_core.errors import CheckpointError
from tests.gguf_bytes import F64, I8, IQ2_XXS, Gguf, Tensor, toy

P = "deepseek41.engram."
TABLE, WKV, Q = (f"blk.14.engram_{name}.weight" for name in ("embd", "wkv", "q"))


def retype(file: Gguf, name: str, type_id: int, num_bytes: int | None = None) -> None:
    tensor = file.tensor(name)
    tensor.type_id = type_id
    if num_bytes is not None:
        tensor.data = bytes(num_bytes)


def reshape(file: Gguf, name: str, *ne: int) -> None:
    file.tensor(name).ne = ne


def move(file: Gguf, name: str, offset: int) -> None:
    file.tensor(name).offset = offset


def duplicate_key(file: Gguf) -> None:
    file.keys.append((f"{P}pad_id", "u32", 1))


def two_prefixes(file: Gguf) -> None:
    file.set("deepseek4.engram.head_count", "u32", 2)


def other_prefix(file: Gguf) -> None:
    """The first uploads: four keys under the other architecture, five missing."""
    kept = ("layer_ids", "head_count", "key_length", "max_ngram_size")
    keys = [key for key in file.keys if key[0].removeprefix(P) in kept]
    file.keys = [key for key in file.keys if P not in key[0]]
    file.keys += [(f"deepseek4.engram.{n.removeprefix(P)}", k, v) for n, k, v in keys]


def flat_keys(file: Gguf) -> None:
    """The Hugging Face names under the architecture, which were never shipped."""
    file.keys = [
        (name.replace(".engram.", ".engram_"), kind, value) for name, kind, value in file.keys
    ]


def drop_all(file: Gguf, *names: str) -> None:
    for name in names:
        file.drop(P + name)


def drop_layer(file: Gguf, layer_id: int) -> None:
    file.tensors = [pair for pair in file.tensors if f"blk.{layer_id}." not in pair[0]]


def changed(file: Gguf, name: str, index: int, value: int, kind: str = "u64") -> None:
    values = list(next(v for k, _, v in file.keys if k == P + name))
    values[index] = value
    file.set(P + name, f"[{kind}]", values)


def copied(file: Gguf, name: str) -> None:
    file.tensors.append((name, file.tensor(name)))


def set_attribute(name: str, value: object) -> Callable[[Gguf], None]:
    return lambda file: setattr(file, name, value)


CASES: dict[str, tuple[Callable[[Gguf], object], str]] = {
    "not_gguf": (set_attribute("magic", b"PK\3\4"), "magic: expected GGUF"),
    "magic_reversed": (set_attribute("magic", b"FUGG"), "byte order: expected little-endian"),
    "big_endian": (set_attribute("order", ">"), "byte order: expected little-endian.*big-endian"),
    "version_1": (set_attribute("version", 1), "version: expected GGUF version 2 or 3, got 1"),
    "version_99": (set_attribute("version", 99), "version: expected GGUF version 2 or 3, got 99"),
    "absurd_tensor_count": (set_attribute("counts", (2**63, 3)), "tensor count: expected at most"),
    "absurd_key_count": (set_attribute("counts", (8, 2**63)), "key count: expected at most"),
    "too_few_keys_counted": (set_attribute("counts", (8, 2)), "expected"),
    "duplicate_key": (duplicate_key, "pad_id'.*each key once"),
    "nested_array": (lambda f: f.keys.append(("n", "[arr]", [])), "array of numbers or strings"),
    "unknown_value_type": (lambda f: f.keys.append(("n", "what", 0)), "a GGUF value type, got 77"),
    "alignment_0": (lambda f: f.set("general.alignment", "u32", 0), "non-zero multiple of 8"),
    "alignment_12": (lambda f: f.set("general.alignment", "u32", 12), "non-zero multiple of 8"),
    "alignment_text": (lambda f: f.set("general.alignment", "str", "32"), "multiple of 8"),
    "duplicate_tensor": (lambda f: copied(f, Q), "engram_q.weight'.*each tensor once"),
    "offset_not_aligned": (lambda f: move(f, WKV, 200_001), "multiple of 32, got 200001"),
    "offset_past_the_end": (lambda f: f.tensors.append(("x", Tensor((4,), 0, b"", 2**40))), "'x'"),
    "offset_near_2_64": (
        lambda f: f.tensors.append(("x", Tensor((4,), 0, b"", 2**64 - 32))),
        "'x'.*data up to",
    ),
    "overlapping_tensors": (lambda f: move(f, WKV, 0), "expected data from byte"),
    "no_dimensions": (lambda f: reshape(f, Q), "1 to 4 dimensions, got 0"),
    "five_dimensions": (lambda f: reshape(f, Q, 64, 2, 1, 1, 1), "1 to 4 dimensions, got 5"),
    "zero_dimension": (lambda f: reshape(f, Q, 64, 0), "elements"),
    "elements_overflow": (lambda f: reshape(f, Q, 2**63, 2**63), "elements"),
    "row_not_whole_blocks": (lambda f: reshape(f, TABLE, 255, 204), "multiple of 256 values"),
    "no_engram_keys": (lambda f: setattr(f, "keys", f.keys[:3]), "no Engram key"),
    "keys_of_two_architectures": (two_prefixes, "keys: expected .*got keys under"),
    "only_shape_keys": (
        lambda f: drop_all(f, "multipliers", "primes", "offsets", "token_map", "pad_id"),
        "keys: expected token_map, multipliers, primes, pad_id, got none",
    ),
    "other_prefix_and_keys_missing": (other_prefix, "token_map, multipliers, primes, pad_id"),
    "no_eps": (
        lambda f: f.drop("deepseek41.attention.layer_norm_rms_epsilon"),
        "deepseek41.attention.layer_norm_rms_epsilon.*config.json",
    ),
    "eps_is_an_integer": (
        lambda f: f.set("deepseek41.attention.layer_norm_rms_epsilon", "u32", 0),
        "a float in",
    ),
    "eps_is_nan": (
        lambda f: f.set("deepseek41.attention.layer_norm_rms_epsilon", "f32", float("nan")),
        "a float in",
    ),
    "unknown_engram_key": (
        lambda f: f.set(f"{P}multiplier", "u32", 1),
        "engram.multiplier'.*nearest known one is 'multipliers'",
    ),
    "two_spellings": (lambda f: f.set(f"{P}n_heads", "u32", 2), "one spelling"),
    "both_layers_keys": (lambda f: f.set(f"{P}layers", "[u32]", [1, 14]), "one spelling"),
    "external_storage": (lambda f: f.set(f"{P}storage", "str", "external"), "engram.storage'"),
    "unknown_encoding": (
        lambda f: f.set(f"{P}encoding", "str", "lloyd4_e5m3_32_r136"),
        "expected e4m3_e8m0_32_row264 or .*, got 'lloyd4",
    ),
    "head_count_text": (lambda f: f.set(f"{P}head_count", "str", "2"), "an integer >= 0, got '2'"),
    "head_count_absurd": (
        lambda f: f.set(f"{P}head_count", "u32", 2**31),
        "at most 256 layers and 4096 hash columns, got",
    ),
    "max_ngram_size_absurd": (
        lambda f: f.set(f"{P}max_ngram_size", "u32", 2**32 - 1),
        "at most 256 layers and 4096 hash columns, got",
    ),
    "encoding_as_array": (
        lambda f: f.set(f"{P}encoding", "[u32]", [1, 2]),
        "encoding'.*a string, got an array of 2 uint32",
    ),
    "identity_as_number": (lambda f: f.set(f"{P}identity", "u32", 1), "identity'.*a string"),
    "identity_of_another_file": (
        lambda f: f.set(f"{P}identity", "str", "0" * 64),
        "key 'identity'.*extract it again",
    ),
    "keys_spelled_flat": (flat_keys, "engram_layer_ids', spelled in no known way"),
    "wkv_scale_beside_q2_k": (
        lambda f: f.tensors.append(("blk.14.engram_wkv_scale.weight", f.tensor(Q))),
        r"engram_wkv\.weight.*expected type I8, got Q2_K",
    ),
    "wkv_scale_shape": (
        lambda f: [
            retype(f, WKV, I8, 1536 * 192),
            f.tensors.append(("blk.14.engram_wkv_scale.weight", Tensor((6, 48), I8, bytes(288)))),
        ],
        r"engram_wkv_scale.*\[6, 48\], got .*\[48, 6\]",
    ),
    "wkv_scale_f16": (
        lambda f: [
            retype(f, WKV, I8, 1536 * 192),
            f.tensors.append(("blk.14.engram_wkv_scale.weight", Tensor((48, 6), 1, bytes(576)))),
        ],
        "engram_wkv_scale.*expected type I8 or F32, got F16",
    ),
    "head_count_negative": (lambda f: f.set(f"{P}head_count", "i32", -2), "an integer >= 0"),
    "head_count_bool": (lambda f: f.set(f"{P}head_count", "bool", True), "an integer >= 0"),
    "head_count_wrong": (lambda f: f.set(f"{P}head_count", "u32", 3), "primes: expected 18 values"),
    "primes_as_floats": (
        lambda f: f.set(f"{P}primes", "[f32]", [5.0] * 12),
        "array of integers, got an array of 12 float32",
    ),
    "primes_as_strings": (
        lambda f: f.set(f"{P}primes", "[str]", ["5"] * 12),
        "array of integers, got an array of 12 strings",
    ),
    "token_map_as_bools": (
        lambda f: f.set(f"{P}token_map", "[bool]", [True] * 11),
        "array of integers",
    ),
    "layer_ids_scalar": (lambda f: f.set(f"{P}layer_ids", "u32", 1), "array of integers"),
    "layer_ids_empty": (lambda f: f.set(f"{P}layer_ids", "[i32]", []), "array of integers"),
    "layer_ids_twice": (lambda f: f.set(f"{P}layer_ids", "[i32]", [1, 1]), "layer_ids"),
    "prime_negative": (lambda f: changed(f, "primes", 3, -13, "i64"), "primes: expected at least"),
    "prime_above_int64": (lambda f: changed(f, "primes", 3, 2**63), "primes: expected at most"),
    "primes_too_short": (lambda f: f.set(f"{P}primes", "[u64]", [5] * 11), "expected 12 values"),
    "primes_sum_wrong": (
        lambda f: [changed(f, "primes", 11, 47), f.drop(f"{P}offsets")],
        r"engram_embd.*expected shape \[208, 256\], got shape \[204, 256\]",
    ),
    "offset_wrong": (lambda f: changed(f, "offsets", 4, 40), "offsets"),
    "multiplier_even": (lambda f: changed(f, "multipliers", 0, 2), "odd numbers"),
    "multiplier_too_large": (lambda f: changed(f, "multipliers", 0, 2**62 + 1), "odd numbers"),
    "map_entry_negative": (lambda f: changed(f, "token_map", 3, -1, "i32"), r"token_map\[3\]"),
    "map_entry_too_large": (
        lambda f: changed(f, "token_map", 3, 2**31, "u32"),
        r"token_map\[3\]",
    ),
    "pad_out_of_range": (
        lambda f: f.set(f"{P}pad_id", "u32", 8),
        r"pad_id: expected 0\.\.7, got 8",
    ),
    "said_rows_wrong": (lambda f: f.set(f"{P}rows", "[u32]", [72, 205]), r"got \[72, 205\]"),
    "said_vocabulary_wrong": (
        lambda f: f.set(f"{P}compressed_vocab_size", "u32", 9),
        "compressed_vocab_size: expected 9, got 8",
    ),
    "said_pads_differ": (lambda f: f.set(f"{P}pad_token_id", "u32", 2), "pad_token_id"),
    "declared_layer_absent": (lambda f: drop_layer(f, 14), "layer 14: expected tensors"),
    "tensor_absent": (lambda f: f.remove(WKV), "layer 14: expected .*no wkv"),
    "layer_not_declared": (lambda f: f.rename(Q, "blk.7.engram_q.weight"), "layer 14.*no q"),
    "extra_layer": (
        lambda f: f.tensors.append(("blk.7.engram_q.weight", f.tensor(Q))),
        "layer 7: expected layers",
    ),
    "unmapped_engram_tensor": (
        lambda f: f.tensors.append(("blk.1.engram_conv.weight", f.tensor(Q))),
        "engram_conv.*known name",
    ),
    "two_of_one_role": (
        lambda f: f.tensors.append(("blk.14.engram_q_norm.weight", f.tensor(Q))),
        "one q, got a second",
    ),
    "table_width_wrong": (lambda f: f.set(f"{P}key_length", "u32", 512), "engram_embd.*shape"),
    "table_rows_wrong": (
        lambda f: reshape(f, TABLE, 256, 203),
        r"\[204, 256\], .*\[203, 256\]",
    ),
    "table_iq2_xxs": (
        lambda f: retype(f, TABLE, IQ2_XXS, 204 * 66),
        r"engram_embd.*got IQ2_XXS \(16\)",
    ),
    "table_f64": (lambda f: retype(f, TABLE, F64, 204 * 2048), r"engram_embd.*got F64 \(28\)"),
    "table_type_250": (lambda f: retype(f, TABLE, 250), r"engram_embd.*ggml type 250 \(250\)"),
    "table_i8_without_encoding": (
        lambda f: [retype(f, TABLE, I8, 204 * 264), reshape(f, TABLE, 264, 204)],
        r"engram_embd.*got I8 \(24\)",
    ),
    "wkv_type_unknown": (lambda f: retype(f, WKV, 250), "engram_wkv.*ggml type 250"),
    "wkv_shape_wrong": (lambda f: reshape(f, WKV, 1536, 128), r"engram_wkv.*\[192, 1536\]"),
    "wkv_transposed": (lambda f: reshape(f, WKV, 256, 1152), "engram_wkv.*shape"),
    "q_and_k_differ": (lambda f: reshape(f, Q, 32, 4), "engram_q.*shape"),
    "five_streams": (
        lambda f: [
            f.tensors.__setitem__(
                slice(None),
                [
                    (n, Tensor((64, 5), 0, bytes(1280)) if "_q." in n or "_k." in n else t)
                    for n, t in f.tensors
                ],
            )
        ],
        r"hc_mult: expected 1\.\.4, got 5",
    ),
}


@pytest.fixture(autouse=True)
def _odd_types(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests import gguf_bytes

    monkeypatch.setitem(gguf_bytes.SCALARS, "arr", (9, "<I"))
    monkeypatch.setitem(gguf_bytes.SCALARS, "what", (77, "<I"))


@pytest.mark.parametrize("case", CASES)
def test_gguf_is_refused(tmp_path: Path, case: str) -> None:
    mutate, message = CASES[case]
    file = toy()
    mutate(file)
    path = file.write(tmp_path / "bad.gguf")
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in caught.value.message


def test_the_toy_itself_is_accepted(tmp_path: Path) -> None:
    assert open_checkpoint(toy().write(tmp_path / "a.gguf")).layout == "GGUF A"


@pytest.mark.parametrize("keep", [0, 3, 23, 24, 100, -1, -84, "header"])
def test_truncated_file_is_refused(tmp_path: Path, keep: int | str) -> None:
    path = toy().write(tmp_path / "cut.gguf")
    raw = path.read_bytes()
    # The last tensor is k of layer 14: 512 bytes, a multiple of the alignment.
    path.write_bytes(raw[: len(toy().header()) if keep == "header" else int(keep)])
    with pytest.raises(CheckpointError, match=r"cut\.gguf: .*expected .*got .*bytes"):
        open_checkpoint(path)


def test_truncation_names_tensor_needed_end_and_file_size(tmp_path: Path) -> None:
    path = toy().write(tmp_path / "cut.gguf")
    size = path.stat().st_size
    os.truncate(path, size - 1)
    match = rf"tensor 'blk\.14\.engram_k\.weight': expected .* {size}, got a file of {size - 1}"
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [(24, "<Q", 2**63), (24, "<Q", 0), (8, "<Q", 10**6), (16, "<Q", 10**6)],
    ids=["key_name_length_2_63", "key_name_empty", "tensor_count_10_6", "key_count_10_6"],
)
def test_absurd_length_is_refused(tmp_path: Path, at: int, form: str, value: int) -> None:
    path = toy().write(tmp_path / "bad.gguf")
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(struct.pack(form, value))
    with pytest.raises(CheckpointError):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("count", "message"),
    [(2**20, "ends inside its header"), (2**21 + 1, "at most 2097152"), (2**63, "at most 2097152")],
)
def test_string_array_longer_than_the_file_is_refused(
    tmp_path: Path, count: int, message: str
) -> None:
    file = Gguf()
    file.set("tokenizer.ggml.tokens", "[str]", [])
    raw = bytearray(file.write(tmp_path / "bad.gguf").read_bytes())
    at = raw.index(b"tokens") + 6 + 4 + 4
    raw[at : at + 8] = struct.pack("<Q", count)
    (tmp_path / "bad.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "bad.gguf")


def shards(folder: Path, count: int = 2) -> list[Path]:
    """The toy in shards, its last tensor in the last one."""
    whole = toy()
    paths = []
    for i in range(count):
        tensors = whole.tensors[:-1] if i == 0 else whole.tensors[-1:] if i == 1 else []
        shard = Gguf(keys=list(whole.keys) if i == 0 else [], tensors=list(tensors))
        for key, value in (("no", i), ("count", count), ("tensors.count", len(whole.tensors))):
            shard.set(f"split.{key}", "i32", value)
        paths.append(shard.write(folder / f"m-{i + 1:05d}-of-{count:05d}.gguf"))
    return paths


def test_missing_shard_is_named(tmp_path: Path) -> None:
    first, second = shards(tmp_path)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"1 missing: m-00002-of-00002\.gguf"):
        open_checkpoint(first)


def test_shards_named_and_numbered_differently_are_refused(tmp_path: Path) -> None:
    first, second = shards(tmp_path)
    third = tmp_path / "third"
    first.rename(third)
    second.rename(first)
    third.rename(second)
    with pytest.raises(CheckpointError, match=r"00001-of.*split\.no.*expected 0, got 1"):
        open_checkpoint(tmp_path)


def test_shard_of_another_count_is_refused(tmp_path: Path) -> None:
    for path in shards(tmp_path, 3):
        path.rename(path.with_name(path.name.replace("of-00003", "of-00002")))
    with pytest.raises(CheckpointError, match=r"split\.count.*expected 2, got 3"):
        open_checkpoint(tmp_path / "m-00001-of-00002.gguf")


def test_split_shard_under_a_plain_name_is_refused(tmp_path: Path) -> None:
    path = shards(tmp_path)[0].rename(tmp_path / "plain.gguf")
    with pytest.raises(CheckpointError, match=r"split\.count.*expected 1, got 2"):
        open_checkpoint(path)


def test_shards_with_too_few_tensors_are_refused(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    shard = Gguf(keys=[("split.no", "i32", 1), ("split.count", "i32", 2)])
    shard.write(paths[1])
    with pytest.raises(CheckpointError, match=r"split\.tensors\.count.*expected 8, got 7"):
        open_checkpoint(paths[0])


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    shard = Gguf(keys=[("split.no", "i32", 1), ("split.count", "i32", 2)])
    shard.tensors = toy().tensors[-2:]
    shard.write(paths[1])
    with pytest.raises(CheckpointError, match=r"engram_q.*each tensor once.*m-00001"):
        open_checkpoint(paths[0])


def test_folder_of_two_checkpoints_is_refused(tmp_path: Path) -> None:
    toy().write(tmp_path / "a.gguf")
    toy().write(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"one GGUF checkpoint, got 'a\.gguf', 'b\.gguf'"):
        open_checkpoint(tmp_path)


def test_config_beside_the_file_must_agree(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"engram_n_heads": 8}')
    with pytest.raises(CheckpointError, match="num_heads: expected 8, got 2"):
        open_checkpoint(toy().write(tmp_path / "a.gguf"))


@pytest.mark.parametrize("name", ["missing.gguf", "/dev/zero", "/dev/null", "nul\0.gguf"])
def test_path_that_is_no_regular_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises((CheckpointError, ValueError), match=r"regular file|readable|null"):
        open_checkpoint(tmp_path / name)


def test_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="a regular file, got a FIFO"):
        open_checkpoint(tmp_path / "pipe.gguf")


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_mutated_header_never_crashes(flips: list[tuple[float, int]]) -> None:
    """Opened or refused, in bounded memory; nothing else."""
    length = len(toy().header())
    with TemporaryDirectory() as folder:
        path = toy().write(Path(folder) / "mutated.gguf")
        raw = bytearray(path.read_bytes())
        for where, value in flips:
            raw[int(where * (length - 1))] = value
        path.write_bytes(raw)
        tracemalloc.start()
        with suppress(CheckpointError):
            open_checkpoint(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100 << 20
