"""The verbs of the interface as generators of effects: sessions, reads, steps. Without I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from engram_client import wire
from engram_client.arrays import empty_view
from engram_client.assembly import Assembly, rows_of
from engram_client.exchange import Effects, Exchange, Need
from engram_client.history import DEAD, History, flags, integers, masked
from engram_client.http1 import Request, Response, Sink
from engram_client.messages import (
    close_request,
    json_of,
    json_request,
    note_session,
    open_request,
    push_request,
    rewind_request,
)
from engram_client.problems import BadAnswer, StaleEpoch, UnknownSession
from engram_client.segments import Answer, Batch, StepSink, read_answer, step_body
from engram_client.state import NOWHERE, SessionState, new_session_id
from engram_client.wire import TensorView, WireError


@dataclass(frozen=True)
class StepOptions:
    """How a step is done. output: what it reads; stored: rows as stored; truncate: sessions end
    where their push ends; wait_ms: for ids that another rank pushes; ahead: of a push alone."""

    layers: tuple[int, ...]
    output: str = "residual"
    stored: bool = False
    truncate: bool = False
    wait_ms: int = 0
    ahead: bool = True

    @property
    def target(self) -> str:
        """The request's path and query."""
        query = f"output={self.output}&layers={','.join(map(str, self.layers))}"
        query += "&encoding=stored" if self.stored else ""
        query += "&on_conflict=truncate" if self.truncate else ""
        query += f"&wait_ms={self.wait_ms}" if self.wait_ms else ""
        query += "" if self.ahead else "&ahead=false"
        return f"/v1/step?{query}"

    @property
    def names(self) -> dict[int, str]:
        """The answer's tensors by layer."""
        if self.output == "none":
            return {}
        return {layer: f"{self.output}.{layer}" for layer in self.layers}


class EngramProtocol(Exchange):
    """Every verb, driven by whoever does the I/O."""

    def weights(self, layer: int, names: Sequence[str]) -> Effects[dict[str, TensorView]]:
        """Fetch a layer's weights."""
        facts = yield from self.facts()
        target = f"/v1/layers/{layer}/weights?names={','.join(names)}"
        build = partial(Request, "GET", target, max_answer_bytes=facts.weights_bytes)
        return (yield from self.call([], build, lambda response, _: _tensors(response)))

    def close_owner(self, owner: str) -> Effects[int]:
        """Close all sessions of a former incarnation of a runner; return how many."""
        build = partial(Request, "DELETE", f"/v1/sessions?owner={quote(owner, safe='')}")
        closed = yield from self.call([], build, lambda response, _: json_of(response))
        return int(closed["closed"])

    def open_session(
        self, position: int, lookback: Sequence[int | None] | None
    ) -> Effects[SessionState]:
        """Open a session, empty or at a position with the ids before it."""
        ids = [DEAD if token is None else token for token in lookback or ()]
        history = History(position - len(ids), ids)
        state = SessionState(new_session_id(), history)

        def take(response: Response, replica: int) -> SessionState:
            note_session(state, json_of(response), expected_length=position)
            state.floor, state.replica = state.base, replica
            return state

        build = partial(open_request, state, position, lookback or (), self._owner)
        return (yield from self.call([], build, take))

    def push(
        self,
        state: SessionState,
        token_ids: Any,
        mask: Any = None,
        *,
        position: int | None = None,
        truncate: bool = False,
        ahead: bool = True,
    ) -> Effects[None]:
        """Push ids at a position, by default at the end."""
        ids = integers(token_ids, "token_ids")
        live = None if mask is None else flags(mask, len(ids))
        first = state.length if position is None else position

        def piece(begin: int, end: int) -> Effects[None]:
            part = None if live is None else live[begin:end]
            need = _write(state, first + begin, truncate, at_end=position is None)
            return self._push(need, ids[begin:end], part, truncate, ahead)

        yield from self.split("push", len(ids), piece)

    def _push(
        self,
        need: Need,
        ids: NDArray[np.int64],
        mask: NDArray[np.bool_] | None,
        truncate: bool,
        ahead: bool,
    ) -> Effects[None]:
        state, position = need.state, need.position
        listed, live = ids.tolist(), None if mask is None else mask.tolist()

        def build() -> Request:
            return push_request(state, position, listed, live, truncate=truncate, ahead=ahead)

        def take(response: Response, _: int) -> None:
            length = _length_after(state, position + len(ids), truncate)
            note_session(state, json_of(response), expected_length=length)
            _record(state, position, ids, mask, truncate)

        yield from self.call([need], build, take)

    def rewind(self, state: SessionState, position: int) -> Effects[None]:
        """Cut a session to a length."""

        def take(response: Response, _: int) -> None:
            note_session(state, json_of(response), expected_length=position)
            state.history.cut(position)

        need = Need(state, position, position, fence=position)
        yield from self.call([need], lambda: rewind_request(state, position), take)

    def fork(self, state: SessionState, position: int | None) -> Effects[SessionState]:
        """Open a second session with the history of this one up to a position."""
        length = state.length if position is None else position
        child = SessionState(NOWHERE, state.history.copy(length), floor=state.floor)

        def build() -> Request:
            child.session_id = new_session_id()  # what a lost try made is left to expire
            document: dict[str, Any] = {
                "session_id": str(child.session_id),
                "fork_of": str(state.session_id),
                "position": length,
                "epoch": state.epoch,
            }
            if self._owner is not None:
                document["owner"] = self._owner
            return json_request("POST", "/v1/sessions", document)

        def take(response: Response, replica: int) -> SessionState:
            note_session(child, json_of(response), expected_length=length)
            child.replica = replica
            return child

        return (yield from self.call([Need(state, length, length)], build, take))

    def close(self, state: SessionState) -> Effects[None]:
        """Close a session; one that is gone already is closed."""
        if state.is_closed:
            return
        state.is_closed = True
        if state.replica != self.replica:
            return
        try:
            yield from self._close(state, state.epoch)
        except StaleEpoch as stale:  # a cut of unknown outcome had been carried out
            if stale.epoch is not None:
                yield from self._close(state, stale.epoch)

    def _close(self, state: SessionState, epoch: int) -> Effects[None]:
        try:
            yield from self.call([], partial(close_request, state, epoch), lambda *_: None)
        except UnknownSession:
            return

    def apply(
        self,
        state: SessionState,
        layer: int,
        residual: TensorView,
        *,
        position: int | None = None,
        out: TensorView | None = None,
    ) -> Effects[TensorView]:
        """Send a residual [T, hc_mult, dim] and receive it updated, into `out` if given."""
        _check_residual(residual, out)
        count = residual.shape[0]
        first = state.newest(count) if position is None else position
        landing = out or empty_view(residual.spec)

        def piece(begin: int, end: int) -> Effects[None]:
            part, into = rows_of(residual, begin, end), rows_of(landing, begin, end)

            def build() -> Request:
                return Request(
                    "POST",
                    _target(state, layer, f"residual?position={first + begin}"),
                    tensor_headers(part.dtype, part.shape),
                    [part.data],
                    sink=_into(into),
                    max_answer_bytes=max(part.data.nbytes, 1),
                )

            def take(response: Response, _: int) -> None:
                _check_answer(response, into)

            yield from self.call([Need(state, first + begin, first + end)], build, take)

        yield from self.split("residual", count, piece)
        return landing

    def read(
        self,
        state: SessionState,
        output: str,
        layer: int,
        *,
        position: int | None = None,
        count: int | None = None,
        stored: bool = False,
        out: TensorView | None = None,
    ) -> Effects[TensorView]:
        """Read kv, rows or hash_ids of `count` positions, by default the newest."""
        first, total = _range(state, position, count)
        assembly = Assembly(total, out)
        facts = yield from self.facts()
        if out is not None:
            facts.check_out(output, out, stored=stored)

        def piece(begin: int, end: int) -> Effects[None]:
            into = assembly.rows(begin, end)
            query = f"position={first + begin}&count={end - begin}"
            target = f"{output}?{query}{'&encoding=stored' if stored else ''}"

            def build() -> Request:
                return Request(
                    "GET",
                    _target(state, layer, target),
                    sink=None if into is None else _into(into),
                    max_answer_bytes=facts.answer_bytes(end - begin, 1),
                )

            def take(response: Response, _: int) -> None:
                if output != "hash_ids":
                    _check_dead(response, state.dead(first + begin, end - begin))
                view = into or _view(response, end - begin)
                _check_answer(response, view)
                assembly.take(begin, view)

            yield from self.call([Need(state, first + begin, first + end)], build, take)

        yield from self.split(output, total, piece)
        return assembly.view()

    def step(
        self,
        batch: Batch,
        options: StepOptions,
        residual: TensorView | None,
        outs: Mapping[int, TensorView],
        *,
        given: Sequence[SessionState] = (),
    ) -> Effects[Answer]:
        """Push and read a batch in as few calls as the service takes.

        given: sessions that the caller has locked, and unlocks
        """
        facts = yield from self.facts()
        total = batch.num_tokens
        for out in outs.values():
            if residual is None:
                facts.check_out(options.output, out, stored=options.stored)
            else:
                _check_residual(residual, out)
        assemblies = {layer: Assembly(total, outs.get(layer)) for layer in options.names}
        length = np.full(len(batch.count), -1, np.int64)
        epoch, dead = length.copy(), np.zeros(total, np.bool_)

        def piece(begin: int, end: int) -> Effects[None]:
            part, chosen = batch, np.arange(len(batch.count))
            if end - begin < total:
                part, chosen = batch.cut(begin, end)
            rows = {layer: assemblies[layer].rows(begin, end) for layer in assemblies}
            sent = None if residual is None else rows_of(residual, begin, end)
            answer = yield from self._step(part, options, sent, rows, facts.answer_bytes, given)
            length[chosen], epoch[chosen] = answer.length, answer.epoch
            dead[begin:end] = answer.dead
            for layer, assembly in assemblies.items():
                assembly.take(begin, answer.outputs[layer])

        yield from self.split(f"step {options.output}", total, piece)
        views = {layer: assembly.view() for layer, assembly in assemblies.items()}
        return Answer(length, epoch, dead, views)

    def _step(
        self,
        batch: Batch,
        options: StepOptions,
        residual: TensorView | None,
        rows: Mapping[int, TensorView | None],
        answer_bytes: Callable[[int, int], int],
        given: Sequence[SessionState],
    ) -> Effects[Answer]:
        landings = {options.names[layer]: view for layer, view in rows.items() if view is not None}
        sink: StepSink | None = None

        def build() -> Request:
            nonlocal sink
            sink = StepSink(landings) if landings else None
            return Request(
                "POST",
                options.target,
                [("Content-Type", wire.TENSOR_MEDIA)],
                step_body(batch, residual),
                sink=sink,
                max_answer_bytes=answer_bytes(batch.num_tokens, len(options.layers))
                + 16 * len(batch.count),
            )

        def take(response: Response, _: int) -> Answer:
            tensors = _tensors(response) if sink is None else sink.tensors
            try:
                answer = read_answer(tensors, batch, options.output, options.layers)
            except WireError as error:
                raise BadAnswer(str(error)) from error
            if batch.token_ids is not None:
                _record_step(batch, answer, options.truncate)
            return answer

        needs = _needs(batch, options.truncate)
        return (yield from self.call(needs, build, take, given=given))


def _write(state: SessionState, position: int, truncate: bool, *, at_end: bool) -> Need:
    fence, length = position if truncate else state.length, position if at_end else None
    return Need(state, position, position, fence, length)


def _needs(batch: Batch, truncate: bool) -> list[Need | None]:
    pushes = batch.token_ids is not None
    needs: list[Need | None] = []
    columns = batch.position.tolist(), batch.count.tolist(), batch.at_end.tolist()
    for state, position, count, at_end in zip(batch.states, *columns, strict=True):
        if state is None:
            needs.append(None)
        elif pushes:
            needs.append(_write(state, position, truncate, at_end=at_end))
        else:
            needs.append(Need(state, position, position + count))
    return needs


def _length_after(state: SessionState, end: int, truncate: bool) -> int:
    return end if truncate else max(state.length, end)


def _record(
    state: SessionState,
    position: int,
    ids: NDArray[np.int64],
    mask: NDArray[np.bool_] | None,
    truncate: bool,
) -> None:
    """Take over what the service now holds."""
    state.history.write(position, masked(ids, mask))
    if truncate:
        state.history.cut(position + len(ids))


def _record_step(batch: Batch, answer: Answer, truncate: bool) -> None:
    """Take over what a step pushed. Raises BadAnswer: a session has another length."""
    assert batch.token_ids is not None
    ids, stops = masked(batch.token_ids, batch.mask), np.cumsum(batch.count).tolist()
    rows = zip(
        batch.states,
        batch.position.tolist(),
        batch.count.tolist(),
        stops,
        answer.length.tolist(),
        answer.epoch.tolist(),
        strict=True,
    )
    for state, position, count, stop, length, epoch in rows:
        if state is None:
            continue
        history, end = state.history, position + count
        expected = end if truncate or end > history.length else history.length
        if length != expected:
            raise BadAnswer(f"session {state.session_id}: expected length {expected}, got {length}")
        history.write(position, ids[stop - count : stop])
        if truncate:
            history.cut(end)
        state.epoch = epoch


def _range(state: SessionState, position: int | None, count: int | None) -> tuple[int, int]:
    """Return first position and count: both left out, the newest; one left out, up to the end."""
    if position is None:
        count = 1 if count is None else count
        return state.newest(count), count
    return position, state.length - position if count is None else count


def _target(state: SessionState, layer: int, rest: str) -> str:
    return f"/v1/sessions/{state.session_id}/layers/{layer}/{rest}&epoch={state.epoch}"


def tensor_headers(dtype: str, shape: Sequence[int]) -> list[tuple[str, str]]:
    """Return the headers of a body that is one tensor."""
    return [
        ("Content-Type", wire.TENSOR_MEDIA),
        (wire.SHAPE, wire.format_shape(shape)),
        (wire.DTYPE, dtype),
    ]


def _into(view: TensorView) -> Sink:
    """Return a sink that fills a tensor."""

    def sink(_: int) -> Iterator[memoryview]:
        yield view.data

    return sink


def _view(response: Response, count: int) -> TensorView:
    """Return the tensor of an answer. Raises BadAnswer."""
    try:
        shape = wire.parse_shape(response.headers.get(wire.SHAPE.lower(), ""))
        view = TensorView(response.headers.get(wire.DTYPE.lower(), ""), shape, response.body)
        if wire.num_bytes(view.spec) != view.data.nbytes or shape[0] != count:
            raise WireError("bytes or rows", expected=f"{count} rows", got=view.spec)
    except WireError as error:
        raise BadAnswer(f"a tensor's answer: {error}") from error
    return view


def _check_answer(response: Response, view: TensorView) -> None:
    """See that an answer is the tensor it should be. Raises BadAnswer."""
    got = (response.headers.get(wire.DTYPE.lower()), response.headers.get(wire.SHAPE.lower()))
    if got != (view.dtype, wire.format_shape(view.shape)):
        raise BadAnswer(f"a tensor's answer: expected {view.spec}, got {got}")


def _check_dead(response: Response, dead: list[int]) -> None:
    """See that the service holds the mask that we pushed. Raises BadAnswer."""
    told = response.headers.get(wire.DEAD.lower(), "")
    if told != wire.format_ranges(dead):
        raise BadAnswer(f"dead positions: expected {wire.format_ranges(dead)!r}, got {told!r}")


def _check_residual(residual: TensorView, out: TensorView | None) -> None:
    if residual.dtype not in ("BF16", "F32") or len(residual.shape) != 3:
        raise ValueError(f"residual: expected BF16 or F32 [T, hc_mult, dim], got {residual.spec}")
    if out is not None and out.spec != residual.spec:
        raise ValueError(f"out: expected {residual.spec}, got {out.spec}")


def _tensors(response: Response) -> dict[str, TensorView]:
    try:
        return wire.decode_tensors(response.body)
    except WireError as error:
        raise BadAnswer(str(error)) from error
