"""A backend held against the plain recomputation, on samples of its own checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.backends.base import Backend
from engram_core.checkpoint import Checkpoint, open_checkpoint
from engram_core.checkpoint.manifest import ManifestCheck, check_manifest
from engram_core.hashing import EngramHasher
from engram_core.loader import load
from engram_core.progress import Progress
from engram_core.tools import plain

_NUM_TOKENS = 64
_NUM_RANDOM_ROWS = 256
_WRAP_BYTES = 1 << 31
_OUTPUT_BLOCK = 32
_STORED_TYPES = {torch.bfloat16: ml_dtypes.bfloat16, torch.float32: np.float32}


@dataclass(frozen=True)
class Check:
    """One comparison. worst: largest difference; outside: values beyond what is promised.

    name: what is compared (rows, hash_ids, kv, residual ...); count: values compared
    """

    layer_id: int
    name: str
    count: int
    worst: float
    outside: int


@dataclass(frozen=True)
class Verification:
    """All comparisons. `ok` when no value lies outside what NUMBERS promises, and every byte is
    the one its manifest was made of (manifest: None for a file without one)."""

    identity: str
    backend: str
    checks: tuple[Check, ...]
    manifest: ManifestCheck | None = None

    @property
    def ok(self) -> bool:
        """Whether every check keeps its promise and the file is what its manifest says."""
        intact = self.manifest is None or not self.manifest.bad
        return intact and not any(check.outside for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Give everything as JSON-ready values."""
        checks = [vars(check) for check in self.checks]
        return {
            "identity": self.identity,
            "backend": self.backend,
            "ok": self.ok,
            "checks": checks,
            "manifest": None if self.manifest is None else vars(self.manifest),
        }


def verify(
    path: Path,
    *,
    device: str = "cpu",
    placement: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> Verification:
    """Load a checkpoint and compare rows, hashes, kv and gated residuals with the plain way.

    A file with a manifest (`extract` writes one) is read whole first, and compared with it.

    Raises: CheckpointError, MemoryShort.
    """
    checkpoint = open_checkpoint(path)
    manifest = None
    if checkpoint.format == "gguf":
        manifest = check_manifest(checkpoint.layers[0].table.parts[0].path, progress)
    backend = load(
        checkpoint, device=device, placement=placement, num_slots=_NUM_TOKENS, progress=progress
    )
    try:
        return replace(verify_backend(checkpoint, backend, seed=seed), manifest=manifest)
    finally:
        backend.close()


def verify_backend(checkpoint: Checkpoint, backend: Backend, *, seed: int = 0) -> Verification:
    """Compare a loaded backend (of at least 64 slots) with the plain way."""
    checks: list[Check] = []
    for index in range(checkpoint.geometry.num_layers):
        rng = np.random.default_rng([seed, index])
        checks += _check_rows(checkpoint, backend, index, rng)
        windows, hash_check = _check_hash(checkpoint, index, rng)
        checks.append(hash_check)
        checks.append(_check_kv(checkpoint, backend, index, windows))
        for dtype in (torch.bfloat16, torch.float32):
            checks.append(_check_gate(checkpoint, backend, index, dtype, rng))
    return Verification(checkpoint.identity, backend.name, tuple(checks))


def _sampled_rows(checkpoint: Checkpoint, index: int, rng: np.random.Generator) -> list[int]:
    """Choose rows: both ends, both sides of each multiple of 2^31 bytes, random ones."""
    table = checkpoint.layers[index].table
    chosen = {0, table.num_rows - 1, *rng.integers(0, table.num_rows, _NUM_RANDOM_ROWS).tolist()}
    for part in table.parts:
        end = table.num_rows * part.row_bytes
        for wrap in range(_WRAP_BYTES, end, _WRAP_BYTES):
            row = wrap // part.row_bytes
            chosen |= {row - 1, row, row + 1}
    return sorted(row for row in chosen if row < table.num_rows)


def _check_rows(
    checkpoint: Checkpoint, backend: Backend, index: int, rng: np.random.Generator
) -> list[Check]:
    layer, geometry = checkpoint.layers[index], checkpoint.geometry
    cols = geometry.n_hash_cols
    row_ids = _sampled_rows(checkpoint, index, rng)
    row_ids += [row_ids[-1]] * (-len(row_ids) % cols)
    hash_ids = np.array(row_ids, np.int64).reshape(-1, cols)
    stored = torch.empty((*hash_ids.shape, layer.table.row_bytes), dtype=torch.uint8)
    backend.rows(index, hash_ids, stored, stored=True)
    rows = torch.empty((*hash_ids.shape, geometry.head_dim), dtype=torch.bfloat16)
    backend.rows(index, hash_ids, rows, stored=False)
    plain_stored = plain.stored_rows(layer.table, row_ids)
    plain_rows = plain.decoded_rows(layer.table.encoding, plain_stored)
    got_stored = stored.numpy().reshape(plain_stored.shape)
    got_rows = rows.double().numpy().reshape(plain_rows.shape)
    return [
        _exact(layer.layer_id, "stored rows", got_stored, plain_stored),
        _exact(layer.layer_id, "rows", got_rows, plain_rows),
    ]


def _check_hash(
    checkpoint: Checkpoint, index: int, rng: np.random.Generator
) -> tuple[list[list[int]], Check]:
    """Hash random tokens with dead positions among them; gives the windows as well."""
    tables = checkpoint.hash_tables
    token_ids = rng.integers(0, tables.vocab_size, _NUM_TOKENS)
    is_live = rng.random(_NUM_TOKENS) > 0.1
    got = EngramHasher(tables, _NUM_TOKENS).hash(token_ids, 0, is_live)[:, index]
    windows = plain.plain_windows(token_ids.tolist(), is_live.tolist(), tables)
    expected = np.array([plain.plain_hash(window, index, tables) for window in windows])
    return windows, _exact(checkpoint.layers[index].layer_id, "hash_ids", got, expected)


def _check_kv(
    checkpoint: Checkpoint, backend: Backend, index: int, windows: Sequence[Sequence[int]]
) -> Check:
    """Project windows; compare the first, middle and last outputs with float64."""
    layer, geometry = checkpoint.layers[index], checkpoint.geometry
    slots = np.arange(len(windows))
    backend.project(index, slots, windows=np.array(windows, np.int32))
    kv = _read_kv(backend, index, slots).reshape(len(windows), -1)
    hash_ids = [plain.plain_hash(window, index, checkpoint.hash_tables) for window in windows]
    stored = plain.stored_rows(layer.table, [row for ids in hash_ids for row in ids])
    rows = plain.decoded_rows(layer.table.encoding, stored).reshape(len(windows), -1)
    if layer.requantize_input:
        rows = plain.requantized(rows)
    blocks = -(-geometry.out_features // _OUTPUT_BLOCK)
    worst, outside, count = 0.0, 0, 0
    for block in sorted({0, blocks // 2, blocks - 1}):
        first = block * _OUTPUT_BLOCK
        size = min(_OUTPUT_BLOCK, geometry.out_features - first)
        wkv = plain.decoded_wkv(layer.wkv, first, size)
        got = kv[:, first : first + size]
        difference = np.abs(got - rows @ wkv.T)
        outside += int((~(difference <= _kv_bound(got, rows, wkv))).sum())
        worst, count = max(worst, float(difference.max())), count + got.size
    return Check(layer.layer_id, "kv", count, worst, outside)


def _kv_bound(
    kv: NDArray[np.float64], rows: NDArray[np.float64], wkv: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Bound |kv - kv64|. Source: NUMBERS, "across devices and backends"."""
    magnitudes = np.abs(rows) @ np.abs(wkv).T
    flushed = 2.0**-126 * (np.abs(rows).sum(1)[:, None] + np.abs(wkv).sum(1))
    half_ulp = np.exp2(np.floor(np.log2(np.maximum(np.abs(kv), 2.0**-126))) - 8)
    bound: NDArray[np.float64] = half_ulp + 2.0**-22 * (rows.shape[1] / 16 + 1) * magnitudes
    bound += flushed
    return bound


def _check_gate(
    checkpoint: Checkpoint,
    backend: Backend,
    index: int,
    dtype: torch.dtype,
    rng: np.random.Generator,
) -> Check:
    """Gate random residuals with the kv of `_check_kv`; dead positions must keep their bits."""
    layer, geometry = checkpoint.layers[index], checkpoint.geometry
    slots = np.arange(_NUM_TOKENS)
    dead = rng.random(_NUM_TOKENS) < 0.1
    values = rng.standard_normal((_NUM_TOKENS, geometry.hc_mult, geometry.dim))
    residual = torch.from_numpy(values).to(dtype)
    out = torch.empty_like(residual)
    backend.gate(index, slots, dead, residual, out)
    before, after = residual.double().numpy(), out.double().numpy()
    kv, qk = _read_kv(backend, index, slots), plain.decoded_gate(layer.q, layer.k)
    low, high = plain.gate_interval(before, kv, qk, geometry.eps)
    low, high = _rounded(low, dtype), _rounded(high, dtype)
    low[dead], high[dead] = before[dead], before[dead]
    beyond = np.maximum(np.maximum(low - after, after - high), 0.0)
    outside = int((~((low <= after) & (after <= high))).sum())
    name = f"residual {str(dtype).removeprefix('torch.')}"
    return Check(layer.layer_id, name, after.size, float(beyond.max()), outside)


def _rounded(values: NDArray[np.float64], dtype: torch.dtype) -> NDArray[np.float64]:
    kind = _STORED_TYPES[dtype]
    rounded: NDArray[np.float64] = values.astype(np.float32).astype(kind).astype(np.float64)
    return rounded


def _read_kv(backend: Backend, index: int, slots: NDArray[np.int64]) -> NDArray[np.float64]:
    geometry = backend.geometry
    out = torch.empty((len(slots), geometry.hc_mult + 1, geometry.dim), dtype=torch.bfloat16)
    backend.read_kv(index, slots, np.zeros(len(slots), np.bool_), out)
    kv: NDArray[np.float64] = out.double().numpy()
    return kv


def _exact(layer_id: int, name: str, got: NDArray[Any], expected: NDArray[Any]) -> Check:
    """Compare values that are promised to the bit; NaN equals NaN."""
    same = (got == expected) | ((got != got) & (expected != expected))
    difference = np.abs(got.astype(np.float64) - expected.astype(np.float64))
    worst = float(np.nan_to_num(difference[~same], nan=np.inf).max()) if not same.all() else 0.0
    return Check(layer_id, name, got.size, worst, int((~same).sum()))
