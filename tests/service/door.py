"""The app in this process, asked through ASGI: no sockets, one event loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import torch
from fastapi import FastAPI
from starlette.types import Message

from engram_client import wire
from service.openapi import codes_of
from service.operations import OPERATIONS, Operation
from service.state import ServiceState


class InProcess:
    """Asks an app. Every refusal is checked to be one that its operation documents."""

    def __init__(self, app: FastAPI, runner: asyncio.Runner) -> None:
        self.app = app
        self.state: ServiceState = app.state.service
        self.runner = runner

    def call(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Send one request; `host` replaces the authority of the URL."""
        host = request.pop("host", "localhost:8321")

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport) as client:
                return await client.request(method, f"http://{host}{path}", **request)

        answer = self.runner.run(ask())
        if answer.status_code >= 400:
            check_refusal(method, path, answer)
        assert answer.headers["x-request-id"]
        return answer

    def get(self, path: str, **request: Any) -> httpx.Response:
        return self.call("GET", path, **request)

    def post(self, path: str, **request: Any) -> httpx.Response:
        return self.call("POST", path, **request)

    def delete(self, path: str, **request: Any) -> httpx.Response:
        return self.call("DELETE", path, **request)

    def open(self, **fields: Any) -> dict[str, Any]:
        answer = self.post("/v1/sessions", json=fields)
        assert answer.status_code == 201, answer.text
        document: dict[str, Any] = answer.json()
        return document

    def push(self, session_id: str, position: int, ids: Sequence[int], **fields: Any) -> Any:
        body = {"position": position, "token_ids": list(ids), **fields}
        answer = self.post(f"/v1/sessions/{session_id}/tokens", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def step(self, params: dict[str, Any], **tensors: Any) -> httpx.Response:
        return self.post("/v1/step", params=params, **step_body(**tensors))


def operation_of(method: str, path: str) -> Operation | None:
    """The operation that a request means."""
    plain = path.partition("?")[0]
    for operation in OPERATIONS:
        pattern = re.sub(r"\{[a-z_]+\}", "[^/]+", operation.path)
        if operation.method == method and re.fullmatch(pattern, plain):
            return operation
    return None


def check_refusal(method: str, path: str, answer: httpx.Response) -> None:
    """A refusal is a problem document, complete, and documented for its operation."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    document = answer.json()
    assert {"type", "title", "status", "code", "detail"} <= document.keys()
    assert document["status"] == answer.status_code
    assert ("retry-after" in answer.headers) == (answer.status_code in (429, 503))
    operation = operation_of(method, path)
    if operation is not None:
        assert document["code"] in codes_of(operation)[answer.status_code], document


def refused(answer: httpx.Response) -> tuple[int, str]:
    """Status and code of a refusal."""
    return answer.status_code, answer.json()["code"]


def tensor_body(tensor: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments for a residual."""
    view = wire.as_view(tensor)
    headers = {
        "content-type": wire.TENSOR_MEDIA,
        wire.SHAPE: wire.format_shape(view.shape),
        wire.DTYPE: view.dtype,
    }
    return {"content": bytes(view.data), "headers": headers}


def step_body(**tensors: Any) -> dict[str, Any]:
    """Keyword arguments for a step; tensors as arrays of their exact dtype."""
    views = {name: wire.as_view(value) for name, value in tensors.items()}
    content = b"".join(map(bytes, wire.encode_tensors(views)))
    return {"content": content, "headers": {"content-type": wire.TENSOR_MEDIA}}


def i32(*values: Any) -> Any:
    return np.array(values, np.int32)


def i64(*values: Any) -> Any:
    return np.array(values, np.int64)


class RawRequest:
    """One request as ASGI messages, for bodies no HTTP client would send.

    messages: what `receive` gives, in order; then it waits (`then_wait`) or says disconnect
    """

    def __init__(
        self, method: str, path: str, headers: dict[str, str], messages: Sequence[Message],
        *, then_wait: bool = True,
    ) -> None:  # fmt: skip
        path, _, query = path.partition("?")
        self.aborted, self.has_body, self.is_stalled = False, False, True
        self.unsent_bytes = 0
        self.sent: list[Message] = []
        self._messages: Iterator[Message] = iter(messages)
        self._then_wait = then_wait
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "server": ("127.0.0.1", 8321),
            "client": ("127.0.0.1", 4),
            "headers": [
                (name.lower().encode(), value.encode())
                for name, value in {"host": "localhost", **headers}.items()
            ],
            "extensions": {"engram.connection": {"connection": self}},
        }
        self.tenant: str | None = None

    def abort(self) -> None:
        self.aborted = True

    async def receive(self) -> Message:
        message = next(self._messages, None)
        if message is not None:
            return message
        if self._then_wait and not self.aborted:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        """Of the answer; 0 if there was none."""
        return next((m["status"] for m in self.sent if m["type"] == "http.response.start"), 0)

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent)

    @property
    def headers(self) -> dict[str, str]:
        start = next(m for m in self.sent if m["type"] == "http.response.start")
        return {str(k, "latin-1"): str(v, "latin-1") for k, v in start["headers"]}


def part(body: bytes, *, more: bool) -> Message:
    """One message of a body."""
    return {"type": "http.request", "body": body, "more_body": more}
