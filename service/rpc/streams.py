"""`Stream`: steps applied in the order they come, answered as they are done.

A read that waits holds up no step behind it, so a stream can push what it waits for. What cannot
be done is told in an answer; the stream ends with its client, its key or the service.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from engram_client.proto import engram_pb2 as pb
from engram_core.direct import Ask
from engram_core.engine_types import StepAnswer
from engram_core.errors import Draining, EngramError
from service import operations, problems
from service.bodies import ClientGoneError
from service.calls import Call
from service.desk import GONE, AtOnce, Desk
from service.problems import Unauthenticated
from service.rpc import calls, messages
from service.rpc.calls import Context
from service.rpc.plain import PlainSteps, plain_reply
from service.rpc.steps import StepWork
from service.state import ServiceState
from service.turn import AT_ONCE_BYTES, Place

MAX_PIPELINED = 64
"""Unanswered steps of a stream; while there are so many, it is not read."""


class StreamDoor:
    """Answers the streams of one service, and ends them when they must."""

    def __init__(self, state: ServiceState, desk: Desk) -> None:
        self._state = state
        self._desk = desk
        self._place = Place(state)
        self._streams: set[_Stream] = set()

    async def serve(self, context: Context) -> None:
        """Answer one stream."""
        call, headers = calls.begin(self._state, operations.STEP, context)
        try:
            calls.check(call, headers)
        except Exception as error:
            code, refusal = self._desk.refusal(call, error)
            self._desk.record(call, code, problems.kind_of(refusal).status, headers)
            await calls.refuse(context, refusal)
        stream = _Stream(self._state, self._desk, call, context, self._place)
        self._streams.add(stream)
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)

    def revoke(self, tenant: str) -> None:
        """End the streams of a key that is gone."""
        for stream in self._streams:
            if stream.tenant == tenant:
                stream.end(Unauthenticated("the API key is not known here any more"))

    def close(self) -> None:
        """End all streams."""
        for stream in self._streams:
            stream.end(Draining("the service stops; use another replica"))


class _Exchange:
    """One step of a stream. error: why it is refused; work: what was begun otherwise."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.request_id = 0
        self.work: StepWork | None = None
        self.error: Exception | None = None


@dataclass(eq=False, slots=True)
class _Given:
    """A step that was answered where it was read. reply: held until it is written; asked_bytes: of
    its message; begun_s, done_s: by the clock; gate_s: seconds"""

    reply: bytes
    asked_bytes: int
    begun_s: float
    done_s: float
    gate_s: float


class _Stream:
    """place: where one body at a time is worked on"""

    def __init__(
        self, state: ServiceState, desk: Desk, call: Call, context: Context, place: Place
    ) -> None:
        self._state, self._desk, self._head, self._context = state, desk, call, context
        self._place = place
        self._open: set[_Exchange | _Given] = set()
        self._done: asyncio.Queue[_Exchange | _Given | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(MAX_PIPELINED)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._begun: calls.Begun | None = None
        self._idle = asyncio.Event()  # nothing is being written
        self._idle.set()
        self._reason: EngramError | None = None
        self._pace = calls.Pace(self.end)
        self._plain = PlainSteps()

    @property
    def tenant(self) -> str:
        """Whose stream it is, also when the key is gone (which `Call.tenant` refuses to tell)."""
        assert self._head.key is not None
        return self._head.key.name

    def end(self, reason: EngramError) -> None:
        """End the stream with a refusal."""
        if self._reason is None:
            self._reason = reason
            self._task.cancel()

    async def run(self) -> None:
        """Read and answer until one side ends it."""
        writer = self._loop.create_task(self._write_all())
        try:
            await self._context.send_initial_metadata(())
            await self._read_all()
            await writer
        except asyncio.CancelledError:
            writer.cancel()
            if self._begun is not None:
                self._begun.cancel()
            if self._reason is None:
                raise
            await self._idle.wait()
            await asyncio.wait({writer})  # the end of a stream is a write, and one goes at a time
            # gRPC cannot cut a stream: it holds its bytes until the client takes them or is gone.
            await calls.refuse(self._context, self._reason)
        finally:
            self._pace.close()
            for answer in list(self._open):
                if isinstance(answer, _Exchange):
                    self._end(answer, GONE, 0)
                else:
                    self._free(answer)

    async def _read_all(self) -> None:
        while True:
            await self._room.acquire()
            raw = await calls.read(self._context)
            if raw is None:
                break
            given = self._answer(raw)
            if given is not None and self._idle.is_set() and self._done.empty():
                self._start(given)
                del raw, given
                continue
            if given is not None:
                self._done.put_nowait(given)
            else:
                self._begin(raw)
            del raw, given  # else an idle stream keeps it, admitted no more
            # A small read is computed in this turn of the loop: answer it, then ask for the next.
            await asyncio.sleep(0)
        for _ in range(MAX_PIPELINED - 1):
            await self._room.acquire()  # until all are answered
        self._done.put_nowait(None)

    def _answer(self, raw: bytes) -> _Given | None:
        """Answer a step that is spelled as one before and that the engine can answer here and now.

        None: nothing was done.
        """
        begun_s = time.perf_counter()
        step, model = self._plain.find(raw), self._plain.model
        if step is None or model is None or not self._state.serves(model):
            return None
        num_bytes = len(step.residual)
        try:
            if num_bytes > AT_ONCE_BYTES:
                return None
            self._place.clear()
            placed = self._place.put(model, step.residual)
            if placed is None or not self._state.pool.has_room(len(raw) + num_bytes):
                return None
            place, address = placed
            ask = Ask(
                self._head.tenant,
                [(step.session_id, step.position, step.num_tokens, step.epoch)],
                layer_index=model.checkpoint.geometry.layer_index(step.layer),
                residual=address,
                is_f32=step.dtype == "F32",
            )
            answer = model.engine.answer([ask])[0]
            if answer is None:
                return None
            (spot,) = answer.sessions
            reply = plain_reply(step, spot.length, spot.epoch, answer.dead, place)
            self._state.pool.take(self.tenant, len(reply), "the answer")
        except Exception:  # the general way tells it
            return None
        self._state.enter()
        done_s = time.perf_counter()
        given = _Given(reply, len(raw), begun_s, done_s, answer.gate_s)
        self._open.add(given)
        return given

    def _begin(self, raw: bytes) -> None:
        """Apply a step; a refusal is an answer, too."""
        exchange = _Exchange(self._next_call(len(raw)))
        self._open.add(exchange)
        self._state.enter()
        try:
            exchange.call.lease.add(len(raw), "the message")
            exchange.work = self._ask(exchange, raw)
        except Exception as error:
            exchange.error = error
        future = exchange.work.future if exchange.work else None
        if future is None:
            self._done.put_nowait(exchange)
        else:
            future.add_done_callback(partial(self._completed, exchange))

    def _ask(self, exchange: _Exchange, raw: bytes) -> StepWork:
        """Ask the engine. Raises what a step is refused for."""
        work = StepWork(exchange.call)
        if (known := self._plain.find(raw)) is not None:
            exchange.request_id = known.request_id
            model = self._state.check_open()
            if model is self._plain.model and work.answer(known, model):
                return work
        message = messages.parse(pb.StepRequest, raw)
        exchange.request_id = message.request_id
        if (plain := work.begin(message)) is not None:
            self._plain.learn(raw, plain, self._state.model)
        return work

    def _next_call(self, num_bytes: int) -> Call:
        head = self._head
        call = Call(self._state, calls.no_inbox(), head.request_id)
        call.key, call.operation = head.key, head.operation
        call.headers, call.peer = head.headers, head.peer
        call.inbox.num_bytes = num_bytes
        return call

    def _completed(self, exchange: _Exchange, future: Future[StepAnswer]) -> None:
        """Come back to the loop's thread."""
        if threading.get_ident() == self._thread:
            self._done.put_nowait(exchange)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._done.put_nowait, exchange)

    async def _write_all(self) -> None:
        while (exchange := await self._done.get()) is not None:
            await self._idle.wait()
            self._idle.clear()
            if isinstance(exchange, _Given):
                if not await self._write(exchange.reply):
                    return
                self._tell(exchange)
                del exchange
                self._room.release()
                continue
            code, status, raw = self._reply(exchange)
            exchange.call.sent_bytes = len(raw)
            begun = time.perf_counter()
            if not await self._write(raw):
                return
            exchange.call.stages["send"] = time.perf_counter() - begun
            self._end(exchange, code, status)
            del exchange, raw
            self._room.release()

    async def _write(self, raw: bytes) -> bool:
        """Write an answer; False: the client is gone, and the stream ends."""
        try:
            await self._pace.write(self._context, raw)
        except ClientGoneError:
            self._task.cancel()
            return False
        finally:
            self._idle.set()
        return True

    def _start(self, given: _Given) -> None:
        """Begin to write an answer, with nothing before it; the stream is read on meanwhile."""
        self._idle.clear()
        write = self._pace.write(self._context, given.reply)
        self._begun = calls.Begun(write, partial(self._written, given))

    def _written(self, given: _Given, error: BaseException | None) -> None:
        self._begun = None
        self._idle.set()
        if given not in self._open:
            return  # the stream has ended meanwhile, and freed it
        if error is None:
            self._tell(given)
            self._room.release()
        elif not isinstance(error, asyncio.CancelledError):
            self._task.cancel()

    def _reply(self, exchange: _Exchange) -> tuple[str, int, bytes]:
        """Return code, HTTP status and bytes of an answer."""
        try:
            if exchange.error is not None:
                raise exchange.error
            assert exchange.work is not None
            return "ok", 200, exchange.work.reply()
        except Exception as error:
            code, refusal = self._desk.refusal(exchange.call, error)
            reply = messages.refused_reply(exchange.request_id, refusal)
            return code, problems.kind_of(refusal).status, reply.SerializeToString()

    def _free(self, given: _Given) -> None:
        self._open.discard(given)
        self._state.pool.give(self.tenant, len(given.reply))
        self._state.leave()

    def _tell(self, given: _Given) -> None:
        """Count an answer that is written."""
        self._free(given)
        now_s = time.perf_counter()
        check_s = given.done_s - given.begun_s - given.gate_s
        seconds = now_s - given.begun_s, None, check_s, given.gate_s, now_s - given.done_s
        sizes = given.asked_bytes, len(given.reply)
        self._desk.tally(AtOnce(*seconds, *sizes, operations.STEP.name), self._loop)

    def _end(self, exchange: _Exchange, code: str, status: int) -> None:
        """Give back what a step held."""
        self._open.discard(exchange)
        if exchange.work is not None and exchange.work.future is not None:
            exchange.work.future.cancel()
        # The future's callback knows the exchange: both would keep the body until a collection.
        exchange.work = exchange.error = None
        exchange.call.close()
        self._state.leave()
        self._desk.record(exchange.call, code, status, [])
