"""The gRPC door of a real process: reflection, health, keys, limits, TLS, drain, end."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from engram_client.proto import engram_pb2 as pb
from engram_client.proto import engram_pb2_grpc, message_options
from tests.builders import Shape, write_safetensors
from tests.integration.door import metric, wait_until
from tests.integration.server import ROOT, Server

TOKENS = 103
"""One more than gRPC's own limit of 4 MB takes of a bfloat16 [4, 5120] residual."""
LIMIT = 8 << 20


class GrpcServer(Server):
    """A server whose gRPC door is open, too."""

    keys: Path

    def __init__(self, checkpoint: Path, *flags: str) -> None:
        super().__init__(checkpoint, "--grpc-port", "0", *flags)

    def wait_until_ready(self) -> None:
        super().wait_until_ready()
        self.target = str(self.wait_for(r"^ready grpcs?://(\S+)")[1])

    def channel(self, max_bytes: int = -1) -> grpc.Channel:
        return grpc.insecure_channel(self.target, options=message_options(max_bytes))


@pytest.fixture(scope="module")
def wide_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    """Residuals as wide as the true model's, two users, 16 MiB in flight."""
    folder = tmp_path_factory.mktemp("wide")
    shape = Shape(head_dim=32, dim=5120, hc_mult=4)
    path = write_safetensors(folder / "wide", shape, seed=3)
    keys = folder / "keys"
    keys.write_text(key_line("alice") + key_line("bob"))
    server = GrpcServer(path, "--keys-file", str(keys), "--in-flight-bytes", "16MiB")
    server.keys = keys
    server.wait_until_ready()
    yield server
    assert server.stop() == 0, "".join(server.lines[-40:])
    assert "Traceback" not in "".join(server.lines)


def key_line(name: str) -> str:
    return f"{name} use {hashlib.sha256(name.encode()).hexdigest()}\n"


def bearer(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {name}"),)


def refusal(error: pytest.ExceptionInfo[grpc.RpcError]) -> tuple[str, str]:
    """gRPC status and code of a refusal."""
    trailer = dict(error.value.trailing_metadata() or ())
    return error.value.code().name, str(trailer.get("engram-code", ""))


def tensor(array: Any) -> pb.Tensor:
    dtype = {"int32": "I32", "int64": "I64"}[array.dtype.name]
    return pb.Tensor(dtype=dtype, shape=array.shape, data=array.tobytes())


def residual_step(session_id: int, num_tokens: int) -> pb.StepRequest:
    residual = torch.full((num_tokens, 4, 5120), 0.5, dtype=torch.bfloat16)
    data = residual.view(torch.uint8).numpy().tobytes()
    return pb.StepRequest(
        output=pb.OUTPUT_RESIDUAL,
        layers=[1],
        tensors={
            "count": tensor(np.array([num_tokens], np.int32)),
            "position": tensor(np.array([0], np.int64)),
            "session_id": tensor(np.array([session_id], np.int64)),
            "residual": pb.Tensor(dtype="BF16", shape=residual.shape, data=data),
        },
    )


def test_example_runs(wide_server: GrpcServer) -> None:
    command = [sys.executable, str(ROOT / "examples" / "grpc_step.py"), wide_server.target, "alice"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.count("residual.1") == 4, done.stderr


# ---- limits


def test_103_tokens_pass_where_both_ends_allow_it(wide_server: GrpcServer) -> None:
    with wide_server.channel() as channel, wide_server.client("alice") as http:
        stub = engram_pb2_grpc.EngramStub(channel)
        opened = stub.OpenSession(pb.OpenSessionRequest(), metadata=bearer("alice"))
        ids = [i % 5 for i in range(TOKENS)]
        push = pb.PushRequest(session_id=opened.session_id, position=0, token_ids=ids)
        assert stub.Push(push, metadata=bearer("alice")).length == TOKENS
        message = residual_step(opened.session_id, TOKENS)
        assert message.ByteSize() > 4 << 20
        told = stub.Step(message, metadata=bearer("alice")).tensors["residual.1"]
        (streamed,) = stub.Stream(iter([message]), metadata=bearer("alice"))
        assert streamed.tensors["residual.1"] == told
        answer = http.post(
            f"/v1/sessions/{opened.session_id}/layers/1/residual?position=0",
            content=message.tensors["residual"].data,
            headers={
                "Content-Type": "application/octet-stream",
                "X-Engram-Shape": f"{TOKENS},4,5120",
                "X-Engram-Dtype": "BF16",
            },
        )
        assert answer.content == told.data
        with grpc.insecure_channel(wide_server.target) as plain, pytest.raises(grpc.RpcError) as e:
            engram_pb2_grpc.EngramStub(plain).Step(message, metadata=bearer("alice"))
        assert refusal(e) == ("RESOURCE_EXHAUSTED", "")  # by the client's own limit
        close = pb.CloseSessionRequest(session_id=opened.session_id)
        assert stub.CloseSession(close, metadata=bearer("alice")).sessions == 1


def test_info_tells_the_limit_and_beyond_it_is_refused(wide_server: GrpcServer) -> None:
    with wide_server.channel() as channel, wide_server.client() as http:
        stub = engram_pb2_grpc.EngramStub(channel)
        info = json.loads(stub.GetInfo(pb.GetInfoRequest(), metadata=bearer("bob")).json)
        assert info["limits"]["max_body_bytes"] == LIMIT
        for num_tokens, code in ((LIMIT // 40960 + 1, "body_too_large"), (300, "")):
            message = residual_step(5, num_tokens)
            with pytest.raises(grpc.RpcError) as e:
                stub.Step(message, metadata=bearer("bob"))
            assert refusal(e) == ("RESOURCE_EXHAUSTED", code)
        wait_until(http, "engram_in_flight_bytes", lambda held: held == 0)


# ---- keys


@pytest.mark.parametrize("metadata", [(), bearer("mallory"), (("authorization", "Basic alice"),)])
def test_unknown_key_is_unauthenticated(wide_server: GrpcServer, metadata: Any) -> None:
    with wide_server.channel() as channel:
        stub = engram_pb2_grpc.EngramStub(channel)
        with pytest.raises(grpc.RpcError) as e:
            stub.GetInfo(pb.GetInfoRequest(), metadata=metadata)
        assert refusal(e) == ("UNAUTHENTICATED", "unauthenticated")
        with pytest.raises(grpc.RpcError) as e:
            list(stub.Stream(iter([]), metadata=metadata))
        assert refusal(e) == ("UNAUTHENTICATED", "unauthenticated")


def test_keys_are_tenants_across_doors(wide_server: GrpcServer) -> None:
    with wide_server.channel() as channel, wide_server.client("alice") as http:
        stub = engram_pb2_grpc.EngramStub(channel)
        opened = stub.OpenSession(pb.OpenSessionRequest(session_id=99), metadata=bearer("alice"))
        assert http.get("/v1/sessions/99").json()["epoch"] == opened.epoch
        with pytest.raises(grpc.RpcError) as e:
            stub.GetSession(pb.GetSessionRequest(session_id=99), metadata=bearer("bob"))
        assert refusal(e) == ("NOT_FOUND", "unknown_session")
        assert http.delete("/v1/sessions/99").status_code == 204


def test_removed_key_loses_its_streams(wide_server: GrpcServer) -> None:
    keys = wide_server.keys
    keys.write_text(key_line("alice") + key_line("bob") + key_line("carol"))
    requests: queue.SimpleQueue[pb.StepRequest | None] = queue.SimpleQueue()
    with wide_server.channel() as channel:
        stub = engram_pb2_grpc.EngramStub(channel)
        while not is_known(stub, "carol"):
            assert wide_server.process.poll() is None
        answers = stub.Stream(iter(requests.get, None), metadata=bearer("carol"))
        requests.put(pb.StepRequest(request_id=7))
        assert next(answers).problem.code == "schema"
        keys.write_text(key_line("alice") + key_line("bob"))
        with pytest.raises(grpc.RpcError) as e:
            next(answers)
        assert refusal(e) == ("UNAUTHENTICATED", "unauthenticated")
        requests.put(None)


def is_known(stub: Any, name: str) -> bool:
    try:
        return bool(stub.GetInfo(pb.GetInfoRequest(), metadata=bearer(name)).json)
    except grpc.RpcError:
        return False


# ---- what tools find


def test_reflection_is_enough_to_make_a_step(wide_server: GrpcServer) -> None:
    """As grpcurl does it: no file of ours but what the server tells."""
    with wide_server.channel() as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "engram.v1.Engram" in database.get_services()
        pool = descriptor_pool.DescriptorPool(database)
        service = pool.FindServiceByName("engram.v1.Engram")
        kind = message_factory.GetMessageClass(service.FindMethodByName("GetInfo").input_type)
        info = message_factory.GetMessageClass(service.FindMethodByName("GetInfo").output_type)
        call = channel.unary_unary("/engram.v1.Engram/GetInfo", None, info.FromString)
        told = call(kind().SerializeToString(), metadata=bearer("alice"))
        assert json.loads(told.json)["geometry"]["dim"] == 5120


def test_reflection_tells_the_committed_contract(wide_server: GrpcServer) -> None:
    with wide_server.channel() as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        told = database.FindFileContainingSymbol("engram.v1.Engram")
    own = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(own)
    assert told == own


def test_health_needs_no_key(wide_server: GrpcServer) -> None:
    with wide_server.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "engram.v1.Engram"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as e:
            health.Check(health_pb2.HealthCheckRequest(service="other"))
        assert e.value.code() == grpc.StatusCode.NOT_FOUND


def test_compressed_messages_are_not_taken(wide_server: GrpcServer) -> None:
    with wide_server.channel() as channel, pytest.raises(grpc.RpcError) as e:
        engram_pb2_grpc.EngramStub(channel).Step(
            residual_step(5, 10), metadata=bearer("bob"), compression=grpc.Compression.Gzip
        )
    assert refusal(e)[0] == "UNIMPLEMENTED"


# ---- life


def test_drain_ends_a_waiting_step_then_the_streams(small_gguf: Path) -> None:
    server = GrpcServer(small_gguf)
    server.wait_until_ready()
    requests: queue.SimpleQueue[pb.StepRequest | None] = queue.SimpleQueue()
    with server.channel() as channel, server.client() as http:
        stub = engram_pb2_grpc.EngramStub(channel)
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(health).status == health_pb2.HealthCheckResponse.SERVING
        opened = stub.OpenSession(pb.OpenSessionRequest())
        waiting = pb.StepRequest(
            request_id=1,
            output=pb.OUTPUT_KV,
            wait_ms=1000,
            tensors={
                "count": tensor(np.array([1], np.int32)),
                "position": tensor(np.array([0], np.int64)),
                "session_id": tensor(np.array([opened.session_id], np.int64)),
            },
        )
        answers = stub.Stream(iter(requests.get, None))
        requests.put(waiting)
        wait_until(http, "engram_waiting", lambda waits: waits == 1)
        server.process.send_signal(signal.SIGTERM)
        assert next(health).status == health_pb2.HealthCheckResponse.NOT_SERVING
        requests.put(waiting)
        told = {next(answers).problem.code, next(answers).problem.code}
        assert told == {"not_pushed", "draining"}
        with pytest.raises(grpc.RpcError) as e:
            next(answers)
        assert refusal(e) == ("UNAVAILABLE", "draining")
        requests.put(None)
    assert server.end() == 0
    assert "Traceback" not in "".join(server.lines)


def test_tls_is_that_of_http(small_gguf: Path, tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -days 1 -keyout {key}"
        f" -out {cert} -addext subjectAltName=DNS:localhost".split(),
        check=True,
        capture_output=True,
    )
    server = GrpcServer(small_gguf, "--tls-cert", str(cert), "--tls-key", str(key))
    target = server.wait_for(r"^ready grpcs://(\S+)")[1]
    credentials = grpc.ssl_channel_credentials(cert.read_bytes())
    options = [("grpc.ssl_target_name_override", "localhost")]
    with grpc.secure_channel(target, credentials, options) as channel:
        info = engram_pb2_grpc.EngramStub(channel).GetInfo(pb.GetInfoRequest())
        assert json.loads(info.json)["geometry"]
    url = re.search(r"^ready (https://\S+)", "".join(server.lines), re.MULTILINE)
    assert url, "HTTP has the same certificate"
    context = ssl.create_default_context(cafile=str(cert))
    with httpx.Client(verify=context, trust_env=False) as client:
        port = url[1].rpartition(":")[2]
        assert client.get(f"https://localhost:{port}/livez").status_code == 200
    assert server.stop() == 0


def test_taken_port_is_said_in_one_line(small_gguf: Path, server: Server) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "service",
            "serve",
            str(small_gguf),
            "--port",
            "0",
            "--grpc-port",
            str(server.port),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert f"port {server.port} on 127.0.0.1 is taken" in done.stderr
    assert "choose another --grpc-port" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_in_flight_gauge_ends_at_zero(wide_server: GrpcServer) -> None:
    with wide_server.client() as http:
        wait_until(http, "engram_in_flight_bytes", lambda held: held == 0)
        assert metric(http, "engram_waiting") == 0
