"""Logs: structured, on stderr, text on a terminal and JSON elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Hashable

import structlog
from structlog.typing import Processor


def configure_logs(log_format: str) -> None:
    """Set logging up for this process. log_format: auto, text or json."""
    as_text = log_format == "text" or (log_format == "auto" and sys.stderr.isatty())
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if as_text
        else structlog.processors.JSONRenderer()
    )
    faults = [] if as_text else [structlog.processors.format_exc_info]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *faults,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, handlers=[_Forward()], force=True)


class LineLimit:
    """Lets so many lines a second of each kind through, and counts what it holds back.

    Kinds are few and named by us: a client that is refused a thousand times a second must not
    fill a disk, and must not hide another's fault either.
    """

    def __init__(self, per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._clock = clock
        self._seconds: dict[Hashable, tuple[int, int]] = {}
        self._held_back: dict[Hashable, int] = {}

    def admit(self, kind: Hashable) -> int | None:
        """Return how many lines were held back since the last one; None: hold this one back."""
        now = int(self._clock())
        second, count = self._seconds.get(kind, (now, 0))
        count = count + 1 if second == now else 1
        self._seconds[kind] = now, count
        if count > self._per_s:
            self._held_back[kind] = self._held_back.get(kind, 0) + 1
            return None
        return self._held_back.pop(kind, 0)


class _Forward(logging.Handler):
    """Brings what libraries log into the same stream, a few lines a second of each."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = LineLimit(per_s=5)

    def emit(self, record: logging.LogRecord) -> None:
        held_back = self._limit.admit(record.name)
        if held_back is None:
            return
        log = structlog.get_logger(record.name)
        more = {"held_back": held_back} if held_back else {}
        log.log(record.levelno, record.getMessage(), exc_info=record.exc_info, **more)
