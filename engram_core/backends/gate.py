"""The gate in plain torch, in tiles of tokens; a token's bits do not depend on its tile.

It is the definition, and what serves where there is no libengram_cpu (`cpu.py`).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.geometry import Geometry

CLAMP = 1e-6
"""Smallest |dot| under the square root."""

_TILE_VALUES = 1 << 19
"""Values of the residual gated at a time: a few tiles of them stay in the caches."""

_SIGMOID_PAD = 32
"""`sigmoid` rounds differently in a vector's tail."""

_SIGMOID_TILE = 8192
"""torch cuts work for threads, and makes tails there, from 32,768 values on."""


class Gate:
    """out = h + sigmoid(signed sqrt of the normalised dot of h and key) * value, per stream.

    qk: float32 [hc_mult, dim]

    Source: `Engram.forward` of the reference, operation by operation.
    """

    numerics = "float32 in torch, no fused multiply-add; bits do not depend on the batch"

    def __init__(self, geometry: Geometry, qk: torch.Tensor) -> None:
        self._qk = qk
        self._eps = geometry.eps
        self._scale = geometry.dim**-0.5
        per_token = geometry.hc_mult * geometry.dim
        most = _SIGMOID_TILE // geometry.hc_mult
        self.tile_tokens = max(1, min(most, _TILE_VALUES // per_token))

    def __call__(self, residual: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Gate one tile.

        residual: bfloat16 or float32 [T, hc_mult, dim]; kv: bfloat16 [T, hc_mult + 1, dim]
        Returns: as residual
        """
        num_tokens, hc_mult, dim = residual.shape
        h, kv = residual.float(), kv.float()
        key, value = kv[:, :hc_mult], kv[:, hc_mult:]
        # At least two sums: torch cuts a single one for threads, and its bits with it.
        terms = torch.empty((max(2, num_tokens), hc_mult, dim))
        term = terms[:num_tokens]
        torch.mul(h, h, out=term)
        rstd = torch.rsqrt(terms.mean(-1) + self._eps)
        torch.mul(key, key, out=term)
        rstd = rstd * torch.rsqrt(terms.mean(-1) + self._eps)
        torch.mul(h, self._qk, out=term).mul_(key)
        dot = (terms.sum(-1) * rstd * self._scale)[:num_tokens]
        # clamp_min keeps NaN; copysign tells -0 from +0, sign() would not.
        gate = sigmoid(torch.copysign(dot.abs().clamp_min(CLAMP).sqrt(), dot))
        # Product and sum are rounded one after the other: `addcmul` would fuse them.
        return torch.mul(value, gate.unsqueeze(-1), out=term).add_(h).to(residual.dtype)

    def update(
        self,
        store: torch.Tensor,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        residual: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Gate tokens whose kv lies in slots; dead ones are copied, never computed.

        store: bfloat16 [slots, (hc_mult + 1) * dim]; slots: int64 [T]; dead: bool [T]
        residual, out: [T, hc_mult, dim]; out may be residual
        """
        _, hc_mult, dim = residual.shape
        live = np.flatnonzero(~dead)
        for start in range(0, len(live), self.tile_tokens):
            some = live[start : start + self.tile_tokens]
            places = torch.from_numpy(some)
            kv = store.index_select(0, torch.from_numpy(slots[some]))
            gated = self(residual.index_select(0, places), kv.view(-1, hc_mult + 1, dim))
            out.index_copy_(0, places, gated)
        if out.data_ptr() != residual.data_ptr():
            places = torch.from_numpy(np.flatnonzero(dead))
            out.index_copy_(0, places, residual.index_select(0, places))


def sigmoid(values: torch.Tensor) -> torch.Tensor:
    """Sigmoid of float32 values, whose bits do not depend on how many there are."""
    flat = values.reshape(-1)
    padded = torch.zeros(-(-flat.numel() // _SIGMOID_PAD) * _SIGMOID_PAD)
    padded[: flat.numel()] = flat
    for start in range(0, len(padded), _SIGMOID_TILE):
        tile = padded[start : start + _SIGMOID_TILE]
        torch.sigmoid(tile, out=tile)
    return padded[: flat.numel()].view(values.shape)
