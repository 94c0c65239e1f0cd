"""The layer at the client: gate kv, or project rows, with the weights that the service serves.

The arithmetic is `engram_core`'s, the very functions of the reference backend: on the same CPU the
results are those of a service on the CPU, bit for bit (docs/numbers.md). Needs torch and
`engram_core` (extra `local`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engram_client.arrays import torch_of
from engram_client.client import EngramClient
from engram_core import (
    Geometry,
    Projection,
    make_gate,
    product_dtype,
    requantize,
    row_format,
    to_bf16,
)

PROJECT_TOKENS = 512
"""Tokens that a `Projection` takes at a time."""


class LocalLayer:
    """One layer's gate, and its projection where wkv was fetched.

    eps: as info tells it; qk: float32 [hc_mult, dim]
    wkv: bfloat16 [(hc_mult + 1) * dim, n_hash_cols * head_dim]; None to gate only
    requantizes: whether the projection's input is rounded to e4m3 (FP8 checkpoints)
    encoding: how rows are stored, as info tells it; None to project bfloat16 rows only
    """

    def __init__(
        self,
        qk: torch.Tensor,
        eps: float,
        wkv: torch.Tensor | None = None,
        *,
        requantizes: bool = False,
        encoding: str | None = None,
    ) -> None:
        self._shape = tuple(qk.shape)
        self._form = None if encoding is None else row_format(encoding)
        self._gate = make_gate(_gate_geometry(qk, eps), qk)
        self._requantizes = requantizes
        self._projection = None if wkv is None else Projection(wkv, product_dtype())

    @classmethod
    def fetch(cls, client: EngramClient, layer: int, *, projects: bool = False) -> LocalLayer:
        """Make a layer from what the service hands out; `projects` fetches wkv too."""
        info: dict[str, Any] = client.info()
        weights = client.weights(layer, ("qk", "wkv") if projects else ("qk",))
        return cls(
            torch_of(weights["qk"]),
            info["geometry"]["eps"],
            torch_of(weights["wkv"]) if projects else None,
            requantizes="e4m3" in info["numerics"]["wkv_input"],
            encoding=info["table"]["encodings"][str(layer)],
        )

    def gate(
        self, residual: torch.Tensor, kv: torch.Tensor, dead: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return residual + gate * value; dead positions keep their bits.

        residual: bfloat16 or float32 [T, hc_mult, dim]; kv: bfloat16 [T, hc_mult + 1, dim]
        dead: bool [T]; tensors may be on a device: the gate is computed on the CPU
        Returns: on the residual's device

        Raises ValueError: shapes or dtypes.
        """
        _check_gate(residual, kv, dead, self._shape)
        h = residual.detach().cpu().contiguous()
        out, slots = torch.empty_like(h), np.arange(len(h))
        is_dead = np.zeros(len(h), np.bool_) if dead is None else dead.cpu().numpy()
        self._gate.update(kv.detach().cpu().contiguous().flatten(1), slots, is_dead, h, out)
        return out.to(residual.device)

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """Return kv, bfloat16 [T, hc_mult + 1, dim], of rows.

        rows: bfloat16 [T, n_hash_cols, head_dim], or as stored, uint8 [T, n_hash_cols, row_bytes]
        Returns: on the rows' device; computed on the CPU

        Raises ValueError: shapes or dtypes, or no wkv.
        """
        if self._projection is None:
            raise ValueError("project: expected a layer with wkv: LocalLayer.fetch(projects=True)")
        hc_mult, dim = self._shape
        here = rows.detach().cpu()
        kv = torch.empty((len(rows), (hc_mult + 1) * dim), dtype=torch.bfloat16)
        for begin in range(0, max(len(rows), 1), PROJECT_TOKENS):
            part = self._values(here[begin : begin + PROJECT_TOKENS])
            part = requantize(part) if self._requantizes else part
            kv[begin : begin + len(part)] = self._projection(part)
        return kv.view(-1, hc_mult + 1, dim).to(rows.device)

    def _values(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows as the projection takes them, bfloat16 [T, n_hash_cols * head_dim]."""
        assert self._projection is not None
        width, values = self._projection.wkv.shape[1], rows
        if self._form is not None and rows.dtype == torch.uint8 and rows.ndim == 3:
            num_bytes = rows.shape[2]
            if num_bytes and num_bytes % self._form.block_bytes == 0:
                stored = self._form.dequantize(rows.reshape(-1, num_bytes).numpy())
                values = to_bf16(stored).view(*rows.shape[:2], stored.shape[1])
        if values.dtype != torch.bfloat16 or values.flatten(1).shape[1] != width:
            stored_as = "no stored ones" if self._form is None else f"{self._form.name} as stored"
            raise ValueError(
                f"rows: expected bfloat16 [T, ...] of {width}, or {stored_as}, got {_spec(rows)}"
            )
        return values.flatten(1)


def gate(
    residual: torch.Tensor,
    kv: torch.Tensor,
    qk: torch.Tensor,
    eps: float,
    dead: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gate once; see `LocalLayer.gate`."""
    return LocalLayer(qk, eps).gate(residual, kv, dead)


def project(
    rows: torch.Tensor, wkv: torch.Tensor, hc_mult: int, *, requantizes: bool = False
) -> torch.Tensor:
    """Project once; see `LocalLayer.project`, which keeps wkv ready."""
    dim, rest = divmod(wkv.shape[0], hc_mult + 1)
    if rest:
        raise ValueError(f"wkv: expected a multiple of {hc_mult + 1} outputs, got {wkv.shape[0]}")
    layer = LocalLayer(torch.zeros(hc_mult, dim), 0.0, wkv, requantizes=requantizes)
    return layer.project(rows)


def _gate_geometry(qk: torch.Tensor, eps: float) -> Geometry:
    """Return the sizes that a gate needs; the table's are not used."""
    if qk.dtype != torch.float32 or qk.ndim != 2:
        raise ValueError(f"qk: expected float32 [hc_mult, dim], got {_spec(qk)}")
    hc_mult, dim = qk.shape
    return Geometry(
        layer_ids=(0,),
        max_ngram_size=2,
        num_heads=1,
        head_dim=1,
        dim=dim,
        hc_mult=hc_mult,
        eps=eps,
        table_rows=(1,),
    )


def _check_gate(
    residual: torch.Tensor, kv: torch.Tensor, dead: torch.Tensor | None, shape: tuple[int, ...]
) -> None:
    hc_mult, dim = shape
    count = len(residual)
    if residual.dtype not in (torch.bfloat16, torch.float32) or residual.shape[1:] != shape:
        raise ValueError(f"residual: expected [T, {hc_mult}, {dim}], got {_spec(residual)}")
    if kv.dtype != torch.bfloat16 or tuple(kv.shape) != (count, hc_mult + 1, dim):
        raise ValueError(f"kv: expected bfloat16 [{count}, {hc_mult + 1}, {dim}], got {_spec(kv)}")
    if dead is not None and (dead.dtype != torch.bool or tuple(dead.shape) != (count,)):
        raise ValueError(f"dead: expected bool [{count}], got {_spec(dead)}")


def _spec(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
