"""The projection kv = wkv @ row on the CPU, and how far any projection may be from the truth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from engram_core.engine_types import BESIDE_TOKENS
from engram_core.geometry import Geometry

PROJECT_TOKENS = 512
"""Tokens projected at a time; bounds the workspaces (31 MiB a layer in bf16, true geometry)."""

_PAD_TOKENS = 16
"""torch takes other kernels, with other bits, for fewer rows: 1 in bf16, 1-9 in f32."""

CHECKED_TOKENS = (1, 2, 3, 7, 15, 16, 17, 33, 64, 100, 256)
"""Batches whose bits are compared with those of the same rows among PROJECT_TOKENS."""


class Cut(NamedTuple):
    """How a batch is cut into products, so that a row's bits do not depend on its company.

    max_rows: of a product, a multiple of 16; num_threads: of torch; None: as many as the caller has

    torch's products with AMX (Intel) take other kernels, with other bits, for other numbers of rows
    and of threads; there every product has 16 rows and the same number of threads.
    """

    max_rows: int
    num_threads: int | None

    @property
    def told(self) -> str:
        """In words, for `numerics`."""
        if self.num_threads is None:
            return f"inputs padded to {_PAD_TOKENS} tokens"
        return f"{self.max_rows} tokens a product, on {self.num_threads} threads"


_CUTS: dict[tuple[torch.Size, torch.dtype], Cut] = {}
"""What was found for a shape, which decides torch's kernels."""


def has_bf16_products() -> bool:
    """Whether this CPU multiplies bfloat16 into float32 itself.

    Without it torch's bf16 product is 3-6 times slower than the f32 one over the same values.
    """
    flags = torch.cpu.get_capabilities()
    return bool(flags.get("avx512_bf16") or flags.get("amx_bf16"))


def product_dtype() -> torch.dtype:
    """Choose what wkv is kept and multiplied as, by the CPU's flags and never by timing."""
    return torch.bfloat16 if has_bf16_products() else torch.float32


def projection_bytes(geometry: Geometry) -> tuple[int, int]:
    """Bytes of all layers' wkv and of their workspaces, for the memory ledger."""
    width = geometry.in_features + geometry.out_features
    wkv = geometry.in_features * geometry.out_features
    per_layer = geometry.num_layers * product_dtype().itemsize
    return wkv * per_layer, (PROJECT_TOKENS + BESIDE_TOKENS) * width * per_layer


class Projection:
    """kv = wkv @ row, in float32, rounded once to bfloat16.

    wkv: bfloat16 [out_features, in_features]; dtype: of the product (the values are the same)
    max_tokens: of a call; cut: None: the first that keeps bits here, found by comparing
    """

    def __init__(
        self,
        wkv: torch.Tensor,
        dtype: torch.dtype,
        max_tokens: int = PROJECT_TOKENS,
        cut: Cut | None = None,
    ) -> None:
        self.wkv = wkv.to(dtype)
        out_features, in_features = wkv.shape
        # Kept: fresh pages cost more than the products of a small batch.
        self._input = torch.empty((max_tokens, in_features), dtype=dtype)
        self._output = torch.empty((max_tokens, out_features), dtype=dtype)
        self.cut = cut or _cut_of(self.wkv)

    def beside(self, max_tokens: int) -> Projection:
        """Return one of the same weights, and the same bits, for another thread."""
        return Projection(self.wkv, self.wkv.dtype, max_tokens, self.cut)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Project up to `max_tokens`; the answer is valid until the next call.

        rows: bfloat16 [T, in_features]; Returns: bfloat16 [T, out_features]
        """
        num_tokens = len(rows)
        padded = -(-num_tokens // _PAD_TOKENS) * _PAD_TOKENS
        self._input[:num_tokens] = rows
        self._input[num_tokens:padded] = 0.0
        with _threads(self.cut.num_threads):
            for first in range(0, padded, self.cut.max_rows):
                rows_of = slice(first, min(first + self.cut.max_rows, padded))
                torch.mm(self._input[rows_of], self.wkv.t(), out=self._output[rows_of])
        return self._output[:num_tokens].to(torch.bfloat16)


def unequal_batch(project: Projection, rows: torch.Tensor) -> tuple[int, int] | None:
    """Find a batch whose bits are not those of the same rows in a larger one: its tokens, and in
    how many values; None: there is none.

    rows: bfloat16 [PROJECT_TOKENS, in_features]
    """
    whole = project(rows).clone()
    for num_threads in sorted({1, torch.get_num_threads()}):
        with _threads(num_threads):
            for count in CHECKED_TOKENS:
                unequal = project(rows[-count:]).view(torch.int16) != whole[-count:].view(
                    torch.int16
                )
                if unequal.any():
                    return count, int(unequal.sum())
    return None


def threads_beside() -> int:
    """Threads of torch for each of two that project: a core is left for the thread that asks."""
    return max(1, (torch.get_num_threads() - 1) // 2)


def _cut_of(wkv: torch.Tensor) -> Cut:
    """Return the fastest cut whose bits do not depend on the batch here; the last, if none is."""
    key = wkv.shape, wkv.dtype
    if key not in _CUTS:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn((PROJECT_TOKENS, wkv.shape[1]), generator=generator).to(torch.bfloat16)
        _CUTS[key] = last = Cut(_PAD_TOKENS, 1)
        for cut in (Cut(PROJECT_TOKENS, None), Cut(_PAD_TOKENS, threads_beside()), last):
            if unequal_batch(Projection(wkv, wkv.dtype, cut=cut), rows) is None:
                _CUTS[key] = cut
                break
    return _CUTS[key]


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Let torch use so many threads for what the calling one does."""
    before = torch.get_num_threads()  # asked first: torch initialises a thread's number when asked
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rounding_bound(kv: torch.Tensor, rows: torch.Tensor, wkv: torch.Tensor) -> torch.Tensor:
    """Bound |kv - kv64| of any backend that keeps the promise (NUMBERS, "across devices").

    kv: float64 [T, out]  values of bfloat16; rows: float64 [T, in]; wkv: float64 [out, in]
    """
    num_terms = rows.shape[1]
    magnitudes = rows.abs() @ wkv.abs().t()
    flushed = 2.0**-126 * (rows.abs().sum(1)[:, None] + wkv.abs().sum(1))
    exponent = torch.floor(torch.log2(kv.abs().clamp_min(2.0**-126)))
    half_ulp = torch.exp2(exponent - 8)
    return half_ulp + 2.0**-22 * (num_terms / 16 + 1) * magnitudes + flushed
