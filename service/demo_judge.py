"""Keeps the demo's answers and compares each of them with the oracle afterwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

EXACT, BOUND, INTERVAL = "same bits", "the bound", "its interval"
"""What is promised of an output: docs/numbers.md."""


@dataclass(frozen=True)
class Answer:
    """One answer. compressed: the sequence's ids up to its end; first: position of row 0;
    x: the residual that went in; got: what came back, rows in order of position."""

    stage: str
    output: str
    layer: int
    compressed: Sequence[int]
    first: int
    got: torch.Tensor
    seconds: float
    x: torch.Tensor | None = None

    @property
    def dead(self) -> torch.Tensor:
        """bool [T]"""
        return torch.tensor([i == -1 for i in self.compressed[self.first :]], dtype=torch.bool)


@dataclass(frozen=True)
class Verdict:
    """A stage's sum. worst: largest difference from the reference values; is_right: nothing
    outside what is promised."""

    stage: str
    output: str
    tokens: int
    seconds: float
    worst: float
    is_right: bool
    promise: str


class Judge:
    """The oracle's side of the demo; each distinct (layer, window) is computed once."""

    def __init__(self, oracle: Any, module: ModuleType) -> None:
        self.oracle = oracle
        self._module = module
        self._answers: list[Answer] = []
        self._same: list[tuple[str, str, int, torch.Tensor, torch.Tensor]] = []

    def keep(self, answer: Answer) -> None:
        """Take an answer to be judged later."""
        self._answers.append(answer)

    def same(self, stage: str, output: str, got: torch.Tensor, other: torch.Tensor) -> None:
        """Take two results that must have the same bits: two ways to one thing."""
        self._same.append((stage, output, len(got), got, other))

    def verdicts(self) -> list[Verdict]:
        """Judge everything, a line for each (stage, output), in the order of the story."""
        expected = self._expected_kv()
        sums: dict[tuple[str, str], list[tuple[int, float, float, bool]]] = defaultdict(list)
        promises: dict[tuple[str, str], str] = {}
        for answer in self._answers:
            key = answer.stage, answer.output
            worst, is_right, promises[key] = self._judge(answer, expected)
            sums[key].append((len(answer.got), answer.seconds, worst, is_right))
        for stage, output, tokens, got, other in self._same:
            key = stage, output
            worst, promises[key] = _difference(got, other), EXACT
            sums[key].append((tokens, 0.0, worst, self._module.same_bits(got, other)))
        return [
            Verdict(
                *key,
                tokens=sum(part[0] for part in parts),
                seconds=sum(part[1] for part in parts),
                worst=max(part[2] for part in parts),
                is_right=all(part[3] for part in parts),
                promise=promises[key],
            )
            for key, parts in sums.items()
        ]

    def _judge(self, answer: Answer, expected: dict[Any, Any]) -> tuple[float, bool, str]:
        """Return the worst difference, whether all is as promised, and what is promised."""
        oracle, layer = self.oracle, answer.layer
        if answer.output in ("hash_ids", "rows"):
            want: Any = oracle.layer_hash_ids(layer, answer.compressed, answer.first)
            want = torch.from_numpy(want)
            if answer.output == "rows":
                want = oracle.rows(layer, want.numpy())
            return (
                _difference(answer.got, want),
                self._module.same_bits(answer.got, want),
                EXACT,
            )
        windows = oracle.windows(answer.compressed, answer.first)
        low, high, kv = (
            torch.stack([expected[layer, tuple(w)][i] for w in windows]) for i in range(3)
        )
        dead = answer.dead[:, None, None]
        nothing = torch.zeros_like(kv)
        nothing[:, -1] = -0.0
        if answer.output == "kv":
            low, high, kv = (torch.where(dead, nothing, end) for end in (low, high, kv))
            interval = self._module.Interval(low, high)
            promise = BOUND
        else:
            bounds = self._module.Interval(low, high)
            interval = oracle.residual_interval(layer, answer.x, bounds, answer.dead)
            kv = oracle.apply_reference(layer, answer.x, kv, answer.dead)
            promise = INTERVAL
        is_right = not bool(interval.outside(answer.got).any())
        return _difference(answer.got, kv), is_right, promise

    def _expected_kv(self) -> dict[Any, Any]:
        """(layer, window) -> lowest, highest and reference kv."""
        found: dict[Any, Any] = {}
        for layer in self.oracle.layer_ids:
            hash_ids: dict[tuple[int, ...], Any] = {}
            for answer in self._answers:
                if answer.layer == layer and answer.output in ("kv", "residual"):
                    windows = self.oracle.windows(answer.compressed, answer.first)
                    ids = self.oracle.layer_hash_ids(layer, answer.compressed, answer.first)
                    hash_ids.update(zip(map(tuple, windows), ids, strict=True))
            rows = self.oracle.rows(layer, torch.tensor([i.tolist() for i in hash_ids.values()]).numpy())
            interval = self.oracle.kv_interval(layer, rows)
            reference = self.oracle.kv_reference(layer, rows)
            parts = zip(interval.low, interval.high, reference, strict=True)
            found |= {(layer, window): part for window, part in zip(hash_ids, parts, strict=True)}
        return found


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest absolute difference where both are numbers; infinity for other shapes."""
    if got.shape != want.shape:
        return float("inf")
    distance = (got.double() - want.double()).abs().nan_to_num(0.0)
    return float(distance.max()) if distance.numel() else 0.0
