"""`verify` accepts the reference backend, and sees each thing that can be wrong with another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engram_core.backends.base import Backend
from engram_core.checkpoint import open_checkpoint
from engram_core.loader import load
from engram_core.tools.plain import plain_hash, plain_windows
from engram_core.tools.synth import FORMATS, synth
from engram_core.tools.verify import verify, verify_backend

ALL = [(fmt, quant) for fmt, quants in FORMATS.items() for quant in quants]


@pytest.mark.parametrize(("fmt", "quant"), ALL)
def test_reference_backend_is_within_what_is_promised(tmp_path: Path, fmt: str, quant: str) -> None:
    synth(tmp_path / "c", preset="tiny", fmt=fmt, quant=quant, seed=1)
    result = verify(tmp_path / "c", placement="disk")
    assert result.ok
    assert len(result.checks) == 12
    exact = [check for check in result.checks if check.name in ("stored rows", "rows", "hash_ids")]
    assert all(check.worst == 0 for check in exact)
    assert result.as_json()["ok"] is True


class Faulty:
    """A backend one of whose methods is wrapped."""

    def __init__(self, inner: Backend, name: str, wrong: Callable[..., None]) -> None:
        self._inner, self._name, self._wrong = inner, name, wrong

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name != self._name:
            return method

        def call(*args: Any, **options: Any) -> None:
            method(*args, **options)
            self._wrong(*args, **options)

        return call


def one_bit_of_a_row(*args: Any, stored: bool) -> None:
    args[-1].view(torch.uint8).view(-1)[-1] ^= 1


def dead_position_zeroed(*args: Any) -> None:
    dead, out = args[2], args[4]
    out[torch.from_numpy(np.flatnonzero(dead))] = 0.0


def value_doubled(*args: Any) -> None:
    residual, out = args[3], args[4]
    out += out - residual


def one_ulp_off(*args: Any) -> None:
    out = args[4]
    kind = torch.int16 if out.dtype == torch.bfloat16 else torch.int32
    out.view(kind)[0, 0, 0] += 4


@pytest.mark.parametrize(
    ("method", "wrong", "seen"),
    [
        ("rows", one_bit_of_a_row, "rows"),
        ("gate", dead_position_zeroed, "residual"),
        ("gate", value_doubled, "residual"),
        ("gate", one_ulp_off, "residual"),
        ("read_kv", lambda *args: args[3].neg_(), "kv"),
        ("read_kv", lambda *args: args[3].mul_(1.02), "kv"),
    ],
    ids=["row_bit", "dead_zeroed", "value_doubled", "ulps_off", "kv_negated", "kv_two_percent"],
)
def test_a_fault_of_the_backend_is_seen(
    tmp_path: Path, method: str, wrong: Callable[..., None], seen: str
) -> None:
    synth(tmp_path / "c", preset="tiny", fmt="gguf", quant="Q2_K", seed=1)
    checkpoint = open_checkpoint(tmp_path / "c")
    backend: Any = Faulty(load(checkpoint, num_slots=64), method, wrong)
    result = verify_backend(checkpoint, backend)
    assert not result.ok
    assert any(seen in check.name for check in result.checks if check.outside)


def test_plain_hash_is_that_of_the_published_toy(tmp_path: Path) -> None:
    """engram_vectors.json, tiny_base5, hash_of_0..4: both layers, positions 0 and 1."""
    synth(tmp_path / "c", preset="tiny", fmt="gguf", quant="Q2_K", seed=1)
    tables = open_checkpoint(tmp_path / "c").hash_tables
    windows = plain_windows([0, 2, 3], [True, True, True], tables)  # compressed 0, 1, 2
    assert windows[1] == [1, 0, 2, 2]
    rows = [[plain_hash(window, index, tables) for index in (0, 1)] for window in windows]
    assert rows[0] == [[4, 11, 13, 26, 44, 69], [10, 26, 64, 93, 121, 170]]
    assert rows[1] == [[3, 6, 17, 29, 46, 69], [19, 31, 67, 102, 147, 177]]


def test_plain_window_stops_at_a_dead_position(tmp_path: Path) -> None:
    synth(tmp_path / "c", preset="tiny", fmt="gguf", quant="Q2_K", seed=1)
    tables = open_checkpoint(tmp_path / "c").hash_tables
    windows = plain_windows([0, 5, 6, 7], [True, False, True, True], tables)
    assert windows[1:] == [[2, 2, 2, 2], [4, 2, 2, 2], [5, 4, 2, 2]]
