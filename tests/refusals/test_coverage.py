"""No refusal of the interface is without a test at a real server."""

from __future__ import annotations

from pathlib import Path

from service.problems import PROBLEMS

TESTS = Path(__file__).parents[1]

IN_PROCESS = {"loading": 503, "shard_down": 503, "internal": 500}
"""What a healthy server does not show: `tests/service` makes them in process."""


def test_every_code_is_refused_by_a_named_test() -> None:
    served = "".join(
        path.read_text()
        for folder in ("refusals/test_requests.py", "integration/test_lifecycle.py")
        for path in [TESTS / folder]
    )
    in_process = "".join(path.read_text() for path in (TESTS / "service").glob("test_*.py"))
    for error, kind in PROBLEMS.items():
        is_hidden = IN_PROCESS.get(error.code) == kind.status or kind.status == 500
        if is_hidden:
            code = "internal" if kind.status == 500 else error.code
            assert f'"{code}"' in in_process, code
        else:
            assert f'({kind.status}, "{error.code}")' in served, error.code
