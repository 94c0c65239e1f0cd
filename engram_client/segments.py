"""The runner's verb as data: segments, the batch they form, its bytes, its answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engram_client.arrays import Array, as_numpy
from engram_client.history import DEAD, flags, joined_ids
from engram_client.wire import (
    MAX_HEAD_BYTES,
    TensorView,
    WireError,
    as_view,
    decode_head,
    encode_tensors,
    num_bytes,
    to_numpy,
)

if TYPE_CHECKING:
    from engram_client.state import SessionHandle, SessionState


class Segment(NamedTuple):
    """A run of positions of one sequence in a step.

    session: a session of this client, or the id of somebody else's; or none, with one of
    lookback: the max_ngram_size - 1 ids before `position`, oldest first, None (or -1) = dead
    hash_ids: int [T, layers, n_hash_cols]
    token_ids: [T]  pushed first; all segments of a step have them, or none
    position: of the first token; default: the session's end (with token_ids), else its newest
    count: default: of token_ids or hash_ids, else up to the session's end
    mask: bool [T]  False = dead
    epoch: of somebody else's session, as its pusher told it
    """

    session: SessionHandle | int | None = None
    token_ids: Any = None
    position: int | None = None
    count: int | None = None  # type: ignore[assignment]  # hides tuple.count, which nobody needs
    mask: Any = None
    lookback: Sequence[int | None] | None = None
    hash_ids: Any = None
    epoch: int | None = None


@dataclass(frozen=True)
class StepResult:
    """A step's answer. length, epoch: int64 [S] (-1 without a session); dead: bool [T];
    tensors: by layer id, rows in the order of the segments."""

    length: NDArray[np.int64]
    epoch: NDArray[np.int64]
    dead: NDArray[np.bool_]
    tensors: Mapping[int, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """S segments as arrays, T = sum(count).

    states: the session of each segment, None where it is not this client's
    session_id, given_epoch: int64 [S]; given_epoch -1 = take it from the state, or left out
    at_end: which segments are pushed to their sessions' ends as they were, bool [S]
    """

    states: Sequence[SessionState | None]
    count: NDArray[np.int64]
    position: NDArray[np.int64]
    at_end: NDArray[np.bool_]
    session_id: NDArray[np.int64] | None = None
    given_epoch: NDArray[np.int64] | None = None
    lookback: NDArray[np.int64] | None = None
    hash_ids: NDArray[np.int64] | None = None
    token_ids: NDArray[np.int64] | None = None
    mask: NDArray[np.bool_] | None = None

    @property
    def num_tokens(self) -> int:
        """T, of all segments."""
        return int(self.count.sum())

    def epochs(self) -> NDArray[np.int64]:
        """Return the epoch of each segment as it is now: int64 [S]."""
        assert self.given_epoch is not None
        return np.array(
            [
                given if state is None else state.epoch
                for state, given in zip(self.states, self.given_epoch.tolist(), strict=True)
            ],
            np.int64,
        )

    def tensors(self) -> dict[str, TensorView]:
        """Return the batch as the tensors of a step."""
        arrays: dict[str, NDArray[Any]] = {
            "count": self.count.astype(np.int32),
            "position": self.position,
        }
        if self.session_id is not None:
            arrays["session_id"] = self.session_id
            epochs = self.epochs()
            if (epochs >= 0).all():
                arrays["epoch"] = epochs
            elif (epochs >= 0).any():
                raise ValueError("epoch: expected for all sessions of a step or for none, got some")
        if self.lookback is not None:
            arrays["lookback"] = self.lookback.astype(np.int32)
        for name in ("hash_ids", "token_ids", "mask"):
            if (array := getattr(self, name)) is not None:
                arrays[name] = array
        return {name: as_view(array) for name, array in arrays.items()}

    def cut(self, begin: int, end: int) -> tuple[Batch, NDArray[np.int64]]:
        """Return tokens begin .. end - 1 as a batch, and which segments they are of: int64 [S'].

        A segment without tokens goes with the piece it stands in.
        """
        stops = np.cumsum(self.count)
        starts = stops - self.count
        inside = (starts < end) & (stops > begin)
        inside |= (
            (self.count == 0) & (starts >= begin) & ((starts < end) | (end == self.num_tokens))
        )
        chosen = np.flatnonzero(inside)
        skipped = np.maximum(begin - starts[chosen], 0)
        count = np.minimum(stops[chosen], end) - np.maximum(starts[chosen], begin)
        piece = replace(
            self,
            states=[self.states[index] for index in chosen.tolist()],
            count=count,
            position=self.position[chosen] + skipped,
            at_end=self.at_end[chosen],
            session_id=_take(self.session_id, chosen),
            given_epoch=_take(self.given_epoch, chosen),
            lookback=self._lookback_at(chosen, skipped, starts),
            hash_ids=None if self.hash_ids is None else self.hash_ids[begin:end],
            token_ids=None if self.token_ids is None else self.token_ids[begin:end],
            mask=None if self.mask is None else self.mask[begin:end],
        )
        return piece, chosen

    def _lookback_at(
        self, chosen: NDArray[np.int64], skipped: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        """Return the look-back of segments whose first `skipped` tokens are cut off."""
        if self.lookback is None:
            return None
        assert self.token_ids is not None
        ids = self.token_ids if self.mask is None else np.where(self.mask, self.token_ids, DEAD)
        width = self.lookback.shape[1]
        rows = [
            np.concatenate([self.lookback[index], ids[start : start + skip]])[skip : skip + width]
            for index, skip, start in zip(chosen, skipped, starts[chosen], strict=True)
        ]
        return np.array(rows, np.int64).reshape(len(rows), width)


def _take(array: NDArray[Any] | None, chosen: NDArray[np.int64]) -> NDArray[Any] | None:
    return None if array is None else array[chosen]


Columns = Mapping[str, tuple[Any, ...]]


def batch_of(segments: Sequence[Segment], max_ngram_size: int) -> Batch:
    """Return segments as arrays. Raises ValueError: mixed sources, missing values."""
    fields = _columns(segments)
    states = [getattr(session, "state", None) for session in fields["session"]]
    ids = _column(fields["token_ids"], "token_ids")
    hash_ids = _column(fields["hash_ids"], "hash_ids")
    lookbacks = _column(fields["lookback"], "lookback")
    sources = (_column(fields["session"], "session"), lookbacks, hash_ids)
    if segments and (given := sum(source is not None for source in sources)) != 1:
        got = f"{given} of them" if given else "none"
        raise ValueError(f"segments: expected one of session, lookback and hash_ids, got {got}")
    if lookbacks is not None and ids is None:
        raise ValueError("segments: expected token_ids with a lookback, got none")
    token_ids, rows = None, None if hash_ids is None else list(map(len, hash_ids))
    if ids is not None:
        token_ids, rows = joined_ids(ids)
    count = rows
    if count is None or set(fields["count"]) != {None}:
        count = [
            _count(segment, state, None if rows is None else rows[index])
            for index, (segment, state) in enumerate(zip(segments, states, strict=True))
        ]
    at_end = [
        segment.position is None and state is not None and token_ids is not None
        for segment, state in zip(segments, states, strict=True)
    ]
    position = [
        state.length if is_at_end and state is not None else _position(segment, state, length)
        for segment, state, length, is_at_end in zip(segments, states, count, at_end, strict=True)
    ]
    return Batch(
        states=states,
        count=np.array(count, np.int64),
        position=np.array(position, np.int64),
        at_end=np.array(at_end, np.bool_),
        token_ids=token_ids,
        mask=_mask(fields["mask"], count),
        **_source(fields, states, lookbacks, hash_ids, max_ngram_size),
    )


def _source(
    fields: Columns,
    states: Sequence[SessionState | None],
    lookbacks: Sequence[Any] | None,
    hash_ids: Sequence[Any] | None,
    max_ngram_size: int,
) -> dict[str, NDArray[np.int64]]:
    if lookbacks is not None:
        width = max_ngram_size - 1
        rows = np.full((len(states), width), DEAD, np.int64)
        for row, lookback in zip(rows, lookbacks, strict=True):
            if len(lookback) > width:
                raise ValueError(f"lookback: expected at most {width} ids, got {len(lookback)}")
            known = [DEAD if token is None else token for token in lookback]
            row[width - len(known) :] = known
        return {"lookback": rows}
    if hash_ids is not None:
        arrays = [as_numpy(array) for array in hash_ids]
        return {"hash_ids": np.concatenate(arrays).astype(np.int64, copy=False)}
    ids = [
        session if state is None else state.session_id
        for session, state in zip(fields["session"], states, strict=True)
    ]
    epochs = [-1 if epoch is None else epoch for epoch in fields["epoch"]]
    return {"session_id": np.array(ids, np.int64), "given_epoch": np.array(epochs, np.int64)}


def _columns(segments: Sequence[Segment]) -> Columns:
    """Return every field of all segments, by name."""
    if not segments:
        return dict.fromkeys(Segment._fields, ())
    try:
        return dict(zip(Segment._fields, zip(*segments, strict=True), strict=True))
    except TypeError as error:  # a session in place of its segment, or one segment for a list
        raise ValueError(f"segments: expected a list of Segment(session, ...): {error}") from None


def _column(values: Sequence[Any], name: str) -> Sequence[Any] | None:
    """Return a field of all segments, None if none has it. Raises ValueError: only some have."""
    kinds = set(map(type, values))
    if kinds <= {NoneType}:
        return None
    if NoneType in kinds:
        given = sum(value is not None for value in values)
        raise ValueError(f"segments: expected {name} of all or of none, got {given}/{len(values)}")
    return values


def _mask(masks: Sequence[Any], count: list[int]) -> NDArray[np.bool_] | None:
    if set(map(type, masks)) <= {NoneType}:
        return None
    return np.concatenate(
        [
            np.ones(length, np.bool_) if mask is None else flags(mask, length)
            for mask, length in zip(masks, count, strict=True)
        ]
    )


def _count(segment: Segment, state: SessionState | None, rows: int | None) -> int:
    if rows is not None:
        if segment.count not in (None, rows):
            raise ValueError(f"count: expected {rows} as there are ids, got {segment.count}")
        return rows
    if segment.count is not None:
        return segment.count
    if state is not None and segment.position is not None:
        return state.length - segment.position
    raise ValueError(
        "segment: expected count, or the position in a session of this client, got neither"
    )


def _position(segment: Segment, state: SessionState | None, count: int) -> int:
    if segment.position is not None:
        return segment.position
    if state is not None:
        return state.newest(count)
    if segment.hash_ids is not None:
        return 0
    raise ValueError("segment: expected a position, as the session is not this client's, got none")


@dataclass
class Answer:
    """A step's answer as views: length, epoch int64 [S]; dead bool [T]; outputs by layer."""

    length: NDArray[np.int64]
    epoch: NDArray[np.int64]
    dead: NDArray[np.bool_]
    outputs: dict[int, TensorView]


def read_answer(
    tensors: Mapping[str, TensorView], batch: Batch, output: str, layers: Sequence[int]
) -> Answer:
    """Return a step's answer checked against what was asked. Raises WireError."""
    num_segments, num_tokens = len(batch.count), batch.num_tokens
    names = [] if output == "none" else [f"{output}.{layer}" for layer in layers]
    expected = {"length", "epoch", "dead", *names}
    if tensors.keys() != expected:
        raise WireError("a step's answer", expected=sorted(expected), got=sorted(tensors))
    for name, dtype, size in (
        ("length", "I64", num_segments),
        ("epoch", "I64", num_segments),
        ("dead", "U8", num_tokens),
    ):
        if tensors[name].spec != (dtype, (size,)):
            raise WireError(f"answer {name}", expected=(dtype, (size,)), got=tensors[name].spec)
    for name in names:
        if tensors[name].shape[:1] != (num_tokens,):
            raise WireError(f"answer {name}", expected=num_tokens, got=tensors[name].shape)
    return Answer(
        to_numpy(tensors["length"]),
        to_numpy(tensors["epoch"]),
        to_numpy(tensors["dead"]).astype(np.bool_),
        {layer: tensors[name] for layer, name in zip(layers, names, strict=False)},
    )


class StepSink:
    """Receives a step's answer: named outputs straight into the memory given for them."""

    def __init__(self, landings: Mapping[str, TensorView]) -> None:
        self._landings = landings
        self.tensors: dict[str, TensorView] = {}

    def __call__(self, length: int) -> Iterator[memoryview]:
        """Yield the memory for head and data. Raises WireError."""
        size = bytearray(8)
        yield memoryview(size)
        head_bytes = int.from_bytes(size, "little")
        if not 2 <= head_bytes <= min(length - 8, MAX_HEAD_BYTES):
            raise WireError(
                "the head of a step's answer", expected=f"..{length - 8}", got=head_bytes
            )
        head = bytearray(head_bytes)
        yield memoryview(head)
        self.tensors, order = self._plan(bytes(head), length - 8 - head_bytes)
        for name in order:
            yield self.tensors[name].data

    def _plan(self, head: bytes, data_bytes: int) -> tuple[dict[str, TensorView], list[str]]:
        """Return where each tensor of a head goes, and their order in the data."""
        entries = decode_head(head, data_bytes)
        plan: dict[str, TensorView] = {}
        for name, (spec, _, _) in entries.items():
            landing = self._landings.get(name)
            if landing is None:
                landing = TensorView(*spec, memoryview(bytearray(num_bytes(spec))))
            elif landing.spec != spec:
                raise WireError(f"out for {name}", expected=spec, got=landing.spec)
            plan[name] = landing
        return plan, list(entries)


def step_body(batch: Batch, residual: TensorView | None) -> Sequence[bytes | memoryview]:
    """Return the body of a step."""
    tensors = batch.tensors()
    if residual is not None:
        tensors["residual"] = residual
    return encode_tensors(tensors)
