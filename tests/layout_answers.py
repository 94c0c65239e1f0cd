"""What an engine answers of the model of `layout_files.py`: one sequence, everything there is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engram_core.checkpoint import Checkpoint
from engram_core.engine import Engine
from engram_core.engine_types import EngineLimits, OpenRequest, Output, Segments, StepRequest
from engram_core.loader import load
from tests.layout_files import ROWS
from tests.oracle import same_bits

TOKEN_IDS = np.array([0, 2, 5, 6, 9, 1, 8, 3, 4, 10, 7, 2], np.int64)
MASK = TOKEN_IDS != 9
LIMITS = EngineLimits(max_tokens=64, max_sessions=4, max_held_tokens=4096)


@dataclass(frozen=True)
class Answers:
    """What an engine says of one sequence, by layer."""

    hash_ids: dict[int, torch.Tensor]
    rows: dict[int, torch.Tensor]
    residual: dict[int, torch.Tensor]


def residual_of(layer: int) -> torch.Tensor:
    """The residual that is gated: float32 [T, 2, 64]."""
    generator = torch.Generator().manual_seed(layer)
    return torch.randn((len(TOKEN_IDS), 2, 64), generator=generator)


def answers(checkpoint: Checkpoint, placement: str = "host") -> Answers:
    """Push a sequence with a dead position and read all there is to read."""
    backend = load(checkpoint, placement=placement, num_slots=64)
    count = np.array([len(TOKEN_IDS)], np.int32)
    with Engine(backend, LIMITS) as engine:
        engine.open("", OpenRequest(session_id=1))
        engine.push("", 1, 0, TOKEN_IDS, mask=MASK)
        segments = Segments(count, np.zeros(1, np.int64), session_id=np.ones(1, np.int64))

        def step(output: Output, layer: int) -> torch.Tensor:
            residual = residual_of(layer) if output is Output.RESIDUAL else None
            request = StepRequest(segments, output, (layer,), residual=residual)
            return engine.step("", request).result(30).tensors[layer]

        outputs = (Output.HASH_IDS, Output.ROWS, Output.RESIDUAL)
        read = [{layer: step(output, layer) for layer in ROWS} for output in outputs]
    return Answers(*read)


def assert_same(one: Answers, other: Answers) -> None:
    """Equal bits of everything, of every layer."""
    for layer in ROWS:
        assert same_bits(one.hash_ids[layer], other.hash_ids[layer])
        assert same_bits(one.rows[layer], other.rows[layer])
        assert same_bits(one.residual[layer], other.residual[layer])
