"""libengram_cuda through ctypes: the structures of csrc/engram.h and a checked call for each verb.

Loading the library needs no GPU and no CUDA installation; the first call that does says so.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sysconfig
from collections.abc import Callable
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_float,
    c_int,
    c_uint8,
    c_uint64,
    c_void_p,
)
from ctypes import c_int32 as i32
from ctypes import c_int64 as i64
from functools import cached_property
from pathlib import Path
from typing import Any

from engram_core.errors import BadTensor, CheckpointError, EngramError, Internal

ABI_VERSION = 5
MAX_NGRAM = 8
MAX_HASH_COLS = 64
INLINE_TOKENS = 64
"""Windows, slots and dead flags of so many tokens travel inside the launch: no copy."""

FORMATS = {
    "F32": 0,
    "F16": 1,
    "BF16": 30,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "MXFP4": 39,
    "E8M0_E4M3_32": 64,
    "E4M3_E8M0_32": 1000,
    "E4M3_F32_32": 1001,
}
"""Row formats the kernels read: name in `quant` -> engram_format."""

OUT_BF16, OUT_REQUANTIZED, OUT_STORED = 0, 1, 2
STORED_MMA, STORED_WGMMA = 0, 1

WAY_MAPPED, WAY_COPIED = 0, 1

_LIBRARY = "libengram_cuda.so"
_OK, _INVALID, _CUDA_ERROR, _UNSUPPORTED, _TIMEOUT, _IO_ERROR, _CANCELLED = range(7)


class Device(Structure):
    """engram_device. free_bytes is -1 on integrated devices, which are never asked."""

    _fields_ = (
        ("name", c_char * 256),
        *((name, i32) for name in ("major", "minor", "num_sms", "integrated", "has_image")),
        ("total_bytes", i64),
        ("free_bytes", i64),
    )


class Table(Structure):
    """engram_table. codes, scales: addresses; scales 0 = inside the row."""

    _fields_ = (
        ("format", i32),
        ("head_dim", i32),
        ("num_rows", i64),
        ("codes", c_void_p),
        ("scales", c_void_p),
    )


class Hash(Structure):
    """engram_hash."""

    _fields_ = (
        ("max_ngram_size", i32),
        ("num_heads", i32),
        ("multipliers", i64 * MAX_NGRAM),
        ("primes", i64 * MAX_HASH_COLS),
        ("offsets", i64 * MAX_HASH_COLS),
        ("reciprocals", c_uint64 * MAX_HASH_COLS),
    )


class Gather(Structure):
    """engram_gather_params."""

    _fields_ = (
        ("table", POINTER(Table)),
        ("hash", POINTER(Hash)),
        ("windows", c_void_p),
        ("hash_ids", c_void_p),
        ("descriptor", c_void_p),
        ("slots_out", c_void_p),
        ("num_tokens", i64),
        ("num_cols", i32),
        ("output", i32),
        ("out", c_void_p),
        ("is_released_early", i32),
        ("stream", c_void_p),
    )


class Dequantize(Structure):
    """engram_dequantize_params."""

    _fields_ = (
        ("format", i32),
        ("rows_per_scale", i32),
        ("num_rows", i64),
        ("row_values", i64),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("out", c_void_p),
        ("stream", c_void_p),
    )


class Project(Structure):
    """engram_project_params."""

    _fields_ = (
        ("rows", c_void_p),
        ("wkv", c_void_p),
        ("kv", c_void_p),
        ("slots", c_void_p),
        ("slots_on_device", i32),
        ("num_tokens", i64),
        ("in_features", i64),
        ("out_features", i64),
        ("stream", c_void_p),
    )


class Arrange(Structure):
    """engram_arrange_params."""

    _fields_ = (
        ("format", i32),
        ("out_features", i64),
        ("in_features", i64),
        *((name, c_void_p) for name in ("codes", "scales", "arranged", "is_exotic", "stream")),
    )


class ProjectStored(Structure):
    """engram_project_stored_params. project.wkv: what `arrange` wrote; form: STORED_*"""

    _fields_ = (("project", Project), ("format", i32), ("form", i32))


class Scatter(Structure):
    """engram_scatter_params."""

    _fields_ = (
        ("from_", c_void_p),
        ("kv", c_void_p),
        ("slots", c_void_p),
        ("slots_on_device", i32),
        ("num_tokens", i64),
        ("out_features", i64),
        ("stream", c_void_p),
    )


class Gate(Structure):
    """engram_gate_params."""

    _fields_ = (
        *((name, c_void_p) for name in ("kv", "slots", "is_dead", "qk", "residual", "out")),
        ("descriptor", c_void_p),
        ("num_tokens", i64),
        ("dim", i32),
        ("hc_mult", i32),
        ("eps", c_float),
        ("is_f32", i32),
        ("stream", c_void_p),
    )


class Descriptor(Structure):
    """engram_descriptor: what captured launches read when they run."""

    _fields_ = (
        ("slots", i64 * INLINE_TOKENS),
        ("windows", i32 * (INLINE_TOKENS * 4)),
        ("is_dead", c_uint8 * INLINE_TOKENS),
        ("residual", c_void_p),
        ("out", c_void_p),
    )


class Projections(Structure):
    """engram_projections."""

    _fields_ = (
        ("num_slots", i64),
        ("made_by", c_void_p),
        ("finished", c_void_p),
        ("ends", POINTER(c_void_p)),
        ("num_ends", i64),
    )


class Replay(Structure):
    """engram_replay_params."""

    _fields_ = (
        ("graph", c_void_p),
        ("descriptor", c_void_p),
        ("projections", POINTER(Projections)),
        ("max_ngram_size", i32),
        ("stream", c_void_p),
    )


class Lane(Structure):
    """engram_lane."""

    _fields_ = (
        *((name, c_void_p) for name in ("device", "stage", "stream", "arrived", "computed")),
        ("done", c_void_p * 2),
    )


class GateHost(Structure):
    """engram_gate_host_params."""

    _fields_ = (
        ("gate", Gate),
        ("way", i32),
        ("is_pageable", i32),
        ("piece_tokens", i64),
        ("num_lanes", i32),
        ("lanes", POINTER(Lane)),
        *((name, c_void_p) for name in ("upload", "download", "workers")),
        ("projections", POINTER(Projections)),
        ("graphs", POINTER(c_void_p)),
        ("descriptor", c_void_p),
        ("marks", POINTER(c_void_p)),
        ("timeout_ms", i64),
    )


class ReadKv(Structure):
    """engram_read_kv_params."""

    _fields_ = (
        *((name, c_void_p) for name in ("kv", "slots", "is_dead", "out")),
        ("num_tokens", i64),
        ("dim", i32),
        ("hc_mult", i32),
        ("stream", c_void_p),
    )


PROGRESS = ctypes.CFUNCTYPE(c_int, c_void_p, i64)


class Load(Structure):
    """engram_load_params."""

    _fields_ = (
        ("path", c_char_p),
        ("offset", i64),
        ("num_bytes", i64),
        ("to", c_void_p),
        ("stages", c_void_p),
        ("stage_bytes", i64),
        ("num_threads", i32),
        ("keep_pages", i32),
        ("progress", PROGRESS),
        ("context", c_void_p),
        ("stream", c_void_p),
    )


_PARAMS = {
    "gather": Gather,
    "dequantize": Dequantize,
    "project_chain": Project,
    "arrange": Arrange,
    "project_stored": ProjectStored,
    "scatter_kv": Scatter,
    "gate": Gate,
    "read_kv": ReadKv,
    "load": Load,
}

_VERBS: dict[str, tuple[Any, ...]] = {
    **{name: (POINTER(params),) for name, params in _PARAMS.items()},
    "gate_host": (POINTER(GateHost), *[c_void_p] * 4, i64),
    "replay": (POINTER(Replay), c_void_p, c_void_p, i64, i64),
    "capture_begin": (c_void_p,),
    "capture_end": (c_void_p, POINTER(c_void_p)),
    "graph_launch": (c_void_p, c_void_p),
    "graph_destroy": (c_void_p,),
    "workers_create": (i32, i32, POINTER(c_void_p)),
    "workers_destroy": (c_void_p,),
    "device_count": (POINTER(i32),),
    "device_info": (i32, POINTER(Device)),
    "device_select": (i32,),
    "device_alloc": (i64, POINTER(c_void_p)),
    "device_free": (c_void_p,),
    "host_alloc": (i64, POINTER(c_void_p)),
    "host_free": (c_void_p,),
    "host_register": (c_void_p, i64),
    "host_unregister": (c_void_p,),
    "stream_create": (i32, POINTER(c_void_p)),
    "stream_destroy": (c_void_p,),
    "event_create": (i32, POINTER(c_void_p)),
    "event_destroy": (c_void_p,),
    "event_record": (c_void_p, c_void_p),
    "event_elapsed_us": (c_void_p, c_void_p, POINTER(c_float)),
    "stream_wait": (c_void_p, c_void_p),
    "event_is_done": (c_void_p, POINTER(i32)),
    "event_wait": (c_void_p, i64),
    "copy": (c_void_p, c_void_p, i64, c_void_p),
    "fill": (c_void_p, i32, i64, c_void_p),
    "hash_prepare": (POINTER(Hash), i64),
    "gemm_create": (c_char_p, i64, i64, i32, c_void_p, i64, POINTER(c_void_p)),
    "gemm_destroy": (c_void_p,),
    "gemm_add_class": (c_void_p, i64, i32),
    "gemm_run": (c_void_p, POINTER(Project)),
}


_NO_DRIVER = "driver version is insufficient"
"""What CUDA says where there is no driver at all, too."""


class Unsupported(EngramError):
    """The device, the driver or a library cannot do what was asked."""


class Native:
    """The library. Each verb of engram.h is a method that raises instead of returning a status.

    path: of the library; left out, `find_library()`
    keeps_lock: its calls keep the interpreter's lock (see `held`)

    Raises (every verb): BadTensor for refused parameters; Internal after a CUDA error or a
    timeout, when the device is not to be trusted any more; Unsupported; CheckpointError for files.
    """

    def __init__(self, path: Path | None = None, *, keeps_lock: bool = False) -> None:
        self.path = path or find_library()
        self._library = (ctypes.PyDLL if keeps_lock else ctypes.CDLL)(str(self.path))
        self._library.engram_last_error.restype = c_char_p
        self._library.engram_architectures.restype = c_char_p
        self._library.engram_row_bytes.restype = i64
        self._library.engram_row_bytes.argtypes = (i32, i64)
        self._library.engram_arranged_bytes.restype = i64
        self._library.engram_arranged_bytes.argtypes = (i32, i64, i64)
        self._library.engram_gemm_version.restype = i64
        self._library.engram_gemm_version.argtypes = (c_void_p,)
        version = self._library.engram_abi_version()
        if version != ABI_VERSION:
            raise Unsupported(
                f"{self.path}: expected ABI version {ABI_VERSION}, got {version}; build it again",
                expected=ABI_VERSION,
                got=version,
            )

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in _VERBS:
            raise AttributeError(name)
        verb = self._checked(name, _VERBS[name])
        setattr(self, name, verb)
        return verb

    @cached_property
    def held(self) -> Native:
        """The same, for calls that are shorter than it takes to have the interpreter's lock again
        from a thread that computes."""
        return Native(self.path, keeps_lock=True)

    @property
    def architectures(self) -> str:
        """Embedded images, "80 90a ..."."""
        return str(self._library.engram_architectures().decode())

    def row_bytes(self, format_id: int, row_values: int) -> int:
        """Bytes of a stored row, -1 if there is no such row."""
        return int(self._library.engram_row_bytes(format_id, row_values))

    def arranged_bytes(self, format_id: int, out_features: int, in_features: int) -> int:
        """Bytes of wkv arranged for the kernels that read it as stored, -1 if they cannot."""
        return int(self._library.engram_arranged_bytes(format_id, out_features, in_features))

    def gemm_version(self, gemm: int) -> int:
        """cublasLt's version number."""
        return int(self._library.engram_gemm_version(gemm))

    def make(self, verb: str, *arguments: Any) -> int:
        """Call a verb whose last argument is the address of a new handle; returns the handle."""
        handle = c_void_p()
        getattr(self, verb)(*arguments, byref(handle))
        return handle.value or 0

    def device(self, index: int) -> Device:
        """Read a device's properties, and select it for this thread."""
        info = Device()
        self.device_info(index, byref(info))
        return info

    def _checked(self, name: str, arguments: tuple[Any, ...]) -> Callable[..., None]:
        function = getattr(self._library, f"engram_{name}")
        function.restype = c_int
        function.argtypes = arguments

        def call(*values: Any) -> None:
            status = function(*values)
            if status != _OK:
                raise self._error(name, status)

        return call

    def _error(self, name: str, status: int) -> EngramError:
        text = self._library.engram_last_error().decode(errors="replace")
        if _NO_DRIVER in text:
            text += " (no NVIDIA driver here, or one older than series 580)"
        kind = {
            _INVALID: BadTensor,
            _UNSUPPORTED: Unsupported,
            _IO_ERROR: CheckpointError,
            _CANCELLED: EngramError,
        }.get(status, Internal)
        return kind(f"CUDA {name}: {text}")


def find_library() -> Path:
    """Find the library beside this file (installed), in build/cuda (a source tree), or installed
    apart from it (an editable install).

    Raises: Unsupported where this install has none.
    """
    here = Path(__file__).resolve()
    installed = Path(sysconfig.get_path("platlib"), *__package__.split("."), _LIBRARY)
    candidates = (
        here.with_name(_LIBRARY),
        here.parents[2] / "build" / "cuda" / _LIBRARY,
        installed,  # of an editable install, whose Python files stay in the source tree
    )
    for path in candidates:
        if path.is_file():
            return path
    raise Unsupported(
        "this install has no CUDA backend (no nvcc when it was built); use device cpu, or install "
        "on a machine with nvcc 13",
        expected=_LIBRARY,
        got=[str(path) for path in candidates],
    )


def cublaslt_candidates() -> list[str]:
    """Where cublasLt may lie: in torch's CUDA wheels, in a toolkit, wherever the linker looks."""
    found: list[str] = []
    for package in ("nvidia.cu13", "nvidia.cublas"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec.submodule_search_locations or []) if spec else []:
            found += sorted(map(str, Path(folder).glob("lib/libcublasLt.so.1*")))
    found += sorted(map(str, Path("/usr/local/cuda/lib64").glob("libcublasLt.so.1?")))
    return [*found, "libcublasLt.so.13", "libcublasLt.so.12"]
