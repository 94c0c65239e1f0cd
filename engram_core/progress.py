"""What long work tells of itself."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Told what is made or loaded, how many of its bytes are done, and how many there will be."""
