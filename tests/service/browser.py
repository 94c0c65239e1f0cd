"""Debian's Chromium, headless, driven over its DevTools pipe: no driver, no port, no package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
WAIT_S = 30.0

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
)
_PIPE_IN, _PIPE_OUT = 3, 4


class Page:
    """One page. errors: what its console and its content security policy complained of."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._in, self._out = to_browser, from_browser
        self._buffer, self._count = b"", 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        attached = self.do("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._count:
                assert "error" not in told, told
                result: dict[str, Any] = told["result"]
                return result
            self._note(told)

    def open(self, url: str) -> None:
        self.do("Page.navigate", url=url)

    def evaluate(self, code: str) -> Any:
        """The value of an expression in the page."""
        told = self.do("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def wait_until(self, code: str) -> None:
        """Ask until an expression is true; one that throws (no document yet) is not."""
        deadline = time.monotonic() + WAIT_S
        while not self.evaluate(
            f"(() => {{ try {{ return {code} }} catch {{ return false }} }})()"
        ):
            text = self.evaluate("document.body ? document.body.innerText : ''")
            assert time.monotonic() < deadline, f"{code}\n{text}\n{self.errors}"
            self.evaluate("new Promise((done) => setTimeout(done, 50))")

    def press(self, key: str) -> None:
        code = {"Tab": 9, "Enter": 13}[key]
        told = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        self.do("Input.dispatchKeyEvent", type="keyDown", **told, **text)
        self.do("Input.dispatchKeyEvent", type="keyUp", **told)

    def type(self, text: str) -> None:
        self.do("Input.insertText", text=text)

    def use_scheme(self, scheme: str) -> None:
        """dark or light."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.do("Emulation.setEmulatedMedia", features=[feature])

    def use_size(self, width: int, height: int) -> None:
        self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def screenshot(self, path: Path) -> None:
        shot = self.do("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._out, 1 << 16)
            assert more, "the browser ended"
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\0")
        told: dict[str, Any] = json.loads(line)
        return told

    def _note(self, told: dict[str, Any]) -> None:
        params = told.get("params", {})
        if told.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif told.get("method") == "Log.entryAdded" and params["entry"]["source"] == "security":
            self.errors.append(params["entry"]["text"])


@contextlib.contextmanager
def chromium() -> Iterator[Page]:
    """A browser with an empty profile, ended with its children at the end of the block."""
    assert CHROMIUM is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]

    def place_pipes() -> None:
        os.dup2(high[0], _PIPE_IN)
        os.dup2(high[1], _PIPE_OUT)

    with tempfile.TemporaryDirectory(prefix="eg-chromium-", ignore_cleanup_errors=True) as profile:
        browser = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place_pipes,
            pass_fds=(_PIPE_IN, _PIPE_OUT),
            start_new_session=True,
        )
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        try:
            yield Page(ours_out, ours_in)
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
            os.close(ours_out)
            os.close(ours_in)
