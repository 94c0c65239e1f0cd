"""The kv store against a dictionary: never a wrong entry, never a pinned one lost, never stuck."""

from __future__ import annotations

import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engram_core import kv_store
from engram_core.kv_store import KvStore, Lease

NUM_SLOTS = 12
Key = tuple[int, int, tuple[int, ...]]

batches = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 2**16)), min_size=1, max_size=60
)


class Slots:
    """What a backend's slots would hold: the key whose kv was computed into each."""

    def __init__(self) -> None:
        self.store = KvStore(NUM_SLOTS)
        self.held: dict[int, Key] = {}

    def run(self, layer: int, tenants: list[int], windows: list[list[int]]) -> Lease:
        """Acquire, compute what is to be computed, and look at every token's slot."""
        keys = [(t, layer, tuple(w)) for t, w in zip(tenants, windows, strict=True)]
        lease = self.store.acquire(
            layer, np.array(tenants, np.int64), np.array(windows, np.int32).reshape(-1, 4)
        )
        computed = lease.slots[lease.compute].tolist()
        assert len(set(computed)) == len(computed)
        for token in lease.compute.tolist():
            self.held[int(lease.slots[token])] = keys[token]
        for key, slot in zip(keys, lease.slots.tolist(), strict=True):
            assert self.held[slot] == key
        return lease


def windows_of(seed: int, count: int) -> tuple[list[int], list[list[int]]]:
    """Windows that differ in one place only, the oldest id as often as the newest."""
    rng = np.random.default_rng(seed)
    windows = np.full((count, 4), 7)
    windows[np.arange(count), rng.integers(0, 4, count)] = rng.integers(0, 9, count)
    return rng.integers(0, 2, count).tolist(), windows.tolist()


@given(batches=batches)
def test_every_token_gets_the_slot_of_its_own_window(batches: list[tuple[int, int, int]]) -> None:
    """Hundred times the store's size of random load, tenants and layers mixed."""
    slots = Slots()
    tokens = 0
    for layer, _, seed in batches:
        for part in range(4):
            tenants, windows = windows_of(seed + part, 1 + (seed + part) % NUM_SLOTS)
            slots.store.release(slots.run(layer, tenants, windows))
            tokens += len(windows)
    counters = slots.store.counters
    assert counters.hits + counters.misses + counters.duplicates == tokens
    assert len(slots.store) <= NUM_SLOTS
    assert counters.misses - counters.evicted == len(slots.store)


def test_a_hundred_times_its_size_hits_misses_and_evicts() -> None:
    slots = Slots()
    for seed in range(100 * NUM_SLOTS // 6):
        tenants, windows = windows_of(seed, 6)
        slots.store.release(slots.run(seed % 2, tenants, windows))
    counters = slots.store.counters
    assert min(counters.hits, counters.misses, counters.duplicates, counters.evicted) > 20


@given(seeds=st.lists(st.integers(0, 2**16), min_size=1, max_size=40))
def test_pinned_entries_are_never_evicted(seeds: list[int]) -> None:
    slots = Slots()
    pinned_windows = [[1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]]
    pinned = slots.run(0, [0] * 3, pinned_windows)
    before = [slots.held[s] for s in pinned.slots.tolist()]
    for seed in seeds:
        tenants, windows = windows_of(seed, NUM_SLOTS - 3)
        slots.store.release(slots.run(1, tenants, windows))
        assert [slots.held[s] for s in pinned.slots.tolist()] == before
    again = slots.run(0, [0] * 3, pinned_windows)
    assert again.slots.tolist() == pinned.slots.tolist()
    assert not len(again.compute)


def test_more_than_fits_beside_the_pinned_is_refused_and_changes_nothing() -> None:
    slots = Slots()
    pinned = slots.run(0, [0] * 10, [[i] * 4 for i in range(10)])
    windows = np.array([[50 + i] * 4 for i in range(3)], np.int32)
    with pytest.raises(MemoryError):
        slots.store.acquire(0, np.zeros(3, np.int64), windows)
    slots.store.release(pinned)
    slots.store.release(slots.run(0, [0] * 3, windows.tolist()))


def test_abandoned_computation_is_forgotten() -> None:
    slots = Slots()
    lease = slots.run(0, [0], [[1, 2, 3, 4]])
    slots.store.abandon(lease)
    assert len(slots.run(0, [0], [[1, 2, 3, 4]]).compute) == 1


@given(order=st.lists(st.integers(0, 19), min_size=1, max_size=80))
def test_least_recently_used_goes_first(order: list[int]) -> None:
    """One token at a time the store is exactly an LRU list."""
    slots, recent = Slots(), OrderedDict[int, None]()
    for number in order:
        lease = slots.run(0, [0], [[number] * 4])
        slots.store.release(lease)
        assert (len(lease.compute) == 0) == (number in recent)
        recent.pop(number, None)
        recent[number] = None
        if len(recent) > NUM_SLOTS:
            recent.popitem(last=False)


def test_lent_slots_are_found_by_nobody() -> None:
    slots = Slots()
    lent = slots.store.lend(5).tolist()
    for seed in range(50):
        tenants, windows = windows_of(seed, 7)
        lease = slots.run(0, tenants, windows)
        assert not set(lent) & set(lease.slots.tolist())
        slots.store.release(lease)
    slots.store.give_back(np.array(lent))
    slots.store.release(slots.run(0, [0] * 12, [[i] * 4 for i in range(12)]))


class TwoThreads:
    """A lane that acquires large batches, and a thread that makes small ones itself meanwhile.

    ids: what the kv in each slot was computed of
    """

    def __init__(self, num_slots: int) -> None:
        self.store = KvStore(num_slots)
        self.ids = np.full(num_slots, -1)
        self.num_made = 0
        self._is_over = False

    def lane(self, rounds: int) -> None:
        rng = np.random.default_rng(1)
        for _ in range(rounds):
            ids = rng.integers(0, 500, rng.integers(1, self.store.num_slots - 40))
            lease = self.store.acquire(0, np.zeros(len(ids), np.int64), self.windows(ids))
            self.ids[lease.slots[lease.compute]] = ids[lease.compute]
            self.store.fill(lease)
            assert (self.ids[lease.slots] == ids).all()
            self.store.release(lease)

    def near(self) -> None:
        rng = np.random.default_rng(2)
        while not self._is_over:
            ids = rng.integers(0, 500, rng.integers(1, 32))

            def fill(slots: list[int], tokens: list[int], ids: NDArray[np.int64] = ids) -> bool:
                if rng.random() < 0.2:
                    return False
                self.ids[slots] = ids[tokens]
                self.num_made += len(slots)
                return True

            tenants, windows = np.zeros(len(ids), np.int64), self.windows(ids)
            if rng.random() < 0.5:
                lease = self.store.lease_now(0, tenants, windows, fill)
                if lease is not None:
                    assert (self.ids[lease.slots] == ids).all()
                    self.store.release(lease)
                continue
            with self.store.urgently():
                slots = self.store.use_or_fill(kv_store.keys_of(0, tenants, windows), fill)
                assert slots is None or (self.ids[slots] == ids).all()

    def run(self, rounds: int) -> None:
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(self.near)
            try:
                self.lane(rounds)
            finally:
                self._is_over = True
            beside.result()

    @staticmethod
    def windows(ids: NDArray[np.int64]) -> NDArray[np.int32]:
        windows = np.zeros((len(ids), 4), np.int32)
        windows[:, 0] = ids
        return windows


def test_two_threads_make_entries_and_each_finds_what_the_other_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_store, "_AT_ONCE", 16)
    monkeypatch.setattr(kv_store, "_WHOLE", 16)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = TwoThreads(300)
        threads.run(400)
    finally:
        sys.setswitchinterval(interval)
    assert threads.num_made > 50
    assert not threads.store._pins.any()
    assert len(threads.store) + len(threads.store._free) == 300
