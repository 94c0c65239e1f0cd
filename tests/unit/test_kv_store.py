"""The kv store: equal windows once, whole keys, least recently used out, never a wrong slot."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from engram_core import kv_store
from engram_core.kv_store import KvStore, Lease, Loan
from engram_core.pages import Ints


def windows(*firsts: int) -> NDArray[np.int32]:
    """One window a token, told apart by its newest id."""
    ids = np.zeros((len(firsts), 4), dtype=np.int32)
    ids[:, 0] = firsts
    return ids


def acquire(store: KvStore, *firsts: int, tenant: int = 0, layer: int = 0) -> Lease:
    return store.acquire(layer, np.full(len(firsts), tenant), windows(*firsts))


def use(store: KvStore, *firsts: int, **key: int) -> Lease:
    lease = acquire(store, *firsts, **key)
    store.release(lease)
    return lease


def test_equal_windows_of_a_batch_are_computed_once() -> None:
    store = KvStore(8)
    lease = acquire(store, 5, 7, 5, 7, 9)
    assert lease.compute.tolist() == [0, 1, 4]
    assert lease.slots[0] == lease.slots[2] != lease.slots[1]
    counters = store.counters
    assert (counters.hits, counters.misses, counters.duplicates) == (0, 3, 2)


def test_second_use_is_a_hit() -> None:
    store = KvStore(8)
    first, second = use(store, 5, 7), use(store, 7, 5, 5)
    assert second.compute.tolist() == []
    assert second.slots.tolist() == [first.slots[1], first.slots[0], first.slots[0]]
    assert store.counters.hits == 3


@pytest.mark.parametrize("other", [{"tenant": 1}, {"layer": 1}])
def test_entries_are_private_to_tenant_and_layer(other: dict[str, int]) -> None:
    store = KvStore(8)
    use(store, 5)
    assert use(store, 5, **other).compute.tolist() == [0]


@pytest.mark.parametrize("column", range(4))
def test_keys_are_compared_whole(column: int) -> None:
    store = KvStore(8)
    ids = windows(0, 0)
    ids[1, column] = 1 << 24  # ends in zero bytes but one
    lease = store.acquire(0, np.zeros(2, dtype=np.int64), ids)
    assert lease.compute.tolist() == [0, 1]


def test_least_recently_used_goes_first() -> None:
    store = KvStore(4)
    use(store, 1, 2)
    use(store, 3, 4)
    use(store, 1)
    use(store, 5)
    assert use(store, 1, 3, 4, 5).compute.tolist() == []
    assert store.counters.evicted == 1


def test_eviction_order_stays_exact_while_the_queue_ages() -> None:
    store = KvStore(64)
    for i in range(64):
        use(store, i)
    for i in range(0, 64, 2):  # evicts the odd ones in order, whatever the queue was made of
        use(store, i)
        use(store, 1000 + i)
    assert use(store, *range(0, 64, 2)).compute.tolist() == []
    assert store.counters.evicted == 32


def test_pinned_entries_are_not_evicted() -> None:
    store = KvStore(4)
    pinned = acquire(store, 1, 2)
    for i in range(10, 20):
        use(store, i, i + 100)
    assert use(store, 1, 2).slots.tolist() == pinned.slots.tolist()


def test_batch_that_fills_the_store_fits() -> None:
    store = KvStore(4)
    use(store, 1, 2, 3, 4)
    lease = acquire(store, 3, 5, 6, 7)
    assert lease.compute.tolist() == [1, 2, 3]
    assert len(set(lease.slots.tolist())) == 4


def test_too_large_a_batch_is_refused_and_pins_nothing() -> None:
    store = KvStore(4)
    use(store, 1, 2)
    with pytest.raises(MemoryError, match="kv slots needed"):
        acquire(store, 1, 5, 6, 7, 8)
    assert len(use(store, 5, 6, 7, 8).compute) == 4


def test_failed_computation_leaves_no_entry() -> None:
    store = KvStore(4)
    use(store, 1)
    store.abandon(acquire(store, 1, 2, 3))
    assert len(store) == 1
    assert use(store, 1, 2, 3, 4).compute.tolist() == [1, 2, 3]


def test_lent_slots_are_found_by_no_key_and_come_back() -> None:
    store = KvStore(4)
    use(store, 1, 2, 3)
    lent = store.lend(2)
    assert store.counters.evicted == 1
    assert not set(lent.tolist()) & set(use(store, 2, 3).slots.tolist())
    store.give_back(lent)
    assert len(use(store, 5, 6, 7, 8).compute) == 4


def test_no_tokens_are_fine() -> None:
    assert len(use(KvStore(1)).slots) == 0


def test_store_of_no_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        KvStore(0)


@pytest.mark.parametrize("num_slots", [1, 7, 64])
def test_a_hundred_times_its_size_of_random_load_is_never_served_wrong(num_slots: int) -> None:
    """A model of the memory: what a slot holds must be what was asked for, and LRU exactly."""
    rng = np.random.default_rng(num_slots)
    store = KvStore(num_slots)
    memory: dict[int, tuple[int, ...]] = {}
    last_used: dict[tuple[int, ...], int] = {}
    tokens = 0
    for now in range(10_000):
        if tokens >= 100 * num_slots and now > 400:
            break
        count = int(rng.integers(1, num_slots + 1))
        tenant, layer = int(rng.integers(2)), int(rng.integers(2))
        ids = rng.zipf(1.3, count).clip(max=3 * num_slots)
        lease = acquire(store, *ids.tolist(), tenant=tenant, layer=layer)
        keys = [(tenant, layer, i) for i in ids.tolist()]
        for token in lease.compute.tolist():
            memory[int(lease.slots[token])] = keys[token]
        assert [memory[slot] for slot in lease.slots.tolist()] == keys
        last_used.update(dict.fromkeys(keys, now))
        if rng.random() < 0.1:
            store.abandon(lease)
            for token in lease.compute.tolist():
                del last_used[keys[token]]
        else:
            store.release(lease)
        if rng.random() < 0.1:
            store.give_back(store.lend(int(rng.integers(0, num_slots // 2 + 1))))
        tokens += count
        assert len(store) + len(store._free) == num_slots
        held = {_key(key) for key in store._slot_of}
        if held and (lost := last_used.keys() - held):
            assert max(last_used[k] for k in lost) <= min(last_used[k] for k in held)
        last_used = {key: used for key, used in last_used.items() if key in held}
    assert store.counters.evicted > 0 or num_slots == 1
    assert not store._pins.any()


def _key(key: bytes) -> tuple[int, ...]:
    tenant, layer, first, *_ = np.frombuffer(key, dtype=np.int32).tolist()
    return tenant, layer, first


def fill_now(
    store: KvStore, *firsts: int, may: bool = True
) -> tuple[Lease | None, list[list[int]]]:
    """What a thread beside the lane gets, and the tokens that it was asked to compute."""
    asked: list[list[int]] = []

    def fill(slots: list[int], tokens: list[int]) -> bool:
        assert len(slots) == len(tokens) == len(set(slots))
        asked.append(tokens)
        return may

    return store.lease_now(0, np.zeros(len(firsts), np.int64), windows(*firsts), fill), asked


def test_another_thread_computes_what_is_missing_once_and_all_find_it() -> None:
    store = KvStore(8)
    store.fill(use(store, 5))
    lease, asked = fill_now(store, 7, 5, 7, 9)
    assert lease is not None
    assert asked == [[0, 3]]
    assert lease.slots[0] == lease.slots[2]
    assert len(set(lease.slots.tolist())) == 3
    counters = store.counters
    assert (counters.hits, counters.misses, counters.duplicates) == (1, 3, 1)
    assert not acquire(store, 5, 7, 9).compute.size
    again, asked = fill_now(store, 9, 7, 5)
    assert again is not None
    assert asked == []
    assert again.slots.tolist() == lease.slots[[3, 0, 1]].tolist()


def test_what_a_lane_is_about_to_compute_is_left_to_it() -> None:
    store = KvStore(8)
    lease = acquire(store, 5)
    found, asked = fill_now(store, 5, 7)
    assert (found, asked) == (None, [])
    assert acquire(store, 7).compute.size
    store.fill(lease)
    assert fill_now(store, 5)[0] is not None


def test_what_could_not_be_computed_leaves_nothing_behind() -> None:
    store = KvStore(3)
    store.fill(use(store, 5))
    assert fill_now(store, 5, 7, may=False) == (None, [[1]])
    assert len(store._free) == 2
    assert acquire(store, 7).compute.size
    # Nor where there are not enough slots.
    before = store._pins.copy()
    assert fill_now(store, 1, 2, 3) == (None, [])
    assert (store._pins == before).all()


def test_a_hit_is_not_evicted_for_what_is_missing_beside_it() -> None:
    store = KvStore(3)
    store.fill(use(store, 1, 2, 3))
    lease, asked = fill_now(store, 1, 8, 9)
    assert lease is not None
    assert asked == [[1, 2]]
    assert not acquire(store, 1, 8).compute.size
    assert store.counters.evicted == 2
    store = KvStore(3)
    store.fill(use(store, 1, 2, 3))
    assert fill_now(store, 1, 7, 8, 9) == (None, [])
    assert not acquire(store, 1).compute.size


def test_urgent_work_goes_between_the_parts_of_a_large_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it makes meanwhile is found, before it was looked for or since."""
    monkeypatch.setattr(kv_store, "_AT_ONCE", 4)
    monkeypatch.setattr(kv_store, "_WHOLE", 4)
    store = KvStore(30)
    store.fill(use(store, 7))
    found: list[Lease] = []

    def sleep(seconds: float) -> None:
        store._num_urgent = 0
        if found:
            return
        lease, asked = fill_now(store, 2, 10, 90, 7)
        assert asked == [[0, 1, 2]]
        assert lease is not None
        found.append(lease)

    monkeypatch.setattr(kv_store.time, "sleep", sleep)
    store._num_urgent = 1
    lease = acquire(store, *range(20), 2, 19)
    assert lease.compute.tolist() == [i for i in range(20) if i not in (2, 7, 10)]
    assert lease.slots[[2, 10, 7]].tolist() == found[0].slots[[0, 1, 3]].tolist()
    assert lease.slots[20] == lease.slots[2]
    assert lease.slots[21] == lease.slots[19]
    assert len(set(lease.slots.tolist())) == 20
    store.fill(lease)
    again = acquire(store, *range(20))
    assert not again.compute.size
    assert again.slots.tolist() == lease.slots[:20].tolist()
    for each in (*found, lease, again):
        store.release(each)
    assert not store._pins.any()


# ---- beside the lane that acquires


def borrow(store: KvStore, *firsts: int) -> Loan:
    return store.borrow(0, np.zeros(len(firsts), dtype=np.int64), windows(*firsts))


def test_a_loan_pins_what_is_filled_and_lends_the_rest_once_a_window() -> None:
    store = KvStore(8)
    there = use(store, 5)
    store.fill(there)
    loan = borrow(store, 7, 5, 9, 7, 5)
    assert loan.compute.tolist() == [0, 2]
    assert loan.slots[1] == loan.slots[4] == there.slots[0]
    assert loan.slots[0] == loan.slots[3] != loan.slots[2]
    counters = store.counters
    assert (counters.hits, counters.misses, counters.duplicates) == (2, 1 + 2, 1)
    assert store.find(0, np.zeros(1, dtype=np.int64), windows(7)) is None, "not computed yet"
    store.adopt(loan)
    store.end_loan(loan)
    found = acquire(store, 7, 9)
    assert not found.compute.size
    assert found.slots.tolist() == loan.slots[[0, 2]].tolist()
    store.release(found)
    assert not store._pins.any()


def test_what_the_lane_is_about_to_fill_is_computed_once_more_in_a_slot_of_its_own() -> None:
    store = KvStore(8)
    lease = acquire(store, 5)
    loan = borrow(store, 5, 6)
    assert loan.compute.tolist() == [0, 1]
    assert loan.slots[0] != lease.slots[0]
    store.adopt(loan)
    assert acquire(store, 5).slots.tolist() == lease.slots.tolist(), "the lane's stays"
    store.end_loan(loan)
    assert loan.slots[0] in store._free
    assert loan.slots[1] not in store._free
    store.fill(lease)
    assert borrow(store, 5).slots.tolist() == lease.slots.tolist()


def test_what_two_loans_compute_is_kept_once() -> None:
    store = KvStore(4)
    loans = [borrow(store, 5), borrow(store, 5)]
    for loan in loans:
        store.adopt(loan)
    for loan in loans:
        store.end_loan(loan)
    assert (len(store), len(store._free)) == (1, 3)
    assert acquire(store, 5).slots.tolist() == loans[0].slots.tolist()


def test_slots_of_a_loan_are_not_evicted_until_it_ends() -> None:
    store = KvStore(3)
    store.fill(use(store, 5))
    loan = borrow(store, 5, 6)
    store.adopt(loan)
    use(store, 10)
    use(store, 11)
    with pytest.raises(MemoryError):
        acquire(store, 12, 13)
    assert not borrow(store, 5, 6).compute.size, "pinned once more"
    assert not acquire(store, 5, 6).compute.size


def test_a_loan_without_room_or_without_its_computation_leaves_nothing_behind() -> None:
    store = KvStore(3)
    store.fill(use(store, 5))
    with pytest.raises(MemoryError):
        borrow(store, 5, 6, 7, 8)
    assert not store._pins.any()
    store.end_loan(borrow(store, 5, 6))
    assert not store._pins.any()
    assert (len(store), len(store._free)) == (1, 2)


def test_what_is_adopted_while_a_large_batch_is_acquired_is_found_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_store, "_AT_ONCE", 4)
    monkeypatch.setattr(kv_store, "_WHOLE", 4)
    store = KvStore(30)
    loans: list[Loan] = []

    def sleep(seconds: float) -> None:
        store._num_urgent = 0
        loans.append(borrow(store, 2, 10, 90))
        store.adopt(loans[0])

    monkeypatch.setattr(kv_store.time, "sleep", sleep)
    store._num_urgent = 1
    lease = acquire(store, *range(20))
    assert lease.compute.tolist() == [i for i in range(20) if i not in (2, 10)]
    assert lease.slots[[2, 10]].tolist() == loans[0].slots[:2].tolist()
    store.end_loan(loans[0])
    store.release(lease)
    assert not store._pins.any()


def test_three_threads_read_only_what_is_filled_and_lose_no_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lane, one beside it and the asking one, twice as many windows as slots, some failures."""
    monkeypatch.setattr(kv_store, "_AT_ONCE", 16)
    monkeypatch.setattr(kv_store, "_WHOLE", 16)
    store, memory = KvStore(150), np.zeros(150, dtype=np.int64)
    wrong: list[str] = []

    def check(name: str, slots: Ints, firsts: Ints) -> None:
        if not (memory[slots] == firsts + 1).all():
            wrong.append(name)

    def compute(slots: Ints, firsts: Ints) -> None:
        memory[slots] = -1
        time.sleep(0)
        memory[slots] = firsts + 1

    def lane(firsts: Ints, fails: bool) -> None:
        lease = acquire(store, *firsts)
        compute(lease.slots[lease.compute], firsts[lease.compute])
        if fails:
            store.abandon(lease)
            return
        store.fill(lease)
        check("lane", lease.slots, firsts)
        store.release(lease)

    def beside(firsts: Ints, fails: bool) -> None:
        loan = borrow(store, *firsts[:40])
        compute(loan.slots[loan.compute], firsts[loan.compute])
        if not fails:
            store.adopt(loan)
            check("beside", loan.slots, firsts[:40])
        store.end_loan(loan)

    def asking(firsts: Ints, fails: bool) -> None:
        lease = store.find(0, np.zeros(4, dtype=np.int64), windows(*firsts[:4]))
        if lease is not None:
            check("asking", lease.slots, firsts[:4])
            store.release(lease)

    def run(call: Callable[[Ints, bool], None], seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(150):
                call(rng.integers(0, 300, 4 + rng.integers(60)), rng.random() < 0.05)
        except BaseException as error:
            wrong.append(repr(error))

    threads = [
        threading.Thread(target=run, args=(call, seed))
        for seed, call in enumerate((lane, beside, asking))
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert not store._pins.any()
    assert sorted([*store._free, *store._slot_of.values()]) == list(range(150))


def test_a_large_batch_pauses_only_where_a_thread_was_in_a_hurry_lately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, pauses = [100.0], list[float]()
    monkeypatch.setattr(kv_store.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(kv_store.time, "sleep", pauses.append)
    store = KvStore(2000)
    use(store, *range(1000))
    assert not pauses
    with store.urgently():
        pass
    use(store, *range(256))  # at once
    assert not pauses
    use(store, *range(257))
    assert pauses == [20e-6] * 4
    now[0] += 0.006
    use(store, *range(1000, 2000))
    assert len(pauses) == 4


def test_slots_of_a_large_batch_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its kv is computed where it belongs, without a copy."""
    monkeypatch.setattr(kv_store, "_AT_ONCE", 4)
    monkeypatch.setattr(kv_store, "_WHOLE", 4)
    store = KvStore(20)
    for first in (0, 10, 20, 30):  # the last two in the place of the first two
        lease = use(store, *range(first, first + 10))
        start = first % 20
        assert lease.slots.tolist() == list(range(start, start + 10))
    assert store.counters.evicted == 20  # no more than was needed


@pytest.mark.parametrize("moment", ["before", "after"])
def test_what_changes_while_evictions_are_queued_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Before the stamps are compared, or after: the lock is not held."""
    store = KvStore(12)
    for first in (0, 6):
        store.fill(use(store, *range(first, first + 6)))
    found: list[Lease] = []
    least_recent, flatnonzero = store._least_recent, np.flatnonzero

    def meanwhile() -> None:
        assert not store.lock.locked()
        monkeypatch.undo()
        store._queue = np.empty(0, dtype=np.int64)
        lease, _ = fill_now(store, 2, 50, 51)  # in the place of 0 and 1
        assert lease is not None
        found.append(lease)

    if moment == "before":

        def compared(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
            meanwhile()
            return flatnonzero(mask)

        monkeypatch.setattr(np, "flatnonzero", compared)
    else:

        def queued(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            queue = least_recent(count)
            meanwhile()
            return queue

        monkeypatch.setattr(store, "_least_recent", queued)
    lease = acquire(store, *range(100, 104))
    store.fill(lease)
    assert not set(lease.slots.tolist()) & set(found[0].slots.tolist())
    store.release(found[0])
    store.release(lease)
    assert len(store) == 12
    assert not acquire(store, 2, 50, 51, 7, 8, 9, 10, 11, *range(100, 104)).compute.size


def test_a_large_batch_that_does_not_fit_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_store, "_AT_ONCE", 4)
    monkeypatch.setattr(kv_store, "_WHOLE", 4)
    store = KvStore(16)
    held = acquire(store, *range(100, 108))
    store.fill(held)
    with pytest.raises(MemoryError):
        acquire(store, 100, *range(9))
    store.release(held)
    assert not store._pins.any()
    assert len(store) == 8
    assert not acquire(store, *range(100, 108)).compute.size
