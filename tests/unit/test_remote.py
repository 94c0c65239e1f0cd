"""The torch module over the service: the reference's forward, and one by segments."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from engram_client import EngramClient, Segment
from engram_client.remote import RemoteEngram
from tests.unit.fake_service import COLS, DIM, HC, FakeService, sample
from tests.unit.raw_server import RawServer, serving


@pytest.fixture
def client() -> Iterator[EngramClient]:
    script = serving(FakeService(max_tokens=5), threading.Lock())
    with RawServer([script]) as server, EngramClient(server.url) as client:
        yield client


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [True, False])
def test_forward_gates_every_position_by_its_hash_ids(
    client: EngramClient, dtype: torch.dtype, masked: bool
) -> None:
    x = torch.arange(2 * 4 * HC * DIM).view(2, 4, HC, DIM).remainder(50).to(dtype)
    hash_ids = torch.arange(2 * 4 * COLS).view(2, 4, COLS)
    mask = torch.arange(8).view(2, 4) % 3 != 0 if masked else None
    got = RemoteEngram(client, 14)(x, hash_ids, mask)
    added = torch.tensor([[sample(14, row) for row in rows] for rows in hash_ids.tolist()])
    if mask is not None:
        added = added.masked_fill(~mask, 0)
    assert got.dtype == dtype
    assert torch.equal(got, (x.float() + added[..., None, None]).to(dtype))


def test_int32_hash_ids_and_strided_residuals_are_taken(client: EngramClient) -> None:
    x = torch.randn(4, 2, HC, DIM).transpose(0, 1)
    hash_ids = torch.arange(8 * COLS).view(2, 4, COLS)
    engram = RemoteEngram(client, 1)
    assert torch.equal(engram(x, hash_ids.int()), engram(x.contiguous(), hash_ids))


def test_segments_read_what_sessions_hold(client: EngramClient) -> None:
    sessions = [client.open_session() for _ in range(2)]
    for session in sessions:
        session.push([5, 6, 7])
    residual = torch.zeros(6, HC, DIM)
    got = RemoteEngram(client, 1).forward_segments(
        residual, [Segment(session, position=0) for session in sessions]
    )
    alone = sessions[0].apply(1, residual[:3])
    assert torch.equal(got, torch.cat([alone, alone]))


def test_gradients_and_other_shapes_are_refused(client: EngramClient) -> None:
    engram = RemoteEngram(client, 1)
    x, hash_ids = torch.zeros(1, 2, HC, DIM), torch.zeros(1, 2, COLS, dtype=torch.int64)
    with pytest.raises(ValueError, match="no_grad"):
        engram(x.requires_grad_(), hash_ids)
    with torch.no_grad():
        assert engram(x, hash_ids).shape == x.shape
    for wrong in (x[0], x[:, :1]):
        with pytest.raises(ValueError, match="expected"):
            engram(wrong, hash_ids)


def test_it_has_nothing_to_train_or_to_save(client: EngramClient) -> None:
    engram = RemoteEngram(client, 14)
    assert not list(engram.parameters())
    assert engram.state_dict() == {}
    assert "layer_id=14" in repr(engram)
