"""The versions of what runs."""

from __future__ import annotations

import platform
from importlib.metadata import version

import torch


def versions() -> dict[str, str]:
    """Return them by name, as `/v1/info` and `engram_build_info` tell them."""
    return {
        "service": version("engram-service"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
