"""Residual reads of sessions that are open and settled: one head, one answer, no generators.

What a runner asks for most, for every token and layer. The request is the protocol's to the byte.
Whatever is unusual before it is sent is left to the protocol (`Direct.ask` returns None); so is
every answer but the ordinary one, with what was received of it (`Answering`).
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from engram_client import far, wire
from engram_client.http1 import Request, format_head
from engram_client.problems import ConnectionLost
from engram_client.protocol import EngramProtocol, tensor_headers
from engram_client.shared import Region
from engram_client.state import SessionState

MAX_BYTES = (1 << 20) - (64 << 10)
"""Of a residual: with all else it asks for no leave (Expect). Its answer is received whole before
it lands, maybe in the memory that was sent: the copy costs less than the protocol does."""

MAX_KINDS = 256
"""Kinds of tensors remembered; then all are forgotten."""

MORE, DONE, OTHER = range(3)
"""Of an answer: some of it is to come; all has landed; it is not the ordinary one."""

_SCRATCH_BYTES = 1 << 20  # for a step's residual and all else; what is not used takes no pages
_ANSWER = re.compile(
    rb"HTTP/1\.1 200 OK\r\ndate: [ -~]{29}\r\ncontent-type: application/octet-stream\r\n"
    rb"x-engram-shape: ([0-9,]{1,99})\r\nx-engram-dtype: ([A-Z0-9]{1,9})\r\n"
    rb"x-engram-length: [0-9]{1,19}\r\nx-engram-base: [0-9]{1,19}\r\n"
    rb"x-engram-epoch: [0-9]{1,19}\r\n(?:x-engram-shared-answer: ([0-9,]{1,99})\r\n)?"
    rb"content-length: ([0-9]{1,19})\r\n"
    rb"x-request-id: [!-~]{1,99}\r\n(?:server-timing: [ -~]{1,999}\r\n)?\r\n"
)
"""The head of our service's answer to a residual and nothing but it, each header once."""

Found = tuple[bytes | None, ...]
"""What `_ANSWER` finds: shape, dtype, place in shared memory, length."""


class Kind:
    """Tensors of one dtype, shape and device. memory: their bytes as a type of ctypes"""

    def __init__(self, tensor: Any, *, is_torch: bool) -> None:
        none_of_it = tensor[:0].detach().cpu() if is_torch else tensor[:0]
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        self.dtype_name = wire.as_view(none_of_it).dtype
        self.num_bytes = wire.num_bytes((self.dtype_name, self.shape))
        self.is_torch = is_torch
        self.is_far = is_torch and far.is_far(tensor)
        self.memory: Any = ctypes.c_ubyte * self.num_bytes

    def is_residual(self) -> bool:
        """Tell whether it could be a residual that is sent at once."""
        is_known = self.dtype_name in ("BF16", "F32") and len(self.shape) == 3
        return is_known and 0 < self.num_bytes <= MAX_BYTES

    def new_like(self, tensor: Any) -> Any:
        """Return a new tensor."""
        if self.is_torch:
            return tensor.new_empty(self.shape)
        return np.empty(self.shape, self.dtype)

    def bytes_of(self, tensor: Any) -> memoryview:
        """Return a tensor's memory, which lives no longer than the tensor."""
        if self.is_torch:  # a tenth of what a view as bytes takes
            return memoryview(self.memory.from_address(tensor.data_ptr())).cast("B")
        return tensor.reshape(-1).view(np.uint8).data  # type: ignore[no-any-return]


class Plan(Protocol):
    """What requests of one kind have in common on one connection."""

    def find(self, answer: bytearray, end: int) -> tuple[int, int]:
        """Return where the body of the ordinary answer begins, and its bytes; 0, 0: it is another.

        answer: as much as `end` bytes of it
        """

    def land(self, ask: Any, body: memoryview) -> bool:
        """Take an answer's body; False: it is not the ordinary one."""


class Staged:
    """Memory of the host that a far tensor of one kind passes on its way through a socket."""

    def __init__(self, kind: Kind, tensor: Any) -> None:
        torch = sys.modules["torch"]
        self.tensor: Any = torch.empty(kind.shape, dtype=kind.dtype, pin_memory=tensor.is_cuda)
        self.body = kind.bytes_of(self.tensor)


class Ask:
    """One request. line: the first of its head; source: the caller's tensor; body: its bytes;
    landing: where those of the answer go; result: the tensor they are. Far ones have no bytes."""

    __slots__ = ("body", "is_landed", "kind", "landing", "line", "replica", "result", "source")

    def __init__(self, kind: Kind, source: Any, result: Any, replica: int) -> None:
        self.kind, self.source, self.result, self.replica = kind, source, result, replica
        self.body: Any = None
        self.landing: Any = None
        self.line, self.is_landed = b"", False
        if not kind.is_far:
            self.body, self.landing = kind.bytes_of(source), kind.bytes_of(result)

    @property
    def key(self) -> object:
        """What its plan is remembered by."""
        return self.kind

    def plan(self, identity: str, fixed: bytes, region: Region | None) -> Any:
        """Return its plan for a connection."""
        return ReadPlan(self, identity, fixed, region)

    def buffers(self, plan: Any) -> Sequence[bytes | memoryview]:
        """Return what is sent; a body in shared memory is put there."""
        head = self.line + plan.tail
        if plan.place is None:
            return head, self.sent(plan.staged)
        if self.body is None:
            plan.place.copy_(self.source)
        else:
            plan.place[:] = self.body
        return (head,)

    def is_of(self, request: Request) -> bool:
        """Tell whether this is a request of the protocol's."""
        line = f"{request.method} {request.target} HTTP/1.1\r\n"
        return request.replica == self.replica and line.encode() == self.line

    def sent(self, staged: Staged | None) -> memoryview:
        """Return the tensor's bytes as a socket can send them."""
        if staged is None:
            return self.body  # type: ignore[no-any-return]
        staged.tensor.copy_(self.source)
        return staged.body

    def land(self, body: memoryview, staged: Staged | None) -> None:
        """Take the answer's tensor, as it came through the socket."""
        if staged is None:
            self.landing[:] = body
        else:
            staged.body[:] = body
            self.result.copy_(staged.tensor)
        self.is_landed = True

    def land_shared(self, place: Any) -> None:
        """Take the answer's tensor from shared memory."""
        if self.landing is None:
            self.result.copy_(place)
        else:
            self.landing[:] = place
        self.is_landed = True


class ReadPlan:
    """The plan of `Session.apply`.

    tail: of a request's head, from the first header on; staged: for far tensors
    place: of the body in shared memory
    """

    def __init__(self, ask: Ask, identity: str, fixed: bytes, region: Region | None) -> None:
        kind = ask.kind
        told = wire.format_shape(kind.shape).encode(), kind.dtype_name.encode()
        headers = [*tensor_headers(kind.dtype_name, kind.shape), (wire.TABLE, identity)]
        request = Request("POST", "", headers, [bytes(kind.num_bytes)])
        self.place: Any = None
        self._answer: Found = (*told, None, b"%d" % kind.num_bytes)
        self._num_bytes = kind.num_bytes
        self._places: dict[Found, Any] = {}
        self._found: Any = None
        if region is not None and (placed := region.head_of(request)) is not None:
            request, end = placed
            for offset in (end, 0):  # an answer of its own, or the residual updated in place
                if offset + kind.num_bytes <= len(region.memory):
                    self.place = _part(region, offset, kind)
                    self._places[(*told, b"%d,%d,0" % (offset, kind.num_bytes), b"0")] = self.place
        self.tail = format_head(request, fixed).partition(b"\r\n")[2]
        self.staged = Staged(kind, ask.source) if kind.is_far else None

    def find(self, answer: bytearray, end: int) -> tuple[int, int]:
        """See `Plan`."""
        found = _ANSWER.match(answer, 0, end)
        if found is None:
            return 0, 0
        told = found.groups()
        self._found = None
        if told == self._answer:
            return found.end(), self._num_bytes
        self._found = self._places.get(told)
        return (0, 0) if self._found is None else (found.end(), 0)

    def land(self, ask: Ask, body: memoryview) -> bool:
        """See `Plan`."""
        if self._found is None:
            ask.land(body, self.staged)
        else:
            ask.land_shared(self._found)
        return True


def _part(region: Region, offset: int, kind: Kind) -> Any:
    """Return a part of a region as bytes, for far tensors as one."""
    if kind.is_far:
        return region.tensor(offset, kind.num_bytes).view(kind.dtype).view(kind.shape)
    return region.memory[offset : offset + kind.num_bytes]


class Direct:
    """Makes requests of calls, for one client."""

    def __init__(self, protocol: EngramProtocol) -> None:
        self.protocol = protocol
        self._kinds: dict[tuple[Any, ...], Kind] = {}

    def ask(
        self, state: SessionState, layer: int, residual: Any, position: int | None, out: Any
    ) -> Ask | None:
        """Return the request of `Session.apply`; None where that is for the protocol to make."""
        kind = self.kind_of(residual)
        if kind is None:
            return None
        count = kind.shape[0]
        first = state.history.length - count if position is None else position
        if type(first) is not int or type(layer) is not int or first < 0:
            return None
        if not self.protocol.is_one_request(state, "residual", count):
            return None
        ask = self.of(residual, out, kind, state.replica)
        if ask is not None:
            ask.line = (
                b"POST /v1/sessions/%d/layers/%d/residual?position=%d&epoch=%d HTTP/1.1\r\n"
                % (state.session_id, layer, first, state.epoch)
            )
        return ask

    def of(
        self, residual: Any, out: Any, kind: Kind, replica: int, make: type[Ask] = Ask
    ) -> Ask | None:
        """Return a request that sends a tensor of a kind and is answered by such a one.

        None: `out` is not of the kind
        """
        if out is None:
            out = kind.new_like(residual)
        elif self.kind_of(out) is not kind or not (kind.is_torch or out.flags.writeable):
            return None
        return make(kind, residual, out, replica)

    def kind_of(self, tensor: Any) -> Kind | None:
        """Return the kind of a contiguous tensor, None for others and for what is no residual."""
        if type(tensor) is np.ndarray:
            is_plain = tensor.flags.c_contiguous
            key: tuple[Any, ...] = tensor.dtype, tensor.shape
        elif (torch := sys.modules.get("torch")) is not None and type(tensor) is torch.Tensor:
            is_plain = tensor.is_contiguous() and not tensor.requires_grad
            key = (tensor.dtype, tensor.shape, tensor.device)
        else:
            return None
        if not is_plain:
            return None
        kind = self._kinds.get(key)
        return self._new_kind(key, tensor) if kind is None else kind

    def _new_kind(self, key: tuple[Any, ...], tensor: Any) -> Kind | None:
        try:
            kind = Kind(tensor, is_torch=len(key) == 3)
        except (wire.WireError, IndexError):
            return None
        if not kind.is_residual():
            return None
        if len(self._kinds) >= MAX_KINDS:
            self._kinds.clear()
        return self._kinds.setdefault(key, kind)


class Answering:
    """Receives the answers of one connection: into `space`, told by `received`."""

    def __init__(self) -> None:
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self.space = self._view
        self._begin, self._end, self._count = 0, 0, 0
        self._plans: dict[object, Plan] = {}

    def begin(self, ask: Ask, identity: str, fixed: bytes, region: Region | None) -> Plan:
        """Make ready for an answer; return how to ask for it on this connection."""
        self.space = self._view
        self._end = self._count = 0
        plan = self._plans.get(ask.key)
        if plan is None:
            if len(self._plans) >= MAX_KINDS:
                self._plans.clear()
            plan = self._plans[ask.key] = ask.plan(identity, fixed, region)
        return plan

    @property
    def unread(self) -> memoryview:
        """What was received of an answer that is not the ordinary one."""
        return self._view[: self._count]

    def received(self, count: int, ask: Ask, plan: Plan) -> int:
        """Take note of bytes received into `space`: MORE, DONE or OTHER.

        Raises ConnectionLost: at the end.
        """
        if not count:
            raise ConnectionLost("the connection was closed before a whole answer came")
        self._count = end = self._count + count
        if not self._end:
            self._begin, num_bytes = plan.find(self._scratch, end)
            if not self._begin or end > self._begin + num_bytes:
                return OTHER
            self._end = self._begin + num_bytes
        if end < self._end:
            self.space = self._view[end : self._end]
            return MORE
        return DONE if plan.land(ask, self._view[self._begin : end]) else OTHER
