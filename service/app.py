"""The application: the operations on FastAPI's router, behind the front door."""

from __future__ import annotations

from typing import NoReturn

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from service.calls import Endpoint, endpoint
from service.desk import Desk
from service.door import Door
from service.fast_path import FastPath
from service.openapi import describe_route, document
from service.operations import OPERATIONS
from service.problems import MethodNotAllowed, NotFound
from service.routes import HANDLERS
from service.settings import Settings
from service.state import Model, ServiceState


def create_app(settings: Settings, model: Model | None = None) -> FastAPI:
    """Return the app of one service; `app.state.service` is its ServiceState,
    `app.state.desk` the desk that every door shares.

    `app.state.fast_path` is the way of tensors beside the app (for `transport.Connection`).

    model: what is served; None to load it later (`state.serve`).
    """
    state = ServiceState(settings)
    desk = Desk(state)
    app = FastAPI(
        title="Engram",
        version="1",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=[Middleware(Door, state=state, desk=desk)],
        exception_handlers={HTTPException: _no_such_route},
    )
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
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    if model is not None:
        state.serve(model)
    return app


def _called(answer: Endpoint) -> ASGIApp:
    """Return an endpoint as ASGI. It has no dependencies and no model for FastAPI to look after,
    which takes as long as a small read to find that out."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        response = await answer(Request(scope, receive, send))
        await response(scope, receive, send)

    return call


async def _no_such_route(request: Request, error: Exception) -> NoReturn:
    """Say that a path, or its method, is not there. Raises NotFound, MethodNotAllowed."""
    allowed = sorted(
        method
        for route in request.app.routes
        if route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods
    )
    if not allowed:
        raise NotFound("no such route", got=request.url.path[:120])
    raise MethodNotAllowed(
        "the route has other methods", expected=", ".join(allowed), got=request.method
    )
