"""Loading, ready, draining, failed: what the app answers in each; sockets; the command line."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from engram_core.errors import Internal
from service import cli
from service.listeners import ListenError, bind, bind_tcp, bind_unix
from service.metrics import ENGINE
from service.settings import Settings
from service.state import Model, Progress
from tests.service.door import InProcess, refused


def test_alive_and_not_ready_while_loading(make_door: Callable[..., InProcess]) -> None:
    door = make_door(loaded=False)
    door.state.progress = Progress("layer 1 table", 3, 10)
    assert door.get("/livez").json() == {"status": "alive"}
    for path in ("/readyz", "/health", "/v1/info", "/v1/sessions/1"):
        answer = door.get(path)
        assert refused(answer) == (503, "loading")
        assert (answer.json()["stage"], answer.json()["done"]) == ("layer 1 table", 3)
    assert "engram_ready 0.0" in door.get("/metrics").text


def test_table_cannot_be_told_while_loading(make_door: Callable[..., InProcess]) -> None:
    answer = make_door(loaded=False).get("/v1/info", headers={"x-engram-table": "t"})
    assert refused(answer) == (503, "loading")


def test_draining_refuses_new_work_and_tells_info(door: InProcess) -> None:
    door.state.is_draining = True
    for answer in (door.get("/readyz"), door.post("/v1/sessions", json={})):
        assert refused(answer) == (503, "draining")
        assert answer.headers["retry-after"] == "1"
    assert door.get("/v1/info").status_code == 200
    assert "engram_ready 0.0" in door.get("/metrics").text


def test_failed_engine_is_not_served_from(
    door: InProcess, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(model.engine), "failure", property(lambda _: Internal("gone")))
    for path in ("/readyz", "/v1/info", "/v1/sessions/1"):
        assert refused(door.get(path)) == (503, "shard_down")
    assert door.get("/livez").status_code == 200


@pytest.mark.parametrize("kind", [RuntimeError, Internal])
def test_fault_is_told_without_its_reason(
    door: InProcess, model: Model, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fault(*_: Any) -> None:
        raise kind("secret")

    monkeypatch.setattr(model.engine, "get", fault)
    answer = door.get("/v1/sessions/1")
    assert refused(answer) == (500, "internal")
    assert "secret" not in answer.text
    assert door.state.num_active == 0


def test_probes_are_answered_while_the_backend_computes(
    door: InProcess, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 reads wait for a computation that does not end before the probes are answered."""
    begun, may_end = threading.Event(), threading.Event()
    read_kv = model.backend.read_kv

    def slow(*arguments: Any, **named: Any) -> Any:
        begun.set()
        assert may_end.wait(30)
        return read_kv(*arguments, **named)

    monkeypatch.setattr(model.backend, "read_kv", slow)
    names = [door.open(owner="slow")["session_id"] for _ in range(32)]
    for name in names:
        door.push(name, 0, [4, 6, 8], ahead=False)

    async def go() -> list[httpx.Response]:
        transport = httpx.ASGITransport(door.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            paths = [f"/v1/sessions/{name}/layers/1/kv?position=0&count=3" for name in names]
            reads = [asyncio.create_task(client.get(path)) for path in paths]
            while not begun.is_set():
                await asyncio.sleep(0)  # the app alone never gives way to other tasks
            for path in ("/livez", "/readyz", "/metrics", "/v1/info"):
                assert (await client.get(path)).status_code == 200
            assert not any(read.done() for read in reads)
            may_end.set()
            return await asyncio.gather(*reads)

    answers = door.runner.run(go())
    assert {(answer.status_code, answer.content) for answer in answers} == {
        (200, answers[0].content)
    }
    assert door.delete("/v1/sessions?owner=slow").json() == {"closed": 32}


def test_every_number_of_the_engine_is_told(door: InProcess, model: Model) -> None:
    assert set(model.engine.counters) == set(ENGINE)
    text = door.get("/metrics").text
    for name in model.engine.counters:
        assert f"# HELP {ENGINE[name].name}" in text
    assert sum(not line.startswith("#") for line in text.splitlines()) <= 400


def test_request_id_is_kept_if_it_is_a_plain_word(door: InProcess) -> None:
    assert door.get("/livez", headers={"x-request-id": "a-1"}).headers["x-request-id"] == "a-1"
    assert door.get("/livez", headers={"x-request-id": "a b"}).headers["x-request-id"] != "a b"


# ---- sockets


def test_taken_port_is_told() -> None:
    first = bind_tcp("127.0.0.1", 0)
    port = first.sock.getsockname()[1]
    with pytest.raises(ListenError, match=f"{port} on 127.0.0.1 is taken"):
        bind_tcp("127.0.0.1", port)
    first.close()


def test_unix_socket_is_private_and_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = bind_unix(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ListenError, match="listens"):
        bind_unix(path)
    listener.close()
    assert not path.exists()


def test_stale_unix_socket_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    bind_unix(path).close()
    path.write_text("mine")
    with pytest.raises(ListenError, match="no socket"):
        bind_unix(path)
    assert path.read_text() == "mine"


def test_what_cannot_be_bound_leaves_nothing_open(tmp_path: Path) -> None:
    settings = Settings(port=0, uds=tmp_path / "no" / "such" / "folder")
    with pytest.raises(ListenError, match="No such file"):
        bind(settings)


# ---- command line


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["engram", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_config_tells_values_and_sources(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENGRAM_PORT", "7")
    assert run(monkeypatch, "config", "--max-tokens", "5") == 0
    lines = {line.split(" ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["port"].split() == ["port", "=", "7", "#", "ENGRAM_PORT"]
    assert lines["max_tokens"].endswith("# flag")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["serve"], 2, "CKPT"),
        (["serve", "x", "--prot", "1"], 2, "--port"),
        (["config", "--port", "x"], 2, "--port"),
        (["inspect", "/none.gguf"], 1, "/none.gguf"),
        (["hash", "/none.gguf", "1"], 1, "/none.gguf"),
        (["hash", "/none.gguf", "1.0"], 1, "ID"),
        (["keys", "add", "a"], 2, "keys_file"),
        (["serve", "/none.gguf", "--port", "0"], 1, "/none.gguf"),
    ],
)
def test_wrong_use_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    words: str,
) -> None:
    monkeypatch.setattr("service.logs.configure_logs", lambda _: None)
    assert run(monkeypatch, *arguments) == status
    error = capsys.readouterr().err
    assert error.startswith("engram: ")
    assert error.count("\n") == 1
    assert words in error


def test_made_key_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    assert run(monkeypatch, "keys", "add", "alice", "--keys-file", str(path)) == 0
    token = capsys.readouterr().out.strip()
    assert token.startswith("engram_")
    assert token not in path.read_text()


def test_hash_prints_row_ids(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], official_dir: Path
) -> None:
    assert run(monkeypatch, "hash", str(official_dir), "0", "4", "--json") == 0
    assert '"hash_ids"' in capsys.readouterr().out
