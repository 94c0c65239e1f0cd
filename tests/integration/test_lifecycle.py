"""The life of a server process: start, refusal to start, clients that leave, drain, end."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.builders import Shape, write_gguf
from tests.integration.door import metric, open_session, push, refusal, wait_until
from tests.integration.server import ROOT, Server, read_answer, running


def serve(*arguments: str, port: str = "0", **environment: str) -> subprocess.CompletedProcess[str]:
    """A server that must refuse to start."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ENGRAM_")} | environment
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "service", "serve", *arguments, "--port", port],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
    )


def told(done: subprocess.CompletedProcess[str]) -> str:
    """What a refused start says: a line for people, and no traceback."""
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert "Traceback" not in output, output
    return " ".join(output.split())


def test_missing_checkpoint_is_named(tmp_path: Path) -> None:
    assert "missing.gguf" in told(serve(str(tmp_path / "missing.gguf")))


def test_truncated_checkpoint_is_refused(small_gguf: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(small_gguf.read_bytes()[:-4096])
    assert "cut.gguf" in told(serve(str(cut)))


def test_open_address_without_keys_is_refused(small_gguf: Path) -> None:
    assert "keys" in told(serve(str(small_gguf), "--host", "0.0.0.0"))


def test_unknown_variable_names_the_nearest(small_gguf: Path) -> None:
    output = told(serve(str(small_gguf), ENGRAM_MAX_TOKEN="5"))
    assert "ENGRAM_MAX_TOKENS" in output


def test_malformed_setting_is_refused(small_gguf: Path) -> None:
    assert "max_tokens" in told(serve(str(small_gguf), "--max-tokens", "5_0")).replace("-", "_")


def test_short_memory_says_what_is_missing(small_gguf: Path) -> None:
    output = told(serve(str(small_gguf), "--device", "cpu", "--memory-reserve-bytes", "900000GiB"))
    assert "GiB of host memory needed" in output
    assert "memory_reserve_bytes" in output


def test_taken_port_is_named(small_gguf: Path, server: Server) -> None:
    done = serve(str(small_gguf), port=str(server.port))
    assert f"{server.port} on 127.0.0.1 is taken" in told(done)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_absent_gpu_is_told(small_gguf: Path) -> None:
    assert "device cuda:0 cannot be used" in told(serve(str(small_gguf), "--device", "cuda:0"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_an_idle_server_with_0(small_gguf: Path, number: signal.Signals) -> None:
    server = Server(small_gguf)
    server.wait_until_ready()
    assert server.stop(number) == 0
    assert sum('"event": "draining"' in line for line in server.lines) == 1


def test_drain_lets_a_running_call_end_and_refuses_new_ones(small_gguf: Path) -> None:
    server = Server(small_gguf)
    server.wait_until_ready()
    with server.client() as client, server.client() as other, server.socket() as waiting:
        name = open_session(client)["session_id"]
        waiting.sendall(
            f"GET /v1/sessions/{name}/layers/1/kv?position=0&wait_ms=1000 HTTP/1.1\r\n"
            "Host: localhost\r\n\r\n".encode()
        )
        wait_until(client, "engram_waiting", lambda waiting: waiting == 1)
        other.get("/livez")
        server.process.send_signal(signal.SIGTERM)
        answer = client.get("/readyz")
        while answer.status_code == 200:
            answer = client.get("/readyz")
        assert refusal(answer) == (503, "draining")
        assert refusal(other.post("/v1/sessions", json={})) == (503, "draining")
        assert waiting.recv(4096).startswith(b"HTTP/1.1 409")
    assert server.end() == 0


def test_drain_takes_the_rest_of_a_body_and_outlasts_a_held_connection(tmp_path: Path) -> None:
    """20 MB, half of them sent before the signal; a connection that says nothing stays open."""
    shape = Shape(head_dim=256, dim=128, hc_mult=4)
    checkpoint = write_gguf(tmp_path / "wide.gguf", shape, table="Q2_K", wkv="Q2_K", seed=1)
    server = Server(checkpoint, "--max-tokens", "10000")
    server.wait_until_ready()
    count = 10_000
    with server.client() as client, server.socket() as sending, server.socket() as held:
        held.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_answer(held)[0] == 200
        name = open_session(client)["session_id"]
        push(client, name, 0, [4] * count, ahead=False)
        body = bytes(count * 4 * 128 * 4)
        assert len(body) > 20_000_000
        sending.sendall(
            f"POST /v1/sessions/{name}/layers/1/residual?position=0 HTTP/1.1\r\n"
            f"Host: localhost\r\nContent-Type: application/octet-stream\r\n"
            f"X-Engram-Shape: {count},4,128\r\nX-Engram-Dtype: F32\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body[: len(body) // 2]
        )
        wait_until(client, "engram_in_flight_bytes", lambda bytes_: bytes_ >= len(body))
        server.process.send_signal(signal.SIGTERM)
        while client.get("/readyz").status_code == 200:
            pass
        sending.sendall(body[len(body) // 2 :])
        status, answer = read_answer(sending)
        assert (status, len(answer)) == (200, len(body))
        assert server.end() == 0
        assert held.recv(1) == b"", "closed by the server"


def test_second_signal_does_not_wait_for_the_call_in_flight(small_gguf: Path) -> None:
    server = Server(small_gguf)
    server.wait_until_ready()
    with server.client() as client, server.socket() as sending:
        sending.sendall(
            b"POST /v1/step?output=none HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/octet-stream\r\nContent-Length: 100000000\r\n\r\n"
        )
        wait_until(client, "engram_in_flight_bytes", lambda held: held > 0)
        server.process.send_signal(signal.SIGTERM)
        while client.get("/readyz").status_code == 200:
            pass
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 128 + signal.SIGTERM


def test_unix_socket_is_ours_alone_and_goes_away(small_gguf: Path, socket_folder: Path) -> None:
    path = socket_folder / "b.sock"
    server = Server(small_gguf, "--host", "127.0.0.1", uds=path)
    server.wait_until_ready()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with server.uds_client() as client:
        assert client.get("/livez").status_code == 200
    assert server.stop() == 0
    assert not path.exists()


def test_idle_session_expires(small_gguf: Path) -> None:
    with running(small_gguf, "--session-ttl-s", "0.2") as server, server.client() as client:
        name = open_session(client)["session_id"]
        while metric(client, "engram_sessions"):
            assert server.process.poll() is None
        assert refusal(client.get(f"/v1/sessions/{name}")) == (404, "unknown_session")


def test_removed_key_loses_its_sessions(small_gguf: Path, tmp_path: Path) -> None:
    def line(name: str) -> str:
        return f"{name} use {hashlib.sha256(name.encode()).hexdigest()}\n"

    keys = tmp_path / "keys"
    keys.write_text(line("alice") + line("bob"))
    with (
        running(small_gguf, "--keys-file", str(keys)) as server,
        server.client("alice") as alice,
        server.client("bob") as bob,
    ):
        open_session(alice, session_id="5")
        open_session(bob, session_id="5")
        keys.write_text(line("bob"))
        while metric(bob, "engram_sessions") > 1:
            assert server.process.poll() is None
        with server.client("alice") as gone:  # its old connection was closed
            answer = gone.get("/v1/sessions/5")
        assert refusal(answer) == (401, "unauthenticated")
        assert bob.get("/v1/sessions/5").status_code == 200


# ---------------------------------------------------------------------- clients that leave


def test_client_that_leaves_inside_its_body(server: Server) -> None:
    with server.client() as client:
        name = open_session(client)["session_id"]
        push(client, name, 0, [0, 4])
        before = refused_internally(client)
        for _ in range(5):
            with server.socket() as connection:
                connection.sendall(
                    f"POST /v1/sessions/{name}/tokens HTTP/1.1\r\nHost: localhost\r\n"
                    "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n".encode()
                    + b'{"position": 2, "token_ids": [4'
                )
        assert push(client, name, 2, [6])["length"] == 3
        assert refused_internally(client) == before
        client.delete(f"/v1/sessions/{name}")


def test_client_that_leaves_while_it_waits(server: Server) -> None:
    with server.client() as client:
        name = open_session(client)["session_id"]
        for _ in range(20):
            with server.socket() as connection:
                connection.sendall(
                    f"GET /v1/sessions/{name}/layers/1/kv?position=0&wait_ms=1000 HTTP/1.1\r\n"
                    "Host: localhost\r\n\r\n".encode()
                )
        wait_until(client, "engram_active_requests", lambda active: active == 1)
        wait_until(client, "engram_in_flight_bytes", lambda held: held == 0)
        push(client, name, 0, [0])
        answer = client.get(f"/v1/sessions/{name}/layers/1/kv", params={"position": 0})
        assert answer.status_code == 200
        client.delete(f"/v1/sessions/{name}")


def test_hundred_requests_on_one_connection(server: Server) -> None:
    with server.socket() as connection:
        for _ in range(100):
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"connection: close" not in answer.lower()


def test_two_content_lengths_or_length_and_chunks_are_refused(server: Server) -> None:
    start = b"POST /v1/step?output=none HTTP/1.1\r\nHost: localhost\r\n"
    for smuggled in (
        b"Content-Length: 3\r\nContent-Length: 4\r\n",
        b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: +3\r\n",
        b"Content-Length: -3\r\n",
        b"Content-Length: 3 3\r\n",
    ):
        assert server.raw(start + smuggled + b"\r\nabc")[0] == 400


def test_logs_hold_no_token_ids(server: Server) -> None:
    """A rare id pushed, refused and read leaves no trace in what the server prints."""
    with server.client() as client:
        name = open_session(client)["session_id"]
        body = {"position": 0, "token_ids": [987654321]}
        client.post(f"/v1/sessions/{name}/tokens", json=body)
        client.delete(f"/v1/sessions/{name}")
    assert not re.search("987654321", "".join(server.lines))


def refused_internally(client: httpx.Client) -> list[str]:
    text = client.get("/metrics").text
    return [line for line in text.splitlines() if 'code="internal"' in line]
