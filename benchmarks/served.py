"""Processes that a benchmark talks to: started on free sockets, their CPU time read, ended."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Served:
    """A process that says `ready URL` for each socket. urls: "tcp" and "unix" -> URL."""

    def __init__(self, arguments: list[str]) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ENGRAM_")}
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self.urls: dict[str, str] = {}
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ready "):
                url = line.split()[1]
                self.urls["unix" if url.startswith("unix:") else "tcp"] = url
                if len(self.urls) == 2:
                    break
        else:
            raise SystemExit(f"{arguments}: ended with status {self._process.wait()}")
        # Whatever else it says is read, so that it never waits for us.
        threading.Thread(target=self._process.stdout.read, daemon=True).start()

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far; waiting for a core is not counted."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


@contextmanager
def serving(checkpoint: Path, socket: Path, *flags: str) -> Iterator[Served]:
    """Serve a checkpoint over TCP and a Unix socket."""
    served = Served(
        ["-m", "service", "serve", str(checkpoint), "--port", "0", "--uds", str(socket), *flags]
    )
    try:
        yield served
    finally:
        served.stop()


@contextmanager
def echoing(socket: Path) -> Iterator[Served]:
    """Run the echo (`echo.py`) over TCP and a Unix socket."""
    served = Served([str(ROOT / "benchmarks" / "echo.py"), str(socket)])
    try:
        yield served
    finally:
        served.stop()
