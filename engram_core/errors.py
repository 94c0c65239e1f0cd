"""The errors of the library: one tree, each class with a stable code.

The codes are those of the public interface; `service/problems.py` maps each class to a status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class EngramError(Exception):
    """A refusal. `code` is stable; `expected`, `got` and `details` carry its values.

    Args:
        message: one sentence for people: what was expected, what came, what to do.
        expected: the value or range that would have been accepted, if there is one.
        got: what came.
        details: further values of this refusal (length, epoch, index ...), JSON-ready.
    """

    code: ClassVar[str] = "internal"

    def __init__(
        self, message: str, *, expected: object = None, got: object = None, **details: Any
    ) -> None:
        super().__init__(message)
        self.message = message
        self.expected = expected
        self.got = got
        self.details: Mapping[str, Any] = details


class BadRequest(EngramError):
    """A request that contradicts itself."""

    code = "bad_request"


class SchemaError(EngramError):
    """A field of the wrong type, missing, unknown, or outside its range."""

    code = "schema"


class BadTensor(EngramError):
    """A tensor whose shape, dtype or byte count is not the one asked for."""

    code = "bad_tensor"


class TokenOutOfRange(EngramError):
    """A token id outside the token map."""

    code = "token_out_of_range"


class RowOutOfRange(EngramError):
    """A row id outside its hash column's bucket, or outside its table."""

    code = "row_out_of_range"


class DuplicateSession(EngramError):
    """Ids pushed twice to one session in one step."""

    code = "duplicate_session"


class UnknownSession(EngramError):
    """A session that was never opened, was closed, has expired, or is another key's."""

    code = "unknown_session"


class UnknownLayer(EngramError):
    """A layer id without an Engram."""

    code = "unknown_layer"


class Gap(EngramError):
    """A push that starts behind the end of the session."""

    code = "gap"


class Conflict(EngramError):
    """A push whose ids differ from those the session holds."""

    code = "conflict"


class StaleEpoch(EngramError):
    """An epoch that is not the session's present one."""

    code = "stale_epoch"


class NotPushed(EngramError):
    """A read of positions (or of an epoch) that nobody has pushed yet."""

    code = "not_pushed"


class HistoryTruncated(EngramError):
    """A position below the session's base."""

    code = "history_truncated"


class SessionExists(EngramError):
    """An id already open in another way."""

    code = "session_exists"


class TooManyTokens(EngramError):
    """More tokens in one request than `max_tokens`."""

    code = "too_many_tokens"


class TooManyPositions(EngramError):
    """A position above the longest one served."""

    code = "too_many_positions"


class TooManySessions(EngramError):
    """No free session."""

    code = "too_many_sessions"


class HeldTokensFull(EngramError):
    """No room for more token ids."""

    code = "held_tokens_full"


class Overloaded(EngramError):
    """No room for the bytes of a request now; try again."""

    code = "overloaded"


class Draining(EngramError):
    """The service is about to stop."""

    code = "draining"


class Internal(EngramError):
    """A fault of ours: the service is no longer ready."""

    code = "internal"


class StepRefused(EngramError):
    """A step some of whose segments were refused; nothing was changed.

    `segments` lists every failing segment in order: {index, code, length, epoch, ...}, where
    `index` is the segment's and `token_index` that of a conflict, counted inside the segment.
    The code of the whole is that of the first.
    """

    def __init__(self, errors: Sequence[tuple[int, EngramError]]) -> None:
        first_index, first = errors[0]
        super().__init__(
            f"segment {first_index}: {first.message}"
            + (f" ({len(errors)} segments refused)" if len(errors) > 1 else ""),
            expected=first.expected,
            got=first.got,
            **_in_step(first),
        )
        self.first = first
        self.segments = [
            {"index": index, "code": error.code, "detail": error.message, **_in_step(error)}
            for index, error in errors
        ]


def _in_step(error: EngramError) -> dict[str, Any]:
    """A refusal's values, its token's index named apart from its segment's."""
    return {"token_index" if k == "index" else k: v for k, v in error.details.items()}


class CheckpointError(EngramError):
    """A file that is refused: names path, tensor or key, expected and got."""

    code = "checkpoint"


class MemoryShort(EngramError):
    """A plan that does not fit the memory there is."""

    code = "memory"


class SelfCheckFailed(EngramError):
    """The backend's results are not what they are promised to be."""

    code = "self_check"
