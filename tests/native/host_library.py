"""csrc's headers built for the host: the same formats, the same bits, without a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from engram_core.backends.cpu import CpuLibrary

CPU = Path(__file__).parents[2] / "csrc" / "cpu"
CPU_FLAGS = [
    *("-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror", "-shared", "-fPIC", "-pthread"),
]
SOURCE = Path(__file__).parents[2] / "csrc" / "tests" / "formats_host.cc"


def build_host_library(folder: Path) -> ctypes.CDLL:
    """Compile csrc/tests into a folder and open it; skips where there is no compiler."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = folder / "formats.so"
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    command = [compiler, *flags, "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    for name, arguments in {
        "host_row_bytes": (c_int32, c_int64),
        "host_arranged_bytes": (c_int32, c_int64, c_int64),
        "host_floor_mod": (c_int64, c_int64),
    }.items():
        getattr(loaded, name).restype = c_int64
        getattr(loaded, name).argtypes = arguments
    return loaded


def build_cpu_library(folder: Path, *flags: str) -> CpuLibrary:
    """Compile csrc/cpu with warnings as errors; skips where there is no compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    path = folder / f"cpu{'_'.join(flags)}.so"
    sources = [str(CPU / name) for name in ("gate.cc", "sessions.cc")]
    subprocess.run([compiler, *CPU_FLAGS, *flags, *sources, "-o", str(path)], check=True)
    return CpuLibrary(path)


def address(array: NDArray[Any]) -> c_void_p:
    """Where an array's bytes begin."""
    return c_void_p(array.ctypes.data)
