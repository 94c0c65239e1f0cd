"""The memory ledger: what will be held where, decided and checked before anything is loaded.

On a part whose CPU and GPU share memory this is the only guard: cgroups do not see CUDA memory,
and a host that runs out wedges until a power cycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from engram_core.errors import MemoryShort

HELD_ID_BYTES = 4
"""Bytes of one held token id (a compressed id, int32)."""

_PAGE_BYTES = 4096
_GIB = 1 << 30


class Placement(StrEnum):
    """Where the tables lie."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Pool(StrEnum):
    """What runs out. A CPU, and a part with shared memory, have the host's alone."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class Budget:
    """What else has to fit beside the backend: requests in flight, held ids, the reserve, and what
    is shared with clients.

    wkv_copy: whether a GPU keeps the bfloat16 copy of weights that its kernels read as stored
    """

    in_flight_bytes: int = 0
    held_tokens: int = 0
    reserve_bytes: int = 1 << 30
    shared_bytes: int = 0
    wkv_copy: bool = True


@dataclass(frozen=True)
class Memory:
    """Readings, taken by the caller.

    host_available_bytes: MemAvailable (evictable page cache counts as available)
    device_free_bytes: of the GPU's own memory; None = there is no GPU
    integrated: the GPU uses the host's memory; its own "free" counts page cache as used and is
        not looked at
    swap_used_bytes: for the notes
    total_bytes: of an integrated part, whoever uses it now; None = not read
    """

    host_available_bytes: int
    device_free_bytes: int | None = None
    integrated: bool = False
    swap_used_bytes: int = 0
    total_bytes: int | None = None

    @property
    def has_device_pool(self) -> bool:
        """Whether the device has memory of its own."""
        return self.device_free_bytes is not None and not self.integrated

    def available(self, pool: Pool) -> int:
        """Bytes left in a pool now."""
        free = self.host_available_bytes if pool is Pool.HOST else self.device_free_bytes
        return free or 0


@dataclass(frozen=True)
class Measured:
    """What the doctor measured on this machine (`doctor_report.py`).

    rows_per_s: random rows a second from tables in each placement, where that was measured
    refused: placements that cannot be had here, and why
    """

    rows_per_s: Mapping[Placement, float]
    refused: Mapping[Placement, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Needs:
    """What has to be held, in bytes.

    tables: rows of all layers as stored; wkv: as the backend keeps it; kv_store: all slots
    workspaces: of the backend; in_flight: bodies and answers; held_ids: token ids of sessions
    context: of the device's driver; reserve: left free in every pool; shared: with clients
    """

    tables: int
    wkv: int
    kv_store: int
    workspaces: int
    in_flight: int
    held_ids: int
    reserve: int
    context: int = 0
    shared: int = 0


@dataclass(frozen=True)
class Line:
    """One line of the ledger."""

    name: str
    num_bytes: int
    pool: Pool


@dataclass(frozen=True)
class Ledger:
    """What is held where. why: the reason for the placement, a sentence; notes: to be shown."""

    placement: Placement
    lines: tuple[Line, ...]
    why: str
    notes: tuple[str, ...] = ()

    def total(self, pool: Pool) -> int:
        """Bytes of a pool, its reserve included."""
        return sum(line.num_bytes for line in self.lines if line.pool is pool)

    def table(self) -> list[str]:
        """Lay the ledger out for people, a line each."""
        width = max(len(line.name) for line in self.lines)
        rows = [
            f"{line.name:<{width}}  {line.pool:<6}  {line.num_bytes / _GIB:10.3f} GiB"
            for line in self.lines
        ]
        totals = [
            f"{'total':<{width}}  {pool:<6}  {self.total(pool) / _GIB:10.3f} GiB"
            for pool in Pool
            if any(line.pool is pool for line in self.lines)
        ]
        return [*rows, *totals, f"placement {self.placement}: {self.why}", *self.notes]


def plan(
    needs: Needs,
    memory: Memory,
    placement: str = "auto",
    *,
    measured: Measured | None = None,
) -> Ledger:
    """Choose where the tables lie, fastest first, and refuse what does not fit.

    placement: "auto", or one of `Placement`; measured: which is fastest, for auto; left out,
        device, host, disk

    Raises: MemoryShort saying what is missing where, and what to change.
    """
    notes = _notes(memory)
    refused: list[str] = []
    candidates = _candidates(memory, placement)
    if placement == "auto":
        if _fits_when_empty(needs, memory):
            candidates = [each for each in candidates if each is not Placement.DISK]
        if measured is not None:
            refused += [
                f"{each}: {measured.refused[each]}"
                for each in candidates
                if each in measured.refused
            ]
            candidates = _fastest_first(candidates, measured)
    for candidate in candidates:
        lines = _lines(needs, memory, candidate)
        ledger = Ledger(candidate, lines, _why(candidate, refused, placement, measured), notes)
        missing = _missing(ledger, memory)
        if missing is None:
            return ledger
        refused.append(f"{candidate}: {missing}")
    raise MemoryShort(
        f"tables, weights and store do not fit ({'; '.join(refused)}); lower kv_store_bytes, "
        f"in_flight_bytes or memory_reserve_bytes, or use placement disk{_late_return(memory)}",
        expected="a plan that fits",
        got=refused,
    )


def check(needs: Needs, ledger: Ledger, memory: Memory) -> None:
    """After loading: refuse to serve when less than the reserve is left. Raises: MemoryShort."""
    for pool in {line.pool for line in ledger.lines}:
        left = memory.available(pool)
        if left < needs.reserve:
            raise MemoryShort(
                f"{pool} memory: expected {needs.reserve} bytes left after loading, got {left}; "
                "something else on this machine uses memory, or the ledger is wrong"
                f"{_late_return(memory)}",
                expected=needs.reserve,
                got=left,
            )


def _candidates(memory: Memory, placement: str) -> Sequence[Placement]:
    """Placements to try, fastest first."""
    if memory.has_device_pool:
        known = [Placement.DEVICE, Placement.HOST, Placement.DISK]
    elif memory.integrated:
        # Pinned host memory is the same memory: it saves nothing and cannot be evicted.
        known = [Placement.DEVICE, Placement.DISK]
    else:
        known = [Placement.HOST, Placement.DISK]
    if placement == "auto":
        return known
    if placement not in known:
        advice = ""
        if placement in tuple(Placement):
            advice = " (host and device are one memory here)"
            advice = advice if memory.integrated else " (there is no device)"
        allowed = ", ".join(["auto", *known])
        raise MemoryShort(
            f"placement: expected one of {allowed}, got {placement!r}{advice}",
            expected=allowed,
            got=placement,
        )
    return [Placement(placement)]


def _lines(needs: Needs, memory: Memory, placement: Placement) -> tuple[Line, ...]:
    device = Pool.DEVICE if memory.has_device_pool else Pool.HOST
    tables = {
        Placement.DEVICE: Line("tables", needs.tables, device),
        Placement.HOST: Line("tables", _pages(needs.tables), Pool.HOST),
        Placement.DISK: Line("tables (on disk)", 0, Pool.HOST),
    }
    lines = [
        tables[placement],
        Line("wkv", needs.wkv, device),
        Line("kv store", needs.kv_store, device),
        Line("workspaces", needs.workspaces, device),
        Line("context", needs.context, device),
        Line("in flight", needs.in_flight, Pool.HOST),
        Line("shared memory", needs.shared, Pool.HOST),
        Line("held ids", needs.held_ids, Pool.HOST),
        Line("reserve", needs.reserve, Pool.HOST),
    ]
    if device is not Pool.HOST:
        lines.append(Line("reserve", needs.reserve, device))
    return tuple(line for line in lines if line.num_bytes or "tables" in line.name)


def _pages(num_bytes: int) -> int:
    """Whole pages. Buffers are pinned in place: torch's pinned allocator would round each up to a
    power of two (39.3 GiB of Q3_K rows to 64)."""
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _missing(ledger: Ledger, memory: Memory) -> str | None:
    for pool in {line.pool for line in ledger.lines}:
        needed, available = ledger.total(pool), memory.available(pool)
        if needed > available:
            return f"{needed / _GIB:.1f} GiB of {pool} memory needed, {available / _GIB:.1f} there"
    return None


def _late_return(memory: Memory) -> str:
    """What else may be the reason on a part with shared memory (docs/gb10.md)."""
    if not memory.integrated:
        return ""
    return (
        "; a process that ended on this GPU may still be giving its memory back, for seconds to "
        "minutes: try again (docker/engram.service does every 15 s)"
    )


def _fits_when_empty(needs: Needs, memory: Memory) -> bool:
    """Whether a part with shared memory holds the tables once others have given theirs back.

    What is short now is then short for a while: auto does not go to the disk, which is a thousand
    times slower, for the rest of the process's life.
    """
    if not memory.integrated or memory.total_bytes is None:
        return False
    lines = _lines(needs, memory, Placement.DEVICE)
    return sum(line.num_bytes for line in lines) <= memory.total_bytes


def _fastest_first(candidates: Sequence[Placement], measured: Measured) -> list[Placement]:
    """Order those that were measured among themselves; the others keep their places."""
    rates = measured.rows_per_s
    usable = [each for each in candidates if each not in measured.refused]
    fastest = iter(sorted((each for each in usable if each in rates), key=lambda p: -rates[p]))
    return [next(fastest) if each in rates else each for each in usable]


def _why(
    placement: Placement, refused: Sequence[str], asked: str, measured: Measured | None
) -> str:
    if refused:
        reason = f"the first that fits ({'; '.join(refused)})"
    else:
        reason = {
            Placement.DEVICE: "everything fits the device",
            Placement.HOST: "everything fits the host's memory",
            Placement.DISK: "rows come fastest from there" if asked == "auto" else "asked for",
        }[placement]
    if measured is None or not measured.rows_per_s:
        return reason
    rates = ", ".join(f"{each} {rate:,.0f}" for each, rate in measured.rows_per_s.items())
    return f"{reason}; random rows a second, as the doctor measured: {rates}"


def _notes(memory: Memory) -> tuple[str, ...]:
    if not memory.swap_used_bytes:
        return ()
    return (f"note: {memory.swap_used_bytes / _GIB:.1f} GiB of swap are in use",)
