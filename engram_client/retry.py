"""How long to go on trying: the pauses of one call, bounded by `reconnect_s`."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engram_client.problems import (
    ConnectionLost,
    EngramClientError,
    EngramUnavailable,
    ServiceFault,
    Transient,
    WrongTable,
)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
TELL_AFTER_S = 1.0
"""A call that fails for so long says once that it goes on: a silent minute looks like a hang."""

log = logging.getLogger("engram_client")


class Patience:
    """The failures of one call."""

    def __init__(self, reconnect_s: float, clock: Callable[[], float], num_replicas: int) -> None:
        self._reconnect_s = reconnect_s
        self._clock = clock
        self._num_replicas = num_replicas
        self._first_s: float | None = None
        self._failures = 0
        self._has_seen_fault = False
        self._is_told = False

    def should_move(self, error: EngramClientError) -> bool:
        """Tell whether the next try goes to the next address.

        A connection that broke may only have been idle for too long: that is tried again where it
        was. Too much load (429) does not become less by moving a session.
        """
        if isinstance(error, Transient):
            return error.status not in (408, 429)
        if isinstance(error, ConnectionLost):
            return not error.connected or self._failures > 0
        return isinstance(error, WrongTable)

    def pause_s(self, error: EngramClientError) -> float:
        """Count a failure; return how long to wait before the next try.

        Raises EngramUnavailable: `reconnect_s` would be over; ServiceFault: the second one. A
        service whose engine has failed refuses with 503 until its successor answers: whatever else
        fails twice will fail again.
        """
        if isinstance(error, ServiceFault):
            if self._has_seen_fault:
                raise error
            self._has_seen_fault = True
        now = self._clock()
        told = "refused" if isinstance(error, Transient) else "no answer"
        if self._first_s is None:
            self._first_s = now
        self._failures += 1
        pause = self._backoff_s(error)
        if now + pause - self._first_s > self._reconnect_s:
            raise EngramUnavailable(
                f"{told} for {now - self._first_s:.1f} s, {self._failures} tries, the next one"
                f" would be beyond reconnect_s {self._reconnect_s:g}; last: {error}",
                error,
            ) from error
        if now - self._first_s >= TELL_AFTER_S and not self._is_told:
            self._is_told = True
            log.warning(
                "%s for %.1f s, trying for %g s; last: %s",
                told,
                now - self._first_s,
                self._reconnect_s,
                error,
            )
        return pause

    def _backoff_s(self, error: EngramClientError) -> float:
        """Nothing while an address is untried, then doubling; at least what is asked."""
        asked = error.retry_after_s if isinstance(error, Transient) else 0.0
        untried = self._failures < self._num_replicas and self.should_move(error)
        free = not isinstance(error, Transient) and self._failures <= self._num_replicas
        if untried or free:
            return 0.0
        doubled = FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 10)
        return max(asked, min(doubled, LONGEST_PAUSE_S))
