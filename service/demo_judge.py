"""Keeps the demo's answers and compares each of them with the oracle afterwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch

Known = dict[tuple[int, tuple[int, ...]], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""(layer, window) -> lowest, highest and reference kv, each bfloat16 [hc_mult + 1, dim]."""

EXACT, BOUND, INTERVAL = "same bits", "the bound", "its interval"
"""What is promised of an output: docs/numbers.md."""


@dataclass(frozen=True)
class Reading:
    """What was asked for. held: the sequence's token ids up to its end, -1 = dead; count: of
    its newest positions that are read."""

    stage: str
    output: str
    layer: int
    held: Sequence[int]
    count: int

    @property
    def first(self) -> int:
        """Position of the first row."""
        return len(self.held) - self.count

    @property
    def dead(self) -> torch.Tensor:
        """bool [count]"""
        return torch.tensor([i == -1 for i in self.held[self.first :]], dtype=torch.bool)


@dataclass(frozen=True)
class Answer:
    """What came back. got: rows in order of position; x: the residual that went in."""

    reading: Reading
    got: torch.Tensor
    seconds: float
    x: torch.Tensor | None = None


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
        self._same: list[tuple[str, str, torch.Tensor, torch.Tensor]] = []

    def keep(self, answer: Answer) -> None:
        """Take an answer to be judged later."""
        self._answers.append(answer)

    def same(self, stage: str, output: str, got: torch.Tensor, other: torch.Tensor) -> None:
        """Take two results that must have the same bits: two ways to one thing."""
        self._same.append((stage, output, got, other))

    def verdicts(self) -> list[Verdict]:
        """Judge everything, a line for each (stage, output), in the order of the story."""
        known = self._known_kv()
        lines: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
        for answer in self._answers:
            verdict = self._judge(answer, known)
            lines[verdict.stage, verdict.output].append(verdict)
        for stage, output, got, other in self._same:
            is_right = self._module.same_bits(got, other)
            verdict = Verdict(
                stage, output, len(got), 0.0, _difference(got, other), is_right, EXACT
            )
            lines[stage, output].append(verdict)
        return [_sum(verdicts) for verdicts in lines.values()]

    def _judge(self, answer: Answer, known: Known) -> Verdict:
        reading, oracle = answer.reading, self.oracle
        compressed = self._compressed(reading)
        if reading.output in ("hash_ids", "rows"):
            ids = oracle.layer_hash_ids(reading.layer, compressed, reading.first)
            is_rows = reading.output == "rows"
            want = oracle.rows(reading.layer, ids) if is_rows else torch.from_numpy(ids)
            is_right, promise = self._module.same_bits(answer.got, want), EXACT
        else:
            interval, want = self._expected(
                answer, known, oracle.windows(compressed, reading.first)
            )
            is_right = not bool(interval.outside(answer.got).any())
            promise = BOUND if reading.output == "kv" else INTERVAL
        return Verdict(
            reading.stage,
            reading.output,
            len(answer.got),
            answer.seconds,
            _difference(answer.got, want),
            is_right,
            promise,
        )

    def _expected(self, answer: Answer, known: Known, windows: Any) -> tuple[Any, torch.Tensor]:
        """Return the interval and the reference values of a kv or residual answer."""
        reading, oracle = answer.reading, self.oracle
        parts = [known[reading.layer, tuple(window)] for window in windows]
        low, high, kv = (torch.stack(ends) for ends in zip(*parts, strict=True))
        if reading.output == "residual":
            bounds = self._module.Interval(low, high)
            return (
                oracle.residual_interval(reading.layer, answer.x, bounds, reading.dead),
                oracle.apply_reference(reading.layer, answer.x, kv, reading.dead),
            )
        nothing = torch.zeros_like(kv)
        nothing[:, -1] = -0.0
        dead = reading.dead[:, None, None]
        low, high, kv = (torch.where(dead, nothing, end) for end in (low, high, kv))
        return self._module.Interval(low, high), kv

    def _known_kv(self) -> Known:
        """Compute kv once for every window that an answer of kv or residual is about."""
        known: Known = {}
        for layer in self.oracle.layer_ids:
            hash_ids: dict[tuple[int, ...], Any] = {}
            for reading in (answer.reading for answer in self._answers):
                if reading.layer == layer and reading.output in ("kv", "residual"):
                    compressed = self._compressed(reading)
                    windows = self.oracle.windows(compressed, reading.first)
                    ids = self.oracle.layer_hash_ids(layer, compressed, reading.first)
                    hash_ids.update(zip(map(tuple, windows), ids, strict=True))
            rows = self.oracle.rows(layer, np.stack(list(hash_ids.values())))
            interval = self.oracle.kv_interval(layer, rows)
            reference = self.oracle.kv_reference(layer, rows)
            parts = zip(interval.low, interval.high, reference, strict=True)
            known |= {(layer, window): part for window, part in zip(hash_ids, parts, strict=True)}
        return known

    def _compressed(self, reading: Reading) -> list[int]:
        mask = [i != -1 for i in reading.held]
        compressed: list[int] = self.oracle.compress(reading.held, mask)
        return compressed


def _sum(verdicts: Sequence[Verdict]) -> Verdict:
    """Add up the verdicts of one line."""
    return replace(
        verdicts[0],
        tokens=sum(verdict.tokens for verdict in verdicts),
        seconds=sum(verdict.seconds for verdict in verdicts),
        worst=max(verdict.worst for verdict in verdicts),
        is_right=all(verdict.is_right for verdict in verdicts),
    )


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest absolute difference where both are numbers; infinity for other shapes."""
    if got.shape != want.shape:
        return float("inf")
    distance = (got.double() - want.double()).abs().nan_to_num(0.0)
    return float(distance.max()) if distance.numel() else 0.0
