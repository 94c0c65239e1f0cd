"""What tells one machine from another, without naming it: processor, memory, GPU, its driver."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GIB = 1 << 30

Fingerprint = Mapping[str, str | int | None]
"""Name -> value. Those of a GPU are None without one."""

HOST_FACTS = ("architecture", "cpu", "memory_gib")
GPU_FACTS = ("gpu", "compute_capability", "gpu_gib", "driver")


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver tells it. driver: the kernel module's version, "" where untold."""

    name: str
    compute_capability: str
    total_bytes: int
    driver: str


def gpu_of(properties: Any) -> Gpu:
    """Take a GPU's facts. properties: `backends.native.Device`"""
    return Gpu(
        name=properties.name.decode(errors="replace"),
        compute_capability=f"{properties.major}.{properties.minor}",
        total_bytes=int(properties.total_bytes),
        driver=driver_version(),
    )


def fingerprint(gpu: Gpu | None) -> dict[str, str | int | None]:
    """Take this machine's: what changes how fast memory is, and nothing that names its owner.

    gpu: the one that is used or was probed; None = none
    """
    kib = re.search(r"^MemTotal:\s+(\d+) kB$", _read(Path("/proc/meminfo")), re.MULTILINE)
    return {
        "architecture": platform.machine(),
        "cpu": cpu_model(_read(Path("/proc/cpuinfo"))),
        # A kernel's update moves MemTotal by megabytes.
        "memory_gib": round(int(kib[1]) * 1024 / _GIB) if kib else 0,
        "gpu": gpu.name if gpu else None,
        "compute_capability": gpu.compute_capability if gpu else None,
        "gpu_gib": round(gpu.total_bytes / _GIB) if gpu else None,
        "driver": gpu.driver if gpu else None,
    }


def differences(theirs: Fingerprint, ours: Fingerprint, *, with_gpu: bool) -> list[str]:
    """Say what tells two machines apart. with_gpu: False = only the host is compared."""
    names = (*HOST_FACTS, *(GPU_FACTS if with_gpu else ()))
    return [
        f"{name} {theirs.get(name)!r} there, {ours.get(name)!r} here"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]


def cpu_model(cpuinfo: str) -> str:
    """Return the processor's name in the text of /proc/cpuinfo (on Arm its part number)."""
    found = re.search(r"^(?:model name|CPU part)\s*: (.*)$", cpuinfo, re.MULTILINE)
    return found[1] if found else ""


def driver_version(told: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of NVIDIA's kernel module; "" where it is not told."""
    found = re.search(r"Kernel Module\D*?(?:for \w+)?\s+(\d+\.\d+(?:\.\d+)?)", _read(told))
    return found[1] if found else ""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
