"""The little of NVIDIA's driver that the kernels' library has no verb for: registration, clocks.

Both libraries come with the driver; nothing is linked against.
Source: CUDA driver API (cuMemHostRegister, cuDeviceGetPCIBusId), NVML (clock, power).
"""

from __future__ import annotations

import ctypes
import mmap
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from types import TracebackType
from typing import Self

_PORTABLE, _DEVICE_MAP = 1, 2
_CLOCK_SM = 1


class Registered:
    """Ordinary memory that the device reads in place once it is registered.

    address: as the device sees it. Raises: OSError where the driver refuses.
    """

    def __init__(self, num_bytes: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._memory = mmap.mmap(-1, num_bytes)
        self._view = (ctypes.c_uint8 * num_bytes).from_buffer(self._memory)
        host = ctypes.addressof(self._view)
        ctypes.memset(host, 1, num_bytes)
        self._host = c_void_p(host)
        status = self._driver.cuMemHostRegister_v2(
            self._host, c_size_t(num_bytes), c_uint(_PORTABLE | _DEVICE_MAP)
        )
        _require(status, "cuMemHostRegister")
        seen = c_void_p()
        _require(
            self._driver.cuMemHostGetDevicePointer_v2(byref(seen), self._host, c_uint(0)),
            "cuMemHostGetDevicePointer",
        )
        self.address = seen.value or 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._driver.cuMemHostUnregister(self._host)
        del self._view
        self._memory.close()


class Clocks:
    """Clock and power of one device. Raises: OSError without NVML."""

    def __init__(self, index: int) -> None:
        driver, self._nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
        bus = ctypes.create_string_buffer(32)
        device = c_int()
        _require(driver.cuDeviceGet(byref(device), c_int(index)), "cuDeviceGet")
        _require(driver.cuDeviceGetPCIBusId(bus, c_int(32), device), "cuDeviceGetPCIBusId")
        self._device = c_void_p()
        _require(self._nvml.nvmlInit_v2(), "nvmlInit")
        find = self._nvml.nvmlDeviceGetHandleByPciBusId_v2
        _require(find(c_char_p(bus.value), byref(self._device)), "nvmlDeviceGetHandle")

    def read(self) -> tuple[float | None, float | None]:
        """Return MHz of the multiprocessors and watts; None for what is not told."""
        mhz, milliwatts = c_uint(), c_uint()
        has_clock = not self._nvml.nvmlDeviceGetClockInfo(self._device, _CLOCK_SM, byref(mhz))
        has_power = not self._nvml.nvmlDeviceGetPowerUsage(self._device, byref(milliwatts))
        return (
            float(mhz.value) if has_clock else None,
            milliwatts.value / 1e3 if has_power else None,
        )


def _require(status: int, verb: str) -> None:
    if status:
        raise OSError(f"{verb} answers {status}")
