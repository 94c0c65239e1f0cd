"""Pieces of one block: bounded, whole again, and never given twice while anybody refers to one."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from engram_core.errors import Overloaded
from engram_core.host_memory import (
    PAGE_BYTES,
    WARM_BYTES,
    Pieces,
    PlainMemory,
    PooledMemory,
    WarmMemory,
)

PAGES = 16


@pytest.fixture
def pieces() -> Pieces:
    return Pieces(np.zeros(PAGES * PAGE_BYTES, np.uint8))


def test_pieces_do_not_overlap_and_fill_the_block(pieces: Pieces) -> None:
    taken = [pieces.take(2 * PAGE_BYTES) for _ in range(PAGES // 2)]
    for number, piece in enumerate(taken, 1):
        assert piece is not None
        piece[:] = number
    assert pieces.take(1) is None
    assert [int(piece.min()) for piece in taken if piece is not None] == list(range(1, 9))
    assert all((piece == number).all() for number, piece in enumerate(taken, 1))


def test_a_piece_comes_back_when_nothing_refers_to_it(pieces: Pieces) -> None:
    piece = pieces.take(3 * PAGE_BYTES - 5)
    assert piece is not None
    assert (len(piece), pieces.used_bytes) == (3 * PAGE_BYTES - 5, 3 * PAGE_BYTES)
    del piece
    assert pieces.used_bytes == 0


@pytest.mark.parametrize("kind", ["memoryview", "slice of a slice", "torch", "numpy of torch"])
def test_whatever_refers_to_a_part_keeps_the_whole(pieces: Pieces, kind: str) -> None:
    piece = pieces.take(PAGES * PAGE_BYTES)
    assert piece is not None
    holder: object = {
        "memoryview": lambda p: p.data[100:200],
        "slice of a slice": lambda p: np.asarray(p[10:])[5:6],
        "torch": lambda p: torch.from_numpy(p).view(torch.bfloat16)[7:9],
        "numpy of torch": lambda p: torch.from_numpy(p)[3:].numpy()[1:],
    }[kind](piece)
    del piece
    gc.collect()
    assert pieces.take(1) is None
    del holder
    assert pieces.take(PAGES * PAGE_BYTES) is not None


def test_neighbours_become_one_hole_in_any_order(pieces: Pieces) -> None:
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [1, 3, 2, 0]):
        taken = {place: pieces.take(4 * PAGE_BYTES) for place in range(4)}
        for place in order:
            del taken[place]
        assert (pieces.used_bytes, pieces._holes) == (0, [(0, PAGES * PAGE_BYTES)])


def test_large_pieces_come_from_the_end() -> None:
    pieces = Pieces(np.zeros(4 << 20, np.uint8))
    small, large = pieces.take(PAGE_BYTES), pieces.take(2 << 20)
    assert small is not None
    assert large is not None
    start = large.__array_interface__["data"][0] - small.__array_interface__["data"][0]
    assert start == 2 << 20


def test_threads_share_one_block() -> None:
    pieces = Pieces(np.zeros(64 * PAGE_BYTES, np.uint8))
    torn: list[int] = []

    def work(number: int) -> None:
        for turn in range(300):
            piece = pieces.take(1 + (turn * 977) % (9 * PAGE_BYTES))
            if piece is None:
                continue
            piece[:] = number
            if (piece != number).any():
                torn.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (torn, pieces.used_bytes) == ([], 0)


def test_pool_refuses_what_has_no_room_and_leaves_small_ones_plain() -> None:
    memory = PooledMemory(np.zeros(2 * PAGE_BYTES, np.uint8))
    held = memory.buffer(2 * PAGE_BYTES)
    with pytest.raises(Overloaded):
        memory.buffer(PAGE_BYTES)
    assert len(memory.buffer(PAGE_BYTES - 1)) == PAGE_BYTES - 1
    assert memory.pieces.used_bytes == len(held)


@pytest.mark.parametrize("memory", [PlainMemory(), PooledMemory(np.zeros(1 << 20, np.uint8))])
@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 3, 8), (64, 3, 64)])
def test_tensors_are_what_was_asked_for(
    memory: PlainMemory | PooledMemory, shape: tuple[int, ...]
) -> None:
    for dtype in (torch.bfloat16, torch.uint8, torch.int64):
        tensor = memory.tensor(shape, dtype)
        assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        tensor.fill_(1)


def test_large_bodies_find_warm_pages_until_none_comes_for_a_while() -> None:
    memory = WarmMemory(2 * WARM_BYTES)
    first = memory.buffer(WARM_BYTES)
    first[:] = 7
    address = first.__array_interface__["data"][0]  # first.ctypes would keep it
    del first
    memory.rest()  # one came since the start
    again = memory.buffer(WARM_BYTES)
    assert (again.__array_interface__["data"][0], int(again.min())) == (address, 7)
    memory.rest()
    memory.rest()  # none came, but one lives
    assert int(again.min()) == 7
    del again
    memory.rest()
    assert int(memory.buffer(WARM_BYTES).max()) == 0


def test_what_finds_no_warm_pages_is_plain() -> None:
    memory = WarmMemory(2 * WARM_BYTES)
    held = [memory.buffer(WARM_BYTES) for _ in range(3)]
    for number, buffer in enumerate(held):
        buffer[:] = number
    assert [len(buffer) for buffer in held] == [WARM_BYTES] * 3
    assert [int(buffer.max()) for buffer in held] == [0, 1, 2]
    assert len(memory.buffer(3 * WARM_BYTES)) == 3 * WARM_BYTES
    small = memory.buffer(WARM_BYTES - 1)
    assert (len(small), memory.pieces.used_bytes) == (WARM_BYTES - 1, 2 * WARM_BYTES)
