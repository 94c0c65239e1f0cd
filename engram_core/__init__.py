"""The Engram library: hash, tables, projection, gate and sessions; no HTTP."""

from engram_core.backends.gate import Gate
from engram_core.backends.projection import Projection, product_dtype
from engram_core.geometry import Geometry
from engram_core.quant import requantize

__all__ = ["Gate", "Geometry", "Projection", "product_dtype", "requantize"]
