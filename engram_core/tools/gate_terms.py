"""The gate's own value and what it adds, for figures; `backends.gate` is what serves."""

from __future__ import annotations

import torch

from engram_core.backends.gate import CLAMP


def gate_values(
    residual: torch.Tensor, kv: torch.Tensor, qk: torch.Tensor, eps: float
) -> torch.Tensor:
    """Compute the gate in float32.

    residual: float32 [T, hc_mult, dim]; kv: float32 [T, hc_mult + 1, dim]
    qk: float32 [hc_mult, dim]
    Returns: float32 [T, hc_mult]  between 0 and 1

    Source: engram-format 5.
    """
    key, dim = kv[:, :-1], residual.shape[-1]
    rstd = torch.rsqrt(residual.square().mean(-1) + eps)
    rstd = rstd * torch.rsqrt(key.square().mean(-1) + eps)
    dot = (residual * qk * key).sum(-1) * rstd * dim**-0.5
    return torch.sigmoid(torch.copysign(dot.abs().clamp_min(CLAMP).sqrt(), dot))


def updates(gate: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Compute what is added to the residual: float32 [T, hc_mult, dim]."""
    return gate[:, :, None] * kv[:, -1:]
