"""What is said of a refused segment: a verdict of the fence as an error."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engram_core import errors
from engram_core.engine_types import EPOCH_OPENED, MAX_POSITIONS
from engram_core.fence import Asked, Fence, Verdict
from engram_core.pages import Ints


def refusals(
    verdict: NDArray[np.int8], fence: Fence, asked: Asked, same: Ints | None = None
) -> list[tuple[int, errors.EngramError]]:
    """Make the error of every refused segment: (segment, error), in order.

    same: int64 [S]  index of the first id that differs (conflict)
    """
    return [
        (i, _error(i, Verdict(int(verdict[i])), fence, asked, 0 if same is None else int(same[i])))
        for i in np.flatnonzero(verdict).tolist()
    ]


def _error(
    i: int, verdict: Verdict, fence: Fence, asked: Asked, first_difference: int
) -> errors.EngramError:
    position, epoch = int(asked.position[i]), int(asked.epoch[i])
    end = position + int(asked.count[i])
    length, base, present = int(fence.length[i]), int(fence.base[i]), int(fence.epoch[i])
    now = {"length": length, "epoch": present}
    match verdict:
        case Verdict.UNKNOWN_SESSION:
            return unknown_session(int(asked.session_id[i]))
        case Verdict.STALE_EPOCH:
            omitted = epoch == EPOCH_OPENED
            return errors.StaleEpoch(
                f"epoch: expected {present}, the present one, got"
                f" {'none, so the opening one' if omitted else epoch}",
                expected=present,
                got=None if omitted else epoch,
                **now,
            )
        case Verdict.TOO_MANY_POSITIONS:
            return errors.TooManyPositions(
                f"{end} positions: expected at most {MAX_POSITIONS}",
                expected=MAX_POSITIONS,
                got=end,
                **now,
            )
        case Verdict.HISTORY_TRUNCATED:
            return errors.HistoryTruncated(
                f"position: expected at least {base}, where the session begins, got"
                f" {position}; open one there with its look-back",
                expected=base,
                got=position,
                base=base,
                **now,
            )
        case Verdict.GAP:
            return errors.Gap(
                f"position: expected {length}, the session's length, or less, got {position};"
                f" continue from {length}",
                expected=length,
                got=position,
                **now,
            )
        case Verdict.CONFLICT:
            return errors.Conflict(
                f"token_ids[{first_difference}]: expected the id held at position"
                f" {position + first_difference}, got another; rewind, or push with truncate"
                " (over HTTP on_conflict=truncate)",
                index=first_difference,
                **now,
            )
        case _ if epoch > present:
            return errors.NotPushed(
                f"epoch: expected {present}, the present one, got {epoch}, a later one;"
                " read with wait_ms where another rank is about to cut the session",
                expected=present,
                got=epoch,
                **now,
            )
        case _:
            what = f"positions [{position}, {end})" if end > position else f"position {position}"
            return errors.NotPushed(
                f"{what}: the session holds {length} at epoch"
                f" {present}; push first, or read with wait_ms",
                expected=end,
                got=length,
                **now,
            )


def unknown_session(session_id: int) -> errors.UnknownSession:
    """Make the error of a session that is not open under this key."""
    return errors.UnknownSession(
        f"session {session_id} is not open: never opened, closed, expired, or another key's;"
        " open it with its look-back",
        got=session_id,
        length=None,
        epoch=None,
    )


def duplicates(fence: Fence, asked: Asked) -> list[tuple[int, errors.EngramError]]:
    """Refuse every segment whose session an earlier one names.

    A step that pushes names a session once: which of two pushes to it comes first is not said.
    """
    ids = asked.session_id.tolist()
    if len(set(ids)) == len(ids):
        return []
    first = {session_id: i for i, session_id in reversed(list(enumerate(ids)))}
    return [
        (
            i,
            errors.DuplicateSession(
                f"session {session_id}: expected once in a step with token_ids, got it in"
                f" segments {first[session_id]} and {i}",
                got=session_id,
                length=int(fence.length[i]) if fence.known[i] else None,
                epoch=int(fence.epoch[i]) if fence.known[i] else None,
            ),
        )
        for i, session_id in enumerate(ids)
        if first[session_id] != i
    ]


def too_many_held(
    fence: Fence, growth: Ints, *, held: int, limit: int
) -> list[tuple[int, errors.EngramError]]:
    """Refuse the segments that no room is left for, in order.

    growth: int64 [S]  positions each session gains (or loses); held: of all sessions now
    """
    total = held + np.cumsum(growth)
    if len(total) == 0 or total[-1] <= limit:
        return []
    return [
        (i, held_full(int(growth[i]), held, limit, int(fence.length[i]), int(fence.epoch[i])))
        for i in np.flatnonzero((growth > 0) & (total > limit)).tolist()
    ]


def held_full(
    growth: int, held: int, limit: int, length: int | None = None, epoch: int | None = None
) -> errors.HeldTokensFull:
    """Make the error of ids that there is no room for."""
    return errors.HeldTokensFull(
        f"expected at most {limit} held token ids over all sessions, got {growth} more than the"
        f" {held} held; close sessions, or try again later",
        expected=limit,
        got=held + growth,
        length=length,
        epoch=epoch,
    )


def too_many_sessions(limit: int) -> errors.TooManySessions:
    """Make the error of a session that there is no row for."""
    return errors.TooManySessions(
        f"expected at most {limit} sessions, all are open; close some, or try again later",
        expected=limit,
        got=limit + 1,
    )


def session_exists(session_id: int, length: int, epoch: int) -> errors.SessionExists:
    """Make the error of an id that is taken."""
    return errors.SessionExists(
        f"session {session_id} is already open in another way; take another id",
        got=session_id,
        length=length,
        epoch=epoch,
    )
