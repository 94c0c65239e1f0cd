"""Processes that a benchmark talks to: started on free sockets, their CPU time read, ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Served:
    """A process that says `ready URL` for each socket. urls: "tcp" and "unix" -> URL."""

    def __init__(self, arguments: list[str]) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ENGRAM_")}
        said = tempfile.TemporaryFile("w+")  # noqa: SIM115  as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", *arguments],
            stdout=subprocess.PIPE,
            stderr=said,
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
            status = self._process.wait()
            said.seek(0)
            raise SystemExit(f"{said.read()[-4000:]}\n{arguments}: ended with status {status}")
        # Whatever else it says is read, so that it never waits for us.
        threading.Thread(target=self._process.stdout.read, daemon=True).start()

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far; waiting for a core is not counted."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def rss_bytes(self) -> int:
        """Resident memory now."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def num_descriptors(self) -> int:
        """Open descriptors now."""
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def num_threads(self) -> int:
        """Threads now."""
        return len(os.listdir(f"/proc/{self._process.pid}/task"))

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


class Counters:
    """The service's totals since the last look."""

    NAMES = ("store_hits", "store_misses", "store_duplicates", "received_bytes", "sent_bytes")

    def __init__(self, served: Served) -> None:
        self._served = served
        self._last: dict[str, float] = {}
        self.look()

    def gauge(self, name: str) -> float:
        """The present value of a metric without labels."""
        return float(re.findall(rf"^engram_{name} (\S+)$", self._text(), re.M)[0])

    def _text(self) -> str:
        with urllib.request.urlopen(f"{self._served.urls['tcp']}/metrics") as answer:
            text: str = answer.read().decode()
        return text

    def look(self) -> dict[str, float]:
        """What was added, by name; `cpu_s`: of the process."""
        text = self._text()
        now = {
            name: sum(map(float, re.findall(rf"^engram_{name}_total (\S+)$", text, re.M)))
            for name in self.NAMES
        }
        now["cpu_s"] = self._served.cpu_s()
        added = {name: value - self._last.get(name, 0.0) for name, value in now.items()}
        self._last = now
        return added


def hit_ratio(added: dict[str, float]) -> float | None:
    """Token-layers that were found, or were a batch mate's, of all that were looked for."""
    found = added["store_hits"] + added["store_duplicates"]
    total = found + added["store_misses"]
    return found / total if total else None


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
def echoing(socket: Path, *arguments: str) -> Iterator[Served]:
    """Run the echo (`echo.py`) over TCP and a Unix socket."""
    served = Served([str(ROOT / "benchmarks" / "echo.py"), str(socket), *arguments])
    try:
        yield served
    finally:
        served.stop()


@contextmanager
def barely_echoing(socket: Path) -> Iterator[Served]:
    """Run the bare echo (`bare_echo.py`) over TCP and a Unix socket."""
    served = Served([str(ROOT / "benchmarks" / "bare_echo.py"), str(socket)])
    try:
        yield served
    finally:
        served.stop()
