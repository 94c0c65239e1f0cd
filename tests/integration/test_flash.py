"""The true geometry, served from disk by a real server: rows anywhere, by an independent read.

Row ids are named directly (`hash_ids` source), so any row of either 384 M row table can be asked
for: both ends, and both sides of every multiple of 2^31 bytes. The oracle reads the files' headers
by itself.
"""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engram_core.tools.sparse_rows import FLASH_TEXT
from engram_core.tools.synth import synth
from tests.golden.test_oracle_vectors import V41, tokenizer_json
from tests.integration.door import refusal, step
from tests.integration.server import Server, running
from tests.oracle import Oracle, same_bits

MEMORY = Path("/dev/shm")
LAYERS = (1, 14)
FLAGS = ("--placement", "disk", "--kv-store-bytes", "32MiB", "--in-flight-bytes", "64MiB")


class Flash:
    def __init__(self, path: Path, client: httpx.Client) -> None:
        self.path, self.oracle, self.client = path, Oracle.open(path), client

    def row_bytes(self, layer: int) -> int:
        table = self.oracle.table(layer)
        return int(table.data.shape[1])

    def edges(self, layer: int) -> list[int]:
        """Rows at both ends, and on both sides of every multiple of 2^31 bytes of the tensor."""
        num_rows, width = self.oracle.table(layer).num_rows, self.row_bytes(layer)
        rows = {0, 1, num_rows - 2, num_rows - 1}
        for edge in range(2**31, num_rows * width, 2**31):
            rows |= {edge // width + d for d in (-1, 0, 1)}
        return sorted(rows)

    def hash_ids(self, layer: int, rows: list[int]) -> np.ndarray[Any, Any]:
        """Row ids [T, 1, 24], each wanted row in the column whose bucket it lies in."""
        offsets = self.oracle.files.offsets[LAYERS.index(layer)]
        ids = np.tile(np.array(offsets, dtype=np.int64), (len(rows), 1, 1))
        for token, row in enumerate(rows):
            ids[token, 0, bisect_right(offsets, row) - 1] = row
        return ids


@pytest.fixture(scope="module", params=["gguf-Q2_K", "safetensors-FP8"])
def flash(request: pytest.FixtureRequest) -> Iterator[Flash]:
    fmt, quant = request.param.split("-")
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as name:
        path = Path(name) / ("flash.gguf" if fmt == "gguf" else "flash")
        synth(path, preset="flash", fmt=fmt, quant=quant, seed=3)
        with running(path, *FLAGS) as server, server.client() as client:
            yield Flash(path, client)


def session(client: httpx.Client, chunks: list[list[int]]) -> str:
    """A session that holds the chunks: its path."""
    path = f"/v1/sessions/{client.post('/v1/sessions', json={}).json()['session_id']}"
    position = 0
    for ids in chunks:
        body = {"position": position, "token_ids": ids, "ahead": False}
        assert client.post(f"{path}/tokens", json=body).status_code == 200
        position += len(ids)
    return path


def read(client: httpx.Client, path: str, layer: int, what: str, count: int) -> bytes:
    params = {"position": 0, "count": count}
    answer = client.get(f"{path}/layers/{layer}/{what}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.content


def test_constants_are_the_published_ones(flash: Flash) -> None:
    info = flash.client.get("/v1/info").json()
    assert info["geometry"]["table_rows"] == V41["row_totals"]
    assert [[int(m) for m in row] for row in info["hash"]["multipliers"]] == V41["multipliers"]
    assert info["hash"]["compressed_vocab_size"] == V41["compressed_vocab_size"]


@pytest.mark.parametrize("layer", LAYERS)
def test_rows_across_every_2_31_bytes(flash: Flash, layer: int) -> None:
    rows = flash.edges(layer)
    ids = flash.hash_ids(layer, rows)
    answer = step(
        flash.client,
        {"output": "rows", "layers": str(layer)},
        count=[len(rows)],
        position=[0],
        hash_ids=ids,
    )
    expected = flash.oracle.rows(layer, ids[:, 0])
    assert same_bits(answer[f"rows.{layer}"], expected)
    columns = [bisect_right(flash.oracle.files.offsets[LAYERS.index(layer)], r) - 1 for r in rows]
    wanted = expected[torch.arange(len(rows)), torch.tensor(columns)]
    assert (wanted.count_nonzero(1) > 100).all(), "the rows there are not zero"
    assert rows[-1] * flash.row_bytes(layer) > 7 * 2**32


def test_real_text_through_a_session(flash: Flash) -> None:
    """Hash ids and rows of the text a sparse checkpoint is made for, in chunks, by bits."""
    token_ids = Tokenizer.from_file(str(tokenizer_json())).encode(FLASH_TEXT).ids
    compressed = flash.oracle.compress(token_ids, [True] * len(token_ids))
    path = session(flash.client, [token_ids[:7], token_ids[7:]])
    for layer in LAYERS:
        ids = read(flash.client, path, layer, "hash_ids", len(token_ids))
        expected = flash.oracle.layer_hash_ids(layer, compressed)
        assert np.array_equal(np.frombuffer(ids, "<i8").reshape(-1, 24), expected)
        rows = flash.oracle.rows(layer, expected)
        assert (rows.count_nonzero(2) > 100).all(), "the rows there are not zero"
        served = read(flash.client, path, layer, "rows", len(token_ids))
        assert served == rows.contiguous().view(torch.uint8).numpy().tobytes()


def test_tokens_of_the_published_digests(flash: Flash) -> None:
    path = session(flash.client, [[0, 3]])
    case = V41["hash"]["raw_tokens_0_3 (compressed 0,3)"]
    for index, layer in enumerate(LAYERS):
        got = np.frombuffer(read(flash.client, path, layer, "hash_ids", 2), "<i8").reshape(2, 24)
        assert got.tolist() == [token[index] for token in case["rows"]]


def test_signal_while_loading_ends_with_0(flash: Flash) -> None:
    """wkv of 300 MB a layer is being read: alive, not ready, and nobody waits for its end."""
    server = Server(flash.path, *FLAGS)
    server.port = int(server.wait_for(r"^listening http://127\.0\.0\.1:(\d+)")[1])
    with server.client() as client:
        assert client.get("/livez").status_code == 200
        assert refusal(client.get("/readyz")) == (503, "loading")
        assert refusal(client.post("/v1/sessions", json={})) == (503, "loading")
    assert server.stop() == 0
    assert not any(line.startswith("ready ") for line in server.lines)


def test_the_tokenizer_is_found() -> None:
    assert tokenizer_json().name == "tokenizer.json"
