"""The ledger: the fastest placement that fits, and refusals that say what is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engram_core.errors import MemoryShort
from engram_core.memory import Memory, Needs, Placement, Pool, check, plan

GIB = 1 << 30


def needs(tables: float, **changed: Any) -> Needs:
    sizes = {"wkv": 1, "kv_store": 2, "workspaces": 1, "in_flight": 1, "held_ids": 0, "reserve": 1}
    return Needs(tables=int(tables * GIB), **{k: v * GIB for k, v in (sizes | changed).items()})


def cpu(available: float) -> Memory:
    return Memory(int(available * GIB))


def gpu(free: float, host: float, *, integrated: bool = False) -> Memory:
    return Memory(int(host * GIB), int(free * GIB), integrated)


@pytest.mark.parametrize(
    ("memory", "tables", "placement"),
    [
        (cpu(100), 60, Placement.HOST),
        (cpu(60), 60, Placement.DISK),
        (gpu(100, 20), 60, Placement.DEVICE),
        (gpu(40, 100), 60, Placement.HOST),
        (gpu(40, 20), 60, Placement.DISK),
        (gpu(3, 115, integrated=True), 60, Placement.DEVICE),
        (gpu(3, 50, integrated=True), 60, Placement.DISK),
    ],
)
def test_auto_takes_the_fastest_placement_that_fits(
    memory: Memory, tables: float, placement: Placement
) -> None:
    assert plan(needs(tables), memory).placement is placement


def test_page_cache_counts_as_free_on_a_part_with_shared_memory_only() -> None:
    assert plan(needs(65), gpu(3, 115, integrated=True), "device").placement is Placement.DEVICE
    with pytest.raises(MemoryShort, match=r"device: 70\.0 GiB of device memory needed, 3\.0 there"):
        plan(needs(65), gpu(3, 115), "device")


def test_pinned_host_memory_is_no_option_on_a_part_with_shared_memory() -> None:
    memory = gpu(20, 61, integrated=True)
    ledger = plan(needs(64.5), memory)
    assert ledger.placement is Placement.DISK
    assert "device: 70.5 GiB of host memory needed, 61.0 there" in ledger.why
    with pytest.raises(MemoryShort, match="host and device are one memory here"):
        plan(needs(64.5), memory, "host")


def test_swap_in_use_is_noted() -> None:
    ledger = plan(needs(1), Memory(50 * GIB, swap_used_bytes=3 * GIB))
    assert ledger.table()[-1] == "note: 3.0 GiB of swap are in use"


@pytest.mark.parametrize("gib", [30.04, 39.34, 91.55, 2.86])
def test_pinned_tables_take_what_they_need(gib: float) -> None:
    ledger = plan(needs(gib), gpu(10, 200), "host")
    tables = next(line.num_bytes for line in ledger.lines if line.name == "tables")
    assert gib * GIB - 1 <= tables < gib * GIB * 1.001


def test_what_does_not_fit_even_on_disk_is_refused_with_every_reason() -> None:
    with pytest.raises(MemoryShort) as got:
        plan(needs(60), cpu(2))
    assert "host: 66.0 GiB of host memory needed, 2.0 there" in got.value.message
    assert "disk: 6.0 GiB of host memory needed, 2.0 there" in got.value.message


def test_an_exact_fit_is_accepted_and_one_byte_less_refused() -> None:
    total = plan(needs(60), cpu(100)).total(Pool.HOST)
    plan(needs(60), Memory(total), "host")
    with pytest.raises(MemoryShort):
        plan(needs(60), Memory(total - 1), "host")


@pytest.mark.parametrize("placement", ["device", "HBM", "", "Disk"])
def test_a_placement_this_machine_does_not_have_is_refused(placement: str) -> None:
    with pytest.raises(MemoryShort, match="expected one of auto, host, disk") as got:
        plan(needs(1), cpu(100), placement)
    assert ("there is no device" in got.value.message) == (placement == "device")


def test_the_reserve_is_kept_in_both_pools() -> None:
    ledger = plan(needs(60), gpu(100, 20))
    assert ledger.total(Pool.DEVICE) == (60 + 1 + 2 + 1 + 1) * GIB
    assert ledger.total(Pool.HOST) == (1 + 1) * GIB


def test_the_table_shows_every_line_and_the_reason() -> None:
    rows = plan(needs(60), cpu(100)).table()
    assert rows[0].split() == ["tables", "host", "60.000", "GiB"]
    assert rows[-2].split() == ["total", "host", "66.000", "GiB"]
    assert rows[-1] == "placement host: everything fits the host's memory"


def test_less_than_the_reserve_after_loading_is_refused() -> None:
    need = needs(60)
    ledger = plan(need, gpu(100, 20))
    check(need, ledger, gpu(1, 1))
    with pytest.raises(MemoryShort, match="device memory: expected 1073741824 bytes left"):
        check(need, ledger, gpu(0.9, 1))


LATE = "may still be giving its memory back"


def test_short_shared_memory_may_be_a_former_process_s() -> None:
    """On a GB10 it comes back late: auto does not go to the disk because of it."""
    memory = gpu(3, 50, integrated=True)
    late = replace(memory, total_bytes=121 * GIB)
    with pytest.raises(
        MemoryShort, match=f"or use placement disk; a process .* {LATE}.* try again"
    ):
        plan(needs(60), late)
    assert plan(needs(60), late, "disk").placement is Placement.DISK
    assert plan(needs(189), late).placement is Placement.DISK, "which never fits"
    assert plan(needs(60), replace(late, host_available_bytes=90 * GIB)).placement == "device"
    with pytest.raises(MemoryShort, match=LATE):
        check(needs(60, reserve=51), plan(needs(1), memory), memory)


@pytest.mark.parametrize("memory", [cpu(2), gpu(3, 2)])
def test_other_memory_comes_back_at_once(memory: Memory) -> None:
    with pytest.raises(MemoryShort) as got:
        plan(needs(60), memory, "host" if memory.device_free_bytes is None else "device")
    assert LATE not in got.value.message
