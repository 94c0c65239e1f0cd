"""Makes docs/status.png: traffic against the demo checkpoint, and the page that shows it.

python -m tests.service.screenshot docs/status.png
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from engram_client import EngramClient, Session
from engram_core.tools.synth import synth
from tests.integration.server import running
from tests.service.browser import chromium

SECONDS = 125
"""A little more than the page remembers."""


def play(sessions: list[Session], rng: random.Random) -> None:
    """A turn of every session: a token or a few, read one way or the other."""
    for index, session in enumerate(sessions):
        length = session.length
        session.push([rng.choice(range(200, 260)) for _ in range(rng.choice((1, 1, 1, 6)))])
        count = session.length - length
        if index % 3 == 0:
            residual = np.ones((count, 4, 1024), np.float32)
            session.apply(1, residual, length)
        elif index % 3 == 1:
            session.kv(14, length, count)
        else:
            session.rows(1, length, count)
        time.sleep(rng.random() / 30)


def main(out: Path) -> None:
    """Play, then take the picture."""
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as folder, chromium() as page:
        synth(Path(folder) / "d.gguf", preset="demo", fmt="gguf", quant="Q2_K", seed=1)
        with running(Path(folder) / "d.gguf") as server, EngramClient(server.url) as client:
            page.use_size(1160, 1250)
            page.open(f"{server.url}/")
            sessions = [client.open_session() for _ in range(12)]
            end = time.monotonic() + SECONDS
            with server.client() as plain:
                while time.monotonic() < end:
                    play(sessions, rng)
                    plain.get(f"/v1/sessions/{rng.choice((77, 78, 'x'))}")
            page.wait_until("document.querySelector('#errors').innerText.includes('unknown')")
            page.screenshot(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
