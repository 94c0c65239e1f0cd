"""The projection kv = wkv @ row on the CPU, and how far any projection may be from the truth."""

from __future__ import annotations

import torch

from engram_core.engine_types import BESIDE_TOKENS
from engram_core.geometry import Geometry

PROJECT_TOKENS = 512
"""Tokens projected at a time; bounds the workspaces (31 MiB a layer in bf16, true geometry)."""

_PAD_TOKENS = 16
"""torch takes other kernels, with other bits, for fewer rows: 1 in bf16, 1-9 in f32."""


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
    max_tokens: of a call
    """

    def __init__(
        self, wkv: torch.Tensor, dtype: torch.dtype, max_tokens: int = PROJECT_TOKENS
    ) -> None:
        self.wkv = wkv.to(dtype)
        out_features, in_features = wkv.shape
        # Kept: fresh pages cost more than the products of a small batch.
        self._input = torch.empty((max_tokens, in_features), dtype=dtype)
        self._output = torch.empty((max_tokens, out_features), dtype=dtype)

    def beside(self, max_tokens: int) -> Projection:
        """Return one of the same weights for another thread."""
        return Projection(self.wkv, self.wkv.dtype, max_tokens)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Project up to `max_tokens`; the answer is valid until the next call.

        rows: bfloat16 [T, in_features]; Returns: bfloat16 [T, out_features]
        """
        num_tokens = len(rows)
        padded = -(-num_tokens // _PAD_TOKENS) * _PAD_TOKENS
        self._input[:num_tokens] = rows
        self._input[num_tokens:padded] = 0.0
        product = torch.mm(self._input[:padded], self.wkv.t(), out=self._output[:padded])
        return product[:num_tokens].to(torch.bfloat16)


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
