"""Progress as plain lines: share, rate and time left; nothing for what is quick."""

from __future__ import annotations

import pytest

from service import console


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(console.time, "monotonic", made)
    return made


def test_lines_say_rate_and_time_left(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    mib = 1 << 20
    with console.progress_bars() as report:
        report("extract", 0, 1_000 * mib)
        clock.now += 2.0
        report("extract", 200 * mib, 1_000 * mib)
    assert capsys.readouterr().err == "extract 20 %, 100 MiB/s, 8 s left\n"


def test_what_is_quick_says_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress_bars() as report:
        report("extract", 0, 10)
        clock.now += 0.5
        report("extract", 10, 10)
    assert capsys.readouterr().err == ""
