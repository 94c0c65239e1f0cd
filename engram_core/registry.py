"""Which row is whose: (tenant, session id) -> row of the session pool, idle times, owners."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from engram_core.engine_types import EPOCH_OPENED
from engram_core.pages import Ints


@dataclass(frozen=True)
class Opening:
    """A checked way to make a session; two that are equal are alike.

    lookback: COMPRESSED ids before `position`, oldest first, DEAD = dead
    position: None = the parent's length (fork); epoch: of the parent
    """

    session_id: int | None = None
    position: int | None = None
    lookback: tuple[int, ...] = ()
    fork_of: int | None = None
    epoch: int = EPOCH_OPENED
    owner: str | None = None


class Registry:
    """The open sessions of all tenants; a tenant finds its own only.

    clock: seconds, monotonic
    """

    def __init__(self, num_rows: int, clock: Callable[[], float]) -> None:
        self.num_rows = num_rows
        self._clock = clock
        self._ids = np.zeros(num_rows, dtype=np.int64)  # 0: the row is free
        self._last_used = np.zeros(num_rows, dtype=np.float64)
        self._tenant_of = [""] * num_rows
        self._opening_of = [Opening()] * num_rows
        self._free = list(range(num_rows))[::-1]
        self._tenants: dict[str, dict[int, int]] = {}

    def __len__(self) -> int:
        return self.num_rows - len(self._free)

    @property
    def last_used_address(self) -> int:
        """Where the times of last use begin: float64 [num_rows], by the clock."""
        return self._last_used.ctypes.data

    @property
    def is_full(self) -> bool:
        """Whether no row is free."""
        return not self._free

    def row(self, tenant: str, session_id: int | None) -> int | None:
        """The row of one session, None if it is not open."""
        return self.rows_of(tenant).get(session_id or 0)

    def rows_of(self, tenant: str) -> Mapping[int, int]:
        """The row of each of a tenant's sessions, by id."""
        return self._tenants.get(tenant, {})

    def rows(self, tenant: str, session_ids: Ints) -> Ints:
        """The rows of S sessions: int64 [S], -1 where one is not open."""
        found = map(self.rows_of(tenant).get, session_ids.tolist(), repeat(-1))
        return np.fromiter(found, dtype=np.int64, count=len(session_ids))

    def session_id(self, row: int) -> int:
        """The id of a row's session."""
        return int(self._ids[row])

    def opening(self, row: int) -> Opening:
        """How a row's session was opened."""
        return self._opening_of[row]

    def add(self, tenant: str, opening: Opening) -> int:
        """Take a free row for a session, with an id of our own if the opening names none."""
        sessions = self._tenants.setdefault(tenant, {})
        session_id = opening.session_id
        while not session_id or session_id in sessions:
            session_id = secrets.randbits(63)
        row = self._free.pop()
        sessions[session_id] = row
        self._ids[row] = session_id
        self._tenant_of[row] = tenant
        self._opening_of[row] = opening
        self.touch(row)
        return row

    def remove(self, rows: list[int]) -> list[tuple[str, int]]:
        """Free rows; returns (tenant, session id) of each."""
        names = [(self._tenant_of[row], int(self._ids[row])) for row in rows]
        for tenant, session_id in names:
            del self._tenants[tenant][session_id]
            if not self._tenants[tenant]:
                del self._tenants[tenant]
        self._ids[rows] = 0
        self._free += rows
        return names

    def touch(self, rows: Ints | int) -> None:
        """Renew the idle time."""
        self._last_used[rows] = self._clock()

    def of_owner(self, tenant: str, owner: str) -> list[int]:
        """Rows of the sessions opened with this owner."""
        return [row for row in self.of_tenant(tenant) if self._opening_of[row].owner == owner]

    def of_tenant(self, tenant: str) -> list[int]:
        """Rows of a tenant's sessions."""
        return list(self.rows_of(tenant).values())

    def idle(self, seconds: float) -> list[int]:
        """Rows not used for longer than `seconds`."""
        idle = (self._ids > 0) & (self._last_used < self._clock() - seconds)
        rows: list[int] = np.flatnonzero(idle).tolist()
        return rows
