"""Reports of several machines: what auto takes from its own, and that it takes no other's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engram_core.doctor_report import Report, read_report
from engram_core.errors import EngramError, SchemaError
from engram_core.machine import Gpu, differences, driver_version, fingerprint, gpu_of
from engram_core.memory import Measured, Memory, Needs, Placement, plan
from engram_core.tools.probe import Sizes

GIB = 1 << 30
NEEDS = Needs(60 * GIB, GIB, GIB, GIB, GIB, 0, GIB)
H200 = Gpu("NVIDIA H200", "9.0", 143 * GIB, "580.95.05")
GB10 = Gpu("NVIDIA GB10", "12.1", 120 * GIB, "580.95.05")
HERE = fingerprint(None)

# As measured: docs/notes/doctor.md (H200, the build machine); the others are made up.
HOST = {"gather Q2_K, plain memory": 41e6, "gather E4M3_E8M0_32, plain memory": 24e6}
ON_H200 = {
    "gather Q2_K, device memory, 1024 tokens": 3.37e9,
    "gather Q2_K, pinned memory, 1024 tokens": 43e6,
    "gather E4M3_E8M0_32, device memory, 1024 tokens": 2.75e9,
    "gather E4M3_E8M0_32, pinned memory, 1024 tokens": 42e6,
}
BUILD_MACHINE = {**HOST, "disk random 4 KiB": 76e3}
SLOW_MEMORY = {"gather Q2_K, plain memory": 40e3, "disk random 4 KiB": 900e3}
NO_PINNING = {**ON_H200, "gather Q2_K, pinned memory, 1024 tokens": None}
NO_DISK = {**HOST, "disk random 4 KiB": None}
Values = dict[str, float | None]


def document(values: dict[str, Any], gpu: Gpu | None = None) -> dict[str, Any]:
    return {
        "report": "engram doctor",
        "version": 2,
        "fingerprint": fingerprint(gpu),
        "readings": [
            {"name": name, "value": value, "unit": "", "note": "" if value else "no room"}
            for name, value in values.items()
        ],
    }


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "report.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def measured(tmp_path: Path, values: dict[str, Any], *, with_gpu: bool, row: int = 84) -> Measured:
    report = read_report(written(tmp_path, document(values, H200 if with_gpu else None)))
    return report.measured(row, with_gpu=with_gpu)


# ---- what auto takes from it

ROOMY = Memory(200 * GIB)
BOTH = Memory(200 * GIB, device_free_bytes=140 * GIB)
SMALL_GPU = Memory(200 * GIB, device_free_bytes=40 * GIB)
UNIFIED = Memory(115 * GIB, device_free_bytes=3 * GIB, integrated=True)


@pytest.mark.parametrize(
    ("values", "memory", "placement"),
    [
        (BUILD_MACHINE, ROOMY, Placement.HOST),
        (BUILD_MACHINE, Memory(20 * GIB), Placement.DISK),
        (SLOW_MEMORY, ROOMY, Placement.DISK),
        (NO_DISK, ROOMY, Placement.HOST),
        (ON_H200, BOTH, Placement.DEVICE),
        (ON_H200, SMALL_GPU, Placement.HOST),
        (ON_H200, UNIFIED, Placement.DEVICE),
        (NO_PINNING, BOTH, Placement.DEVICE),
        (ON_H200 | {"disk random 4 KiB": 90e6}, SMALL_GPU, Placement.DISK),
    ],
)
def test_auto_takes_what_was_measured_fastest_of_what_fits(
    tmp_path: Path, values: Values, memory: Memory, placement: Placement
) -> None:
    with_gpu = memory.device_free_bytes is not None
    found = measured(tmp_path, values, with_gpu=with_gpu)
    ledger = plan(NEEDS, memory, measured=found)
    assert ledger.placement is placement
    assert "as the doctor measured" in ledger.why


@pytest.mark.parametrize(
    ("values", "memory", "why"),
    [
        (NO_PINNING | {"disk random 4 KiB": None}, SMALL_GPU, "host: no room; disk: no room"),
        (NO_DISK, Memory(20 * GIB), "disk: no room"),
    ],
)
def test_auto_does_not_take_what_could_not_be_had_here(
    tmp_path: Path, values: Values, memory: Memory, why: str
) -> None:
    with_gpu = memory.device_free_bytes is not None
    found = measured(tmp_path, values, with_gpu=with_gpu)
    with pytest.raises(EngramError, match=why):
        plan(NEEDS, memory, measured=found)


def test_pinned_memory_that_cannot_be_had_leaves_the_disk(tmp_path: Path) -> None:
    values = NO_PINNING | {"disk random 4 KiB": 40e3}
    ledger = plan(NEEDS, SMALL_GPU, measured=measured(tmp_path, values, with_gpu=True))
    assert ledger.placement is Placement.DISK
    assert "host: no room" in ledger.why


def test_an_operator_who_names_a_placement_gets_it(tmp_path: Path) -> None:
    found = measured(tmp_path, SLOW_MEMORY, with_gpu=False)
    assert plan(NEEDS, ROOMY, "host", measured=found).placement is Placement.HOST


def test_what_was_not_measured_keeps_its_place() -> None:
    only_disk = Measured({Placement.DISK: 1e9})
    assert plan(NEEDS, ROOMY, measured=only_disk).placement is Placement.HOST


@pytest.mark.parametrize(("row_bytes", "rate"), [(84, 41e6), (110, 41e6), (264, 24e6)])
def test_the_nearest_measured_row_stands_for_a_table(
    tmp_path: Path, row_bytes: int, rate: float
) -> None:
    found = measured(tmp_path, HOST, with_gpu=False, row=row_bytes)
    assert found.rows_per_s == {Placement.HOST: rate}


def test_report_of_a_real_h200_is_read() -> None:
    """As `engram doctor` wrote it on one (docs/notes/doctor.md)."""
    report = read_report(Path(__file__).parents[2] / "benchmarks/results/doctor_h200.json")
    found = report.measured(84, with_gpu=True)
    assert found.rows_per_s[Placement.DEVICE] > 50 * found.rows_per_s[Placement.HOST]
    assert found.rows_per_s[Placement.HOST] > 500 * found.rows_per_s[Placement.DISK]
    assert found.refused == {}
    assert plan(NEEDS, BOTH, measured=found).placement is Placement.DEVICE
    assert "gpu 'NVIDIA H200' there, None here" in report.elsewhere(HERE, with_gpu=True)


# ---- whose it is


def report_of(gpu: Gpu | None, **changed: object) -> Report:
    return Report({**fingerprint(gpu), **changed}, {}, {})


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (report_of(H200, cpu="another"), H200, "cpu 'another' there"),
        (report_of(H200, memory_gib=7), H200, "memory_gib 7 there"),
        (report_of(H200), replace(H200, driver="590.1"), "driver '580.95.05' there, '590.1' here"),
        (report_of(H200), GB10, "gpu 'NVIDIA H200' there, 'NVIDIA GB10' here"),
        (report_of(None), H200, "without a GPU"),
    ],
)
def test_report_of_another_machine_or_driver_is_told(theirs: Report, ours: Gpu, words: str) -> None:
    assert words in theirs.elsewhere(fingerprint(ours), with_gpu=True)


def test_report_of_this_machine_is_its_own() -> None:
    assert report_of(H200).elsewhere(fingerprint(H200), with_gpu=True) == ""
    assert report_of(H200).elsewhere(HERE, with_gpu=False) == "", "served on the CPU"
    assert differences(HERE, HERE, with_gpu=True) == []


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05 x",
            "580.95.05",
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.12  Wed Sep 20", "535.104.12"),
        ("", ""),
    ],
)
def test_driver_version_is_read(tmp_path: Path, text: str, version: str) -> None:
    path = tmp_path / "version"
    assert driver_version(path) == ""
    path.write_text(text)
    assert driver_version(path) == version


def test_facts_of_a_gpu_are_those_of_its_driver() -> None:
    class Told:
        name, major, minor, total_bytes = b"NVIDIA H200", 9, 0, 143 * GIB

    assert gpu_of(Told()) == replace(H200, driver=driver_version())


# ---- a file that is no report


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[]", "engram doctor"),
        ({"report": "engram doctor", "version": 1}, "version 2"),
        ({"report": "engram doctor", "version": 2}, "fingerprint"),
        (document({"x": 1.0}) | {"readings": [1]}, "reading 0"),
        (document({"x": "fast"}), "reading 0"),
        (document({"x": -1.0}), "reading 0"),
        (document({"x": float("nan")}), "reading 0"),
        (document({"x": 10**400}), "reading 0"),
        (document({"x": True}), "reading 0"),
        (" " * (1 << 20) + "{}", "at most 1048576 bytes"),
    ],
)
def test_file_that_is_no_report_is_refused(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(SchemaError, match=words):
        read_report(written(tmp_path, content))


@pytest.mark.parametrize("note", ["\ud800", "\n\x1b[31mno room", "x" * 100_000])
def test_note_is_words_in_a_line(tmp_path: Path, note: str) -> None:
    content = document({"gather Q2_K, plain memory": None})
    content["readings"][0]["note"] = note
    found = read_report(written(tmp_path, content)).measured(84, with_gpu=False)
    ledger = plan(NEEDS, ROOMY, measured=found)
    assert all(line.isprintable() and len(line) < 1000 for line in ledger.table())


def test_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_report(tmp_path / "none")


def test_sizes_of_the_doctor_name_the_rows_that_are_looked_for() -> None:
    from engram_core import doctor_report
    from engram_core.tools.probe import ROW_FORMATS

    assert {name: size for size, name in doctor_report._ROWS.items()} == ROW_FORMATS
    assert Sizes().host_bytes >= 8 * GIB
