"""What goes into the engine and what comes out: plain records, no behaviour."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.host_memory import HostMemory

EPOCH_OPENED = -1
"""An epoch left out: stands for the one the session was opened with."""

MAX_POSITIONS = 1_048_576
"""The longest position served (constant in info)."""

MAX_WAIT_MS = 1_000
"""The longest `wait_ms` (constant in info)."""

BESIDE_TOKENS = 256
"""The largest batch of the lane beside the kv lane, which takes reads of a quarter of it."""


class Output(StrEnum):
    """What a step reads."""

    NONE = "none"
    RESIDUAL = "residual"
    KV = "kv"
    ROWS = "rows"
    HASH_IDS = "hash_ids"


@dataclass(frozen=True)
class EngineLimits:
    """The engine's bounds (settings of the same names).

    max_tokens: of one request and of one batch; chunk_tokens: largest piece of a batch
    near_tokens: largest read that the asking thread may run itself (0: none; needs a backend whose
        gate and read_kv may run beside project, or that has `near_batches`)
    """

    max_tokens: int = 8192
    max_sessions: int = 4096
    max_held_tokens: int = 64 << 20
    session_ttl_s: float = 600.0
    ahead_tokens: int = 64
    chunk_tokens: int = 256
    near_tokens: int = 0


@dataclass(frozen=True)
class OpenRequest:
    """How a session is made: empty, at a position with look-back, or as a fork.

    lookback: raw token ids before `position`, oldest first, None = dead
    epoch: of `fork_of` (EPOCH_OPENED = left out)
    """

    session_id: int | None = None
    position: int | None = None
    lookback: tuple[int | None, ...] | None = None
    fork_of: int | None = None
    epoch: int = EPOCH_OPENED
    owner: str | None = None


@dataclass(frozen=True)
class SessionState:
    """A session as it is now. compressed_lookback: the last <= max_ngram_size-1 ids, oldest first,
    DEAD = -1; expires_in_s: idle time left; created: False when an alike open found it."""

    session_id: int
    length: int
    base: int
    epoch: int
    owner: str | None
    compressed_lookback: tuple[int, ...]
    expires_in_s: float
    created: bool = False


@dataclass(frozen=True)
class PushResult:
    """length, base, epoch after the push; appended: how many positions are new; removed: cut."""

    length: int
    base: int
    epoch: int
    appended: int
    removed: int


@dataclass(frozen=True)
class Segments:
    """S ragged segments in the order of the flat batch, T = sum(count). Exactly one source:
    session_id, lookback (with token_ids) or hash_ids.

    count: int32 [S]; position: int64 [S]  first position of each segment
    session_id: int64 [S]; epoch: int64 [S]  EPOCH_OPENED = left out
    lookback: int32 [S, max_ngram_size-1]  oldest first, -1 = dead or before the start
    hash_ids: int64 [T, layers named, n_hash_cols]
    token_ids: int64 [T]  pushed first; mask: bool [T]  False = dead
    """

    count: NDArray[np.int32]
    position: NDArray[np.int64]
    session_id: NDArray[np.int64] | None = None
    epoch: NDArray[np.int64] | None = None
    lookback: NDArray[np.int32] | None = None
    hash_ids: NDArray[np.int64] | None = None
    token_ids: NDArray[np.int64] | None = None
    mask: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class StepRequest:
    """One step. layers: layer ids; residual: [T, hc_mult, dim] bfloat16 or float32, updated in
    place and returned; client: whose turn it is (fairness); stored: rows as stored; memory: where
    other answers are made, None: in the backend's."""

    segments: Segments
    output: Output
    layers: tuple[int, ...]
    residual: torch.Tensor | None = None
    stored: bool = False
    truncate: bool = False
    wait_ms: int = 0
    ahead: bool = True
    client: Hashable = ""
    memory: HostMemory | None = None


@dataclass(frozen=True)
class StepAnswer:
    """length, base, epoch: int64 [S] (-1 without a session); dead: bool [T]; tensors by layer id
    as `output` says; stages: seconds by name (check, queue, project, gate ...)."""

    length: NDArray[np.int64]
    base: NDArray[np.int64]
    epoch: NDArray[np.int64]
    dead: NDArray[np.bool_]
    tensors: dict[int, torch.Tensor]
    stages: dict[str, float] = field(default_factory=dict)
