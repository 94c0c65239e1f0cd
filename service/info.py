"""`/v1/info`: what is served, where it lives, and what it promises."""

from __future__ import annotations

from typing import Any

from engram_core.engine_types import MAX_POSITIONS, MAX_WAIT_MS
from service import schemas
from service.state import Model, ServiceState
from service.versions import versions


def describe(model: Model, state: ServiceState) -> schemas.Info:
    """Return the info document."""
    backend = model.backend
    return schemas.Info(
        table=_table(model),
        geometry=_geometry(model),
        hash=_hash_constants(model),
        backend=backend.name,
        placement=model.ledger.placement,
        memory=[
            schemas.LedgerLine(name=line.name, pool=line.pool, num_bytes=line.num_bytes)
            for line in model.ledger.lines
        ],
        numerics=dict(backend.numerics),
        limits=_limits(model, state),
        shared_memory=schemas.SharedMemory(
            total_bytes=state.regions.total_bytes, mode=state.regions.mode
        ),
        versions=versions(),
    )


def _table(model: Model) -> schemas.Table:
    checkpoint, backend = model.checkpoint, model.backend
    layers = [str(layer) for layer in checkpoint.geometry.layer_ids]
    return schemas.Table(
        identity=checkpoint.identity,
        encodings=dict(zip(layers, backend.encodings, strict=True)),
        row_bytes=dict(zip(layers, backend.row_bytes, strict=True)),
        image_token_id=checkpoint.image_token_id,
    )


def _geometry(model: Model) -> schemas.Geometry:
    geometry = model.checkpoint.geometry
    return schemas.Geometry(
        layer_ids=list(geometry.layer_ids),
        max_ngram_size=geometry.max_ngram_size,
        num_heads=geometry.num_heads,
        n_hash_cols=geometry.n_hash_cols,
        head_dim=geometry.head_dim,
        dim=geometry.dim,
        hc_mult=geometry.hc_mult,
        eps=geometry.eps,
        table_rows=list(geometry.table_rows),
    )


def _hash_constants(model: Model) -> schemas.HashConstants:
    tables = model.checkpoint.hash_tables
    return schemas.HashConstants(
        vocab_size=tables.vocab_size,
        compressed_vocab_size=tables.compressed_vocab_size,
        pad_id=tables.pad_id,
        multipliers=_as_strings(tables.multipliers.tolist()),
        primes=_as_strings(tables.primes.tolist()),
        offsets=_as_strings(tables.offsets.tolist()),
    )


def _as_strings(value: Any) -> Any:
    """Spell 64-bit integers as strings: JSON readers round them."""
    return [_as_strings(item) for item in value] if isinstance(value, list) else str(value)


def _limits(model: Model, state: ServiceState) -> schemas.Limits:
    limits = model.limits
    return schemas.Limits(
        max_tokens=limits.max_tokens,
        max_positions=MAX_POSITIONS,
        max_wait_ms=MAX_WAIT_MS,
        max_sessions=limits.max_sessions,
        max_held_tokens=limits.max_held_tokens,
        max_body_bytes=state.pool.max_request_bytes,
        max_json_bytes=state.max_json_bytes,
        in_flight_bytes=model.in_flight_bytes,
        session_ttl_s=limits.session_ttl_s,
        ahead_tokens=limits.ahead_tokens,
    )
