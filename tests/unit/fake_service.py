"""A service in a hundred lines for tests of the client: the fence as docs/sessions.md tells it.

No I/O: `handle(request)` answers. What a position reads as is a small function of its window, so
that a lost, doubled or shifted id shows. It shares no code with the product but the wire format.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import ml_dtypes
import numpy as np

from engram_client import wire
from engram_client.http1 import Request, Response

HC, DIM, WIDTH, COLS = 2, 4, 3, 6
DEAD = -1


def sample(layer: int, window: list[int]) -> int:
    """A number below 97 that depends on every id of a window, in order."""
    return sum((token + 2) * (layer + 5) ** (place + 1) for place, token in enumerate(window)) % 97


class Refusal(Exception):
    def __init__(self, status: int, code: str, **fields: Any) -> None:
        self.status, self.fields = status, {"code": code, **fields}


class Held:
    """One session as the service holds it: ids by position from `origin` on."""

    def __init__(self, document: dict[str, Any], origin: int, ids: list[int], epoch: int) -> None:
        self.document, self.origin, self.ids = document, origin, ids
        self.opened_epoch = self.epoch = epoch
        self.base = 0 if self.length <= WIDTH else self.length

    @property
    def length(self) -> int:
        return self.origin + len(self.ids)

    def window(self, position: int) -> list[int]:
        at = position - self.origin
        return self.ids[max(at - WIDTH, 0) : at + 1]

    def state(self) -> dict[str, int]:
        return {"length": self.length, "base": self.base, "epoch": self.epoch}


class FakeService:
    def __init__(
        self, *, first_epoch: int = 1000, max_tokens: int = 8, identity: str = "table"
    ) -> None:
        self.sessions: dict[int, Held] = {}
        self.next_epoch = first_epoch
        self.max_tokens = max_tokens
        self.identity = identity
        self.requests: list[Request] = []
        self.refuse: Callable[[Request], Refusal | None] = lambda request: None

    def handle(self, request: Request) -> Response:
        self.requests.append(request)
        try:
            if (refusal := self.refuse(request)) is not None:
                raise refusal
            if dict(request.headers).get(wire.TABLE, self.identity) != self.identity:
                raise Refusal(412, "wrong_table")
            return self._route(request)
        except Refusal as refusal:
            body = json.dumps({"status": refusal.status, "detail": "", **refusal.fields}).encode()
            return _response(refusal.status, {"content-type": wire.PROBLEM_MEDIA}, body)

    def _route(self, request: Request) -> Response:
        url = urlsplit(request.target)
        query = dict(parse_qsl(url.query))
        body = b"".join(bytes(buffer) for buffer in request.body)
        match request.method, url.path.split("/")[1:]:
            case "GET", ["v1", "info"]:
                return _json(self.info())
            case "GET", ["v1", "layers", _, "weights"]:
                qk = wire.as_view(np.full((HC, DIM), 0.5, np.float32))
                return _safetensors(request, {"qk": qk})
            case "POST", ["v1", "sessions"]:
                return self._open(json.loads(body))
            case "DELETE", ["v1", "sessions"]:
                return _json({"closed": len(self.sessions)})
            case "DELETE", ["v1", "sessions", text]:
                held = self._held(int(text))
                self._fence(held, int(query["epoch"]))
                del self.sessions[int(text)]
                return _response(204, {}, b"")
            case "POST", ["v1", "sessions", text, "tokens"]:
                held, document = self._held(int(text)), json.loads(body)
                self._push(held, document, check_only=False)
                return _json(held.state())
            case "POST", ["v1", "sessions", text, "rewind"]:
                return self._rewind(self._held(int(text)), json.loads(body))
            case method, ["v1", "sessions", text, "layers", layer, output]:
                del method
                return self._read(request, self._held(int(text)), int(layer), output, query, body)
            case "POST", ["v1", "step"]:
                return self._step(request, query, body)
        raise Refusal(404, "not_found")

    def info(self) -> dict[str, Any]:
        geometry = {"max_ngram_size": WIDTH + 1, "hc_mult": HC, "dim": DIM, "n_hash_cols": COLS}
        return {
            "geometry": geometry | {"head_dim": 2},
            "limits": {"max_tokens": self.max_tokens},
            "table": {"identity": self.identity},
        }

    def _held(self, session_id: int) -> Held:
        if session_id not in self.sessions:
            raise Refusal(404, "unknown_session")
        return self.sessions[session_id]

    def _epoch(self) -> int:
        self.next_epoch += 1000
        return self.next_epoch

    def _fence(self, held: Held, epoch: int | None) -> None:
        if (held.opened_epoch if epoch is None else epoch) != held.epoch:
            raise Refusal(409, "stale_epoch", **held.state())

    def _open(self, document: dict[str, Any]) -> Response:
        session_id = int(document["session_id"])
        if session_id in self.sessions:
            if self.sessions[session_id].document != document:
                raise Refusal(409, "session_exists")
            return _json(self.sessions[session_id].state())
        if "fork_of" in document:
            parent = self._held(int(document["fork_of"]))
            self._fence(parent, document.get("epoch"))
            self._bound(parent, document["position"], document["position"])
            ids = parent.ids[: document["position"] - parent.origin]
            held = Held(document, parent.origin, list(ids), self._epoch())
            held.base = parent.base
        else:
            position = document.get("position", 0)
            lookback = [DEAD if token is None else token for token in document.get("lookback", [])]
            if len(lookback) != min(position, WIDTH):
                raise Refusal(422, "schema", expected=min(position, WIDTH), got=len(lookback))
            held = Held(document, position - len(lookback), lookback, self._epoch())
        self.sessions[session_id] = held
        return _json(held.state())

    def _bound(self, held: Held, begin: int, end: int) -> None:
        if begin < held.base:
            raise Refusal(409, "history_truncated", **held.state())
        if end > held.length:
            raise Refusal(409, "not_pushed", **held.state())

    def _push(self, held: Held, document: dict[str, Any], *, check_only: bool) -> None:
        position, ids = document["position"], list(document["token_ids"])
        if len(ids) > self.max_tokens:
            raise Refusal(413, "too_many_tokens", expected=self.max_tokens, got=len(ids))
        for index, live in enumerate(document.get("mask") or ()):
            ids[index] = ids[index] if live else DEAD
        truncates = document.get("on_conflict") == "truncate"
        end = position + len(ids)
        if position < held.base:
            raise Refusal(409, "history_truncated", **held.state())
        at = position - held.origin
        there = held.ids[at : at + len(ids)]
        in_place = position <= held.length and there == ids
        in_place &= not truncates or end == held.length
        if document["epoch"] != held.epoch:
            if in_place:
                return
            self._fence(held, document["epoch"])
        if position > held.length:
            raise Refusal(409, "gap", **held.state())
        if not truncates and there != ids[: len(there)]:
            raise Refusal(409, "conflict", **held.state())
        if check_only:
            return
        if truncates:
            held.ids[at:] = ids
            held.epoch += 1
        elif end > held.length:
            held.ids[at:] = ids

    def _rewind(self, held: Held, document: dict[str, Any]) -> Response:
        position = document["position"]
        if document["epoch"] != held.epoch and position == held.length:
            return _json(held.state())
        self._fence(held, document["epoch"])
        if position > held.length:
            raise Refusal(409, "gap", **held.state())
        if position < held.base:
            raise Refusal(409, "history_truncated", **held.state())
        del held.ids[position - held.origin :]
        held.epoch += 1
        return _json(held.state())

    def _read(
        self,
        request: Request,
        held: Held,
        layer: int,
        output: str,
        query: dict[str, str],
        body: bytes,
    ) -> Response:
        self._fence(held, int(query["epoch"]))
        headers = dict(request.headers)
        position = int(query["position"])
        residual = None
        if output == "residual":
            shape = wire.parse_shape(headers[wire.SHAPE])
            residual = wire.TensorView(headers[wire.DTYPE], shape, memoryview(body))
        count = int(query.get("count", 1)) if residual is None else residual.shape[0]
        if count > self.max_tokens:
            raise Refusal(413, "too_many_tokens")
        self._bound(held, position, position + count)
        windows = [held.window(position + index) for index in range(count)]
        view = tensor(output, layer, windows, residual)
        dead = [index for index, window in enumerate(windows) if window[-1] == DEAD]
        told = {
            wire.SHAPE.lower(): wire.format_shape(view.shape),
            wire.DTYPE.lower(): view.dtype,
        }
        if dead:
            told[wire.DEAD.lower()] = wire.format_ranges(dead)
        return _binary(request, told, bytes(view.data))

    def _step(self, request: Request, query: dict[str, str], body: bytes) -> Response:
        tensors = {name: wire.to_numpy(view) for name, view in wire.decode_tensors(body).items()}
        views = wire.decode_tensors(body)
        count, position = tensors["count"].tolist(), tensors["position"].tolist()
        if sum(count) > self.max_tokens:
            raise Refusal(413, "too_many_tokens")
        stops = np.cumsum(count).tolist()
        windows: list[list[int]] = []
        held_of: list[Held] = []
        refused, pushes = [], []
        for index, (size, stop) in enumerate(zip(count, stops, strict=True)):
            try:
                if "hash_ids" in tensors:
                    windows += tensors["hash_ids"][stop - size : stop, 0].tolist()
                    continue
                if "lookback" in tensors:
                    windows += _windows(tensors, index, stop - size, stop)
                    continue
                held = self._held(int(tensors["session_id"][index]))
                held_of.append(held)
                epoch = int(tensors["epoch"][index])
                if "token_ids" in tensors:
                    document = {
                        "position": position[index],
                        "token_ids": tensors["token_ids"][stop - size : stop].tolist(),
                        "epoch": epoch,
                        "on_conflict": query.get("on_conflict"),
                    }
                    if "mask" in tensors:
                        document["mask"] = tensors["mask"][stop - size : stop].tolist()
                    self._push(held, document, check_only=True)
                    pushes.append((held, document))
                else:
                    self._fence(held, epoch)
                    self._bound(held, position[index], position[index] + size)
            except Refusal as refusal:
                refused.append((index, refusal))
        if refused:
            first = refused[0][1]
            segments = [{"index": index, **refusal.fields} for index, refusal in refused]
            raise Refusal(first.status, first.fields["code"], segments=segments)
        for held, document in pushes:
            self._push(held, document, check_only=False)
        for held, first, size in zip(held_of, position, count, strict=False):
            windows += [held.window(first + index) for index in range(size)]
        answer = {
            "length": _numbers([held.length for held in held_of] or [-1] * len(count)),
            "epoch": _numbers([held.epoch for held in held_of] or [-1] * len(count)),
            "dead": wire.as_view(np.array([w[-1] == DEAD for w in windows], np.uint8)),
        }
        for layer in map(int, query["layers"].split(",")):
            if (output := query["output"]) != "none":
                view = tensor(output, layer, windows, views.get("residual"))
                if "hash_ids" in tensors and "mask" in tensors:
                    view = wire.as_view(
                        np.where(
                            tensors["mask"][:, None, None].astype(bool),
                            wire.to_numpy(view),
                            tensors["residual"],
                        )
                    )
                answer[f"{output}.{layer}"] = view
        return _safetensors(request, answer)


def _numbers(values: list[int]) -> wire.TensorView:
    return wire.as_view(np.array(values, np.int64))


def _windows(tensors: dict[str, Any], index: int, begin: int, end: int) -> list[list[int]]:
    ids = tensors["token_ids"][begin:end]
    if "mask" in tensors:
        ids = np.where(tensors["mask"][begin:end], ids, DEAD)
    line = [*tensors["lookback"][index].tolist(), *ids.tolist()]
    return [line[at : at + WIDTH + 1] for at in range(end - begin)]


def tensor(
    output: str, layer: int, windows: list[list[int]], residual: wire.TensorView | None = None
) -> wire.TensorView:
    """What the fake answers: numbers that are exact in bfloat16."""
    numbers = np.array([sample(layer, window) for window in windows], np.float32)
    if output == "residual":
        assert residual is not None
        array = wire.to_numpy(residual)
        return wire.as_view((array + numbers[:, None, None]).astype(array.dtype))
    shape, dtype = {
        "kv": ((HC + 1, DIM), ml_dtypes.bfloat16),
        "rows": ((COLS, 2), ml_dtypes.bfloat16),
        "hash_ids": ((COLS,), np.int64),
    }[output]
    spread = numbers.reshape(-1, *[1] * len(shape))
    return wire.as_view(np.broadcast_to(spread, (len(windows), *shape)).astype(dtype))


def _response(status: int, headers: dict[str, str], body: bytes) -> Response:
    return Response(status, headers, memoryview(body))


def _json(document: dict[str, Any]) -> Response:
    return _response(200, {"content-type": wire.JSON_MEDIA}, json.dumps(document).encode())


def _safetensors(request: Request, views: dict[str, wire.TensorView]) -> Response:
    return _binary(request, {}, b"".join(wire.encode_tensors(views)))


def _binary(request: Request, headers: dict[str, str], body: bytes) -> Response:
    """Deliver a body as a connection does: into the request's sink if it has one."""
    if request.sink is None:
        return _response(200, headers, body)
    at = 0
    for piece in request.sink(len(body)):
        piece[:] = body[at : at + len(piece)]
        at += len(piece)
    assert at == len(body)
    return _response(200, headers, b"")
