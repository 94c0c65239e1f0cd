"""Ten times the load that is sustained, in short: nothing lost, nothing doubled, memory bounded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*flags: str) -> dict[str, object]:
    """Run `benchmarks/overload.py`; its last line."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "overload.py"), *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, found["faults"]
    return found


def test_overload_refuses_and_keeps_every_session_right() -> None:
    found = run("--seconds", "2")
    assert found["faults"] == []
    assert found["tokens_held"]


def test_clients_that_misbehave_leave_nothing_behind() -> None:
    found = run("--soak", "0.05")
    assert found["faults"] == []
    assert found["calls"]
