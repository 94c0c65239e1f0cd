"""Residual reads whose headers were checked before: a runner's heads differ in path and query.

What headers alone decide (who asks, the tensor's form, the length of the body) is remembered by
their very bytes; path, query, admission and the state of the service are looked at every time.
Whatever is unusual is not found here, and is checked in full.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engram_core.engine_types import EPOCH_OPENED, Output
from engram_core.errors import EngramError
from service import operations
from service.access import Key
from service.bodies import Headers, Inbox
from service.calls import Call
from service.reads import ReadForm, SingleRead
from service.state import ServiceState
from service.strict import INT64_MAX

MAX_KNOWN = 256
"""Heads remembered; then all are forgotten."""

_URL = re.compile(
    rb"/v1/sessions/([1-9][0-9]{0,18})/layers/(0|[1-9][0-9]{0,8})/residual"
    rb"\?position=(0|[1-9][0-9]{0,17})(?:&epoch=(0|[1-9][0-9]{0,17}))?"
)
_PLAIN = frozenset(
    b"host content-type content-length authorization user-agent accept accept-encoding connection "
    b"expect x-engram-shape x-engram-dtype x-engram-table x-engram-owner "
    b"x-engram-shared-body x-engram-shared-answer".split()
)
"""Heads with other headers are not remembered: they may differ from request to request."""


@dataclass(frozen=True)
class _Known:
    """What headers decide. told: of them, what the body's reception depends on."""

    key: Key
    headers: dict[str, str]
    form: ReadForm
    told: Headers


class Recall:
    """Remembered heads; one for an app."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state
        self._known: dict[tuple[object, ...], _Known] = {}

    def find(
        self,
        url: bytes,
        headers: Headers,
        client: tuple[str, int] | None,
        server: tuple[str, int | None] | None,
        request_id: str,
    ) -> tuple[Call, SingleRead] | None:
        """Return a POST's call and read, as checking it in full would; None: check it."""
        known = self._known.get((_is_unix(server), *headers))
        found = None if known is None else _URL.fullmatch(url)
        if known is None or found is None or not self._is_valid(known):
            return None
        session_id, layer, position, epoch = found.groups()
        form = known.form
        known_layers = form.model.checkpoint.geometry.layer_ids
        if int(layer) not in known_layers or int(session_id) > INT64_MAX:
            return None
        call = Call(self._state, Inbox({"headers": known.told}), request_id)
        call.key, call.headers = known.key, known.headers
        call.operation, call.peer = operations.RESIDUAL, client
        read = SingleRead(
            call,
            Output.RESIDUAL,
            form,
            session_id=int(session_id),
            layer=int(layer),
            position=int(position),
            epoch=EPOCH_OPENED if epoch is None else int(epoch),
        )
        return call, read

    def keep(
        self, headers: Headers, server: tuple[str, int | None] | None, call: Call, read: object
    ) -> None:
        """Remember a head that was checked in full."""
        if not isinstance(read, SingleRead) or read.output is not Output.RESIDUAL:
            return
        if call.key is None or not all(name in _PLAIN for name, _ in headers):
            return
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        told = [pair for pair in headers if pair[0] in (b"content-length", b"expect")]
        self._known[(_is_unix(server), *headers)] = _Known(call.key, call.headers, read.form, told)

    def _is_valid(self, known: _Known) -> bool:
        """Whether it would be decided alike now."""
        try:
            self._state.access.confirm(known.key)
            return self._state.check_open() is known.form.model
        except EngramError:
            return False


def _is_unix(server: tuple[str, int | None] | None) -> bool:
    return server is not None and server[1] is None
