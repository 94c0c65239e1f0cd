"""What a client can be told: a class for every code of the service, and a few of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class EngramClientError(Exception):
    """Anything this package raises on purpose."""


class ConnectionLost(EngramClientError):
    """A connection that failed before a whole answer came: the call's outcome is unknown.

    connected: False if nothing was sent, since no connection came about.
    """

    def __init__(self, message: str, *, connected: bool = True) -> None:
        super().__init__(message)
        self.connected = connected


class BadAnswer(EngramClientError):
    """An answer that is not what the interface promises."""


class SessionClosed(EngramClientError):
    """A session that was closed by `close()`."""


class PushedMeanwhile(EngramClientError):
    """Two threads pushed to the end of one session at the same time; this push was not made."""


class EngramUnavailable(EngramClientError):
    """No answer within `reconnect_s`. `reason` is the last failure; nothing was skipped."""

    def __init__(self, message: str, reason: EngramClientError) -> None:
        super().__init__(message)
        self.reason = reason


class EngramProblem(EngramClientError):
    """A refusal by the service (RFC 9457). Nothing was changed by the refused request.

    status: HTTP status; code: stable; detail: for people; expected, got: where they apply;
    length, epoch: of the session; segments: of a refused step, {index, code, length, epoch} each;
    retry_after_s: when trying again makes sense; fields: the whole document.
    """

    code_of_class: ClassVar[str] = ""

    def __init__(self, status: int, fields: Mapping[str, Any], retry_after_s: float = 0.0) -> None:
        self.status = status
        self.fields = dict(fields)
        self.code = str(fields.get("code", f"http_{status}"))
        self.detail = str(fields.get("detail", fields.get("title", "")))
        self.expected = fields.get("expected")
        self.got = fields.get("got")
        self.length: int | None = fields.get("length")
        self.epoch: int | None = fields.get("epoch")
        segments = fields.get("segments")
        self.segments: Sequence[Mapping[str, Any]] = segments if isinstance(segments, list) else ()
        self.retry_after_s = retry_after_s
        super().__init__(self._text())

    def _text(self) -> str:
        parts = [f"{self.status} {self.code}: {self.detail}"]
        for name, value in (("expected", self.expected), ("got", self.got)):
            if value is not None and f"{name} " not in self.detail:
                parts.append(f"{name} {value!r}")
        return ", ".join(parts)


class BadRequest(EngramProblem):
    """A request that contradicts itself."""

    code_of_class = "bad_request"


class BadTensor(EngramProblem):
    """A tensor of another shape, dtype or byte count than asked for."""

    code_of_class = "bad_tensor"


class TokenOutOfRange(EngramProblem):
    """A token id outside the token map."""

    code_of_class = "token_out_of_range"


class RowOutOfRange(EngramProblem):
    """A row id outside its hash column's bucket."""

    code_of_class = "row_out_of_range"


class DuplicateSession(EngramProblem):
    """Ids pushed twice to one session in one step."""

    code_of_class = "duplicate_session"


class Unauthenticated(EngramProblem):
    """No API key, or one that is not known."""

    code_of_class = "unauthenticated"


class Forbidden(EngramProblem):
    """A key whose scope does not cover this."""

    code_of_class = "forbidden"


class UnknownSession(EngramProblem):
    """A session that the service does not hold (expired, closed, another key's or replica's)."""

    code_of_class = "unknown_session"


class UnknownLayer(EngramProblem):
    """A layer id without an Engram."""

    code_of_class = "unknown_layer"


class Gap(EngramProblem):
    """A push that starts behind the end of the session."""

    code_of_class = "gap"


class Conflict(EngramProblem):
    """A push whose ids differ from those the session holds."""

    code_of_class = "conflict"


class StaleEpoch(EngramProblem):
    """Somebody else has cut this session."""

    code_of_class = "stale_epoch"


class NotPushed(EngramProblem):
    """A read of positions that nobody has pushed yet."""

    code_of_class = "not_pushed"


class HistoryTruncated(EngramProblem):
    """A position below the session's base."""

    code_of_class = "history_truncated"


class SessionExists(EngramProblem):
    """A session id already open in another way."""

    code_of_class = "session_exists"


class WrongTable(EngramProblem):
    """Another table is served than the one this client began with."""

    code_of_class = "wrong_table"


class BodyTooLarge(EngramProblem):
    """More bytes than one request may hold, even for a single token."""

    code_of_class = "body_too_large"


class TooManyTokens(EngramProblem):
    """More tokens than one request may name, even for a single token."""

    code_of_class = "too_many_tokens"


class TooManyPositions(EngramProblem):
    """A position above the longest one served."""

    code_of_class = "too_many_positions"


class SchemaProblem(EngramProblem):
    """A field that the service does not know, or of the wrong type."""

    code_of_class = "schema"


class Transient(EngramProblem):
    """A refusal that passes: the client tries again, and never shows it but as the reason of
    EngramUnavailable."""


class ServiceFault(Transient):
    """A fault of the service's own (500), which it has still after one repetition. What the call
    was to do may be done, or not; the next one settles that."""


_BY_CODE = {kind.code_of_class: kind for kind in EngramProblem.__subclasses__()}
_TRANSIENT_STATUS = frozenset((408, 429, 502, 503, 504))


def problem_of(status: int, fields: Mapping[str, Any], retry_after_s: float = 0.0) -> EngramProblem:
    """Return the exception of a problem document."""
    kind: type[EngramProblem] = EngramProblem
    if status == 500:
        kind = ServiceFault
    elif status in _TRANSIENT_STATUS:
        kind = Transient
    elif isinstance(code := fields.get("code"), str):
        kind = _BY_CODE.get(code, EngramProblem)
    return kind(status, fields, retry_after_s)
