"""The Engram library: hash, tables, projection, gate and sessions; no HTTP.

`load(open_checkpoint(path), num_slots=...)` gives a backend, `Engine(backend)` its sessions.
A name is imported where it is first used: torch takes seconds, and many commands need none.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engram_core.backends.cpu import make_gate
    from engram_core.backends.projection import Projection, product_dtype
    from engram_core.checkpoint import open_checkpoint
    from engram_core.engine import Engine
    from engram_core.engine_types import EngineLimits, OpenRequest, Output, Segments, StepRequest
    from engram_core.errors import EngramError
    from engram_core.geometry import EngramHashTables, Geometry
    from engram_core.hashing import EngramHasher
    from engram_core.loader import load
    from engram_core.quant import requantize, row_format, to_bf16

__all__ = [
    "Engine",
    "EngineLimits",
    "EngramError",
    "EngramHashTables",
    "EngramHasher",
    "Geometry",
    "OpenRequest",
    "Output",
    "Projection",
    "Segments",
    "StepRequest",
    "load",
    "make_gate",
    "open_checkpoint",
    "product_dtype",
    "requantize",
    "row_format",
    "to_bf16",
]

_HOMES = {
    "backends.cpu": ("make_gate",),
    "backends.projection": ("Projection", "product_dtype"),
    "checkpoint": ("open_checkpoint",),
    "engine": ("Engine",),
    "engine_types": ("EngineLimits", "OpenRequest", "Output", "Segments", "StepRequest"),
    "errors": ("EngramError",),
    "geometry": ("EngramHashTables", "Geometry"),
    "hashing": ("EngramHasher",),
    "loader": ("load",),
    "quant": ("requantize", "row_format", "to_bf16"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
