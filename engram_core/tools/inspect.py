"""What a checkpoint is: geometry, layout, tensors, identity, memory for every placement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engram_core.checkpoint import Checkpoint, LayerSource, TensorSource, open_checkpoint
from engram_core.checkpoint.dense import read_matrix_rows, read_stored_rows
from engram_core.checkpoint.files import RegularFile
from engram_core.checkpoint.identity import sampled_row_ids
from engram_core.errors import MemoryShort
from engram_core.loader import ledger_on_cpu
from engram_core.memory import Ledger, Placement
from engram_core.quant import QUANT_GROUP, row_format, to_bf16

_SAMPLED_GROUPS = 8

KV_STORE_BYTES = 256 << 20
"""The kv store assumed in the ledgers where nobody says otherwise (the default on a CPU)."""

LedgerOf = Callable[[Checkpoint, str], Ledger]
"""(checkpoint, placement) -> what serving it takes. Raises MemoryShort."""


@dataclass(frozen=True)
class TensorLine:
    """One tensor. type: of the stored values; files: where its parts lie."""

    layer_id: int
    role: str
    type: str
    shape: tuple[int, ...]
    num_bytes: int
    files: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    """All that can be said before anything is loaded.

    ledgers: placement -> ledger, or why it does not fit; warnings: for people
    """

    checkpoint: Checkpoint
    tensors: tuple[TensorLine, ...]
    ledgers: dict[str, Ledger | str]
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Give everything as JSON-ready values; 64-bit constants as strings."""
        checkpoint, tables = self.checkpoint, self.checkpoint.hash_tables
        geometry = checkpoint.geometry
        return {
            "path": str(checkpoint.path),
            "format": checkpoint.format,
            "layout": checkpoint.layout,
            "identity": checkpoint.identity,
            "image_token_id": checkpoint.image_token_id,
            "geometry": {
                "layer_ids": list(geometry.layer_ids),
                "max_ngram_size": geometry.max_ngram_size,
                "num_heads": geometry.num_heads,
                "head_dim": geometry.head_dim,
                "dim": geometry.dim,
                "hc_mult": geometry.hc_mult,
                "eps": geometry.eps,
                "table_rows": list(geometry.table_rows),
            },
            "hash": {
                "vocab_size": tables.vocab_size,
                "compressed_vocab_size": tables.compressed_vocab_size,
                "pad_id": tables.pad_id,
                "multipliers": [[str(value) for value in row] for row in tables.multipliers],
            },
            "tensors": [
                {
                    "layer": line.layer_id,
                    "role": line.role,
                    "type": line.type,
                    "shape": list(line.shape),
                    "num_bytes": line.num_bytes,
                    "files": list(line.files),
                }
                for line in self.tensors
            ],
            "ledgers": {name: _ledger_json(ledger) for name, ledger in self.ledgers.items()},
            "warnings": list(self.warnings),
        }


def inspect(path: Path, ledger_of: LedgerOf | None = None) -> Inspection:
    """Open a checkpoint and say what it is.

    ledger_of: left out, the bare backend on this machine's CPU

    Raises: CheckpointError.
    """
    checkpoint = open_checkpoint(path)
    return Inspection(
        checkpoint=checkpoint,
        tensors=tuple(line for layer in checkpoint.layers for line in _lines(layer, checkpoint)),
        ledgers=_ledgers(checkpoint, ledger_of or _on_cpu),
        warnings=tuple(_warnings(checkpoint)),
    )


def _lines(layer: LayerSource, checkpoint: Checkpoint) -> list[TensorLine]:
    table = layer.table
    shape = (table.num_rows, checkpoint.geometry.head_dim)
    files = tuple(dict.fromkeys(part.path.name for part in table.parts))
    num_bytes = table.num_rows * table.row_bytes
    lines = [TensorLine(layer.layer_id, "table", table.encoding, shape, num_bytes, files)]
    for role in ("wkv", "q", "k"):
        source: TensorSource = getattr(layer, role)
        scale_bytes = source.scale.num_bytes if source.scale else 0
        num_bytes = source.num_bytes + scale_bytes
        file = (source.path.name,)
        lines.append(TensorLine(layer.layer_id, role, source.type, source.shape, num_bytes, file))
    return lines


def _on_cpu(checkpoint: Checkpoint, placement: str) -> Ledger:
    num_slots = KV_STORE_BYTES // checkpoint.geometry.kv_bytes
    return ledger_on_cpu(checkpoint, num_slots=num_slots, placement=placement)


def _ledgers(checkpoint: Checkpoint, ledger_of: LedgerOf) -> dict[str, Ledger | str]:
    ledgers: dict[str, Ledger | str] = {}
    for placement in Placement:
        try:
            ledgers[placement.value] = ledger_of(checkpoint, placement.value)
        except MemoryShort as error:
            ledgers[placement.value] = error.message
    return ledgers


def _ledger_json(ledger: Ledger | str) -> dict[str, Any]:
    if isinstance(ledger, str):
        return {"fits": False, "why": ledger}
    lines = [
        {"name": line.name, "pool": line.pool.value, "num_bytes": line.num_bytes}
        for line in ledger.lines
    ]
    return {"fits": True, "why": ledger.why, "lines": lines}


def _warnings(checkpoint: Checkpoint) -> list[str]:
    warnings = []
    if checkpoint.image_token_id is None:
        warnings.append("image_token_id is not known: no config.json says it")
    for layer in checkpoint.layers:
        if layer.wkv.type in ("F16", "F32"):
            warnings.append(
                f"layer {layer.layer_id}: wkv is stored as {layer.wkv.type} and rounded to "
                f"bfloat16 (relative RMS of that {_rounding_rms(layer.wkv):.2g}, sampled)"
            )
        bad = _sampled_not_finite(layer)
        if bad:
            warnings.append(
                f"layer {layer.layer_id}: {bad} of the sampled table rows are not finite"
            )
    return warnings


def _rounding_rms(wkv: TensorSource) -> float:
    """Measure it over 8 groups of rows, spread evenly."""
    last = (wkv.shape[0] - 1) // QUANT_GROUP
    groups = sorted({i * last // (_SAMPLED_GROUPS - 1) for i in range(_SAMPLED_GROUPS)})
    error, power = 0.0, 0.0
    with RegularFile(wkv.path) as file:
        for group in groups:
            first = group * QUANT_GROUP
            count = min(QUANT_GROUP, wkv.shape[0] - first)
            values = read_matrix_rows(file, wkv, first, count)
            rounded = to_bf16(values).float().numpy()
            error += float(np.square(rounded - values, dtype=np.float64).sum())
            power += float(np.square(values, dtype=np.float64).sum())
    return (error / power) ** 0.5 if power else 0.0


def _sampled_not_finite(layer: LayerSource) -> int:
    rows = read_stored_rows(layer.table, sampled_row_ids(layer.table.num_rows))
    values = row_format(layer.table.encoding).dequantize(rows)
    return int((~np.isfinite(values)).any(axis=1).sum())
