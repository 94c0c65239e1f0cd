"""Logs: structured, on stderr, text on a terminal and JSON elsewhere."""

from __future__ import annotations

import logging
import sys

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


class _Forward(logging.Handler):
    """Brings what libraries log into the same stream."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger(record.name)
        log.log(record.levelno, record.getMessage(), exc_info=record.exc_info)
