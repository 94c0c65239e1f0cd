"""The control calls as HTTP messages: requests made of a session, and what their answers say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engram_client import wire
from engram_client.http1 import Request, Response
from engram_client.problems import BadAnswer
from engram_client.state import SessionState


def json_request(method: str, target: str, document: dict[str, Any]) -> Request:
    """Return a request with a JSON body."""
    body = json.dumps(document, separators=(",", ":")).encode()
    return Request(method, target, [("Content-Type", wire.JSON_MEDIA)], [body])


def open_request(
    state: SessionState, position: int, lookback: Sequence[int | None], owner: str | None
) -> Request:
    """Return the request that opens a session, empty or at a position."""
    document: dict[str, Any] = {"session_id": str(state.session_id)}
    if position or lookback:  # what lies before position 0 is for the service to refuse
        document |= {"position": position, "lookback": list(lookback)}
    if owner is not None:
        document["owner"] = owner
    return json_request("POST", "/v1/sessions", document)


def push_request(
    state: SessionState,
    position: int,
    token_ids: list[int],
    mask: list[bool] | None,
    *,
    truncate: bool = False,
    ahead: bool,
) -> Request:
    """Return the request that pushes ids under the session's present epoch."""
    document: dict[str, Any] = {
        "position": position,
        "token_ids": token_ids,
        "epoch": state.epoch,
    }
    if mask is not None:
        document["mask"] = mask
    if truncate:
        document["on_conflict"] = "truncate"
    if not ahead:
        document["ahead"] = False
    return json_request("POST", f"/v1/sessions/{state.session_id}/tokens", document)


def rewind_request(state: SessionState, position: int) -> Request:
    """Return the request that cuts a session."""
    document = {"position": position, "epoch": state.epoch}
    return json_request("POST", f"/v1/sessions/{state.session_id}/rewind", document)


def close_request(state: SessionState, epoch: int) -> Request:
    """Return the request that closes a session."""
    return Request("DELETE", f"/v1/sessions/{state.session_id}?epoch={epoch}")


def json_of(response: Response) -> dict[str, Any]:
    """Return an answer's JSON object. Raises BadAnswer."""
    try:
        document = wire.load_json(bytes(response.body))
    except wire.WireError as error:
        raise BadAnswer(f"an answer that is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadAnswer(f"expected a JSON object, got {type(document).__name__}")
    return document


def note_session(state: SessionState, document: dict[str, Any], *, expected_length: int) -> None:
    """Take base and epoch from an answer. Raises BadAnswer: the session has another length."""
    numbers = [document.get(name) for name in ("length", "base", "epoch")]
    if any(type(number) is not int for number in numbers):
        raise BadAnswer(f"a session's answer without length, base and epoch: {numbers}")
    length, base, epoch = numbers
    if length != expected_length:
        raise BadAnswer(
            f"session {state.session_id}: expected length {expected_length}, got {length}"
        )
    assert base is not None
    assert epoch is not None
    state.base, state.epoch = base, epoch
