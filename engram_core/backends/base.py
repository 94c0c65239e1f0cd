"""What a backend is: the tables, `wkv` and q*k of every layer, and a store of kv slots.

A kv slot holds the `hc_mult` keys and the value of one (layer, window) as bfloat16
[(hc_mult + 1) * dim]. The backend owns the memory of the slots; which slot holds what is
`kv_store.py`'s business. Calls come from one thread a lane (see `scheduler.py`): `rows` may run
beside the other methods, which never run beside each other; only where `near_tokens` of the
engine's limits allows it, `gate` and `read_kv` run beside a `project` into other slots, as does
`project_beside` where there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.geometry import EngramHashTables, Geometry
from engram_core.host_memory import HostMemory
from engram_core.sessions import Spot

STAGES = ("hash_gather", "wkv", "h2d", "gate", "d2h")
"""What a backend tells apart. hash_gather: row ids of windows, their rows gathered, dequantised and
re-quantised; wkv: the projection, into its slots; h2d, d2h: copies between host and device."""


class StageObserver(Protocol):
    """Is told how long stages of a backend's calls take. Both methods cost about 1 us."""

    def part(self, stage: str, seconds: float) -> None:
        """Note a part of the call that this thread is in: it is taken off the call's own time."""

    def late(self, stage: str, seconds: float) -> None:
        """Note what the device did after its call had returned, once that is known; any thread."""


class Unobserved:
    """A `StageObserver` that nobody listens to."""

    def part(self, stage: str, seconds: float) -> None:
        """Nothing."""

    def late(self, stage: str, seconds: float) -> None:
        """Nothing."""


Run = tuple[int, int, int, bool]
"""Positions whose residuals lie one behind the other: the first, how many, the address of bfloat16
or float32 [count, hc_mult, dim], whether it is float32."""


class Project(Protocol):
    """See `Backend.project`."""

    def __call__(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        *,
        windows: NDArray[np.int32] | None = None,
        hash_ids: NDArray[np.int64] | None = None,
    ) -> None: ...


class NearRead(Protocol):
    """A batch of small reads of one layer by the one thread that makes them all: no tensors, no
    arrays.

    max_tokens: of a batch; can_project: whether `project` may ever say True
    """

    max_tokens: int
    can_project: bool

    def judge(
        self,
        sessions: int,
        tenant: int,
        segments: Sequence[int],
        token_ids: Sequence[int] | None,
        *,
        begins: bool,
    ) -> int:
        """Judge segments as `SessionPool.read` and `SessionPool.push` do, and take them into the
        batch behind those before. Returns how many tokens they have; 0: one is no plain read of
        what is there, or no plain append in the page that its session ends in, for whose ids there
        is room; nothing is changed.

        No session is changed before `settle`: ids are written where nobody reads them.

        tenant: number of the kv store's keys
        segments: four each: row of its session (-1 = not open), position, number of tokens, epoch
        token_ids: to be appended, one for each token; None: they are reads
        begins: whether the batch has nothing yet: what was in the last one is forgotten
        """

    def keys(self) -> list[bytes]:
        """Return the kv store's keys of the batch's positions (see `kv_store.keys_of`)."""

    def settle(self, sessions: int, now_s: float) -> tuple[list[Spot], bytes]:
        """End and renew the sessions of the batch. Returns each segment's, and the dead flags of
        the positions, a byte each.

        now_s: by the clock of the sessions
        """

    def reaches(self, residual: int, count: int, *, is_f32: bool) -> bool:
        """Whether `gate` takes a residual that lies there."""

    def project(self, slots: list[int], tokens: list[int]) -> bool:
        """Begin the kv of some of the batch's positions; a `gate` of the same layer comes
        behind it. False: nothing was done, as it would take long.

        slots: of each; tokens: which positions, counted from the first; none of them twice
        """

    def wait(self) -> None:
        """Wait for what `project` began. Raises Internal."""

    def gate(self, slots: list[int], runs: list[Run]) -> bool:
        """Gate the batch's positions, in place, and wait for the end. False:
        nothing was done, as that would take long.

        slots: of each position; runs: what they are, all of them
        """


class NearBatches(Protocol):
    """Small batches of one layer by the one thread that makes them all, up to 64 tokens.

    `rows`, `gate` and `read_kv` are `Backend`'s, and wait for their end.

    has_rows: whether `rows` needs no disk
    """

    has_rows: bool

    def project(self, layer_index: int, slots: list[int], windows: NDArray[np.int32]) -> bool:
        """Compute the kv of windows, and wait: whoever finds it in the store then may read it in
        any way. False: nothing was done, as it would take long.

        slots: distinct; windows: int32 [T, max_ngram_size]
        """

    def is_ready(self, slots: NDArray[np.int64]) -> bool:
        """Whether the kv that others project into slots is there, or will be in no time."""

    def rows(
        self, layer_index: int, hash_ids: NDArray[np.int64], out: torch.Tensor, *, stored: bool
    ) -> None:
        """See `Backend.rows`."""

    def read_kv(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        out: torch.Tensor,
    ) -> None:
        """See `Backend.read_kv`."""

    def gate(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        residual: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See `Backend.gate`."""


class Backend(Protocol):
    """The arithmetic of the layer on one device."""

    observer: StageObserver
    """Told the stages of `STAGES` that exist here; set by who runs the calls, before the first."""

    serving: threading.Lock
    """Held by the engine that it serves: which slot holds what is known to one engine alone."""

    name: str
    geometry: Geometry
    hash_tables: EngramHashTables
    num_slots: int
    encodings: tuple[str, ...]
    """Format of each layer's stored rows, by layer index (names of `quant.py`)."""
    row_bytes: tuple[int, ...]
    """Bytes of one stored row of each layer, by layer index."""
    host_memory: HostMemory
    """Where bodies and answers are to lie: pinned for a GPU."""
    numerics: Mapping[str, str]
    """What runs and what it promises, for `info` (kernel class -> how)."""

    near_reads: Sequence[NearRead]
    """What small reads of each layer take, by layer index; empty: they go the general way."""
    near_batches: NearBatches | None
    """What batches of the asking thread take, kv that is missing included; None: what is missing is
    for a lane, and the rest is for `gate` and `read_kv`."""

    def rows(
        self, layer_index: int, hash_ids: NDArray[np.int64], out: torch.Tensor, *, stored: bool
    ) -> None:
        """Gather rows, dequantised or as stored.

        hash_ids: int64 [T, n_hash_cols]  row ids, checked by the caller
        out: bfloat16 [T, n_hash_cols, head_dim], or uint8 [T, n_hash_cols, row_bytes] (stored)
        """

    def project(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        *,
        windows: NDArray[np.int32] | None = None,
        hash_ids: NDArray[np.int64] | None = None,
    ) -> None:
        """Compute kv = wkv @ rows into slots: exactly one of windows and hash_ids is given.

        slots: int64 [T]  distinct
        windows: int32 [T, max_ngram_size]  newest first, after blocking
        hash_ids: int64 [T, n_hash_cols]
        """

    def read_kv(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        out: torch.Tensor,
    ) -> None:
        """Copy kv out of slots; dead positions come as keys +0.0 and value -0.0.

        slots: int64 [T]; dead: bool [T]; out: bfloat16 [T, hc_mult + 1, dim]
        """

    def gate(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        residual: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Add gate * value to the residual; dead positions keep their bits.

        residual, out: bfloat16 or float32 [T, hc_mult, dim]; out may be residual
        """

    @property
    def project_beside(self) -> Project | None:
        """As `project`, up to BESIDE_TOKENS, by one other thread at the same time, which then calls
        `gate` and `read_kv` as well; None: one thread at a time."""

    def self_check(self) -> None:
        """Compare what runs with what is promised. Raises SelfCheckFailed."""

    def close(self) -> None:
        """Free the device. The backend cannot be used afterwards."""
