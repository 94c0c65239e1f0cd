"""The doctor's report, read again: what it measured decides where tables lie, on its own machine.

A report is a file like any other: bounded, checked, and refused where it is not one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram_core.errors import SchemaError
from engram_core.machine import Fingerprint, differences
from engram_core.memory import Measured, Placement

NAME, VERSION = "engram doctor", 2

_MAX_BYTES = 1 << 20
_NOTE_CHARACTERS = 200
_ROWS = {84: "Q2_K", 264: "E4M3_E8M0_32"}
"""Bytes of a stored row that the doctor gathers -> its name in a reading."""


@dataclass(frozen=True)
class Report:
    """values: by a reading's name, None = it could not be measured; notes: then why."""

    fingerprint: Fingerprint
    values: Mapping[str, float | None]
    notes: Mapping[str, str]

    def elsewhere(self, ours: Fingerprint, *, with_gpu: bool) -> str:
        """Say why it is not of this machine; "" if it is. with_gpu: a GPU is used."""
        if with_gpu and self.fingerprint.get("gpu") is None:
            return "it was made without a GPU"
        told = [each[:200] for each in differences(self.fingerprint, ours, with_gpu=with_gpu)]
        return f"it is of another machine or driver ({'; '.join(told)})" if told else ""

    def measured(self, row_bytes: int, *, with_gpu: bool) -> Measured:
        """Return what decides about tables of such rows.

        row_bytes: of a stored row; the nearest that was measured stands for it
        """
        rows = _ROWS[min(_ROWS, key=lambda known: abs(known - row_bytes))]
        if with_gpu:
            sources = {
                Placement.DEVICE: f"gather {rows}, device memory, 1024 tokens",
                Placement.HOST: f"gather {rows}, pinned memory, 1024 tokens",
                Placement.DISK: "disk random 4 KiB",
            }
        else:
            sources = {
                Placement.HOST: f"gather {rows}, plain memory",
                Placement.DISK: "disk random 4 KiB",
            }
        rates, refused = {}, {}
        for placement, name in sources.items():
            value = self.values.get(name)
            if value is not None:
                rates[placement] = value
            elif name in self.values:
                refused[placement] = self.notes[name] or "could not be measured"
        return Measured(rates, refused)


def read_report(path: Path) -> Report:
    """Read what `engram doctor --out` wrote.

    Raises: OSError; SchemaError: it is no such report, or of another version.
    """
    with path.open("rb") as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise _no_report(path, f"at most {_MAX_BYTES} bytes", "more")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_report(path, "JSON", str(error)) from None
    if not isinstance(document, dict) or document.get("report") != NAME:
        raise _no_report(path, f'an object with "report": "{NAME}"', "something else")
    if document.get("version") != VERSION:
        got = f"version {document.get('version')!r}"[:80]
        raise _no_report(path, f"version {VERSION} (run `engram doctor --out` again)", got)
    fingerprint, readings = document.get("fingerprint"), document.get("readings")
    if not isinstance(fingerprint, dict) or not isinstance(readings, list):
        raise _no_report(path, "a fingerprint and readings", "something else")
    values, notes = {}, {}
    for index, line in enumerate(readings):
        if not _is_reading(line):
            raise _no_report(path, f"a name and a value in reading {index}", repr(line)[:80])
        values[line["name"]] = None if line["value"] is None else float(line["value"])
        notes[line["name"]] = _words(line["note"])
    return Report(fingerprint, values, notes)


def _is_reading(line: Any) -> bool:
    if not isinstance(line, dict) or not {"name", "value", "note"} <= line.keys():
        return False
    value = line["value"]
    # Not `isfinite`: an integer may be larger than any float.
    is_number = type(value) in (int, float) and 0 <= value <= sys.float_info.max
    return (
        isinstance(line["name"], str)
        and isinstance(line["note"], str)
        and (value is None or is_number)
    )


def _words(note: str) -> str:
    """Return a note as it may stand in a line of a log, or of `info`."""
    plain = (letter if letter.isprintable() else " " for letter in note[:_NOTE_CHARACTERS])
    return "".join(plain).strip()


def _no_report(path: Path, expected: str, got: str) -> SchemaError:
    return SchemaError(
        f"doctor_report {path}: expected {expected}, got {got}", expected=expected, got=got
    )
