"""The application: the operations on FastAPI's router, behind the front door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from engram_core.errors import EngramError
from service.calls import Endpoint, endpoint
from service.desk import Desk
from service.door import Door
from service.fast_path import FastPath
from service.openapi import describe_route, document
from service.operations import HEALTH, LIVE, OPERATIONS, PUSH, READY, RESIDUAL, STEP
from service.problems import MethodNotAllowed, NotFound
from service.routes import HANDLERS
from service.settings import Settings
from service.state import Model, ServiceState

_PROBES = frozenset((LIVE.path, READY.path, HEALTH.path))
"""What load balancers ask, with HEAD too."""

_OFTEN = frozenset((RESIDUAL.name, STEP.name, PUSH.name))


def create_app(settings: Settings, model: Model | None = None) -> FastAPI:
    """Return the app of one service; `app.state.service` is its ServiceState,
    `app.state.desk` the desk that every door shares.

    `app.state.fast_path` is the way of tensors beside the app (for `transport.Connection`).

    model: what is served; None to load it later (`state.serve`).
    """
    state = ServiceState(settings)
    desk = Desk(state)
    app = App(
        title="Engram",
        version="1",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.door = Door(app.routed, state, desk)
    app.state.service = state
    app.state.desk = desk
    app.state.fast_path = FastPath(state, desk)
    for operation in OPERATIONS:
        answer = endpoint(operation, HANDLERS[operation])
        app.add_api_route(
            operation.path, answer, methods=[operation.method], **describe_route(operation)
        )
        route = app.router.routes[-1]
        assert isinstance(route, APIRoute)
        route.app = _called(answer)
    app.often = [route for route in app.routes if getattr(route, "name", "") in _OFTEN]
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    if model is not None:
        state.serve(model)
    return app


class App(FastAPI):
    """FastAPI's routes right behind the front door, which does what its middlewares would.

    often: what runners ask for, which its router would look for among all
    """

    door: Door
    often: Sequence[Any] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take a request to the door."""
        scope["app"] = self
        await self.door(scope, receive, send)

    async def routed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by a route. Raises NotFound, MethodNotAllowed, what the route raises."""
        if scope.get("method") == "HEAD" and scope["path"] in _PROBES:
            scope = {**scope, "method": "GET"}  # the server leaves the body out
        for route in self.often:
            found = route.path_regex.fullmatch(scope.get("path", ""))
            if found is not None and scope["method"] in route.methods:
                scope["path_params"] = found.groupdict()
                await route.app(scope, receive, send)
                return
        try:
            await self.router(scope, receive, send)
        except HTTPException:
            raise _no_such_route(self, scope) from None


def _called(answer: Endpoint) -> ASGIApp:
    """Return an endpoint as ASGI. It has no dependencies and no model for FastAPI to look after,
    which takes as long as a small read to find that out."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        response = await answer(Request(scope, receive, send))
        await response(scope, receive, send)

    return call


def _no_such_route(app: FastAPI, scope: Scope) -> EngramError:
    """Return what says that a path, or its method, is not there."""
    allowed = sorted(
        method
        for route in app.routes
        if isinstance(route, APIRoute) and route.matches(scope)[0] is not Match.NONE
        for method in route.methods or ()
    )
    if not allowed:
        return NotFound("no such route", got=str(scope["path"])[:120])
    return MethodNotAllowed(
        "the route has other methods", expected=", ".join(allowed), got=scope["method"]
    )
