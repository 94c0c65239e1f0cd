"""What the command line says to common mistakes: one line, and status 2 for wrong usage."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from service import cli

Capture = pytest.CaptureFixture[str]


def said(monkeypatch: pytest.MonkeyPatch, capsys: Capture, *arguments: object) -> tuple[str, int]:
    """Run a command that fails; return what it said on stderr beside help, and its status."""
    monkeypatch.setattr(sys, "argv", ["engram", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return capsys.readouterr().err, ended.value.code


@pytest.mark.parametrize("arguments", [(), ("keys",)])
def test_no_arguments_is_help_and_no_empty_error(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, arguments: tuple[str, ...]
) -> None:
    error, status = said(monkeypatch, capsys, *arguments)
    assert status == 2
    assert "engram: " not in error


@pytest.mark.parametrize(
    ("arguments", "line", "status"),
    [
        (("servee",), "engram: No such command 'servee'. Did you mean 'serve'?\n", 2),
        (("verify", "FILE", "--porrt"), "engram: No such option: --porrt\n", 2),
        (
            ("doctor", "--folder", "NONE"),
            "engram: --folder NONE: expected a folder, got none of that name\n",
            1,
        ),
        (("hash", "FILE", 1, "abc"), "engram: ID 'abc': not an integer of int64\n", 1),
        (("compare", "A", "B", "--text", "NONE"), "engram: NONE: No such file or directory\n", 1),
        (("compare", "A", "B", "--text", "FILE"), None, 1),
    ],
)
def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    tmp_path: Path,
    arguments: tuple[object, ...],
    line: str | None,
    status: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_bytes(b"text \xff")
    expected = line or "engram: FILE: expected UTF-8 text, got other bytes at 5\n"
    assert said(monkeypatch, capsys, *arguments) == (expected, status)
