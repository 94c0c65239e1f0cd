"""Small batches on a lane of their own, beside those of the kv lane.

A read of few tokens waits for its own projection and for what its lane does before it. A piece of
a prefill takes longer than that, however small it is cut, as all of `wkv` is read for each. So
where a backend projects for two threads, small reads have one, and the system shares the cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engram_core.backends.base import Backend, Project
from engram_core.batches import KvBatches, windows_of
from engram_core.engine_types import BESIDE_TOKENS
from engram_core.jobs import Job, Piece
from engram_core.kv_store import KvStore, Lease
from engram_core.stages import StageClock

READ_TOKENS = BESIDE_TOKENS // 4
"""A read of so many tokens is small: more would delay others as a piece of a prefill does. Batches
of several are larger, as many clients at a time are served 1.3 times as fast so."""


def is_for_beside(job: Job) -> bool:
    """Whether a job is small, and of windows."""
    return len(job.read) <= READ_TOKENS and job.read.windows is not None


class BesideBatches(KvBatches):
    """`KvBatches` of windows that run while another thread runs those of the kv lane.

    project: what runs beside `backend.project`
    """

    def __init__(
        self, backend: Backend, store: KvStore, clock: StageClock, project: Project
    ) -> None:
        super().__init__(backend, store, BESIDE_TOKENS, clock)
        self._project = project

    @contextmanager
    def _lease(self, pieces: list[Piece]) -> Iterator[Lease]:
        """Pin the entries of windows; what is missing, or not filled yet, is computed here."""
        layer, store = pieces[0].layer, self._store
        with self._clock.measure("store", pieces):
            windows, tenants = windows_of(pieces)
            loan = store.borrow(layer, tenants, windows)
            try:
                if len(loan.compute):
                    slots = loan.slots[loan.compute]
                    self._project(layer, slots, windows=windows[loan.compute])
                    store.adopt(loan)
            except BaseException:
                store.end_loan(loan)
                raise
        try:
            yield Lease(loan.slots, loan.compute)
        finally:
            store.end_loan(loan)
