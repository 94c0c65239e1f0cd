"""The doctor on any machine: bounded, complete, silent about whose machine it is."""

from __future__ import annotations

import getpass
import json
import os
import platform
import sys
from pathlib import Path

import pytest

from engram_core.errors import EngramError
from engram_core.tools import doctor, probe_host
from engram_core.tools.doctor import Diagnosis, Sample, diagnose
from engram_core.tools.probe import Reading, Sizes, rate, reading, reason
from service import cli

TINY = Sizes(
    host_bytes=1 << 20, device_bytes=1 << 20, disk_bytes=8 << 20, copy_bytes=1 << 18, wkv_outputs=64
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    return diagnose(seconds=0.5, folder=tmp_path_factory.mktemp("scratch"), sizes=TINY)


def test_everything_a_cpu_has_is_measured(found: Diagnosis) -> None:
    values = {line.name: line.value for line in found.readings}
    missing = {name for name, value in values.items() if value is None}
    assert not missing - {"gather Q2_K, huge pages", "gather E4M3_E8M0_32, huge pages"}
    for name in ("gather Q2_K, plain memory", "gather Q2_K, file mapping", "disk random 4 KiB"):
        assert values[name]
    assert values["self-check, cpu"] == 0
    assert found.samples


def test_report_says_why_there_is_no_gpu(found: Diagnosis) -> None:
    assert (found.device is None) == bool(found.why_no_device)


def test_report_is_json_and_names_nobody(found: Diagnosis) -> None:
    text = json.dumps(found.as_json())
    assert json.loads(text)["report"] == "engram doctor"
    told = " ".join(_strings(json.loads(text)))
    for secret in (platform.node(), os.getcwd(), os.path.expanduser("~"), "engram-doctor-"):
        assert secret not in told
    assert getpass.getuser() not in told.split()


def _strings(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.items() for text in _strings(list(item))]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return [value] if isinstance(value, str) else []


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    list(probe_host.probe_disk(tmp_path, TINY, 0.01))
    assert not list(tmp_path.iterdir())


def test_refused_direct_reading_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: object, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *mode)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    lines = list(probe_host.probe_disk(tmp_path, TINY, 0.01))
    told = [line.note for line in lines if line.name.startswith("disk ") and line.note]
    assert told
    assert all("O_DIRECT refused" in note for note in told)
    assert any("O_DIRECT" in text for text in _findings(lines))


def test_what_cannot_be_measured_has_a_reason_without_paths() -> None:
    def fail() -> float:
        raise OSError(2, "No such file", "/home/ann/secret")

    line = reading("x", "s", fail)
    assert (line.value, line.note) == (None, "No such file")
    assert reason(EngramError("lib /opt/ann/lib.so is old")) == "lib ... is old"


def test_rate_counts_what_was_done_in_the_time() -> None:
    assert rate(lambda: 3.0, 0.001) > 3


@pytest.mark.parametrize(
    ("readings", "rates", "words"),
    [
        ({"self-check, cpu": 2.0}, (1.0,), "self-check failed"),
        ({"self-check, cpu": None}, (1.0,), "self-check failed"),
        ({}, (10.0, 4.0), "2.5 times slower"),
        ({"gather Q2_K, plain memory": 1.0, "disk random 4 KiB": 2.0}, (1.0,), "from disk than"),
    ],
)
def test_findings_say_what_an_owner_should_know(
    readings: dict[str, float | None], rates: tuple[float, ...], words: str
) -> None:
    lines = [Reading(name, value, "") for name, value in readings.items()]
    assert words in " ".join(_findings(lines, rates))


def test_quiet_machine_has_no_findings() -> None:
    lines = [Reading("gather Q2_K, plain memory", 9.0, ""), Reading("disk random 4 KiB", 1.0, "")]
    assert not _findings(lines, (10.0, 9.0))


def _findings(lines: list[Reading], rates: tuple[float, ...] = (1.0,)) -> list[str]:
    samples = tuple(Sample(0.0, per_s, None, None) for per_s in rates)
    return list(doctor._findings(lines, samples, {}, None))


def test_command_prints_the_report_or_writes_it(
    found: Diagnosis,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    asked: dict[str, object] = {}
    monkeypatch.setattr(doctor, "diagnose", lambda **given: asked.update(given) or found)
    out = tmp_path / "report.json"
    arguments = ["doctor", "--json", "--out", str(out), "--seconds", "7"]
    monkeypatch.setattr(sys, "argv", ["engram", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert asked["seconds"] == 7
    as_read = json.loads(json.dumps(found.as_json()))
    assert json.loads(out.read_text()) == json.loads(capsys.readouterr().out) == as_read
