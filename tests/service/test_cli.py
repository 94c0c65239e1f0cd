"""What the command line says to common mistakes: one line, and status 2 for wrong usage."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engram_core.tools.presets import installed_tokenizer
from engram_core.tools.synth import synth
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
        (
            ("hash", "FILE", 1, "abc"),
            "engram: ID: not an integer of int64: expected an int64 in decimal, such as 17, "
            "got abc\n",
            1,
        ),
        (("compare", "A", "B", "--text", "NONE"), "engram: NONE: No such file or directory\n", 1),
        (("compare", "A", "B", "--text", "FILE"), None, 1),
        (
            ("serve", ""),
            "engram: Invalid value for 'CKPT': expected a path, got an empty one;"
            " is a variable not set?\n",
            2,
        ),
        (
            ("doctor", "--out", "none/report.json"),
            "engram: --out none/report.json: expected a file to write,"
            " got one in none, which is no folder\n",
            1,
        ),
        (
            ("doctor", "--out", "."),
            "engram: --out .: expected a file to write, got a folder\n",
            1,
        ),
        (
            ("synth", "OUT", "--seed", "-1"),
            "engram: Invalid value for '--seed': Input should be greater than or equal to 0\n",
            2,
        ),
        (
            ("verify", "FILE", "--seed", "-1"),
            "engram: Invalid value for '--seed': Input should be greater than or equal to 0\n",
            2,
        ),
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


def test_a_wrong_tokenizer_is_refused_by_the_name_it_was_given(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("no JSON")
    synth(Path("tiny.gguf"), preset="tiny", fmt="gguf", quant="Q2_K", seed=1)
    both = ("compare", "tiny.gguf", "tiny.gguf", "--text", "FILE", "--tokenizer")
    for arguments in (("synth", "OUT", "--tokenizer", "FILE"), (*both, "FILE")):
        error, status = said(monkeypatch, capsys, *arguments)
        assert (error.startswith("engram: FILE: not a tokenizer.json: "), status) == (True, 1)
    installed = installed_tokenizer()
    assert installed is not None
    error, status = said(monkeypatch, capsys, *both, installed)
    assert "expected the tokenizer of tiny.gguf, whose ids are 0..10, got id " in error
    assert status == 1
