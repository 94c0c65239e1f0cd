"""What a client knows of one session: its ids, its fence, and where it is open."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field
from typing import Protocol

from engram_client.history import DEAD, History

KEEP_TAIL = 256
"""A session is opened again this many positions before the one that is asked for (reads and
rewinds of the near past then find it), and from its start if that lies within `KEEP_WHOLE`."""

KEEP_WHOLE = 1024

NOWHERE = -1


def new_session_id() -> int:
    """Return a random session id: an int64 above 0."""
    return secrets.randbits(63) or 1


@dataclass
class SessionState:
    """One session as its client knows it.

    history: every id that was pushed, the client's own copy
    floor: the lowest length the user may rewind to; base: the server's, higher after a re-open
    epoch: the present fence; replica: index of the address where it is open, or NOWHERE
    unsettled: lowest position that a call of unknown outcome may have changed, or None
    """

    session_id: int
    history: History
    floor: int = 0
    base: int = 0
    epoch: int = 0
    replica: int = NOWHERE
    unsettled: int | None = None
    is_closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Only ever tried, never waited for: one way for threads and for tasks."""

    @property
    def length(self) -> int:
        """How many positions it holds."""
        return self.history.length

    def newest(self, count: int) -> int:
        """Return the first of the newest `count` positions. Raises ValueError: it has fewer."""
        if count > self.length:
            raise ValueError(
                f"session {self.session_id}: expected at most {self.length} positions, its length, "
                f"got {count}"
            )
        return self.length - count

    def dead(self, position: int, count: int) -> list[int]:
        """Return which of `count` positions are dead, as indices from 0."""
        ids = self.history.read(position, position + count)
        return [] if (ids >= 0).all() else (ids == DEAD).nonzero()[0].tolist()

    def lookback(self, position: int, width: int) -> list[int | None]:
        """Return the min(position, width) ids before a position, oldest first, None = dead."""
        ids = self.history.read(max(position - width, 0), position).tolist()
        return [None if token == DEAD else token for token in ids]

    def reopen_position(self, needed: int) -> int:
        """Return where to open the session again so that `needed` is held."""
        if self.floor == 0 and needed <= KEEP_WHOLE:
            return 0
        return max(self.floor, needed - KEEP_TAIL)


class SessionHandle(Protocol):
    """A session object of either client."""

    state: SessionState
