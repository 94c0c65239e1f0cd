"""What is freed goes back to the machine, whoever had it. Counted by malloc, not by time."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIECE_BYTES = 16 << 20
"""Of a decoded weight, float32."""

# Each thread has an arena of its own; the first freed block of its size teaches malloc to keep it.
KEPT = """
import ctypes, sys, threading
import numpy as np
from pathlib import Path
from service.heap import bound_heap
from service.lifecycle import StartError, serve
from service.settings import Settings

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost")]

info = ctypes.CDLL(None).mallinfo2
info.restype = Info
PIECE = int(sys.argv[2])
how = sys.argv[1]
is_bound = how == "bound" and bound_heap()
if how == "served":
    try:
        serve(Path("/no such checkpoint"), Settings(port=0, device="cpu"), say=lambda line: None)
    except StartError:
        is_bound = True
before = info()
for _ in range(4):
    held = threading.Barrier(4)
    def work():
        piece = np.ones(PIECE, np.uint8)
        below = np.ones(PIECE // 2, np.uint8)
        held.wait()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
after = info()

def decode():
    # A body and an answer of 3 MiB: mapped ones, and bytes that go back when they are freed.
    begin = info()
    bodies = [np.ones(3 << 20, np.uint8) for _ in range(2)]
    held = info()
    del bodies
    told[:] = held.hblks - begin.hblks, held.arena - info().arena

told = []
thread = threading.Thread(target=decode)
thread.start()
thread.join()
print(is_bound, after.arena + after.hblkhd - before.arena - before.hblkhd, *told)
"""

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc's malloc is what is bounded"
)


def kept(how: str, **environment: str) -> tuple[int, ...]:
    """What KEPT prints.

    (whether the thresholds are ours, bytes that malloc has beside what it had at first, bodies of
    3 MiB that are mapped, bytes that go back when they are freed)
    """
    told = subprocess.run(
        [sys.executable, "-c", KEPT, how, str(PIECE_BYTES)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
        | environment,
    ).stdout.split()
    return told[0] == "True", *map(int, told[1:])


def test_large_blocks_of_every_thread_go_back() -> None:
    is_bound, num_bytes, *_ = kept("bound")
    assert is_bound
    assert num_bytes < PIECE_BYTES // 4
    assert kept("as it is")[1] > PIECE_BYTES, "malloc keeps nothing by itself: no need for heap.py"


def test_a_process_that_serves_is_bounded_from_the_start() -> None:
    """Before it loads: what loading has freed is not kept either."""
    is_bound, num_bytes, *_ = kept("served")
    assert is_bound
    assert num_bytes < PIECE_BYTES // 4


def test_smaller_blocks_keep_their_pages() -> None:
    """Else each request pays for some hundred of them."""
    is_bound, _, num_mapped, num_bytes = kept("bound")
    assert is_bound
    assert (num_mapped, num_bytes) == (0, 0)


def test_thresholds_of_the_environment_stand() -> None:
    is_bound, *_ = kept("bound", MALLOC_MMAP_THRESHOLD_="33554432")
    assert not is_bound


SETTLED = """
import gc, time, weakref
from service.heap import settle
from service.lifecycle import _load
import service.lifecycle as lifecycle

class Node:
    pass

def cycle():
    node = Node()
    node.me = node
    return weakref.ref(node)

before = cycle()
lifecycle.load_model = lambda *_: "model"
assert _load(None, None, None) == "model"
assert before() is None  # garbage of the start is not kept
frozen = gc.get_freeze_count()
assert frozen > 10_000, frozen
assert len(gc.get_objects()) < frozen / 10
after = cycle()
gc.collect()
assert after() is None
"""


def test_what_is_loaded_is_no_longer_looked_at_by_collections() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SETTLED], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
