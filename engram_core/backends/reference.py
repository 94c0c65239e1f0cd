"""The layer in plain torch on the CPU: the definition of what is right, and the embedded default.

A token's bits do not depend on the batch it comes in. torch does not promise that, so three of
its habits are worked around here, and `self_check` measures that it worked:
- matrix products take other kernels for few rows: the input is padded to a multiple of 16 rows;
- `sigmoid` rounds differently in a vector's tail: padded to multiples of 32 values, in tiles
  below the 32,768 at which torch cuts work for threads;
- a reduction to a single number is cut for threads: there are always at least two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.errors import BadTensor, CheckpointError, SelfCheckFailed
from engram_core.geometry import EngramHashTables, Geometry
from engram_core.hashing import hash_windows
from engram_core.quant import requantize
from engram_core.tables import Table
from engram_core.weights import EngramLayerWeights

CLAMP = 1e-6
"""Smallest |dot| under the gate's square root."""

_PROJECT_TOKENS = 512
"""Tokens projected at a time; bounds the workspaces (31 MiB a layer in bf16, true geometry)."""

_PAD_TOKENS = 16
_GATE_VALUES = 1 << 19
"""Values of the residual gated at a time: a few tiles of them stay in the caches."""

_SIGMOID_PAD = 32
_SIGMOID_TILE = 8192
_CHECKED_TOKENS = (1, 2, 3, 7, 15, 16, 17, 33, 64, 100)
_CHECKED_SIGMOIDS = (*_CHECKED_TOKENS, 8200)
_CHECKED_OUTPUTS = 64


def has_bf16_products() -> bool:
    """Whether this CPU multiplies bfloat16 into float32 itself.

    Without it torch's bf16 product is 3-6 times slower than the f32 one over the same values.
    """
    flags = torch.cpu.get_capabilities()
    return bool(flags.get("avx512_bf16") or flags.get("amx_bf16"))


class ReferenceBackend:
    """Implements `backends.base.Backend`.

    tables, weights: one a layer, in the order of geometry.layer_ids
    num_slots: kv slots; their memory is reserved here and becomes resident as it is written

    Without bfloat16 products `wkv` is kept as float32: twice the memory.
    """

    name = "reference"

    def __init__(
        self,
        geometry: Geometry,
        hash_tables: EngramHashTables,
        tables: Sequence[Table],
        weights: Sequence[EngramLayerWeights],
        num_slots: int,
    ) -> None:
        _check_parts(geometry, hash_tables, tables, weights)
        self.geometry = geometry
        self.hash_tables = hash_tables
        self.num_slots = num_slots
        self._tables = tuple(tables)
        self._requantize = tuple(layer.requantize_input for layer in weights)
        self._gates = tuple(Gate(geometry, layer.qk) for layer in weights)
        dtype = torch.bfloat16 if has_bf16_products() else torch.float32
        self._projections = tuple(Projection(layer.wkv, dtype) for layer in weights)
        self._kv = torch.empty((num_slots, geometry.out_features), dtype=torch.bfloat16)
        self.numerics: Mapping[str, str] = {
            "wkv": f"{str(dtype).removeprefix('torch.')} matrix product, one float32 accumulator "
            "rounded once; inputs padded to 16 tokens; bits do not depend on the batch",
            "gate": "float32, no fused multiply-add; bits do not depend on the batch",
            "wkv_input": "e4m3 per 32 values" if any(self._requantize) else "bfloat16 rows",
        }

    def rows(
        self, layer_index: int, hash_ids: NDArray[np.int64], out: torch.Tensor, *, stored: bool
    ) -> None:
        """Gather rows, dequantised or as stored (see `Backend.rows`)."""
        table = self._tables[layer_index]
        width, dtype = (
            (table.row_bytes, torch.uint8) if stored else (table.head_dim, torch.bfloat16)
        )
        _check("out", out, (dtype,), (*hash_ids.shape, width))
        for piece in _pieces(len(hash_ids), _PROJECT_TOKENS):
            ids = hash_ids[piece].reshape(-1)
            rows = torch.from_numpy(table.gather_stored(ids)) if stored else table.gather(ids)
            out[piece] = rows.view(-1, hash_ids.shape[1], width)

    def project(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        *,
        windows: NDArray[np.int32] | None = None,
        hash_ids: NDArray[np.int64] | None = None,
    ) -> None:
        """Compute kv into slots (see `Backend.project`)."""
        if (windows is None) == (hash_ids is None):
            raise BadTensor("project: give exactly one of windows and hash_ids")
        self._check_slots(slots)
        if hash_ids is None:
            assert windows is not None
            hash_ids = hash_windows(windows, self.hash_tables, [layer_index])[:, 0]
        _check_len("hash_ids", len(hash_ids), len(slots))
        for piece in _pieces(len(slots), _PROJECT_TOKENS):
            rows = self._tables[layer_index].gather(hash_ids[piece].reshape(-1))
            rows = rows.view(-1, self.geometry.in_features)
            if self._requantize[layer_index]:
                rows = requantize(rows)
            kv = self._projections[layer_index](rows)
            self._kv.index_copy_(0, torch.from_numpy(slots[piece]), kv)

    def read_kv(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        out: torch.Tensor,
    ) -> None:
        """Copy kv out of slots (see `Backend.read_kv`). Slots of dead positions are not read."""
        hc_mult, dim = self.geometry.hc_mult, self.geometry.dim
        _check("out", out, (torch.bfloat16,), (len(slots), hc_mult + 1, dim))
        _check_len("dead", len(dead), len(slots))
        live = np.flatnonzero(~dead)
        self._check_slots(slots[live])
        for piece in _pieces(len(live), _PROJECT_TOKENS):
            out.index_copy_(0, torch.from_numpy(live[piece]), self._read(slots[live[piece]]))
        places = torch.from_numpy(np.flatnonzero(dead))
        out[places, :hc_mult] = 0.0
        out[places, hc_mult] = -0.0

    def gate(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        residual: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Add gate * value (see `Backend.gate`). Dead positions are copied, never computed."""
        shape = (len(slots), self.geometry.hc_mult, self.geometry.dim)
        _check("residual", residual, (torch.bfloat16, torch.float32), shape)
        _check("out", out, (residual.dtype,), shape)
        _check_len("dead", len(dead), len(slots))
        live = np.flatnonzero(~dead)
        self._check_slots(slots[live])
        gate = self._gates[layer_index]
        for piece in _pieces(len(live), gate.tile_tokens):
            places = torch.from_numpy(live[piece])
            kv = self._read(slots[live[piece]])
            out.index_copy_(0, places, gate(residual.index_select(0, places), kv))
        if out.data_ptr() != residual.data_ptr():
            places = torch.from_numpy(np.flatnonzero(dead))
            out.index_copy_(0, places, residual.index_select(0, places))

    def self_check(self) -> None:
        """Look rows up, and compare bits over batch sizes. Raises: SelfCheckFailed."""
        for table in self._tables:
            table.gather(np.array([0, table.num_rows - 1]))
        generator = torch.Generator().manual_seed(0)
        _check_sigmoid(generator)
        _check_projection(self._projections[0], generator)
        _check_gate(self._gates[0], self.geometry, generator)

    def close(self) -> None:
        """Free tables, weights and slots."""
        for table in self._tables:
            table.close()
        self._tables, self._projections = (), ()
        self._kv = torch.empty(0)

    def _read(self, slots: NDArray[np.int64]) -> torch.Tensor:
        """Gather slots: bfloat16 [n, hc_mult + 1, dim]."""
        kv = self._kv.index_select(0, torch.from_numpy(slots))
        return kv.view(-1, self.geometry.hc_mult + 1, self.geometry.dim)

    def _check_slots(self, slots: NDArray[np.int64]) -> None:
        if slots.size and not (slots.min() >= 0 and slots.max() < self.num_slots):
            got = [int(slots.min()), int(slots.max())]
            expected = f"0..{self.num_slots - 1}"
            raise BadTensor(f"slots: expected {expected}, got {got}", expected=expected, got=got)


class Projection:
    """kv = wkv @ row, in float32, rounded once to bfloat16.

    wkv: bfloat16 [out_features, in_features]; dtype: of the product (the values are the same)
    """

    def __init__(self, wkv: torch.Tensor, dtype: torch.dtype) -> None:
        self.wkv = wkv.to(dtype)
        out_features, in_features = wkv.shape
        # Kept: fresh pages cost more than the products of a small batch.
        self._input = torch.empty((_PROJECT_TOKENS, in_features), dtype=dtype)
        self._output = torch.empty((_PROJECT_TOKENS, out_features), dtype=dtype)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Project up to 512 tokens; the answer is valid until the next call.

        rows: bfloat16 [T, in_features]; Returns: bfloat16 [T, out_features]
        """
        num_tokens = len(rows)
        padded = -(-num_tokens // _PAD_TOKENS) * _PAD_TOKENS
        self._input[:num_tokens] = rows
        self._input[num_tokens:padded] = 0.0
        product = torch.mm(self._input[:padded], self.wkv.t(), out=self._output[:padded])
        return product[:num_tokens].to(torch.bfloat16)


class Gate:
    """out = h + sigmoid(signed sqrt of the normalised dot of h and key) * value, per stream.

    qk: float32 [hc_mult, dim]

    Source: `Engram.forward` of the reference, operation by operation.
    """

    def __init__(self, geometry: Geometry, qk: torch.Tensor) -> None:
        self._qk = qk
        self._eps = geometry.eps
        self._scale = geometry.dim**-0.5
        per_token = geometry.hc_mult * geometry.dim
        most = _SIGMOID_TILE // geometry.hc_mult
        self.tile_tokens = max(1, min(most, _GATE_VALUES // per_token))

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
        gate = _sigmoid(torch.copysign(dot.abs().clamp_min(CLAMP).sqrt(), dot))
        # Product and sum are rounded one after the other: `addcmul` would fuse them.
        return torch.mul(value, gate.unsqueeze(-1), out=term).add_(h).to(residual.dtype)


def _sigmoid(values: torch.Tensor) -> torch.Tensor:
    """Sigmoid of float32 values, whose bits do not depend on how many there are."""
    flat = values.reshape(-1)
    padded = torch.zeros(-(-flat.numel() // _SIGMOID_PAD) * _SIGMOID_PAD)
    padded[: flat.numel()] = flat
    for piece in _pieces(len(padded), _SIGMOID_TILE):
        torch.sigmoid(padded[piece], out=padded[piece])
    return padded[: flat.numel()].view(values.shape)


def _pieces(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _check_parts(
    geometry: Geometry,
    hash_tables: EngramHashTables,
    tables: Sequence[Table],
    weights: Sequence[EngramLayerWeights],
) -> None:
    """Refuse parts that are not of one checkpoint, before any memory is taken."""
    hash_tables.require(table_rows=geometry.table_rows)
    rows = tuple(table.num_rows for table in tables)
    layer_ids = tuple(layer.layer_id for layer in weights)
    head_dims = {table.head_dim for table in tables}
    for name, expected, got in (
        ("table rows", geometry.table_rows, rows),
        ("layers with weights", geometry.layer_ids, layer_ids),
        ("layers with hash constants", geometry.layer_ids, hash_tables.layer_ids),
        ("hash columns", geometry.n_hash_cols, hash_tables.n_hash_cols),
        ("row values", {geometry.head_dim}, head_dims),
    ):
        if expected != got:
            message = f"{name}: expected {expected}, got {got}"
            raise CheckpointError(message, expected=expected, got=got)
    for layer in weights:
        layer.require(geometry)


def _check(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]
) -> None:
    if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
        expected = f"{' or '.join(map(str, dtypes))} {list(shape)}"
        got = f"{tensor.dtype} {list(tensor.shape)}"
        raise BadTensor(f"{name}: expected {expected}, got {got}", expected=expected, got=got)


def _check_len(name: str, got: int, expected: int) -> None:
    if got != expected:
        raise BadTensor(f"{name}: expected {expected}, got {got}", expected=expected, got=got)


def _check_sigmoid(generator: torch.Generator) -> None:
    values = torch.randn(max(_CHECKED_SIGMOIDS), generator=generator)
    whole = _sigmoid(values)
    for count in _CHECKED_SIGMOIDS:
        _require_equal("sigmoid", count, _sigmoid(values[-count:]), whole[-count:])


def _check_projection(project: Projection, generator: torch.Generator) -> None:
    in_features = project.wkv.shape[1]
    rows = torch.randn((_PROJECT_TOKENS, in_features), generator=generator).to(torch.bfloat16)
    whole = project(rows).clone()
    for count in _CHECKED_TOKENS:
        _require_equal("wkv", count, project(rows[-count:]), whole[-count:])
    x = rows[:_PAD_TOKENS].double()
    wkv = project.wkv[:_CHECKED_OUTPUTS].double()
    got = whole[:_PAD_TOKENS, : len(wkv)].double()
    outside = (got - x @ wkv.t()).abs() > rounding_bound(got, x, wkv)
    if outside.any():
        count = int(outside.sum())
        raise SelfCheckFailed(
            f"wkv: {count} of {outside.numel()} values differ from float64 by more than one "
            "float32 accumulation and one rounding allow",
            expected=0,
            got=count,
        )


def _check_gate(gate: Gate, geometry: Geometry, generator: torch.Generator) -> None:
    most = max(_CHECKED_TOKENS)
    residual = torch.randn((most, geometry.hc_mult, geometry.dim), generator=generator)
    kv = torch.randn((most, geometry.hc_mult + 1, geometry.dim), generator=generator)
    kv = kv.to(torch.bfloat16)
    whole = gate(residual, kv)
    for count in _CHECKED_TOKENS:
        _require_equal("gate", count, gate(residual[-count:], kv[-count:]), whole[-count:])


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


def _require_equal(what: str, count: int, got: torch.Tensor, expected: torch.Tensor) -> None:
    unequal = got.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)
    if unequal.any():
        raise SelfCheckFailed(
            f"{what}: {int(unequal.sum())} bytes of a batch of {count} differ from the same "
            "values in a larger batch; expected 0. This CPU (or build of torch) is not supported",
            expected=0,
            got=int(unequal.sum()),
            batch=count,
        )
