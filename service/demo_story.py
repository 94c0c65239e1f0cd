"""What the demo's model runner does: one text, in the ways a runner meets tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from engram_client import EngramClient, Segment, Session, torch_of
from engram_client.local import LocalLayer
from service.demo_judge import Answer, Judge, Reading

PREFILL_CHUNKS = (1, 2, 61, 7, 130, 3, 256)
NUM_DECODED = 24
DRAFT, ACCEPTED, NUM_DRAFTS = 6, 3, 8
NUM_SEQUENCES = 8
IMAGE_SPAN = 5
NUM_LOCAL = 96
BF16, F32 = torch.bfloat16, torch.float32


class Story:
    """A runner with one text of token ids.

    client, second: two clients of the same service
    """

    def __init__(
        self, client: EngramClient, second: EngramClient, judge: Judge, token_ids: Sequence[int]
    ) -> None:
        self._client, self._second, self._judge = client, second, judge
        self._text = list(token_ids)
        info = client.info()
        geometry = info["geometry"]
        self._image_id = int(info["table"]["image_token_id"] or 0)
        self._layers = [int(layer) for layer in geometry["layer_ids"]]
        self._shape = int(geometry["hc_mult"]), int(geometry["dim"])

    def play(self) -> None:
        """Stream the text."""
        session = self._client.open_session()
        held = self._prefill(session)
        held = self._decode(session, held)
        held = self._drafts(session, held)
        self._fork(session, held)
        held = self._image(session, held)
        self._second_client(held)  # the rest of the text, its code
        self._gate_and_project_here(session, held)
        self._steps()
        session.close()

    def _prefill(self, session: Session) -> list[int]:
        start = 0
        for count in PREFILL_CHUNKS:
            ids = self._text[start : start + count]
            session.push(ids)
            start += count
            self._read_both("prefill, uneven", session, self._text[:start], count, BF16)
        return self._text[:start]

    def _decode(self, session: Session, held: list[int]) -> list[int]:
        for token_id in self._text[len(held) : len(held) + NUM_DECODED]:
            session.push([token_id])
            held = [*held, token_id]
            self._read_both("decode", session, held, 1, F32)
        return held

    def _drafts(self, session: Session, held: list[int]) -> list[int]:
        """Verify blocks: half of each draft is wrong, the next block replaces it."""
        for _ in range(NUM_DRAFTS):
            start = len(held)
            right = self._text[start : start + ACCEPTED]
            wrong = [(i + 1) % 1000 for i in self._text[start + ACCEPTED : start + DRAFT]]
            session.push(right + wrong, truncate=True, position=start)
            self._read_both("drafts, truncated", session, held + right + wrong, DRAFT, BF16)
            held = held + right
        session.rewind(len(held))
        return held

    def _fork(self, session: Session, held: list[int]) -> None:
        with session.fork() as fork:
            others = [100 + i for i in range(16)]
            fork.push(others)
            self._read_both("fork", fork, held + others, len(others), F32)

    def _image(self, session: Session, held: list[int]) -> list[int]:
        after = self._text[len(held) : len(held) + 12]
        ids = [self._image_id] * IMAGE_SPAN + after
        session.push(ids, mask=[False] * IMAGE_SPAN + [True] * len(after))
        held = held + [-1] * IMAGE_SPAN + after
        self._read_both("image span", session, held, len(ids), BF16)
        return held

    def _second_client(self, held: list[int]) -> None:
        """Another process continues the text at a position it knows only three ids before."""
        lookback = [None if i == -1 else i for i in held[-3:]]
        with self._second.open_session(position=len(held), lookback=lookback) as session:
            rest = self._text[sum(i != -1 for i in held) :]
            session.push(rest)
            self._read_both("second client", session, held + rest, len(rest), F32)

    def _gate_and_project_here(self, session: Session, held: list[int]) -> None:
        """kv gated and rows projected by the client, against the service's own residual."""
        count, stage = NUM_LOCAL, "gated, projected here"
        for layer in self._layers:
            here = LocalLayer.fetch(self._client, layer, projects=True)
            x = self._residual(count, BF16)
            served = session.apply(layer, x.clone())
            answers = {
                output: self._ask(
                    Reading(stage, output, layer, held, count),
                    partial(read, layer, None, count),
                )
                for output, read in (
                    ("kv", session.kv),
                    ("rows", session.rows),
                    ("hash_ids", session.hash_ids),
                )
            }
            dead = torch.tensor([i == -1 for i in held[-count:]])
            gated = here.gate(x, answers["kv"], dead)
            self._judge.same(stage, "kv -> residual", gated, _tensor(served))
            projected = here.project(answers["rows"])
            self._judge.same(stage, "rows -> kv", projected[~dead], answers["kv"][~dead])

    def _steps(self) -> None:
        """Eight ragged sequences: prompts, then a verify block of six each, in one call a step."""
        stage = f"step, {NUM_SEQUENCES} sequences"
        sessions = [self._client.open_session() for _ in range(NUM_SEQUENCES)]
        held = [self._text[40 * i : 40 * i + 5 + 7 * i] for i in range(NUM_SEQUENCES)]
        self._push_step(stage, sessions, held, held)
        blocks = [self._text[300 + i : 300 + i + DRAFT] for i in range(NUM_SEQUENCES)]
        held = [prompt + block for prompt, block in zip(held, blocks, strict=True)]
        self._push_step(stage, sessions, held, blocks)
        segments = [
            Segment(session, position=len(ids) - DRAFT, count=DRAFT)
            for session, ids in zip(sessions, held, strict=True)
        ]
        for layer in self._layers:
            x = self._residual(NUM_SEQUENCES * DRAFT, F32)
            answer, seconds = _timed(
                partial(self._client.step, segments, [layer], "residual", residual=x.clone())
            )
            parts = _parts(held, [DRAFT] * NUM_SEQUENCES, _tensor(answer.tensors[layer]))
            for i, (ids, got) in enumerate(parts):
                reading = Reading(stage, "residual", layer, ids, DRAFT)
                spent = seconds if i == 0 else 0.0
                self._keep(reading, got, spent, x[i * DRAFT : (i + 1) * DRAFT])
        for session in sessions:
            session.close()

    def _push_step(
        self,
        stage: str,
        sessions: Sequence[Session],
        held: Sequence[list[int]],
        pushed: Sequence[list[int]],
    ) -> None:
        """Push ids to every session and read the kv of both layers, in one call."""
        segments = [
            Segment(session, token_ids=ids) for session, ids in zip(sessions, pushed, strict=True)
        ]
        answer, seconds = _timed(partial(self._client.step, segments, self._layers, "kv"))
        for layer in self._layers:
            counts = [len(ids) for ids in pushed]
            for ids, got in _parts(held, counts, _tensor(answer.tensors[layer])):
                self._keep(Reading(stage, "kv", layer, ids, len(got)), got, seconds)
                seconds = 0.0  # the call's time is told once

    def _read_both(
        self, stage: str, session: Session, held: list[int], count: int, dtype: torch.dtype
    ) -> None:
        """Gate the newest positions in both layers."""
        for layer in self._layers:
            x = self._residual(count, dtype)
            self._ask(
                Reading(stage, "residual", layer, held, count),
                partial(session.apply, layer, x.clone()),
                x,
            )

    def _ask(
        self, reading: Reading, call: Callable[[], Any], x: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Make a timed call and keep its answer."""
        got, seconds = _timed(call)
        answer = _tensor(got)
        self._keep(reading, answer, seconds, x)
        return answer

    def _keep(
        self, reading: Reading, got: torch.Tensor, seconds: float, x: torch.Tensor | None = None
    ) -> None:
        self._judge.keep(Answer(reading, got, seconds, x))

    def _residual(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn((count, *self._shape)).to(dtype)


def _parts(
    held: Sequence[list[int]], counts: Sequence[int], flat: torch.Tensor
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Cut a ragged batch into its sequences."""
    yield from zip(held, torch.split(flat, list(counts)), strict=True)


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def _tensor(array: Any) -> torch.Tensor:
    """The answer as a tensor: torch comes back for torch, numpy where nothing went in."""
    return array if isinstance(array, torch.Tensor) else torch_of(array)
