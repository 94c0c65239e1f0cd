"""Skips everything here without a GPU; with ENGRAM_REQUIRE_GPU (make test-gpu) fails instead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from ctypes import byref, c_int32

import pytest

from engram_core.backends.native import Native, Unsupported
from engram_core.errors import EngramError
from tests.gpu.arrays import Arrays


def open_device() -> Native:
    """The library with device 0 selected. Raises: EngramError."""
    native = Native()
    count = c_int32()
    native.device_count(byref(count))
    if not count.value:
        raise Unsupported("no CUDA device")
    native.device(0)
    return native


@pytest.fixture(scope="session")
def native() -> Native:
    try:
        return open_device()
    except EngramError as error:
        if os.environ.get("ENGRAM_REQUIRE_GPU"):
            pytest.fail(f"a GPU is required here: {error}")
        pytest.skip(f"no usable GPU: {error}")


@pytest.fixture
def arrays(native: Native) -> Iterator[Arrays]:
    made = Arrays(native)
    yield made
    made.close()
