"""What a checkpoint is once its headers are read: where every value lies, nothing loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engram_core.geometry import EngramHashTables, Geometry
from engram_core.tables import TableSource


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written. type: a safetensors dtype, or the name of a GGUF type."""

    name: str
    type: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class TensorSource:
    """One dense tensor, row-major. `type` is a name of `quant`, or "F8_E4M3" with its `scale`.

    scale: one factor ("F8_E8M0" codes, or "F32") for each 32 x 32 block of the tensor
    """

    name: str
    path: Path
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    type: str
    scale: TensorSource | None = None


@dataclass(frozen=True)
class LayerSource:
    """Where one Engram layer lies.

    wkv: [(hc_mult + 1) * dim, n_hash_cols * head_dim]  keys of each stream, then the value
    q, k: [hc_mult, dim]  used only as their product
    """

    layer_id: int
    table: TableSource
    wkv: TensorSource
    q: TensorSource
    k: TensorSource

    @property
    def requantize_input(self) -> bool:
        """Whether the input of wkv is quantised to e4m3 first, as the official FP8 model does."""
        return self.wkv.type == "F8_E4M3"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: constants read and checked, weights and rows still on disk.

    path: the file or folder that was named; format: "gguf" or "safetensors"
    layout: whose spelling of the names it is; image_token_id: None where no file says it
    identity: hex digest over constants, types and sampled values (see `identity.py`)
    notes: what a user may want to know (say, wkv rounded to bf16 at load)
    """

    path: Path
    format: str
    layout: str
    geometry: Geometry
    hash_tables: EngramHashTables
    image_token_id: int | None
    identity: str
    layers: tuple[LayerSource, ...]
    notes: tuple[str, ...] = ()
