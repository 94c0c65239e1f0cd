"""The command line on a side file (layout G): extract it, verify it, serve it, compare answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engram_client import EngramClient
from engram_client.arrays import torch_of
from engram_core.checkpoint import open_checkpoint
from tests.integration.server import ROOT, Server, running
from tests.layout_answers import MASK, TOKEN_IDS, answers, residual_of
from tests.layout_files import LAYOUTS, ROWS
from tests.oracle import same_bits


def engram(*args: object, status: int = 0) -> str:
    """Run the command line; returns what it printed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ENGRAM_")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "service", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("extracted")


@pytest.fixture(scope="module")
def source(folder: Path) -> Path:
    return LAYOUTS["G"](folder / "g")


@pytest.fixture(scope="module")
def extracted(folder: Path, source: Path) -> Path:
    said = json.loads(engram("extract", source, folder / "out.gguf", "--json"))
    assert said["path"] == str(folder / "out.gguf")
    assert said["errors"] == []
    return folder / "out.gguf"


@pytest.fixture(scope="module")
def server(extracted: Path) -> Iterator[Server]:
    with running(extracted, "--placement", "disk") as started:
        yield started


def test_server_gives_the_rows_and_residuals_of_the_official_names(
    server: Server, folder: Path
) -> None:
    official = answers(open_checkpoint(LAYOUTS["official"](folder / "official")))
    with EngramClient(server.url) as client, client.open_session() as session:
        session.push(TOKEN_IDS, mask=MASK)
        for layer in ROWS:
            rows = torch_of(session.rows(layer, 0, len(TOKEN_IDS)))
            assert same_bits(rows, official.rows[layer])
            got = session.apply(layer, residual_of(layer))
            assert same_bits(torch_of(got), official.residual[layer])


def test_verify_hashes_the_file_and_says_ok(extracted: Path) -> None:
    found = json.loads(engram("verify", extracted, "--placement", "disk", "--json"))
    assert found["ok"] is True
    assert found["manifest"] == {"num_pieces": 1, "piece_bytes": 64 << 20, "bad": []}


def test_verify_of_a_changed_file_exits_1(extracted: Path, tmp_path: Path) -> None:
    raw = bytearray(extracted.read_bytes())
    at = raw.index(b"embedding_length")
    raw[at] ^= 1
    (tmp_path / "changed.gguf").write_bytes(raw)
    said = engram("verify", tmp_path / "changed.gguf", "--placement", "disk", status=1)
    assert "that differ: 0" in said
    assert "NOT OK" in said


def test_inspect_says_identity_and_layout(source: Path, extracted: Path) -> None:
    before, after = (json.loads(engram("inspect", path, "--json")) for path in (source, extracted))
    assert before["identity"] == after["identity"]
    assert (before["layout"], after["layout"]) == ("GGUF G", "GGUF A, extracted")
    assert set(after["ledgers"]) == {"device", "host", "disk"}


def test_errors_of_each_table_are_printed(source: Path, folder: Path) -> None:
    said = engram("extract", source, folder / "q8.gguf", "--quant", "Q8_0")
    assert "layer 1: E8M0_E4M3_32 -> Q8_0, RMS error " in said
    assert "layer 14: E8M0_E4M3_32 -> Q8_0, RMS error " in said


def test_compare_prints_a_table_by_order(source: Path, folder: Path) -> None:
    (folder / "text").write_text("The cat sat on the Mat")
    said = engram("compare", source, source, "--text", folder / "text")
    assert "6 tokens" in said
    for order in ("2-grams", "3-grams", "4-grams", "all of B"):
        assert said.count(order) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--quant", "Q9"), "quant: expected FP8"),
        ((), "expected a path not in use"),
    ],
    ids=["unknown_quant", "output_in_use"],
)
def test_extract_refuses_on_one_line(
    source: Path, extracted: Path, args: tuple[str, ...], message: str
) -> None:
    said = engram("extract", source, extracted, *args, status=1)
    assert message in said
    assert said.count("\n") == 1
