"""Requests and answers of the public interface, spelled with httpx, numpy and safetensors only.

A second, independent reading of API.md: the shipped client is not used here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import safetensors.torch
import torch

TORCH = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
NAME = {dtype: name for name, dtype in TORCH.items()}


def tensor_of(answer: httpx.Response) -> torch.Tensor:
    """The tensor of a binary answer, by its headers."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/octet-stream"
    shape = [int(n) for n in answer.headers["x-engram-shape"].strip("[] ").split(",")]
    dtype = TORCH[answer.headers["x-engram-dtype"]]
    if not answer.content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(answer.content), dtype=dtype).reshape(shape)


def body_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of httpx for a tensor body."""
    return {
        "content": raw_bytes(tensor),
        "headers": {
            "Content-Type": "application/octet-stream",
            "X-Engram-Shape": ",".join(map(str, tensor.shape)),
            "X-Engram-Dtype": NAME[tensor.dtype],
        },
    }


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def step_body(**tensors: Any) -> dict[str, Any]:
    """Keyword arguments of httpx for /v1/step. count, position ... by name; None is left out."""
    dtypes = {"count": torch.int32, "lookback": torch.int32, "mask": torch.uint8}
    named = {}
    for name, value in tensors.items():
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            value = torch.as_tensor(np.array(value), dtype=dtypes.get(name, torch.int64))
        named[name] = value.contiguous()
    return {
        "content": safetensors.torch.save(named),
        "headers": {"Content-Type": "application/octet-stream"},
    }


def step(
    client: httpx.Client, params: Mapping[str, Any], **tensors: Any
) -> dict[str, torch.Tensor]:
    """POST /v1/step that must succeed: its tensors."""
    answer = client.post("/v1/step", params=params, **step_body(**tensors))
    assert answer.status_code == 200, answer.text
    return safetensors.torch.load(answer.content)


def open_session(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/sessions", json=fields)
    assert answer.status_code == 201, answer.text
    document: dict[str, Any] = answer.json()
    return document


def push(
    client: httpx.Client, session_id: str, position: int, token_ids: Sequence[int], **fields: Any
) -> dict[str, Any]:
    body = {"position": position, "token_ids": list(token_ids), **fields}
    answer = client.post(f"/v1/sessions/{session_id}/tokens", json=body)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def refusal(answer: httpx.Response) -> tuple[int, str]:
    """(status, code) of an answer that must be a problem document."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    document = answer.json()
    assert document["status"] == answer.status_code
    if answer.status_code in (429, 503):
        assert document["retry_after_ms"] > 0
        assert int(answer.headers["retry-after"]) >= 1
    return answer.status_code, document["code"]


def metric(client: httpx.Client, name: str) -> float:
    """The value of one metric without labels; there must be one."""
    for line in client.get("/metrics").text.splitlines():
        if line.split(" ")[0] == name:
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name}")


def wait_until(client: httpx.Client, name: str, is_so: Callable[[float], bool]) -> None:
    """Ask for a metric until it is so; fails after a minute."""
    deadline = time.monotonic() + 60
    while not is_so(value := metric(client, name)):
        assert time.monotonic() < deadline, f"{name} stays {value}"
