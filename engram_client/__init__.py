"""The Engram client: sessions and steps over HTTP, blocking or with asyncio."""

from engram_client.aio import AsyncEngramClient, AsyncSession
from engram_client.arrays import torch_of
from engram_client.client import EngramClient, Session
from engram_client.problems import (
    BadAnswer,
    ConnectionLost,
    EngramClientError,
    EngramProblem,
    EngramUnavailable,
    PushedMeanwhile,
    SessionClosed,
)
from engram_client.segments import Segment, StepResult

__all__ = [
    "AsyncEngramClient",
    "AsyncSession",
    "BadAnswer",
    "ConnectionLost",
    "EngramClient",
    "EngramClientError",
    "EngramProblem",
    "EngramUnavailable",
    "PushedMeanwhile",
    "Segment",
    "Session",
    "SessionClosed",
    "StepResult",
    "torch_of",
]
