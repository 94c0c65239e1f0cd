"""The client with tensors on a GPU: staged through the CPU, answered where they lie."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from engram_client import EngramClient
from engram_client.local import LocalLayer
from engram_client.remote import RemoteEngram
from engram_core.backends.native import Native
from tests.unit.fake_service import COLS, DIM, HC, FakeService
from tests.unit.raw_server import RawServer, serving

DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture
def client(native: Native) -> Iterator[EngramClient]:
    script = serving(FakeService(max_tokens=5), threading.Lock())
    with RawServer([script]) as server, EngramClient(server.url) as client:
        yield client


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_on_the_gpu_comes_back_there(client: EngramClient, dtype: torch.dtype) -> None:
    x = torch.arange(2 * 4 * HC * DIM).view(2, 4, HC, DIM).remainder(50).to(dtype)
    hash_ids = torch.arange(2 * 4 * COLS).view(2, 4, COLS)
    mask = torch.arange(8).view(2, 4) % 3 != 0
    engram = RemoteEngram(client, 14)
    want = engram(x, hash_ids, mask)
    got = engram(x.cuda(), hash_ids.cuda(), mask.cuda())
    assert got.is_cuda
    assert got.dtype == dtype
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_session_takes_ids_and_residuals_on_the_gpu(
    client: EngramClient, dtype: torch.dtype
) -> None:
    sessions = [client.open_session() for _ in range(2)]
    sessions[0].push(torch.tensor([5, 6, 7]))
    sessions[1].push(torch.tensor([5, 6, 7], device="cuda"))
    residual = torch.ones((3, HC, DIM), dtype=dtype)
    want = sessions[0].apply(1, residual)
    got = sessions[1].apply(1, residual.cuda())
    assert got.is_cuda
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_local_layer_answers_on_the_residuals_device(
    native: Native, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    qk = torch.randn((2, 96), generator=generator)
    wkv = torch.randn((3 * 96, 64), generator=generator).to(torch.bfloat16)
    layer = LocalLayer(qk, 1e-20, wkv)
    rows = torch.randn((7, 2, 32), generator=generator).to(torch.bfloat16)
    kv = layer.project(rows)
    on_gpu = layer.project(rows.cuda())
    assert on_gpu.is_cuda
    assert torch.equal(on_gpu.cpu(), kv)
    residual = torch.randn((7, 2, 96), generator=generator).to(dtype)
    dead = torch.arange(7) % 3 == 0
    got = layer.gate(residual.cuda(), on_gpu, dead.cuda())
    assert got.is_cuda
    assert torch.equal(got.cpu(), layer.gate(residual, kv, dead))
