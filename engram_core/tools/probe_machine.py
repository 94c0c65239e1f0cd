"""What a machine is: processor, memory, limits. No names of hosts, users or files, no serials."""

from __future__ import annotations

import os
import platform
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram_core.machine import cpu_model
from engram_core.meminfo import host_available_bytes

_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "amx_bf16",
    "asimd",
    "bf16",
    "sve",
    "i8mm",
    "hypervisor",
)


def describe_machine() -> dict[str, Any]:
    """Tell processor, kernel and versions."""
    text = _read("/proc/cpuinfo")
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    known = set(flags[1].split()) if flags else set()
    kernel = re.match(r"\d+\.\d+", platform.release())
    return {
        "architecture": platform.machine(),
        "cpu": cpu_model(text),
        "cpu_flags": [flag for flag in _FLAGS if flag in known],
        "num_cpus": len(os.sched_getaffinity(0)),
        "kernel": f"{platform.system()} {kernel[0] if kernel else ''}".strip(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }


def describe_memory() -> dict[str, Any]:
    """Tell memory readings in bytes. None: no limit, or nothing to read."""
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    pages = re.search(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled"))
    return {
        **{name: int(kib[name]) * 1024 for name in _KIB if name in kib},
        "available_bytes": host_available_bytes(),
        "memlock_limit_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "transparent_huge_pages": pages[1] if pages else None,
    }


_KIB = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")


def cpu_mhz() -> float | None:
    """Read the clock of the fastest core, if this machine tells it."""
    folder = Path("/sys/devices/system/cpu")
    khz = [_read(path) for path in folder.glob("cpu[0-9]*/cpufreq/scaling_cur_freq")]
    told = [int(text) / 1e3 for text in khz if text.strip().isdigit()]
    told += [float(mhz) for mhz in re.findall(r"cpu MHz\s*: ([\d.]+)", _read("/proc/cpuinfo"))]
    return max(told, default=None)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
