"""From a checkpoint's path to what is served: device, sizes, backend, self-check, engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from engram_core.backends import cuda, native
from engram_core.backends.base import Backend
from engram_core.checkpoint import Checkpoint, open_checkpoint
from engram_core.doctor_report import read_report
from engram_core.engine import Engine
from engram_core.engine_types import EngineLimits
from engram_core.errors import EngramError
from engram_core.geometry import Geometry
from engram_core.loader import ledger_on_cpu, load
from engram_core.machine import Gpu, fingerprint, gpu_of
from engram_core.memory import Budget, Ledger, Measured
from service.settings import GIB, MIB, Settings, SettingsError
from service.state import Model

log = structlog.get_logger("engram.load")

TORCH_NEAR_TOKENS = 16
"""Reads up to this size are run on the event loop's thread, where torch gates: 400 us, and handing
them over costs 100 to 300 more (docs/notes/fast_path.md)."""

CPU_NEAR_TOKENS = 64
"""The same where our own gate does, for a residual of one session whose kv is there: 72 us of a
gate instead of some 500 on the way through a lane."""

CUDA_NEAR_TOKENS = 512
"""The same on a GPU, for a residual of one session whose kv is there: 25 to 600 us that wait for
nothing (`cuda_near.py`), instead of 1,100 on the way through a lane. Anything else up to 64."""

CHUNK_TOKENS = 256
"""Of a prefill on the CPU: four pieces of 64 take 1.3 times as long. Reads of up to 64 tokens do
not wait for it (`beside.py`)."""

CUDA_CHUNK_TOKENS = 2048
"""The same on a GPU, where it is 3 ms: 8,192 tokens take 3.3 ms so, and 4.5 in pieces of 256."""

ProgressReport = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Sizes:
    """The settings whose defaults depend on the device."""

    kv_store_bytes: int
    ahead_tokens: int
    in_flight_bytes: int
    memory_reserve_bytes: int

    @classmethod
    def of(cls, settings: Settings, *, is_cuda: bool, is_integrated: bool = False) -> Sizes:
        """Return what was set, else the default of the device."""
        kv_store = 256 * MIB
        if is_cuda:
            kv_store = 2 * GIB if is_integrated else 8 * GIB
        return cls(
            kv_store_bytes=_or(settings.kv_store_bytes, kv_store),
            ahead_tokens=_or(settings.ahead_tokens, 8192 if is_cuda else 64),
            in_flight_bytes=_or(settings.in_flight_bytes, 512 * MIB if is_integrated else GIB),
            memory_reserve_bytes=_or(
                settings.memory_reserve_bytes, 16 * GIB if is_integrated else GIB
            ),
        )


@dataclass(frozen=True)
class Device:
    """What is computed on. name: "cpu" or "cuda:N"; why: the reason for the choice."""

    name: str
    why: str
    is_integrated: bool = False
    gpu: Gpu | None = None

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.name != "cpu"


def choose_device(name: str) -> Device:
    """Return the device a setting means: auto is the first GPU that can be used, else the CPU.

    Raises EngramError: the device that was asked for is not there.
    """
    if name == "cpu":
        return Device("cpu", "asked for")
    asked = "cuda:0" if name == "auto" else name
    try:
        properties = native.Native().device(int(asked.removeprefix("cuda:")))
    except (EngramError, OSError) as error:
        if name == "auto":
            return Device("cpu", f"no GPU can be used: {error}")
        raise EngramError(
            f"device {name} cannot be used: {error}; name another, or auto (the CPU without a GPU)"
        ) from error
    why = "the first GPU" if name == "auto" else "asked for"
    return Device(asked, why, bool(properties.integrated), gpu_of(properties))


def ledger_of(settings: Settings) -> Callable[[Checkpoint, str], Ledger]:
    """Return what says how much memory a placement takes when served with these settings.

    Raises EngramError: no such device. What is returned raises MemoryShort, SettingsError.
    """
    device = choose_device(settings.device)
    sizes = Sizes.of(settings, is_cuda=device.is_cuda, is_integrated=device.is_integrated)
    budget = _budget(settings, sizes)

    def ledger(checkpoint: Checkpoint, placement: str) -> Ledger:
        num_slots = _num_slots(sizes.kv_store_bytes, checkpoint.geometry)
        return _ledger(checkpoint, device, placement, num_slots, budget, None)

    return ledger


def load_model(path: Path, settings: Settings, report: ProgressReport) -> Model:
    """Load a checkpoint and check the backend; the calling thread does all the work.

    Raises CheckpointError, MemoryShort, SelfCheckFailed, SettingsError, EngramError.
    """
    report("opening", 0, 0)
    checkpoint = open_checkpoint(path)
    device = choose_device(settings.device)
    log.info("device", device=device.name, why=device.why)
    sizes = Sizes.of(settings, is_cuda=device.is_cuda, is_integrated=device.is_integrated)
    budget = _budget(settings, sizes)
    num_slots = _num_slots(sizes.kv_store_bytes, checkpoint.geometry)
    measured, note = _measured(settings.doctor_report, checkpoint, device)
    if note:
        log.info("doctor_report", told=note)
    ledger = _ledger(checkpoint, device, settings.placement, num_slots, budget, measured)
    ledger = replace(ledger, notes=(*ledger.notes, *([note] if note else [])))
    backend = load(
        checkpoint,
        device=device.name,
        placement=ledger.placement,
        num_slots=num_slots,
        budget=budget,
        progress=report,
        graphs=settings.graphs,
    )
    report("self-check", 0, 0)
    backend.self_check()
    limits = EngineLimits(
        max_tokens=settings.max_tokens,
        max_sessions=settings.max_sessions,
        max_held_tokens=settings.max_held_tokens,
        session_ttl_s=settings.session_ttl_s,
        ahead_tokens=sizes.ahead_tokens,
        chunk_tokens=CUDA_CHUNK_TOKENS if device.is_cuda else CHUNK_TOKENS,
        near_tokens=_near_tokens(backend, is_cuda=device.is_cuda),
    )
    engine = Engine(backend, limits)
    return Model(engine, backend, checkpoint, limits, ledger, sizes.in_flight_bytes)


def _near_tokens(backend: Backend, *, is_cuda: bool) -> int:
    if is_cuda:
        return CUDA_NEAR_TOKENS
    return CPU_NEAR_TOKENS if backend.near_reads else TORCH_NEAR_TOKENS


def _budget(settings: Settings, sizes: Sizes) -> Budget:
    return Budget(
        sizes.in_flight_bytes,
        settings.max_held_tokens,
        sizes.memory_reserve_bytes,
        settings.shared_memory_bytes,
        settings.wkv_copy == "on",
    )


def _measured(
    path: Path | None, checkpoint: Checkpoint, device: Device
) -> tuple[Measured | None, str]:
    """Read the doctor's report: what it measured, None if it is of elsewhere; and what to say.

    Raises: SettingsError: there is no such file; SchemaError: it is no report.
    """
    if path is None:
        return None, ""
    try:
        report = read_report(path)
    except OSError as error:
        raise SettingsError(f"doctor_report {path}: {error.strerror}") from None
    elsewhere = report.elsewhere(fingerprint(device.gpu), with_gpu=device.is_cuda)
    if elsewhere:
        return None, (
            f"doctor_report is not used: {elsewhere}; run `engram doctor --out` on this machine"
        )
    largest = max(checkpoint.layers, key=lambda layer: layer.table.num_rows)
    measured = report.measured(largest.table.row_bytes, with_gpu=device.is_cuda)
    return measured, "doctor_report is used"


def _ledger(
    checkpoint: Checkpoint,
    device: Device,
    placement: str,
    num_slots: int,
    budget: Budget,
    measured: Measured | None,
) -> Ledger:
    if device.is_cuda:
        return cuda.plan_on_device(
            checkpoint,
            device=device.name,
            placement=placement,
            num_slots=num_slots,
            budget=budget,
            measured=measured,
        )
    return ledger_on_cpu(
        checkpoint, num_slots=num_slots, placement=placement, budget=budget, measured=measured
    )


def _num_slots(kv_store_bytes: int, geometry: Geometry) -> int:
    """Return how many kv entries the store holds. Raises SettingsError: less than one batch."""
    num_slots = kv_store_bytes // geometry.kv_bytes
    least = EngineLimits().chunk_tokens
    if num_slots < least:
        raise SettingsError(
            f"kv_store_bytes: {kv_store_bytes} holds {num_slots} entries of {geometry.kv_bytes} "
            f"bytes; at least {least} are needed: {least * geometry.kv_bytes} bytes"
        )
    return num_slots


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
