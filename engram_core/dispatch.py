"""Between the checks and the scheduler: a step's answer is laid out, its read becomes a job."""

from __future__ import annotations

import itertools
import time
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from engram_core.backends.base import Backend
from engram_core.engine_types import EPOCH_OPENED, EngineLimits, Output, StepAnswer, StepRequest
from engram_core.fence import Asked
from engram_core.geometry import Geometry
from engram_core.jobs import Job, Read
from engram_core.pages import Ints
from engram_core.requests import check_step
from engram_core.scheduler import Scheduler

DECODE_TOKENS = 16
"""Work ahead for no more tokens of one session than this goes before prefill."""


@dataclass(frozen=True)
class State:
    """Of the sessions of S segments: int64 [S] each, -1 without a session."""

    length: Ints
    base: Ints
    epoch: Ints


@dataclass(frozen=True, eq=False)
class Step:
    """A step whose request is checked. layers: layer indices; tensors: what it will write."""

    tenant: str
    request: StepRequest
    layers: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    begun_s: float
    answer: Future[StepAnswer]

    @property
    def asked(self) -> Asked:
        """What its segments ask of their sessions."""
        segments = self.request.segments
        assert segments.session_id is not None
        count = segments.count.astype(np.int64)
        epoch = segments.epoch
        if epoch is None:
            epoch = np.full(len(count), EPOCH_OPENED, dtype=np.int64)
        return Asked(segments.session_id, segments.position, count, epoch)


class Dispatcher:
    """Makes jobs of reads. The engine's lock guards everything but `prepare`."""

    def __init__(self, backend: Backend, limits: EngineLimits, scheduler: Scheduler) -> None:
        self._geometry = backend.geometry
        self._row_bytes = backend.row_bytes
        self._memory = backend.host_memory
        self._limits = limits
        self._scheduler = scheduler
        # A number is never used again, so a revoked key's kv is found by nobody and ages out.
        self._numbers: dict[str, int] = {}
        self._next_number = itertools.count()

    def prepare(self, tenant: str, request: StepRequest) -> Step:
        """Check a request and make room for its answer, before anything is changed.

        Raises: what `check_step` raises; Overloaded: no piece of memory is large enough now.
        """
        begun_s = time.perf_counter()
        layers = check_step(request, self._geometry, self._limits)
        num_tokens = int(request.segments.count.sum(dtype=np.int64))
        tensors = self._allocate(request, layers, num_tokens)
        return Step(tenant, request, layers, tensors, begun_s, Future())

    def submit(self, step: Step, read: Read, state: State) -> StepAnswer | None:
        """Hand a read to the scheduler, or return the answer of one without tokens or output.

        Raises: Internal, Draining.
        """
        request = step.request
        named = dict(zip(request.layers, step.tensors, strict=False))
        result = StepAnswer(state.length, state.base, state.epoch, read.dead, named)
        result.stages["check"] = time.perf_counter() - step.begun_s
        if request.output is Output.NONE or not len(read):
            return result
        self._scheduler.submit(
            Job(
                tenant=self.number(step.tenant),
                client=request.client,
                output=request.output,
                layers=step.layers,
                read=read,
                tensors=step.tensors,
                stored=request.stored,
                result=result,
                answer=step.answer,
            )
        )
        return None

    def work_ahead(
        self, tenant: str, client: Hashable, layers: tuple[int, ...], read: Read, *, longest: int
    ) -> None:
        """Fill the store with a read's kv, for nobody in particular.

        longest: most tokens of one session (decode-sized work goes before prefill)
        """
        job = Job(self.number(tenant), client, Output.NONE, layers, read)
        self._scheduler.work_ahead(job, is_decode=longest <= DECODE_TOKENS)

    def forget(self, tenant: str) -> None:
        """Let nobody find the kv of a tenant any more."""
        self._numbers.pop(tenant, None)

    def number(self, tenant: str) -> int:
        """Return a tenant's number in the kv store."""
        number = self._numbers.get(tenant)
        if number is None:
            number = self._numbers[tenant] = next(self._next_number)
        return number

    def _allocate(
        self, request: StepRequest, layers: tuple[int, ...], num_tokens: int
    ) -> tuple[torch.Tensor, ...]:
        """The tensors of an answer, one a layer; a residual is its own."""
        if request.output is Output.NONE:
            return ()
        if request.residual is not None:
            return (request.residual,)
        memory = request.memory or self._memory
        return tuple(
            memory.tensor(*answer_form(request, num_tokens, self._geometry, self._row_bytes[layer]))
            for layer in layers
        )


def answer_form(
    request: StepRequest, num_tokens: int, geometry: Geometry, row_bytes: int
) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of what a step reads of a layer. row_bytes: of the layer"""
    match request.output:
        case Output.RESIDUAL:
            assert request.residual is not None
            return (num_tokens, geometry.hc_mult, geometry.dim), request.residual.dtype
        case Output.KV:
            return (num_tokens, geometry.hc_mult + 1, geometry.dim), torch.bfloat16
        case Output.ROWS if request.stored:
            return (num_tokens, geometry.n_hash_cols, row_bytes), torch.uint8
        case Output.ROWS:
            return (num_tokens, geometry.n_hash_cols, geometry.head_dim), torch.bfloat16
        case _:
            return (num_tokens, geometry.n_hash_cols), torch.int64
