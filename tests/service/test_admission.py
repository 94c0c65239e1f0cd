"""Room for bodies and answers."""

from __future__ import annotations

import pytest

from engram_core.errors import Overloaded
from service.admission import WAITING_S, InFlightPool
from service.problems import BodyTooLarge


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> InFlightPool:
    return InFlightPool(100, clock)


def test_lease_gives_everything_back(pool: InFlightPool) -> None:
    with pool.lease("a") as lease:
        lease.add(30, "body")
        lease.add(20, "answer")
        assert pool.used_bytes == 50
    lease.close()
    assert pool.used_bytes == 0


def test_more_than_half_is_too_large_even_when_empty(pool: InFlightPool) -> None:
    with pytest.raises(BodyTooLarge):
        pool.lease("a").add(51, "body")


def test_no_room_is_overloaded_and_takes_nothing(pool: InFlightPool) -> None:
    pool.lease("a").add(50, "body")
    pool.lease("a").add(40, "body")
    with pytest.raises(Overloaded):
        pool.lease("b").add(20, "body")
    assert pool.used_bytes == 90


def test_one_key_may_fill_the_pool_while_nobody_waits(pool: InFlightPool) -> None:
    pool.lease("a").add(50, "body")
    pool.lease("a").add(50, "body")
    assert pool.used_bytes == 100


def test_no_key_holds_more_than_half_while_another_waits(pool: InFlightPool) -> None:
    held = [pool.lease("a") for _ in range(4)]
    for lease in held:
        lease.add(25, "body")
    with pytest.raises(Overloaded):
        pool.lease("b").add(30, "body")
    held[0].close()
    with pytest.raises(Overloaded):
        pool.lease("a").add(25, "body")
    held[1].close()
    pool.lease("b").add(30, "body")


def test_key_that_got_its_room_no_longer_waits(pool: InFlightPool) -> None:
    held = pool.lease("a")
    held.add(50, "body")
    pool.lease("a").add(40, "body")
    with pytest.raises(Overloaded):
        pool.lease("b").add(20, "body")
    pool.lease("b").add(5, "body")
    pool.lease("a").add(5, "body")


def test_waiting_ends_when_nobody_comes_again(pool: InFlightPool, clock: Clock) -> None:
    held = pool.lease("a")
    held.add(50, "body")
    pool.lease("a").add(40, "body")
    with pytest.raises(Overloaded):
        pool.lease("b").add(20, "body")
    clock.now = WAITING_S + 0.1
    pool.lease("a").add(10, "body")


def test_empty_bodies_always_fit(pool: InFlightPool) -> None:
    pool.lease("a").add(50, "body")
    pool.lease("a").add(50, "body")
    pool.lease("b").add(0, "body")


def test_anybody_may_hold_bytes_for_a_moment_unless_there_is_no_room_or_somebody_waits(
    pool: InFlightPool, clock: Clock
) -> None:
    assert pool.has_room(50)
    assert not pool.has_room(51)
    held = pool.lease("a")
    held.add(50, "body")
    pool.lease("b").add(45, "body")
    assert not pool.has_room(6)
    with pytest.raises(Overloaded):
        pool.lease("c").add(6, "body")
    held.close()
    assert not pool.has_room(6)  # c's turn
    clock.now += WAITING_S
    assert pool.has_room(6)  # c did not come again
