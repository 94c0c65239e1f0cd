"""Which kv slot holds what: (tenant, layer, window) -> slot, least recently used out first.

kv is a function of (layer, window), so an entry serves every position, session, fork and draft of
its tenant that has the window, and nothing ever needs invalidating. Keys are compared whole. The
memory of the slots is the backend's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from engram_core.pages import Ints

Fill = Callable[[list[int], list[int]], bool]
"""Called with slots and the tokens they are for; False: nothing was done."""

_AT_ONCE = 64
"""Keys that `acquire` looks up or makes before it lets others have the interpreter and the lock:
some 30 us, three times as long where it has not run for a while."""

_WHOLE = 256
"""Up to here it does so without a pause."""

_PAUSE_S = 20e-6
"""How long it sleeps then; without, it would have both again before anybody wakes."""

_BUSY_S = 5e-3
"""A thread that was in a hurry so lately will be again: it finds the interpreter free."""

_FEW = 16
"""Up to here entries are changed one by one: an array of a few takes longer than they do."""

_REFILL = 16
"""1/16 of the store or more is queued for eviction at a time: a pass over all stamps (1.5 ms for
the 167,000 slots of 8 GiB) is paid once in 10,000 evictions."""


@dataclass(frozen=True)
class Lease:
    """Pinned slots of one batch. Give it back with `release` or `abandon`.

    slots: int64 [T]  equal windows have equal slots
    compute: int64 [M]  the tokens whose kv is to be computed now, into slots[compute] (distinct)
    """

    slots: Ints
    compute: Ints


@dataclass
class Loan:
    """Slots of one batch beside those of the lane that acquires. End it with `end_loan`.

    slots: int64 [T]  equal windows have equal slots
    compute: int64 [M]  the tokens whose kv is to be computed now, into slots[compute] (distinct)
    keys: of those tokens; lent: their slots, which no key finds; pinned: the other slots
    """

    slots: Ints
    compute: Ints
    keys: list[bytes]
    lent: list[int]
    pinned: list[int]


@dataclass
class StoreCounters:
    """Tokens by what they found. duplicates: their window is computed by a batch mate."""

    hits: int = 0
    misses: int = 0
    duplicates: int = 0
    evicted: int = 0


class KvStore:
    """The index of a fixed number of kv slots; thread-safe (`lock` guards it).

    `acquire` finds an entry from the moment its lease is made: one lane acquires, and whoever finds
    it there runs after the projection that fills it. `find`, `use_filled`, `use_or_fill` and
    `borrow`, for other threads, find only what is filled, and fill what they make before anybody
    else finds it.
    A batch of at most `num_slots` tokens always fits while no other lease is open.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots: expected at least 1, got {num_slots}")
        self.num_slots = num_slots
        self.counters = StoreCounters()
        self._slot_of: dict[bytes, int] = {}
        self._key_of = np.full(num_slots, None, dtype=object)
        self._pins = np.zeros(num_slots, dtype=np.int32)
        self._filled = np.zeros(num_slots, dtype=np.bool_)
        # When each entry was last leased; 0 = no entry (free, or lent without a key).
        self._stamps = np.zeros(num_slots, dtype=np.int64)
        self._now = 0
        self._free = list(range(num_slots))[::-1]
        self._queue = np.empty(0, dtype=np.int64)
        self._queued_at = np.empty(0, dtype=np.int64)
        self.lock = threading.Lock()
        self._num_urgent = 0  # of one thread, the asking one
        self._urgent_s = float("-inf")  # when it was so last
        self._num_others = 0  # times that threads beside the lane have made entries

    def __len__(self) -> int:
        return len(self._slot_of)

    def acquire(self, layer_index: int, tenants: Ints, windows: NDArray[np.int32]) -> Lease:
        """Find or make the entry of every token, and pin it.

        tenants: int64 [T]  number of each token's tenant; windows: int32 [T, max_ngram_size]

        Some tokens at a time in every step, so that nobody else waits long: neither for `lock` nor
        for the interpreter's, which one call of C keeps to its end.

        Raises: MemoryError if more slots are pinned than the batch leaves room for.
        """
        keys: list[bytes] = []
        whole = _whole_keys(layer_index, tenants, windows)
        slots = np.full(len(windows), -1, dtype=np.int64)
        pinned: set[int] = set()
        made: list[int] = []
        token_of: dict[bytes, int] = {}  # of each absent window, its first token
        computed: list[int] = []
        num_missing, num_others = 0, self._num_others
        try:
            # Hits are pinned before anything is evicted for the others.
            for part in self._in_turns(len(windows)):
                some: list[bytes] = whole[part].tolist()
                with self.lock:
                    if not part.start:
                        self._now += 1
                    found = list(map(self._slot_of.get, some, repeat(-1)))
                    num_absent = found.count(-1)
                    if num_absent < len(found):
                        self._pin_hits(found, pinned)
                keys += some
                absent: Iterable[int] = range(part.start, part.stop)
                if num_absent < len(found):
                    slots[part] = found
                    absent = [token for token, slot in zip(absent, found, strict=True) if slot < 0]
                    some = [keys[token] for token in absent]
                deque(map(token_of.setdefault, some, absent), maxlen=0)
                num_missing += num_absent
            self._queue_ahead(len(token_of))
            missing = list(token_of)
            for part in self._in_turns(len(missing)):
                some = missing[part]
                with self.lock:
                    if self._num_others != num_others:
                        some = self._found_since(some, pinned)
                    self._insert(some, made, len(missing) - part.start)
                computed += map(token_of.__getitem__, some)
        except MemoryError:
            with self.lock:
                self._pins[[*pinned, *made]] -= 1
                self._forget(np.array(made, dtype=np.int64))
            raise
        compute = np.array(computed, dtype=np.int64)
        slots[compute] = made
        if num_missing > len(compute):  # what is computed or found for others of the batch
            for token in np.flatnonzero(slots < 0).tolist():
                slots[token] = self._slot_of[keys[token]]  # pinned: it stays
        with self.lock:
            self.counters.hits += len(keys) - num_missing
            self.counters.misses += len(compute)
            self.counters.duplicates += num_missing - len(compute)
        return Lease(slots, compute)

    def lock_urgently(self) -> None:
        """Take `lock` as `urgently` does; whoever does releases it."""
        self._urgent_s = time.monotonic()
        self._num_urgent += 1
        try:
            self.lock.acquire()
        finally:
            self._num_urgent -= 1

    @contextmanager
    def urgently(self) -> Iterator[None]:
        """Hold `lock` before a thread that is acquiring many entries goes on."""
        self.lock_urgently()
        try:
            yield
        finally:
            self.lock.release()

    def find(self, layer_index: int, tenants: Ints, windows: NDArray[np.int32]) -> Lease | None:
        """Pin the entries of all tokens if each is there and filled; None, and no change, if not.

        tenants: int64 [T]; windows: int32 [T, max_ngram_size]
        """
        keys = keys_of(layer_index, tenants, windows)
        with self.urgently():
            try:
                slots = np.array([self._slot_of[key] for key in keys], dtype=np.int64)
            except KeyError:
                return None
            if not self._filled[slots].all():
                return None
            self._now += 1
            self._pin(np.unique(slots) if len(slots) > 1 else slots)
            self.counters.hits += len(keys)
        return Lease(slots, slots[:0])

    def lease_now(
        self, layer_index: int, tenants: Ints, windows: NDArray[np.int32], fill: Fill
    ) -> Lease | None:
        """Pin the entries of all tokens, making those that are missing (see `use_or_fill`).

        tenants: int64 [T]; windows: int32 [T, max_ngram_size]
        """
        keys = keys_of(layer_index, tenants, windows)
        with self.urgently():
            found = self.use_or_fill(keys, fill)
            if found is None:
                return None
            slots = np.array(found, dtype=np.int64)
            self._pins[np.unique(slots) if len(slots) > 1 else slots] += 1
        return Lease(slots, slots[:0])

    def use_filled(self, keys: list[bytes]) -> list[int] | None:
        """As `find` by keys, without pins: the caller holds `lock` until it has read the slots."""
        slot_of, filled = self._slot_of, self._filled
        try:
            slots = [slot_of[key] for key in keys]
        except KeyError:
            return None
        self._now += 1
        if len(slots) > _FEW:
            places = np.array(slots, dtype=np.int64)
            if not filled[places].all():
                return None
            self._stamps[places] = self._now
        else:
            for slot in slots:
                if not filled[slot]:
                    return None
            for slot in slots:
                self._stamps[slot] = self._now
        self.counters.hits += len(slots)
        return slots

    def use_or_fill(self, keys: list[bytes], fill: Fill) -> list[int] | None:
        """As `use_filled`, making entries of what is missing; None, and no change, if another
        thread is about to fill one, if there are no slots, or if `fill` says False.

        fill: computes the kv of tokens (one of each key that is missing) into slots, before it
            returns as far as anybody who may read them can tell
        """
        slot_of = self._slot_of
        slots = [slot_of.get(key, -1) for key in keys]
        tokens: list[int] = []
        for token, slot in enumerate(slots):
            if slot < 0:
                tokens.append(token)
            elif not self._filled[slot]:
                return None
        if not tokens:
            return self.use_filled(keys)
        num_missing = len(tokens)
        if num_missing > 1:
            first = {keys[token]: token for token in reversed(tokens)}
            tokens = sorted(first.values())
        # None as a rule: arrays of nothing take as long as all the rest.
        hits = np.array([slot for slot in slots if slot >= 0], dtype=np.int64)
        self._now += 1
        if len(hits):
            self._stamps[hits] = self._now
            self._pins[hits] += 1  # so that they are not evicted for the others
        try:
            fresh = self._take(len(tokens))
        except MemoryError:
            return None
        finally:
            if len(hits):
                self._pins[hits] -= 1
        if not fill(fresh, tokens):
            self._free_again(fresh)
            return None
        self._num_others += 1
        for slot, token in zip(fresh, tokens, strict=True):
            slot_of[keys[token]] = slot
            self._key_of[slot] = keys[token]
            self._filled[slot] = True
            self._stamps[slot] = self._now
        counters = self.counters
        counters.hits += len(keys) - num_missing
        counters.misses += len(tokens)
        counters.duplicates += num_missing - len(tokens)
        return [slot_of[key] for key in keys]

    def _in_turns(self, count: int) -> Iterator[slice]:
        """Cut so many into parts; who is in a hurry goes between two."""
        size = count if count <= _WHOLE else _AT_ONCE
        for start in range(0, count, size or 1):
            if start:
                self._give_way()
            yield slice(start, min(start + size, count))

    def _give_way(self) -> None:
        """Let a thread in a hurry go on, one that waits now or may come soon."""
        if self._num_urgent or time.monotonic() - self._urgent_s < _BUSY_S:
            time.sleep(_PAUSE_S)
        while self._num_urgent:
            time.sleep(_PAUSE_S)

    def _found_since(self, keys: list[bytes], pinned: set[int]) -> list[bytes]:
        """Pin what another thread has made since it was looked for; returns what is missing."""
        self._pin_hits([self._slot_of[key] for key in keys if key in self._slot_of], pinned)
        return [key for key in keys if key not in self._slot_of]

    def _insert(self, keys: list[bytes], made: list[int], num_left: int) -> None:
        """Make and pin entries for distinct keys; their slots are added to `made`.

        num_left: entries that the batch has still to make at most, these included
        """
        fresh = self._take(len(keys), min(num_left, _WHOLE))
        made += fresh
        self._slot_of.update(zip(keys, fresh, strict=True))
        places = np.array(fresh, dtype=np.int64)
        # Through an object array: a list of bytes would become an S array and lose its zeros.
        self._key_of[places] = np.fromiter(keys, dtype=object, count=len(keys))
        self._pin(places)

    def _pin_hits(self, slots: Iterable[int], pinned: set[int]) -> None:
        """Pin the slots that a lease has not pinned yet; -1 is none."""
        new = list(set(slots).difference(pinned, (-1,)))
        if new:
            pinned.update(new)
            self._pin(np.array(new, dtype=np.int64))

    def fill(self, lease: Lease) -> None:
        """Let `find` find what was computed for a lease."""
        with self.lock:
            self._filled[lease.slots[lease.compute]] = True

    def release(self, lease: Lease) -> None:
        """Unpin: every slot of the lease has been computed."""
        slots = lease.slots
        is_distinct = len(lease.compute) == len(slots) or len(slots) == 1
        distinct = slots if is_distinct else np.unique(slots)
        with self.lock:
            self._pins[distinct] -= 1

    def abandon(self, lease: Lease) -> None:
        """Unpin after a failed computation, and forget what it was to compute."""
        self.release(lease)
        with self.lock:
            self._forget(lease.slots[lease.compute])

    def lend(self, count: int) -> Ints:
        """Lend slots that no key finds: int64 [count]. `give_back` them.

        Raises: MemoryError if too many slots are pinned.
        """
        with self.lock:
            return np.array(self._take(count), dtype=np.int64)

    def give_back(self, slots: Ints) -> None:
        """Take lent slots back."""
        with self.lock:
            self._free_again(slots.tolist())

    def borrow(self, layer_index: int, tenants: Ints, windows: NDArray[np.int32]) -> Loan:
        """Pin the entries that are there and filled; lend slots for the others.

        tenants: int64 [T]; windows: int32 [T, max_ngram_size]

        What another thread is about to fill is computed once more: that takes no longer than to
        wait for it.

        Raises: MemoryError if too many slots are pinned.
        """
        keys = keys_of(layer_index, tenants, windows)
        found: dict[bytes, int] = {}
        token_of: dict[bytes, int] = {}  # of each missing window, its first token
        hits = 0
        with self.lock:
            for token, key in enumerate(keys):
                slot = self._slot_of.get(key, -1)
                if slot >= 0 and self._filled[slot]:
                    found[key] = slot
                    hits += 1
                else:
                    token_of.setdefault(key, token)
            pinned = list(found.values())
            self._now += 1
            self._pin(np.array(pinned, dtype=np.int64))
            try:
                lent = self._take(len(token_of))
            except MemoryError:
                self._pins[pinned] -= 1
                raise
            self.counters.hits += hits
            self.counters.misses += len(lent)
            self.counters.duplicates += len(keys) - hits - len(lent)
        found |= zip(token_of, lent, strict=True)
        slots = np.array([found[key] for key in keys], dtype=np.int64)
        compute = np.array(list(token_of.values()), dtype=np.int64)
        return Loan(slots, compute, list(token_of), lent, pinned)

    def adopt(self, loan: Loan) -> None:
        """Let everybody find what was computed for a loan, but for what has been made since."""
        with self.lock:
            lent, loan.lent = loan.lent, []
            for key, slot in zip(loan.keys, lent, strict=True):
                if key in self._slot_of:
                    loan.lent.append(slot)
                    continue
                self._slot_of[key] = slot
                self._key_of[slot] = key
                self._filled[slot] = True
                self._stamps[slot] = self._now
                self._pins[slot] += 1
                loan.pinned.append(slot)
            self._num_others += 1

    def end_loan(self, loan: Loan) -> None:
        """Unpin what was found or adopted, and take back what was lent."""
        with self.lock:
            self._pins[loan.pinned] -= 1
            self._free_again(loan.lent)

    def _pin(self, slots: Ints) -> None:
        self._pins[slots] += 1
        self._stamps[slots] = self._now

    def _take(self, count: int, soon: int = 0) -> list[int]:
        """Take free slots, evicting what was not used for longest.

        In the order in which they were freed, ascending ones at first: the kv of a batch whose
        slots follow each other is computed where it belongs.

        soon: how many are taken soon, these included: they are evicted at once
        """
        if count > len(self._free):
            self._evict(count - len(self._free), soon - len(self._free))
        start = len(self._free) - count
        taken = self._free[start:]
        del self._free[start:]
        taken.reverse()
        return taken

    def _free_again(self, slots: list[int]) -> None:
        """Take slots back that hold nothing; what was freed last is taken first."""
        self._free += reversed(slots)

    def _evict(self, count: int, wanted: int) -> None:
        """Free at least `count` slots, `wanted` if that is easy.

        The queue holds the least recently used slots at the time it was made, oldest first. What
        was used since is skipped, and everything outside is younger: eviction order is exact.
        """
        while count > 0:
            if not len(self._queue):
                self._queue, self._queued_at = self._least_recent(count)
            size = max(count, wanted)
            slots, stamps = self._queue[:size], self._queued_at[:size]
            self._queue, self._queued_at = self._queue[size:], self._queued_at[size:]
            victims = slots
            if len(slots) > 1 or self._stamps[slots[0]] != stamps[0] or self._pins[slots[0]]:
                victims = slots[(self._stamps[slots] == stamps) & (self._pins[slots] == 0)]
            self._forget(victims)
            self.counters.evicted += len(victims)
            count -= len(victims)
            wanted -= len(victims)

    def _queue_ahead(self, count: int) -> None:
        """Queue what may have to be evicted for so many, before `lock` is held: that takes long.

        What changes meanwhile is younger than all that is queued, and what is queued is looked at
        again when its turn comes.
        """
        if count <= len(self._free) or count <= len(self._queue):
            return
        try:
            queue, queued_at = self._least_recent(count)
        except MemoryError:
            return  # if it stays so, `_evict` says it
        with self.lock:
            self._queue, self._queued_at = queue, queued_at

    def _least_recent(self, count: int) -> tuple[Ints, Ints]:
        """Return at least `count` slots in the order of their stamps, and these."""
        stamps = self._stamps.copy()  # another thread may free some meanwhile
        slots = np.flatnonzero((stamps > 0) & (self._pins == 0))
        stamps = stamps[slots]
        if len(slots) < count:
            raise MemoryError(f"{count} kv slots needed, {len(slots)} of {self.num_slots} unpinned")
        queued = min(len(slots), max(count, self.num_slots // _REFILL))
        order = stamps * self.num_slots + slots  # of equal age: the lowest slot first
        if queued < len(slots):
            oldest = np.argpartition(order, queued - 1)[:queued]
            slots, stamps, order = slots[oldest], stamps[oldest], order[oldest]
        by_age = np.argsort(order)
        return slots[by_age], stamps[by_age]

    def _forget(self, slots: Ints) -> None:
        places = slots.tolist()
        if len(places) <= _FEW:
            for slot in places:
                del self._slot_of[self._key_of[slot]]
                self._key_of[slot], self._stamps[slot], self._filled[slot] = None, 0, False
        else:
            keys = self._key_of[slots].tolist()
            deque(map(self._slot_of.__delitem__, keys), maxlen=0)
            self._key_of[slots] = None
            self._stamps[slots] = 0
            self._filled[slots] = False
        self._free_again(places)


def keys_of(layer_index: int, tenants: Ints, windows: NDArray[np.int32]) -> list[bytes]:
    """One key a token: tenant, layer and window, whole."""
    keys: list[bytes] = _whole_keys(layer_index, tenants, windows).tolist()
    return keys


def _whole_keys(layer_index: int, tenants: Ints, windows: NDArray[np.int32]) -> NDArray[np.void]:
    """The same, not yet a list."""
    fields = np.empty((len(windows), windows.shape[1] + 2), dtype=np.int32)
    fields[:, 0] = tenants
    fields[:, 1] = layer_index
    fields[:, 2:] = windows
    return fields.view(f"V{fields.shape[1] * 4}").ravel()
