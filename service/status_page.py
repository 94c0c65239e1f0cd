"""The status page: three static files of our own, sent as they are.

The page holds no fact about the service. What it draws it asks for itself: `/metrics`, and
`/v1/info` with the key that the reader types in where keys are used.
"""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response

from service.calls import Call

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""Only this origin's own files run, and nobody frames them; inline script and style are off."""


async def page(call: Call) -> Response:
    """Send the page."""
    return _file("html", "text/html; charset=utf-8")


async def script(call: Call) -> Response:
    """Send its script."""
    return _file("js", "text/javascript; charset=utf-8")


async def style(call: Call) -> Response:
    """Send its style sheet."""
    return _file("css", "text/css; charset=utf-8")


def _file(suffix: str, media: str) -> Response:
    content = Path(__file__).with_suffix(f".{suffix}").read_bytes()
    return Response(content, headers=HEADERS, media_type=media)
