"""Sessions as plain lists: what API.md says about them, with no arrays, pages or shortcuts.

A refusal is a set of codes, since the papers fix no order between several that apply. Imports
nothing of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

LEFT_OUT = -1
"""An epoch left out: the one the session was opened with."""


class Refused(Exception):
    """A request that changes nothing; `codes` are those that apply."""

    def __init__(self, *codes: str) -> None:
        super().__init__(", ".join(codes))
        self.codes = set(codes)


@dataclass
class Session:
    """ids: compressed by absolute position; None where nobody ever said (below the base)."""

    ids: list[int | None]
    base: int
    epoch: int
    opened_epoch: int
    opened_as: tuple[object, ...]
    owner: str | None = None
    last_used: float = 0.0

    @property
    def length(self) -> int:
        return len(self.ids)

    def in_place(self, position: int, ids: Sequence[int], *, truncate: bool) -> bool:
        """Every id is there already (and a truncating push would end where the session ends)."""
        end = position + len(ids)
        there = self.base <= position and end <= self.length
        there = there and self.ids[position:end] == list(ids)
        return there and not (truncate and end != self.length)


@dataclass
class Sessions:
    """All sessions of all tenants. `ngram` is max_ngram_size."""

    ngram: int
    held: dict[tuple[str, int], Session] = field(default_factory=dict)
    highest_epoch: int = 0

    def find(self, tenant: str, session_id: int) -> Session:
        if (tenant, session_id) not in self.held:
            raise Refused("unknown_session")
        return self.held[tenant, session_id]

    def open(
        self,
        tenant: str,
        session_id: int,
        *,
        ids: Sequence[int] = (),
        position: int = 0,
        owner: str | None = None,
    ) -> Session | None:
        """Empty, or at `position` with its look-back `ids`; None when opened alike before."""
        opened_as = "at", position, tuple(ids), owner
        if (tenant, session_id) in self.held:
            if self.held[tenant, session_id].opened_as == opened_as:
                return None
            raise Refused("session_exists")
        history: list[int | None] = [None] * (position - len(ids)) + list(ids)
        base = 0 if position <= self.ngram - 1 else position
        self.held[tenant, session_id] = Session(history, base, 0, 0, opened_as, owner)
        return self.held[tenant, session_id]

    def fork(
        self, tenant: str, session_id: int, source_id: int, position: int, epoch: int = LEFT_OUT
    ) -> Session | None:
        """With the history of another session up to `position`."""
        opened_as = "fork", source_id, position, epoch
        if (tenant, session_id) in self.held:
            if self.held[tenant, session_id].opened_as == opened_as:
                return None
            raise Refused("session_exists")
        source = self.find(tenant, source_id)
        codes = self.reading_refused(source, position, 0, epoch)
        if self.named(source, epoch) > source.epoch:
            codes = codes - {"not_pushed"} | {"stale_epoch"}
        if position > source.length:
            codes.add("not_pushed")
        if codes:
            raise Refused(*codes)
        history = source.ids[:position]
        made = Session(history, source.base, 0, 0, opened_as, None)
        self.held[tenant, session_id] = made
        return made

    def named(self, session: Session, epoch: int) -> int:
        return session.opened_epoch if epoch == LEFT_OUT else epoch

    def reading_refused(self, session: Session, position: int, count: int, epoch: int) -> set[str]:
        """Codes that refuse a read (nobody will push meanwhile)."""
        named, codes = self.named(session, epoch), set()
        if named < session.epoch:
            codes.add("stale_epoch")
        if named > session.epoch or position + count > session.length:
            codes.add("not_pushed")
        if position < session.base:
            codes.add("history_truncated")
        return codes

    def push_refused(
        self, session: Session, position: int, ids: Sequence[int], epoch: int, *, truncate: bool
    ) -> set[str]:
        """Codes that refuse a push; empty when it is applied or already in place."""
        codes = set()
        if position < session.base:
            codes.add("history_truncated")
        if position > session.length:
            codes.add("gap")
        overlap = session.ids[position : position + len(ids)]
        if not truncate and overlap != list(ids[: len(overlap)]):
            codes.add("conflict")
        stale = self.named(session, epoch) != session.epoch
        if stale and not session.in_place(position, ids, truncate=truncate):
            codes.add("stale_epoch")
        return codes

    def push(
        self,
        session: Session,
        position: int,
        ids: Sequence[int],
        epoch: int = LEFT_OUT,
        *,
        truncate: bool = False,
    ) -> None:
        codes = self.push_refused(session, position, ids, epoch, truncate=truncate)
        if codes:
            raise Refused(*codes)
        if self.named(session, epoch) != session.epoch:
            return  # a retry: all in place
        end = position + len(ids)
        if truncate or end > session.length:
            session.ids[position:] = list(ids)
        if truncate:
            session.epoch += 1

    def rewind(self, session: Session, position: int, epoch: int = LEFT_OUT) -> None:
        codes = set()
        if position < session.base:
            codes.add("history_truncated")
        if position > session.length:
            codes.add("gap")
        present = self.named(session, epoch) == session.epoch
        if not present and position != session.length:
            codes.add("stale_epoch")
        if codes:
            raise Refused(*codes)
        if present:
            del session.ids[position:]
            session.epoch += 1
