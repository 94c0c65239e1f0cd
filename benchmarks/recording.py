"""A client that keeps what the service tells of its stages."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from engram_client import EngramClient
from engram_client.client import drive
from engram_client.exchange import Effects
from engram_client.http1 import Request, Response


class Recording(EngramClient):
    """Every call goes the protocol's way, whose answers can be looked at; the service does the same
    for it as for the direct way. stages: seconds of each request by name of the stage"""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.stages: defaultdict[str, list[float]] = defaultdict(list)
        self._pool.ask = lambda *_: None  # type: ignore[method-assign]

    def _run(self, effects: Effects[Any]) -> Any:
        return drive(effects, self._recorded, time.sleep)

    def _recorded(self, request: Request) -> Response:
        response = self._pool.exchange(request)
        for part in filter(None, response.headers.get("server-timing", "").split(", ")):
            name, _, ms = part.partition(";dur=")
            self.stages[name].append(float(ms) / 1e3)
        return response
