"""Probes of a CUDA device: random rows by allocation kind, copies, registration, wkv, clocks.

Every kernel is one the service runs; numbers are by the host's clock around 16 launches, so they
hold what a caller waits, not what a kernel alone takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ctypes import byref, pointer
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from engram_core.backends import native as abi
from engram_core.backends.device import DeviceBuffer, Event, PinnedBuffer, Stream
from engram_core.backends.native import Native, Unsupported, cublaslt_candidates
from engram_core.backends.race import Race
from engram_core.backends.stored_wkv import (
    BATCH_CLASSES,
    CHAIN,
    STORED_FORMS,
    arranged_bytes,
)
from engram_core.errors import EngramError
from engram_core.machine import Gpu, gpu_of
from engram_core.meminfo import host_available_bytes
from engram_core.tools.probe import (
    IN_FEATURES,
    ROW_FORMATS,
    ROWS_PER_TOKEN,
    Reading,
    Sizes,
    rate,
    reading,
    reason,
)
from engram_core.tools.probe_driver import Clocks, Registered

_LAUNCHES = 16
_GATHERED_TOKENS = (64, 1024)
_GEMM_TOKENS = 1024
_WORKSPACE_BYTES = 32 << 20
_SEED_BYTES = 16 << 20


STORED_ENCODINGS = ("E4M3_E8M0_32", "Q8_0", "Q4_K", "Q3_K", "Q2_K")
"""Types of wkv that kernels multiply as stored."""


class Closes(Protocol):
    """Something the device holds for us."""

    def close(self) -> None:
        """Free it."""


Part = TypeVar("Part", bound=Closes)


def _by_time(item: tuple[str, float]) -> float:
    return item[1]


class CudaProbe:
    """The first CUDA device. Raises: Unsupported, Internal without one that can be used."""

    def __init__(self, sizes: Sizes) -> None:
        self._native = Native()
        self._sizes = sizes
        self._device = self._native.device(0)
        if not self._device.has_image:
            raise Unsupported(
                f"no kernels for compute capability {self._device.major}.{self._device.minor}"
            )
        self._owner = ExitStack()
        self._stream = self._own(Stream(self._native))
        self._end = self._own(Event(self._native))
        self._seed = self._random(_SEED_BYTES)
        self._wkv = self._filled(sizes.wkv_outputs * IN_FEATURES * 2)
        self._rows = self._filled(_GEMM_TOKENS * IN_FEATURES * 2)
        self._kv = self._own(DeviceBuffer(self._native, _GEMM_TOKENS * sizes.wkv_outputs * 2))
        try:
            self._clocks: Clocks | None = Clocks(0)
        except (OSError, AttributeError):
            self._clocks = None

    @property
    def gpu(self) -> Gpu:
        """What tells it from another."""
        return gpu_of(self._device)

    def describe(self) -> dict[str, Any]:
        """Tell what the device is."""
        device = self._native.device(0)
        return {
            "name": device.name.decode(errors="replace"),
            "compute_capability": f"{device.major}.{device.minor}",
            "num_sms": device.num_sms,
            "integrated": bool(device.integrated),
            "total_bytes": device.total_bytes,
            "free_bytes": None if device.free_bytes < 0 else device.free_bytes,
            "architectures": self._native.architectures,
        }

    def readings(self, seconds: float) -> Iterator[Reading]:
        """Measure everything; one reading takes `seconds`."""
        device_bytes = min(self._sizes.device_bytes, self._free_bytes() // 4)
        host_bytes = min(self._sizes.host_bytes, host_available_bytes() // 8)
        device, pinned = DeviceBuffer(self._native, device_bytes), None
        try:
            yield from self._gathers("device memory", device.address, device_bytes, seconds)
            pinned = PinnedBuffer(self._native, host_bytes)
            yield from self._gathers("pinned memory", pinned.address, host_bytes, seconds)
            yield from self._copies(device, pinned, seconds)
        finally:
            device.close()
            if pinned is not None:
                pinned.close()
        yield from self._registered(host_bytes, seconds)
        yield from self._small_batches()
        passes = f"wkv pass, 16 tokens, {self._device.name.decode(errors='replace')}"
        yield reading(passes, "ms", lambda: 1e3 / rate(self.wkv_pass, seconds))
        yield self._gemm(seconds)

    def wkv_pass(self) -> float:
        """Run the chain kernel over wkv, 16 tokens, 16 times; return 16."""
        params = self._project(16)
        return self._launch(lambda _: self._native.project_chain(byref(params)))

    def clock(self) -> tuple[float | None, float | None]:
        """Return MHz and watts now."""
        return (None, None) if self._clocks is None else self._clocks.read()

    def close(self) -> None:
        """Free everything."""
        self._owner.close()

    def _gathers(
        self, kind: str, address: int, num_bytes: int, seconds: float
    ) -> Iterator[Reading]:
        for name, row_bytes in ROW_FORMATS.items():
            num_rows = (num_bytes - 16) // row_bytes
            for tokens in _GATHERED_TOKENS:
                measure = partial(self._gather, name, (address, num_rows), tokens, seconds)
                yield reading(f"gather {name}, {kind}, {tokens} tokens", "rows/s", measure)

    def _gather(self, name: str, rows: tuple[int, int], tokens: int, seconds: float) -> float:
        """Rows a second; every launch reads ids of its own. rows: their address and number."""
        address, num_rows = rows
        count = tokens * ROWS_PER_TOKEN
        ids = np.random.default_rng(0).integers(0, num_rows, (_LAUNCHES, count))
        table = abi.Table(format=abi.FORMATS[name], head_dim=256, num_rows=num_rows, codes=address)
        with ExitStack() as owner:
            held = self._upload(ids.view(np.uint8).reshape(-1), owner)
            out = DeviceBuffer(self._native, count * 264)
            owner.callback(out.close)
            params = [
                abi.Gather(
                    table=pointer(table),
                    hash_ids=held.address + launch * count * 8,
                    num_tokens=tokens,
                    num_cols=ROWS_PER_TOKEN,
                    output=abi.OUT_STORED,
                    out=out.address,
                    stream=self._stream.handle,
                )
                for launch in range(_LAUNCHES)
            ]

            def launch_one(launch: int) -> None:
                self._native.gather(byref(params[launch]))

            return rate(lambda: self._launch(launch_one) * count, seconds)

    def _copies(
        self, device: DeviceBuffer, pinned: PinnedBuffer, seconds: float
    ) -> Iterator[Reading]:
        size = min(self._sizes.copy_bytes, device.num_bytes // 2, pinned.num_bytes)
        there, back = device.address, device.address + device.num_bytes // 2
        for name, to, origin in (
            ("copy, device to device", back, there),
            ("copy, pinned to device", there, pinned.address),
            ("copy, device to pinned", pinned.address, there),
        ):
            measure = partial(self._copy_rate, to, origin, size, seconds)
            yield reading(name, "GB/s", measure, "each byte counted once")

    def _copy_rate(self, to: int, origin: int, size: int, seconds: float) -> float:
        """GB/s, each byte counted once."""

        def copy(_: int) -> None:
            self._native.copy(to, origin, size, self._stream.handle)

        return rate(lambda: self._launch(copy) * size * 1e-9, seconds)

    def _registered(self, num_bytes: int, seconds: float) -> Iterator[Reading]:
        """Register ordinary memory, and gather from it."""
        begin = time.perf_counter()
        try:
            with Registered(num_bytes) as memory:
                per_s = 1e-9 * num_bytes / (time.perf_counter() - begin)
                yield Reading("host registration", round(per_s, 3), "GB/s", "first touch counted")
                yield from self._gathers("registered memory", memory.address, num_bytes, seconds)
        except (OSError, AttributeError) as error:
            yield Reading("host registration", None, "GB/s", str(error))

    def _small_batches(self) -> Iterator[Reading]:
        """Time who multiplies which batch over which type of wkv, as a start does: this device's
        table. The value is the fastest kernel's; the note has all."""
        with ExitStack() as owner:
            bytes_of = {
                name: arranged_bytes(name, self._sizes.wkv_outputs, IN_FEATURES)
                for name in STORED_ENCODINGS
            }
            arranged = DeviceBuffer(self._native, max(16, *bytes_of.values()))
            owner.callback(arranged.close)
            before = partial(self._native.project_chain, byref(self._project(1)))
            race = Race(self._native, self._stream, before)
            owner.callback(race.close)
            for name in STORED_ENCODINGS:
                for tokens in BATCH_CLASSES:
                    yield self._race(race, name, tokens, arranged.address)

    def _race(self, race: Race, name: str, tokens: int, arranged: int) -> Reading:
        chain = self._project(tokens)
        launches: dict[str, Callable[[], None]] = {
            CHAIN: partial(self._native.project_chain, byref(chain))
        }
        for kernel, form in STORED_FORMS.items():
            params = abi.ProjectStored(self._project(tokens), abi.FORMATS[name], form)
            params.project.wkv = arranged
            launch = partial(self._native.project_stored, byref(params))
            try:
                launch()
            except EngramError:
                continue  # not on this device
            launches[kernel] = launch
        what = f"wkv, {name}, {tokens} tokens"
        try:
            times = race.run(launches)
        except EngramError as error:
            return Reading(what, None, "us", reason(error))
        told = ", ".join(f"{kernel} {us:.1f}" for kernel, us in sorted(times.items(), key=_by_time))
        return Reading(what, round(min(times.values()), 1), "us", told)

    def _gemm(self, seconds: float) -> Reading:
        """Time cublasLt at 1,024 tokens, with the algorithm its batch class would take."""

        def measure() -> float:
            with ExitStack() as owner:
                workspace = DeviceBuffer(self._native, _WORKSPACE_BYTES)
                owner.callback(workspace.close)
                gemm = self._open_gemm(workspace)
                owner.callback(self._native.gemm_destroy, gemm)
                self._native.gemm_add_class(gemm, _GEMM_TOKENS, 0)
                params = self._project(_GEMM_TOKENS)
                flop = 2e-12 * _GEMM_TOKENS * IN_FEATURES * self._sizes.wkv_outputs

                def run(_: int) -> None:
                    self._native.gemm_run(gemm, byref(params))

                return rate(lambda: self._launch(run) * flop, seconds)

        return reading("wkv by cublasLt, 1024 tokens", "TFLOP/s", measure)

    def _open_gemm(self, workspace: DeviceBuffer) -> int:
        for library in cublaslt_candidates():
            try:
                return self._native.make(
                    "gemm_create",
                    library.encode(),
                    IN_FEATURES,
                    self._sizes.wkv_outputs,
                    self._device.num_sms,
                    workspace.address,
                    workspace.num_bytes,
                )
            except EngramError:
                continue
        raise Unsupported("no cublasLt was found")

    def _project(self, tokens: int) -> abi.Project:
        return abi.Project(
            rows=self._rows.address,
            wkv=self._wkv.address,
            kv=self._kv.address,
            num_tokens=tokens,
            in_features=IN_FEATURES,
            out_features=self._sizes.wkv_outputs,
            stream=self._stream.handle,
        )

    def _launch(self, work: Callable[[int], None]) -> float:
        """Enqueue 16 launches and wait for them; return 16."""
        for launch in range(_LAUNCHES):
            work(launch)
        self._end.record(self._stream)
        self._end.wait()
        return float(_LAUNCHES)

    def _free_bytes(self) -> int:
        """Free memory of the device; on an integrated one, of the host."""
        if self._device.integrated:
            return host_available_bytes()
        return int(self._native.device(0).free_bytes)

    def _random(self, num_bytes: int) -> PinnedBuffer:
        """Random bfloat16 values: zeros would flatter every reading."""
        seed = self._own(PinnedBuffer(self._native, num_bytes))
        seed.tensor(torch.bfloat16, (num_bytes // 2,)).copy_(torch.randn(num_bytes // 2))
        return seed

    def _filled(self, num_bytes: int) -> DeviceBuffer:
        buffer = self._own(DeviceBuffer(self._native, num_bytes))
        for start in range(0, num_bytes, self._seed.num_bytes):
            size = min(self._seed.num_bytes, num_bytes - start)
            self._native.copy(buffer.address + start, self._seed.address, size, self._stream.handle)
        self._end.record(self._stream)
        self._end.wait()
        return buffer

    def _upload(self, data: np.ndarray[Any, np.dtype[np.uint8]], owner: ExitStack) -> DeviceBuffer:
        staged, buffer = (
            PinnedBuffer(self._native, data.size),
            DeviceBuffer(self._native, data.size),
        )
        owner.callback(buffer.close)
        staged.bytes[:] = data
        self._native.copy(buffer.address, staged.address, data.size, self._stream.handle)
        self._end.record(self._stream)
        self._end.wait()
        staged.close()
        return buffer

    def _own(self, part: Part) -> Part:
        self._owner.callback(part.close)
        return part
