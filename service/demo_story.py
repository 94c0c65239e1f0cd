"""What the demo's model runner does: one text, in the ways a runner meets tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engram_client import EngramClient, Segment, Session
from engram_client.local import gate, project
from service.demo_judge import Answer, Judge

PREFILL_CHUNKS = (1, 2, 61, 7, 130, 3, 256)
NUM_DECODED = 24
DRAFT, ACCEPTED, NUM_DRAFTS = 6, 3, 8
NUM_SEQUENCES = 8
IMAGE_SPAN = 5
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
        self._image_id = int(info["image_token_id"] or 0)
        self._layers = [int(layer) for layer in geometry["layer_ids"]]
        self._shape = int(geometry["hc_mult"]), int(geometry["dim"])
        self._eps = float(geometry["eps"])

    def play(self) -> None:
        """Stream the text."""
        session = self._client.open_session()
        held = self._prefill(session)
        held = self._decode(session, held)
        held = self._drafts(session, held)
        self._fork(session, held)
        held = self._image(session, held)
        self._second_client(held)
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
        """Another process continues at a position it knows only three ids before."""
        lookback = [None if i == -1 else i for i in held[-3:]]
        with self._second.open_session(position=len(held), lookback=lookback) as session:
            rest = self._text[400:460]
            session.push(rest)
            self._read_both("second client", session, held + rest, len(rest), F32)

    def _gate_and_project_here(self, session: Session, held: list[int]) -> None:
        """kv gated and rows projected by the client, against the service's own residual."""
        count, stage = 96, "gated here"
        first = len(held) - count
        for layer in self._layers:
            weights = self._client.weights(layer)
            x = self._residual(count, BF16)
            (served, _) = _timed(lambda: session.apply(layer, x.clone()))
            kv, seconds = _timed(lambda: session.kv(layer, first, count))
            kv = _tensor(kv)
            self._keep(stage, "kv", layer, held, first, kv, seconds)
            dead = torch.tensor([i == -1 for i in held[first:]])
            qk = torch.from_numpy(weights["qk"])
            here = gate(x, kv, qk, self._eps, dead)
            self._judge.same(stage, "kv -> residual", here, _tensor(served))
            rows, seconds = _timed(lambda: session.rows(layer, first, count))
            self._keep(stage, "rows", layer, held, first, _tensor(rows), seconds)
            ids, seconds = _timed(lambda: session.hash_ids(layer, first, count))
            self._keep(stage, "hash_ids", layer, held, first, torch.as_tensor(ids), seconds)
            projected = project(_tensor(rows), _tensor(weights["wkv"]))
            live = ~dead
            self._judge.same(stage, "rows -> kv", projected[live], kv[live])

    def _steps(self) -> None:
        """Eight ragged sequences, both layers, a verify block of six each."""
        sessions = [self._client.open_session() for _ in range(NUM_SEQUENCES)]
        prompts = [self._text[40 * i : 40 * i + 5 + 7 * i] for i in range(NUM_SEQUENCES)]
        stage = "step, 8 sequences"
        for chunk in (prompts, [self._text[300 + i : 306 + i] for i in range(NUM_SEQUENCES)]):
            held = chunk if chunk is prompts else [p + c for p, c in zip(prompts, chunk, strict=True)]
            segments = [
                Segment(session, token_ids=ids) for session, ids in zip(sessions, chunk, strict=True)
            ]
            answer, seconds = _timed(lambda s=segments: self._client.step(s, self._layers, "kv"))
            for layer in self._layers:
                self._keep_ragged(stage, "kv", layer, held, chunk, _tensor(answer.tensors[layer]), seconds)
        blocks = [
            Segment(session, position=len(h) - DRAFT, count=DRAFT)
            for session, h in zip(sessions, held, strict=True)
        ]
        for layer in self._layers:
            x = self._residual(NUM_SEQUENCES * DRAFT, F32)
            answer, seconds = _timed(
                lambda layer=layer, x=x: self._client.step(
                    blocks, [layer], "residual", residual=x.clone()
                )
            )
            got = _tensor(answer.tensors[layer])
            self._keep_ragged(stage, "residual", layer, held, chunk, got, seconds, x)
        for session in sessions:
            session.close()

    def _read_both(
        self, stage: str, session: Session, held: list[int], count: int, dtype: torch.dtype
    ) -> None:
        for layer in self._layers:
            x = self._residual(count, dtype)
            got, seconds = _timed(lambda layer=layer, x=x: session.apply(layer, x.clone()))
            self._keep(stage, "residual", layer, held, len(held) - count, _tensor(got), seconds, x)

    def _keep_ragged(
        self,
        stage: str,
        output: str,
        layer: int,
        held: Sequence[list[int]],
        chunk: Sequence[list[int]],
        got: torch.Tensor,
        seconds: float,
        x: torch.Tensor | None = None,
    ) -> None:
        """Keep a step's answer, a sequence at a time; the first takes the time of all."""
        start = 0
        for ids, new in zip(held, chunk, strict=True):
            stop = start + len(new)
            part = x[start:stop] if x is not None else None
            self._keep(
                stage, output, layer, ids, len(ids) - len(new), got[start:stop], seconds, part
            )
            start, seconds = stop, 0.0

    def _keep(
        self,
        stage: str,
        output: str,
        layer: int,
        held: list[int],
        first: int,
        got: torch.Tensor,
        seconds: float,
        x: torch.Tensor | None = None,
    ) -> None:
        mask = [i != -1 for i in held]
        compressed = self._judge.oracle.compress(held, mask)
        self._judge.keep(Answer(stage, output, layer, compressed, first, got, seconds, x))

    def _residual(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn((count, *self._shape)).to(dtype)


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def _tensor(array: Any) -> torch.Tensor:
    """A torch tensor of the same bits; numpy has no bfloat16 of its own."""
    if isinstance(array, torch.Tensor):
        return array
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("u2").copy()).view(torch.bfloat16)
    return torch.from_numpy(array)
