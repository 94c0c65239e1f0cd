"""The JSON documents of the interface: what is taken (checked strictly) and what is given."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
)

from engram_client import wire
from engram_core.engine_types import EPOCH_OPENED, OpenRequest, SessionState

INT64_MAX = (1 << 63) - 1
SESSION_ID_PATTERN = "^[1-9][0-9]{0,18}$"


def _session_id(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(SESSION_ID_PATTERN, value, re.ASCII):
        try:
            return wire.parse_int(value, "session id")
        except wire.WireError:
            pass
    raise ValueError("a decimal string of an int64 above 0")


SessionId = Annotated[
    int,
    BeforeValidator(_session_id, json_schema_input_type=str),
    PlainSerializer(str, return_type=str),
]
Position = Annotated[int, Field(ge=0, le=INT64_MAX)]
Epoch = Annotated[int, Field(ge=0, le=INT64_MAX)]
Int64 = Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)]
OWNER_PATTERN = "^[!-~]{1,128}$"
Owner = Annotated[str, StringConstraints(pattern=OWNER_PATTERN)]


class _Taken(BaseModel):
    """A request document: no field unknown, nothing converted."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class OpenMemory(_Taken):
    """How much shared memory a connection asks for."""

    num_bytes: Annotated[int, Field(gt=0, le=INT64_MAX)]


class Memory(BaseModel):
    """A connection's shared memory."""

    num_bytes: int = Field(description="its size, whole pages")


class OpenSession(_Taken):
    """How a session is made: empty, at a position with look-back, or as a fork."""

    session_id: SessionId | None = Field(default=None, description="made by the server if left out")
    position: Position | None = Field(
        default=None, description="where the session begins; 0 if left out"
    )
    lookback: list[Int64 | None] | None = Field(
        default=None,
        max_length=16,
        description="the min(position, max_ngram_size-1) token ids before position, oldest first; "
        "null = dead",
    )
    fork_of: SessionId | None = Field(
        default=None,
        description="take the history of this session up to position (its length if left out)",
    )
    epoch: Epoch | None = Field(default=None, description="of fork_of")
    owner: Owner | None = Field(default=None, description="one incarnation of a runner")

    def request(self) -> OpenRequest:
        """Return the engine's form of it."""
        return OpenRequest(
            session_id=self.session_id,
            position=self.position,
            lookback=None if self.lookback is None else tuple(self.lookback),
            fork_of=self.fork_of,
            epoch=EPOCH_OPENED if self.epoch is None else self.epoch,
            owner=self.owner,
        )


class PushTokens(_Taken):
    """Token ids for the positions from `position` on."""

    position: Position
    # One fault is told: to look for all holds the event loop for most of a second.
    token_ids: list[Int64] = Field(fail_fast=True)
    mask: list[bool] | None = Field(
        default=None, fail_fast=True, description="false = dead: the id there is not read"
    )
    epoch: Epoch | None = None
    on_conflict: Literal["truncate"] | None = Field(
        default=None, description="let the session end at position + count, whatever was there"
    )
    ahead: bool = Field(default=True, description="start kv ahead")


class RewindSession(_Taken):
    """Cut the session to `position`."""

    position: Position
    epoch: Epoch | None = None


class Session(BaseModel):
    """A session as it is now."""

    session_id: SessionId
    length: int = Field(description="how many positions it holds")
    base: int = Field(description="lowest length it can be cut to")
    epoch: int = Field(description="its fence: the present epoch")
    owner: str | None
    compressed_lookback: list[int] = Field(
        description="its last compressed ids, oldest first; -1 = dead"
    )
    expires_in_s: float = Field(description="idle time left")

    @classmethod
    def of(cls, state: SessionState) -> Session:
        """Return the document of a session."""
        return cls.model_construct(
            session_id=state.session_id,
            length=state.length,
            base=state.base,
            epoch=state.epoch,
            owner=state.owner,
            compressed_lookback=list(state.compressed_lookback),
            expires_in_s=round(state.expires_in_s, 3),
        )


class Pushed(BaseModel):
    """A session after a push or a rewind."""

    session_id: SessionId
    length: int
    base: int
    epoch: int
    appended: int = Field(description="positions that are new")
    removed: int = Field(description="positions that were cut")


class Closed(BaseModel):
    """How many sessions of an owner were closed."""

    closed: int


class Alive(BaseModel):
    """The process answers."""

    status: Literal["alive"]


class Ready(BaseModel):
    """Tables are resident and the self-check has passed."""

    status: Literal["ready"]


class RefusedSegment(BaseModel):
    """One refused segment of a step."""

    model_config = ConfigDict(extra="allow")

    index: int
    code: str
    detail: str
    length: int | None = None
    epoch: int | None = None


class Problem(BaseModel):
    """Why a request was refused (RFC 9457); further fields tell its values."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    code: str
    detail: str
    expected: Any = None
    got: Any = None
    retry_after_ms: int | None = None
    segments: list[RefusedSegment] | None = None


class Geometry(BaseModel):
    """Sizes of the layers."""

    layer_ids: list[int]
    max_ngram_size: int
    num_heads: int
    n_hash_cols: int
    head_dim: int
    dim: int
    hc_mult: int
    eps: float
    table_rows: list[int]


class HashConstants(BaseModel):
    """What token ids are hashed with; 64-bit constants are decimal strings.

    multipliers: [layers, max_ngram_size]; primes: [layers, max_ngram_size-1, num_heads];
    offsets: [layers, n_hash_cols]
    """

    vocab_size: int
    compressed_vocab_size: int
    pad_id: int = Field(description="compressed")
    multipliers: list[list[str]]
    primes: list[list[list[str]]]
    offsets: list[list[str]]


class Table(BaseModel):
    """The tables served."""

    identity: str
    encodings: dict[str, str] = Field(description="row format by layer id")
    row_bytes: dict[str, int] = Field(description="bytes of a stored row by layer id")
    image_token_id: int | None


class Limits(BaseModel):
    """What one request, one session and the service hold at most."""

    max_tokens: int
    max_positions: int
    max_wait_ms: int
    max_sessions: int
    max_held_tokens: int
    max_body_bytes: int
    max_json_bytes: int
    in_flight_bytes: int
    session_ttl_s: float
    ahead_tokens: int


class LedgerLine(BaseModel):
    """What is held for one purpose."""

    name: str
    pool: str = Field(description="device or host")
    num_bytes: int


class SharedMemory(BaseModel):
    """What clients of the Unix socket may use instead of it."""

    total_bytes: int = Field(description="of all connections; 0 = off")
    mode: str = Field(description="off, in place (the device works in it), or copied once")


class Info(BaseModel):
    """What is served, where it lives, and what it promises."""

    table: Table
    geometry: Geometry
    hash: HashConstants
    backend: str
    placement: str
    memory: list[LedgerLine] = Field(description="the ledger")
    numerics: dict[str, str]
    limits: Limits
    shared_memory: SharedMemory
    versions: dict[str, str]
