"""Room for bodies and answers: `in_flight_bytes`, shared between API keys.

Nothing queues here: what does not fit is refused before it is read, and the client comes again.
All calls come from the event loop's thread.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from types import TracebackType

from engram_core.errors import Overloaded
from engram_core.host_memory import HostMemory, PlainMemory
from service.problems import BodyTooLarge

WAITING_S = 1.0
"""How long a refused key counts as waiting: long enough for its client to come again."""


class Lease:
    """Bytes admitted for one request; given back by `close`, or at the end of a `with`."""

    def __init__(self, pool: InFlightPool, tenant: str) -> None:
        self._pool = pool
        self._tenant = tenant
        self.num_bytes = 0

    def add(self, num_bytes: int, what: str) -> None:
        """Admit more bytes for the same request.

        what: for messages. Raises BodyTooLarge: more than half the pool; Overloaded: no room now.
        """
        self._pool.take(self._tenant, num_bytes, what)
        self.num_bytes += num_bytes

    def buffer(self, num_bytes: int, what: str) -> memoryview:
        """Admit more bytes, and return memory for them where the backend wants it.

        The memory is free once nothing refers to it, whenever the lease is closed. Raises as `add`.
        """
        self.add(num_bytes, what)
        return self._pool.memory.buffer(num_bytes).data

    def close(self) -> None:
        """Give the bytes back. May be called again."""
        self._pool.give(self._tenant, self.num_bytes)
        self.num_bytes = 0

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class InFlightPool:
    """Counts the bytes of bodies and answers that exist now. memory: where bodies are to lie.

    No request holds more than half of it, and no key holds more than half while another, refused
    within the last `WAITING_S`, waits.
    """

    def __init__(
        self,
        total_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        memory: HostMemory | None = None,
    ) -> None:
        self.total_bytes = total_bytes
        self.memory = memory or PlainMemory()
        self.used_bytes = 0
        self._held: defaultdict[str, int] = defaultdict(int)
        self._waiting: dict[str, float] = {}
        self._clock = clock

    @property
    def max_request_bytes(self) -> int:
        """The largest body, and the largest answer."""
        return self.total_bytes // 2

    def lease(self, tenant: str) -> Lease:
        """Return an empty lease for one request."""
        return Lease(self, tenant)

    def has_room(self, num_bytes: int) -> bool:
        """Whether anybody may hold so many bytes for a moment; False: `take` decides."""
        if num_bytes > self.max_request_bytes or num_bytes > self.total_bytes - self.used_bytes:
            return False
        return not self._waiting or not self._still_waiting()

    def take(self, tenant: str, num_bytes: int, what: str) -> None:
        """Admit bytes. Raises BodyTooLarge, Overloaded."""
        if num_bytes > self.max_request_bytes:
            raise BodyTooLarge(
                f"{what}: {num_bytes} bytes; split the request",
                expected=f"<= {self.max_request_bytes}",
                got=num_bytes,
            )
        free = self.total_bytes - self.used_bytes
        if num_bytes > free or self._exceeds_share(tenant, num_bytes):
            self._waiting[tenant] = self._clock() + WAITING_S
            raise Overloaded(
                f"{what}: no room for {num_bytes} bytes now; try again",
                expected=f"<= {free} bytes free",
                got=num_bytes,
            )
        self._waiting.pop(tenant, None)
        self.used_bytes += num_bytes
        self._held[tenant] += num_bytes

    def give(self, tenant: str, num_bytes: int) -> None:
        """Take bytes back."""
        self.used_bytes -= num_bytes
        self._held[tenant] -= num_bytes
        if not self._held[tenant]:
            del self._held[tenant]

    def _exceeds_share(self, tenant: str, num_bytes: int) -> bool:
        """Whether the key would hold more than half while another waits."""
        if not self._waiting or self._held.get(tenant, 0) + num_bytes <= self.max_request_bytes:
            return False
        return any(key != tenant for key in self._still_waiting())

    def _still_waiting(self) -> dict[str, float]:
        """Forget the keys that were refused and did not come again; return the others."""
        now = self._clock()
        self._waiting = {key: until for key, until in self._waiting.items() if until > now}
        return self._waiting
