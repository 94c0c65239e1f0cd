"""After it is ready the backend takes no more device memory (DESIGN 4), as a GB10 needs it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engram_core.backends.cuda_backend import Sizes
from engram_core.backends.native import Native
from tests.gpu.layers import random_windows
from tests.gpu.test_backend import Served

COUNTS = (1, 9, 40, 350)


@pytest.fixture
def served(native: Native) -> Iterator[Served]:
    made = Served(native, Sizes(chunk_tokens=256, lane_tokens=100, num_lanes=3))
    yield made
    made.backend.close()
    made.arrays.close()


def serve(served: Served, windows: np.ndarray) -> None:
    """Every call of a backend, at every kind of size."""
    backend = served.backend
    for count in COUNTS:
        slots, dead = np.arange(count), np.zeros(count, np.bool_)
        backend.project(0, slots, windows=windows[:count])
        for dtype in (torch.bfloat16, torch.float32):
            residual = torch.zeros((count, 4, 1024), dtype=dtype)
            backend.gate(0, slots, dead, residual, residual)
        served.kv(count)
        ids = np.zeros((count, 24), np.int64)
        for stored in (False, True):
            width, kind = (backend.row_bytes[0], torch.uint8) if stored else (256, torch.bfloat16)
            backend.rows(0, ids, torch.empty((count, 24, width), dtype=kind), stored=stored)
    backend.synchronize()


def test_serving_takes_no_more_device_memory(served: Served, native: Native) -> None:
    """The first round loads kernels, which the driver does at their first launch."""
    windows = random_windows(max(COUNTS), seed=5)
    serve(served, windows)
    free_bytes = native.device(0).free_bytes
    for _ in range(3):
        serve(served, windows)
    assert native.device(0).free_bytes == free_bytes
