"""Residuals on a GPU asked for at once, over a socket: staged in memory kept for their kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engram_client import Segment
from engram_core.backends.native import Native
from tests.unit.speaking import Awaiting, Blocking, Speaking, never, residual, talking


@pytest.fixture(params=[Blocking, Awaiting])
def talk(request: pytest.FixtureRequest, native: Native) -> Iterator[Any]:
    with talking(request.param, Speaking()) as made:
        yield made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_residual_and_a_step_give_what_they_give_on_the_cpu(
    talk: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = [Segment(talk.session, position=0, count=3)]
    given = residual(3, dtype)
    want = talk.apply(1, given, 0)
    never(monkeypatch)
    for _ in range(3):
        x = given.cuda()
        got = [
            talk.apply(1, x, 0),
            talk.apply(1, x, 0, out=torch.empty_like(x)),
            talk.step(segment, (1,), residual=x).tensors[1],
            talk.step(segment, (1,), residual=x, out=x).tensors[1],
        ]
        assert got[-1] is x
        assert all(each.is_cuda and torch.equal(each.cpu(), want) for each in got)
    x = residual(1, dtype).cuda()
    told = talk.step([Segment(talk.session, token_ids=[9])], (1,), residual=x)
    assert told.length.tolist() == [5]
    assert torch.equal(told.tensors[1], talk.apply(1, x))


def test_a_residual_of_another_stream_is_waited_for(talk: Any) -> None:
    """The copies follow the work of the caller's stream."""
    want = talk.apply(1, residual(2, torch.float32), 0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros_like(residual(2, torch.float32), device="cuda")
        torch.cuda._sleep(20_000_000)
        x += residual(2, torch.float32).cuda()
        got = talk.apply(1, x, 0)
        assert torch.equal(got.cpu(), want)
