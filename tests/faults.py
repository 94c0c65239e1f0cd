"""Named faults, put into a copy of the product one at a time: each must be caught by a test.

`python -m tests.faults [NAME ...]` (or `make faults`) copies packages and tests to a temporary
folder, replaces an exact piece of text, runs the tests that should notice, and fails when they
pass. A control runs the same tests on an unpatched copy and must pass. The working tree is never
touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.fault_list import FAULTS, Fault

ROOT = Path(__file__).parents[1]
COPIED = (
    *("engram_core", "engram_client", "service", "csrc", "tests", "openapi", "proto", "benchmarks"),
    "pyproject.toml",
)
AT_ONCE = 2
TIMEOUT_S = 120
CONTROL_TIMEOUT_S = 900
"""It runs what all the faults run, one after the other."""

# An editable install finds modules by a hook that goes before PYTHONPATH; Python runs this file at
# start, and the hook goes away.
SITECUSTOMIZE = """\
import sys
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "ScikitBuildRedirectingFinder"]
"""


@dataclass(frozen=True)
class Outcome:
    """What came of one fault. note: the test that caught it, or what went wrong."""

    fault: str
    is_good: bool
    note: str
    seconds: float


def make_copy(folder: Path) -> None:
    """Copy packages and tests, compiled files included (their times are kept)."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target)
        elif source.exists():
            shutil.copy2(source, target)
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)


def patch(folder: Path, fault: Fault) -> None:
    """Replace the fault's texts. Raises: ValueError for one that is not there exactly once."""
    path = folder / fault.file
    text = path.read_text()
    for old, new in fault.changes:
        if text.count(old) != 1:
            raise ValueError(f"{fault.file} holds {old!r} {text.count(old)} times, expected once")
        text = text.replace(old, new)
    path.write_text(text)
    if path.suffix == ".py":
        compile(text, fault.file, "exec")


def run_tests(folder: Path, tests: Sequence[str], timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    """Run pytest on the copy: exit status and output."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ENGRAM_", "PYTEST_"))}
    env |= {
        "PYTHONPATH": str(folder),
        "FAULTS_COPY": str(folder),
        "LAWS_PROFILE": "faults",
        "OMP_NUM_THREADS": "1",
        "MACHINE_STEPS": "4000",
        "MACHINE_SEED": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", *tests]
    command += ["-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end within {timeout_s} s"
    return done.returncode, done.stdout + done.stderr


def try_fault(fault: Fault) -> Outcome:
    """Put one fault in; good if its tests fail (and nothing else goes wrong)."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fault-") as name:
        folder = Path(name)
        make_copy(folder)
        try:
            patch(folder, fault)
        except (ValueError, OSError, SyntaxError) as error:
            return Outcome(fault.name, False, f"does not apply: {error}", 0.0)
        status, output = run_tests(folder, fault.tests)
    seconds = time.monotonic() - started
    caught = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if status == 1 and caught:
        return Outcome(fault.name, True, caught[0].split(" - ")[0].split(" ", 1)[1], seconds)
    note = "NOT CAUGHT" if status == 0 else f"pytest ended with {status}: {output[-300:]}"
    return Outcome(fault.name, False, note, seconds)


def control(faults: Sequence[Fault]) -> Outcome:
    """All tests of all faults on an unpatched copy: they must pass."""
    started = time.monotonic()
    tests = sorted({test for fault in faults for test in fault.tests})
    with tempfile.TemporaryDirectory(prefix="fault-") as name:
        make_copy(Path(name))
        status, output = run_tests(Path(name), tests, CONTROL_TIMEOUT_S)
    note = f"{len(tests)} selections pass" if status == 0 else output[-2000:]
    return Outcome("(control: no fault)", status == 0, note, time.monotonic() - started)


def main(names: Sequence[str]) -> int:
    """Try all faults, or those named; print a table; 1 if one was not caught."""
    unknown = set(names) - {fault.name for fault in FAULTS}
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}")
        return 2
    faults = [fault for fault in FAULTS if not names or fault.name in names]
    started = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = [pool.submit(control, faults), *(pool.submit(try_fault, f) for f in faults)]
        outcomes = []
        for job in running:
            outcome = job.result()
            outcomes.append(outcome)
            mark = "ok  " if outcome.is_good else "FAIL"
            print(f"{mark} {outcome.fault:34} {outcome.seconds:5.1f} s  {outcome.note}", flush=True)
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    print(
        f"{len(faults)} faults, {len(faults) - len(bad)} caught, {len(bad)} not, "
        f"{time.monotonic() - started:.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
