"""What is decided before a byte is loaded: the device, the placement, and when not to start."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from engram_core.backends import cpu, cuda, native
from engram_core.errors import Internal, SchemaError
from engram_core.meminfo import host_total_bytes
from engram_core.memory import Ledger, Placement
from engram_core.tools.doctor import diagnose
from engram_core.tools.inspect import inspect
from service import cli
from service.loading import choose_device, ledger_of, load_model
from service.settings import Settings, SettingsError
from service.state import Model
from tests.native.host_library import build_cpu_library
from tests.unit.test_doctor import TINY

GIB = 1 << 30


class OneGpu:
    """A library that tells of one GPU, as a GB10 is."""

    def __init__(self) -> None:
        self._told = native.Device(name=b"NVIDIA GB10", major=12, minor=1, integrated=1)
        self._told.total_bytes, self._told.free_bytes = 120 * GIB, -1

    def device_count(self, found: Any) -> None:
        found._obj.value = 1

    def device(self, index: int) -> native.Device:
        if index:
            raise Internal(f"CUDA device_info: device {index} of 1")
        return self._told


@pytest.fixture
def gb10(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GB10 whose memory is almost all in use still."""
    monkeypatch.setattr(native, "Native", OneGpu)
    monkeypatch.setattr(cuda, "Native", OneGpu)
    monkeypatch.setattr(cuda, "host_available_bytes", lambda: 3 * GIB)


def refused_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    """The exit status and the one line of `engram serve`."""
    monkeypatch.setattr("service.logs.configure_logs", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["engram", "serve", *arguments, "--port", "0"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    (line,) = capsys.readouterr().err.splitlines()
    return int(ended.value.code or 0), line


def test_auto_takes_the_gpu_and_knows_that_its_memory_is_the_hosts(gb10: None) -> None:
    device = choose_device("auto")
    assert (device.name, device.is_integrated, device.why) == ("cuda:0", True, "the first GPU")
    assert device.gpu is not None
    assert device.gpu.name == "NVIDIA GB10"


def test_gpu_that_is_not_there_is_named_and_auto_advised(
    gb10: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small_gguf: Path,
) -> None:
    status, line = refused_start(monkeypatch, capsys, str(small_gguf), "--device", "cuda:3")
    assert status == 1
    assert "cuda:3 cannot be used: CUDA device_info: device 3 of 1" in line
    assert "or auto" in line


def test_memory_that_a_predecessor_still_holds_is_a_reason_that_is_told(
    gb10: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small_gguf: Path,
) -> None:
    """The unit tries again after 15 s (docker/engram.service); the reserve is 16 GiB there."""
    status, line = refused_start(monkeypatch, capsys, str(small_gguf), "--device", "cuda:0")
    assert status == 1
    assert "GiB of host memory needed, 3.0 there" in line
    assert "may still be giving its memory back" in line


def test_a_gb10_is_known_to_hold_more_than_is_free_now(gb10: None) -> None:
    memory = cuda._memory(OneGpu().device(0))
    assert (memory.host_available_bytes, memory.total_bytes) == (3 * GIB, host_total_bytes())
    assert memory.device_free_bytes is None, "cudaMemGetInfo is never asked there"


@pytest.mark.parametrize("flag", ["--keys-file", "--tls-cert"])
def test_file_of_a_setting_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small_gguf: Path,
    flag: str,
) -> None:
    more = ["--tls-key", "none"] if flag == "--tls-cert" else []
    status, line = refused_start(monkeypatch, capsys, str(small_gguf), flag, "/none", *more)
    assert status == 2
    assert "/none" in line


# ---- the doctor's report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """As `engram doctor --out` writes it, of this machine."""
    folder = tmp_path_factory.mktemp("doctor")
    found = diagnose(seconds=0.5, folder=folder, sizes=TINY).as_json()
    document: dict[str, Any] = json.loads(json.dumps(found))
    return document


def served(checkpoint: Path, report: object, tmp_path: Path, **changes: Any) -> Model:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    sizes = {"kv_store_bytes": 1 << 20, "in_flight_bytes": 1 << 20, "memory_reserve_bytes": 0}
    settings = Settings(device="cpu", doctor_report=path, **sizes, **changes)
    return load_model(checkpoint, settings, lambda *_: None)


def slow_memory(report: dict[str, Any]) -> dict[str, Any]:
    """The same report of a machine whose disk is faster than its memory."""
    values = {"plain": 10.0, "huge": 9.0, "disk random": 1e6}
    readings = [
        line | {"value": value}
        for line in report["readings"]
        for word, value in values.items()
        if word in line["name"]
    ]
    return report | {"readings": readings}


def test_auto_goes_by_the_report_of_this_machine(
    official_dir: Path, report: dict[str, Any], tmp_path: Path
) -> None:
    model = served(official_dir, slow_memory(report), tmp_path)
    model.close()
    assert model.ledger.placement is Placement.DISK
    assert "rows come fastest from there" in model.ledger.why
    assert "disk 1,000,000" in model.ledger.why
    assert model.ledger.notes[-1].startswith("doctor_report is used")


def test_a_real_report_is_read_by_the_service_it_was_made_for(
    official_dir: Path, report: dict[str, Any], tmp_path: Path
) -> None:
    model = served(official_dir, report, tmp_path)
    model.close()
    assert "as the doctor measured" in model.ledger.why
    assert model.ledger.notes[-1].startswith("doctor_report is used")


def test_report_of_another_machine_is_not_used_and_that_is_told(
    official_dir: Path, report: dict[str, Any], tmp_path: Path
) -> None:
    other = slow_memory(report)
    other["fingerprint"] = {**report["fingerprint"], "cpu": "another"}
    model = served(official_dir, other, tmp_path)
    model.close()
    assert model.ledger.placement is Placement.HOST
    note = model.ledger.notes[-1]
    assert note.startswith("doctor_report is not used: it is of another machine")
    assert "cpu 'another' there" in note
    assert model.ledger.table()[-1] == note, "printed with the ledger"


def test_named_placement_stands_against_the_report(
    official_dir: Path, report: dict[str, Any], tmp_path: Path
) -> None:
    model = served(official_dir, slow_memory(report), tmp_path, placement="host")
    model.close()
    assert model.ledger.placement is Placement.HOST


def test_file_that_is_no_report_ends_the_start(official_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="doctor_report"):
        served(official_dir, {}, tmp_path)
    with pytest.raises(SettingsError, match=r"doctor_report .*: No such file"):
        load_model(official_dir, Settings(doctor_report=tmp_path / "no"), lambda *_: None)


@pytest.mark.parametrize("is_native", [True, False], ids=["own gate", "torch"])
def test_the_loops_thread_takes_longer_reads_where_our_gate_serves(
    is_native: bool, official_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gate of 64 tokens takes 72 us, torch's 1,500: a loop may not be kept for so long."""
    library = build_cpu_library(tmp_path, "-O3") if is_native else None
    monkeypatch.setattr(cpu, "find_library", lambda: library)
    model = load_model(official_dir, Settings(), lambda *_: None)
    near_tokens = model.limits.near_tokens
    model.close()
    assert near_tokens == (64 if is_native else 16)


def test_inspect_tells_the_ledger_that_serving_goes_by(small_gguf: Path) -> None:
    settings = Settings(device="cpu", kv_store_bytes=1 << 24, shared_memory_bytes=1 << 20)
    told = inspect(small_gguf, ledger_of(settings)).ledgers["host"]
    model = load_model(small_gguf, settings, lambda *_: None)
    try:
        assert isinstance(told, Ledger)
        assert told.lines == model.ledger.lines
        assert {"in flight", "held ids", "shared memory"} <= {line.name for line in told.lines}
    finally:
        model.close()


def test_inspect_asks_the_gpu_and_takes_its_defaults(
    small_gguf: Path, gb10: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "host_available_bytes", lambda: 100 * GIB)
    ledgers = inspect(small_gguf, ledger_of(Settings())).ledgers
    device = ledgers["device"]
    assert isinstance(device, Ledger)
    assert next(line.num_bytes for line in device.lines if line.name == "reserve") == 16 * GIB
    assert "one memory here" in str(ledgers["host"])
