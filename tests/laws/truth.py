"""What every answer of an engine must be: the oracle's, and the same bits by whatever way it came.

hash_ids and rows are compared with the oracle by bits. A kv is held to the bound of float64 the
first time its (layer, window) is seen, a gated residual to its interval; after that both must
come back with exactly the same bits: from a hit, a miss, a duplicate, another session, batch,
source or tenant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tests.oracle import DEAD, Interval, Oracle, hash_window, same_bits

NUM_RESIDUALS = 6


class Truth:
    """The expected answers of one checkpoint, remembered by window."""

    def __init__(self, checkpoint: Path) -> None:
        self.oracle = Oracle.open(checkpoint)
        self.seen: Counter[str] = Counter()
        self._hashed: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        self._kv: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        self._out: dict[tuple[int, tuple[int, ...], int, torch.dtype], torch.Tensor] = {}
        shape = NUM_RESIDUALS, self.oracle.hc_mult, self.oracle.dim
        generator = torch.Generator().manual_seed(11)
        self.residuals = torch.randn(shape, generator=generator)
        self.raw_of = {c: t for t, c in enumerate(self.oracle.files.token_map)}
        """A token id for every compressed id."""

    def residual(self, which: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """[T, hc_mult, dim]: chosen ones of a few residuals, so that they come again."""
        return self.residuals[torch.tensor(which, dtype=torch.long)].to(dtype)

    def windows(self, ids: Sequence[int | None], position: int, count: int) -> list[list[int]]:
        """Windows of held positions; what nobody knows (None) lies too far back to matter."""
        first = max(position - self.oracle.max_ngram_size + 1, 0)
        known = [0 if c is None else c for c in ids[first : position + count]]
        full = [0] * (3 if first else 0) + known
        return self.oracle.windows(full, position - first + (3 if first else 0))

    def hash_ids(self, layer: int, windows: Sequence[Sequence[int]]) -> torch.Tensor:
        index, files = self.oracle.layer_ids.index(layer), self.oracle.files
        rows = []
        for window in windows:
            key = layer, tuple(window)
            if key not in self._hashed:
                self._hashed[key] = hash_window(
                    window, files.multipliers[index], files.primes[index], files.offsets[index]
                )
            rows.append(self._hashed[key])
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, self.oracle.num_hash_cols)

    def check_hash_ids(
        self, layer: int, windows: Sequence[Sequence[int]], got: torch.Tensor
    ) -> None:
        assert torch.equal(got, self.hash_ids(layer, windows))
        self.seen["hash_ids"] += len(windows)

    def check_rows(
        self, layer: int, windows: Sequence[Sequence[int]], got: torch.Tensor, *, stored: bool
    ) -> None:
        ids = self.hash_ids(layer, windows).numpy()
        if stored:
            assert torch.equal(got, torch.from_numpy(self.oracle.stored_rows(layer, ids)))
        else:
            assert same_bits(got, self.oracle.rows(layer, ids))
        self.seen["stored" if stored else "rows"] += len(windows)

    def check_kv(
        self,
        layer: int,
        windows: Sequence[Sequence[int]],
        dead: Sequence[bool],
        got: torch.Tensor,
    ) -> None:
        nothing = torch.zeros_like(got[:1])
        nothing[:, -1] = -0.0
        for window, is_dead, kv in zip(windows, dead, got, strict=True):
            if is_dead:
                assert same_bits(kv, nothing[0])
                self.seen["dead"] += 1
                continue
            key = layer, tuple(window)
            if key not in self._kv:
                rows = self.oracle.rows(layer, self.hash_ids(layer, [window]).numpy())
                assert not self.oracle.kv_interval(layer, rows).outside(kv[None]).any()
                self._kv[key] = kv.clone()
            assert same_bits(kv, self._kv[key])
            self.seen["kv"] += 1

    def check_residual(
        self,
        layer: int,
        windows: Sequence[Sequence[int]],
        dead: Sequence[bool],
        which: Sequence[int],
        got: torch.Tensor,
    ) -> None:
        sent = self.residual(which, got.dtype)
        for window, is_dead, number, x, out in zip(windows, dead, which, sent, got, strict=True):
            if is_dead:
                assert same_bits(out, x)
                self.seen["dead"] += 1
                continue
            key = layer, tuple(window), number, got.dtype
            if key not in self._out:
                kv = self._kv.get((layer, tuple(window)))
                if kv is None:
                    rows = self.oracle.rows(layer, self.hash_ids(layer, [window]).numpy())
                    bound = self.oracle.kv_interval(layer, rows)
                else:
                    bound = Interval(kv[None], kv[None])
                alive = torch.zeros(1, dtype=torch.bool)
                interval = self.oracle.residual_interval(layer, x[None], bound, alive)
                assert not interval.outside(out[None]).any()
                self._out[key] = out.clone()
            assert same_bits(out, self._out[key])
            self.seen["residual"] += 1


def is_dead(ids: Sequence[int | None]) -> list[bool]:
    return [c == DEAD for c in ids]


def lookback_of(truth: Truth, ids: Sequence[int | None], position: int) -> list[int]:
    """Raw ids before a position, oldest first, -1 = dead or before the start."""
    width = truth.oracle.max_ngram_size - 1
    row = []
    for p in range(position - width, position):
        compressed = ids[p] if p >= 0 else DEAD
        row.append(-1 if compressed in (DEAD, None) else truth.raw_of[compressed])
    return row


def raw(truth: Truth, ids: Sequence[int | None]) -> tuple[list[int], list[bool]]:
    """Token ids and mask that compress to `ids`."""
    mask = [c != DEAD for c in ids]
    return [truth.raw_of.get(c, 0) if c is not None else 0 for c in ids], mask


def int64(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)
