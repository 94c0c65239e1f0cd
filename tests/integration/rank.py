"""One rank of a distributed runner, as a process: sends what it is told to, says what came back.

`python -m tests.integration.rank URL` reads one JSON request a line, writes one JSON answer a line.
Bodies travel as base64.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from typing import Any

import httpx

from tests.integration.server import ROOT


def main() -> None:
    """Answer every line of standard input until it ends."""
    with httpx.Client(base_url=sys.argv[1], timeout=30, trust_env=False) as client:
        for line in sys.stdin:
            request = json.loads(line)
            content = base64.b64decode(request.pop("content", ""))
            answer = client.request(**request, content=content or None)
            told = {
                "status": answer.status_code,
                "headers": dict(answer.headers),
                "content": base64.b64encode(answer.content).decode(),
            }
            print(json.dumps(told), flush=True)


class Rank:
    """The other end: a handle on such a process. `send` does not wait, `receive` does."""

    def __init__(self, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.rank", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def send(self, method: str, url: str, **fields: Any) -> None:
        """Start a request; `json` and `content` as httpx takes them."""
        request: dict[str, Any] = {"method": method, "url": url}
        if "json" in fields:
            fields["content"] = json.dumps(fields.pop("json")).encode()
            fields["headers"] = {"Content-Type": "application/json"}
        if "content" in fields:
            request["content"] = base64.b64encode(fields.pop("content")).decode()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request | fields) + "\n")
        self.process.stdin.flush()

    def receive(self) -> httpx.Response:
        """The answer to the oldest request that was sent."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the rank ended"
        told = json.loads(line)
        headers = {k: v for k, v in told["headers"].items() if k != "content-encoding"}
        content = base64.b64decode(told["content"])
        return httpx.Response(told["status"], headers=headers, content=content)

    def call(self, method: str, url: str, **fields: Any) -> httpx.Response:
        """Send and receive."""
        self.send(method, url, **fields)
        return self.receive()

    def stop(self) -> None:
        """End the process: by closing its input, or at once if it does not listen."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


if __name__ == "__main__":
    main()
