"""What a session's verbs do once their document is read; the same for every door."""

from __future__ import annotations

import re

import numpy as np

from engram_core.engine_types import EPOCH_OPENED, PushResult
from engram_core.errors import SchemaError
from service.schemas import OWNER_PATTERN, PushTokens, RewindSession
from service.state import Model


def push(model: Model, tenant: str, session_id: int, document: PushTokens) -> PushResult:
    """Push ids to one session. Raises SchemaError, and what `Engine.push` raises."""
    token_ids, mask = document.token_ids, document.mask
    if mask is not None and len(mask) != len(token_ids):
        raise SchemaError(
            "mask and token_ids differ in length", expected=len(token_ids), got=len(mask)
        )
    return model.engine.push(
        tenant,
        session_id,
        document.position,
        np.array(token_ids, np.int64),
        None if mask is None else np.array(mask, np.bool_),
        epoch=epoch_or_opened(document.epoch),
        truncate=document.on_conflict is not None,
        ahead=document.ahead,
    )


def rewind(model: Model, tenant: str, session_id: int, document: RewindSession) -> PushResult:
    """Cut one session. Raises what `Engine.rewind` raises."""
    epoch = epoch_or_opened(document.epoch)
    return model.engine.rewind(tenant, session_id, document.position, epoch)


def close_owner(model: Model, tenant: str, owner: str) -> int:
    """Close what a former incarnation of a runner left open. Raises SchemaError."""
    if not re.fullmatch(OWNER_PATTERN, owner):
        raise SchemaError(
            "owner is no name", expected="1 to 128 visible ASCII characters", got=owner[:80]
        )
    return model.engine.close_owner(tenant, owner)


def epoch_or_opened(epoch: int | None) -> int:
    """Return the epoch, or what stands for one left out."""
    return EPOCH_OPENED if epoch is None else epoch
