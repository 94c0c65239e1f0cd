"""`python -m service` is the command `engram`."""

from __future__ import annotations

from service.cli import main

main()
