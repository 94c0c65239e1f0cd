"""What is written as GGUF: the keys and tensor names of layout A, with its converter's types."""

from __future__ import annotations

import numpy as np

from engram_core.checkpoint.gguf_header import GgufValue
from engram_core.geometry import EngramHashTables

ARCH = "deepseek41"
PREFIX = f"{ARCH}.engram."


def layout_a_keys(
    tables: EngramHashTables, *, head_dim: int, dim: int, eps: float
) -> dict[str, GgufValue]:
    """Give the constants under layout A's keys."""
    return {
        f"{ARCH}.embedding_length": dim,
        f"{ARCH}.attention.layer_norm_rms_epsilon": eps,
        f"{PREFIX}layer_ids": np.array(tables.layer_ids, np.int32),
        f"{PREFIX}head_count": tables.num_heads,
        f"{PREFIX}key_length": head_dim,
        f"{PREFIX}max_ngram_size": tables.max_ngram_size,
        f"{PREFIX}multipliers": tables.multipliers.reshape(-1).astype(np.uint64),
        f"{PREFIX}primes": tables.primes.reshape(-1).astype(np.uint64),
        f"{PREFIX}offsets": tables.offsets.reshape(-1).astype(np.uint64),
        f"{PREFIX}token_map": tables.token_map,
        f"{PREFIX}pad_id": tables.pad_id,
    }


def tensor_name(layer_id: int, role: str) -> str:
    """Name a tensor: role is table, wkv, wkv_scale, q or k."""
    stem = "embd" if role == "table" else role
    return f"blk.{layer_id}.engram_{stem}.weight"
