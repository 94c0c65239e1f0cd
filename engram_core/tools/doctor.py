"""A probe of an unknown machine, three minutes at most, whose report an owner can send back.

It holds no host name, no path and no serial number. The service reads it where `doctor_report`
names it: `placement=auto` goes by what was measured, on the machine and driver of its fingerprint
(`doctor_report.py`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from engram_core.backends.stored_wkv import BATCH_CLASSES
from engram_core.doctor_report import NAME, VERSION
from engram_core.errors import EngramError
from engram_core.machine import fingerprint
from engram_core.progress import Progress
from engram_core.tools.probe import Reading, Sizes, rate, reading, reason
from engram_core.tools.probe_cuda import STORED_ENCODINGS, CudaProbe
from engram_core.tools.probe_host import WkvPass, probe_disk, probe_memory
from engram_core.tools.probe_machine import cpu_mhz, describe_machine, describe_memory
from engram_core.tools.synth import synth
from engram_core.tools.verify import verify

MAX_SECONDS = 180.0
DEFAULT_SECONDS_CPU, DEFAULT_SECONDS_CUDA = 20.0, 90.0

_NUM_READINGS_CPU, _NUM_READINGS_CUDA = 13, 32
_NUM_RACES = len(STORED_ENCODINGS) * len(BATCH_CLASSES)
"""Readings of a GPU beside those that take a share of the time each."""
_DISK_SHARES = 4
"""The scratch file is written for as long as so many readings take, at most."""
_SAMPLED_SHARE = 1 / 3
_STEADY = 1.3


@dataclass(frozen=True)
class Sample:
    """The same work again. per_s: passes over wkv a second; mhz, watts: as the machine tells."""

    at_s: float
    per_s: float
    mhz: float | None
    watts: float | None


@dataclass(frozen=True)
class Diagnosis:
    """What was found. device: of the GPU, None without one; why_no_device: then the reason.

    fingerprint: tells the machine and its driver from another (see `machine.fingerprint`)
    """

    fingerprint: dict[str, Any]
    machine: dict[str, Any]
    memory: dict[str, Any]
    device: dict[str, Any] | None
    why_no_device: str
    readings: tuple[Reading, ...]
    samples: tuple[Sample, ...]
    findings: tuple[str, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Give everything as JSON-ready values."""
        return {"report": NAME, "version": VERSION, **asdict(self)}


def diagnose(
    *,
    seconds: float | None = None,
    folder: Path | None = None,
    sizes: Sizes | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Probe this machine.

    seconds: about how long, 180 at most; left out, 20 on a CPU and 90 with a GPU
    folder: on the disk to probe; left out, where temporary files go. Needs about 1 GiB, for a while
    """
    begin, sizes = time.perf_counter(), sizes or Sizes()
    folder = folder or Path(tempfile.gettempdir())
    device, why = _open_device(sizes)
    default = DEFAULT_SECONDS_CPU if device is None else DEFAULT_SECONDS_CUDA
    budget_s = min(default if seconds is None else seconds, MAX_SECONDS)
    readings: list[Reading] = []
    try:
        total = _NUM_READINGS_CPU if device is None else _NUM_READINGS_CUDA
        share = budget_s * (1 - _SAMPLED_SHARE) / (total + _DISK_SHARES)
        total += 0 if device is None else _NUM_RACES
        for found in _readings(device, folder, sizes, share):
            readings.append(found)
            if progress is not None:
                progress(found.name, len(readings), total)
        left = begin + budget_s - time.perf_counter()
        samples = tuple(_samples(device, sizes, min(left, budget_s * _SAMPLED_SHARE)))
        described = None if device is None else device.describe()
        gpu = None if device is None else device.gpu
    finally:
        if device is not None:
            device.close()
    memory = describe_memory()
    return Diagnosis(
        fingerprint=fingerprint(gpu),
        machine=describe_machine(),
        memory=memory,
        device=described,
        why_no_device=why,
        readings=tuple(readings),
        samples=samples,
        findings=tuple(_findings(readings, samples, memory, described)),
        seconds=round(time.perf_counter() - begin, 1),
    )


def _open_device(sizes: Sizes) -> tuple[CudaProbe | None, str]:
    try:
        return CudaProbe(sizes), ""
    except (EngramError, OSError) as error:
        return None, reason(error)


def _readings(
    device: CudaProbe | None, folder: Path, sizes: Sizes, seconds: float
) -> Iterator[Reading]:
    yield from probe_memory(sizes, seconds)
    yield from probe_disk(folder, sizes, seconds)
    host = WkvPass(sizes.wkv_outputs)
    yield reading("wkv pass, 16 tokens, CPU", "ms", lambda: 1e3 / rate(host, seconds))
    yield _self_check("cpu", folder)
    if device is not None:
        yield from device.readings(seconds)
        yield _self_check("cuda:0", folder)


def _self_check(device: str, folder: Path) -> Reading:
    """Make a tiny checkpoint, load it, and hold rows, hashes, kv and gate against the plain way."""

    def outside() -> float:
        with tempfile.TemporaryDirectory(prefix="engram-doctor-", dir=folder) as scratch:
            made = synth(Path(scratch) / "t.gguf", preset="tiny", fmt="gguf", quant="Q2_K", seed=1)
            found = verify(made.path, device=device)
        return float(sum(check.outside for check in found.checks))

    return reading(f"self-check, {device}", "values beyond the promise", outside, "0 is right")


def _samples(device: CudaProbe | None, sizes: Sizes, seconds: float) -> Iterator[Sample]:
    """Run the same pass over wkv again and again: what changes is the machine's state."""
    begin = time.perf_counter()
    work = WkvPass(sizes.wkv_outputs) if device is None else device.wkv_pass
    while (at := time.perf_counter() - begin) < seconds or at == 0:
        per_s = rate(work, max(min(1.0, seconds / 10), 0.01))
        mhz, watts = (cpu_mhz(), None) if device is None else device.clock()
        yield Sample(round(at, 2), round(per_s, 3), mhz, watts)


def _findings(
    readings: list[Reading],
    samples: tuple[Sample, ...],
    memory: dict[str, Any],
    device: dict[str, Any] | None,
) -> Iterator[str]:
    """Say what an owner should know."""
    value = {found.name: found.value for found in readings}
    if any(name.startswith("self-check") and value[name] != 0 for name in value):
        yield "a self-check failed: do not serve from this machine, send the report"
    rates = [sample.per_s for sample in samples]
    if rates and max(rates) > _STEADY * min(rates):
        yield (
            f"the same work ran {max(rates) / min(rates):.1f} times slower for a while: clocks or "
            "neighbours; compare only measurements that took turns"
        )
    if memory.get("SwapTotal", 0) > memory.get("SwapFree", 0):
        yield "swap is in use: a page of a table in swap stalls a step"
    if any("refused" in found.note for found in readings if found.name.startswith("disk")):
        yield "the file system refuses O_DIRECT: the disk's readings may be the page cache's"
    if device is not None and device["integrated"]:
        yield "CPU and GPU share one memory: placement host saves nothing, keep the reserve large"
    order = [
        ("device", value.get("gather Q2_K, device memory, 1024 tokens")),
        ("host", value.get("gather Q2_K, pinned memory, 1024 tokens")),
        ("host", value.get("gather Q2_K, plain memory") if device is None else None),
        ("disk", value.get("disk random 4 KiB")),
    ]
    told = [(name, per_s) for name, per_s in order if per_s is not None]
    for (faster, per_s), (slower, other) in pairwise(told):
        if other > per_s:
            yield (
                f"rows come faster from {slower} than from {faster}, against the order that "
                "placement=auto tries by itself: give it the report (doctor_report), and send it"
            )
