"""Progress for people: bars on a terminal, plain lines elsewhere, nothing for what is quick."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

Report = Callable[[str, int, int], None]
"""Takes a stage, and how many of its bytes are done of how many."""

QUICK_S = 1.0


@contextmanager
def progress_bars() -> Iterator[Report]:
    """Show progress on stderr for the length of a block."""
    if not sys.stderr.isatty():
        yield _PlainLines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Bars(progress)


class _Bars:
    """A bar a stage."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total or None)
        self._progress.update(self._tasks[stage], completed=done, total=total or None)


class _PlainLines:
    """A line a second at most, none within the first."""

    def __init__(self) -> None:
        self._next = time.monotonic() + QUICK_S
        self._begun: dict[str, tuple[float, int]] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        since, before = self._begun.setdefault(stage, (now, done))
        if now < self._next:
            return
        self._next = now + QUICK_S
        share = f" {100 * done // total} %" if total else ""
        rate = (done - before) / (now - since) if now > since else 0.0
        speed = f", {rate / 2**20:,.0f} MiB/s" if rate else ""
        left = f", {(total - done) / rate:,.0f} s left" if rate and total else ""
        print(f"{stage}{share}{speed}{left}", file=sys.stderr, flush=True)
