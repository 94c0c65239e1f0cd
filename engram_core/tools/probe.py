"""What the doctor's probes share: a reading, its reason if there is none, and a clock."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from engram_core.errors import EngramError

ROW_FORMATS = {"Q2_K": 84, "E4M3_E8M0_32": 264}
"""Stored rows of 256 values that the published checkpoints have: name in `quant` -> bytes."""

ROWS_PER_TOKEN = 24
IN_FEATURES, OUT_FEATURES = 6144, 25_600
"""Of wkv at the true geometry: 314.6 MB as bfloat16."""


@dataclass(frozen=True)
class Reading:
    """One measured thing. value: None if there is none; note: why, or how it was measured."""

    name: str
    value: float | None
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Sizes:
    """How much each probe touches, at most.

    host_bytes, device_bytes: of a table. Small ones flatter: on an H200 rows came from 1 GiB of
    pinned memory 2.5 times faster than from 8 GiB, more than its address translation holds.
    """

    host_bytes: int = 8 << 30
    device_bytes: int = 4 << 30
    disk_bytes: int = 1 << 30
    copy_bytes: int = 256 << 20
    wkv_outputs: int = OUT_FEATURES


def reading(name: str, unit: str, measure: Callable[[], float], note: str = "") -> Reading:
    """Measure once. What cannot be measured on this machine is told, never guessed."""
    try:
        return Reading(name, round(measure(), 6), unit, note)
    except (EngramError, OSError, RuntimeError, MemoryError, ValueError) as error:
        return Reading(name, None, unit, reason(error))


def reason(error: BaseException) -> str:
    """Say why in words that may leave the machine: no paths."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return re.sub(r"\S*[/\\]\S*", "...", text or type(error).__name__)[:200]


def rate(work: Callable[[], float], seconds: float) -> float:
    """Repeat `work`, which returns how much it did, for so long; return how much a second."""
    work()  # first touches, lazy set-up
    done, begin = 0.0, time.perf_counter()
    while True:
        done += work()
        elapsed = time.perf_counter() - begin
        if elapsed >= seconds:
            return done / elapsed
