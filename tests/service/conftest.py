"""The app over a real engine on a small checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.app import create_app
from service.loading import load_model
from service.settings import Settings
from service.state import Model
from tests.service.door import InProcess
from tests.service.pooled import PooledBackend, pooled
from tests.service.rpc_client import Rpc

MAX_TOKENS, MAX_SESSIONS = 64, 64


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="session")
def settings() -> Settings:
    return Settings(
        max_tokens=MAX_TOKENS,
        max_sessions=MAX_SESSIONS,
        in_flight_bytes=2 << 20,
        kv_store_bytes=1 << 20,
        memory_reserve_bytes=0,
    )


@pytest.fixture(scope="session")
def model(official_dir: Path, settings: Settings) -> Iterator[Model]:
    loaded = load_model(official_dir, settings, lambda *_: None)
    yield loaded
    loaded.close()


@pytest.fixture(autouse=True)
def _close_sessions(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test leaves open takes no room from the next one."""
    yield
    if "model" in request.fixturenames:
        request.getfixturevalue("model").engine.close_tenant("")


@pytest.fixture
def door(settings: Settings, model: Model, runner: asyncio.Runner) -> InProcess:
    """A fresh app without keys over the engine that all tests share."""
    return InProcess(create_app(settings, model), runner)


@pytest.fixture
def pooled_model(model: Model) -> Iterator[tuple[Model, PooledBackend]]:
    changed, backend = pooled(model)
    yield changed, backend
    backend.go_on.set()
    changed.engine.close()


@pytest.fixture
def pooled_backend(pooled_model: tuple[Model, PooledBackend]) -> PooledBackend:
    return pooled_model[1]


@pytest.fixture
def pooled_door(
    pooled_model: tuple[Model, PooledBackend], settings: Settings, runner: asyncio.Runner
) -> InProcess:
    return InProcess(create_app(settings, pooled_model[0]), runner)


@pytest.fixture
def make_door(model: Model, runner: asyncio.Runner) -> Callable[..., InProcess]:
    """Makes an app with other settings; `loaded=False` leaves it loading."""

    def make(*, loaded: bool = True, **changes: Any) -> InProcess:
        settings = Settings(**{"max_tokens": MAX_TOKENS, **changes})
        return InProcess(create_app(settings, model if loaded else None), runner)

    return make


@pytest.fixture(scope="session")
def make_rpc(
    model: Model, settings: Settings, runner: asyncio.Runner
) -> Iterator[Callable[..., Rpc]]:
    """Makes apps whose gRPC door is open on a free port, and closes them at the end."""
    made: list[Rpc] = []

    def make(*, loaded: bool = True, **changes: Any) -> Rpc:
        asked = settings.model_copy(update={"grpc_port": 0, **changes})
        app = create_app(asked, model if loaded else None)
        made.append(Rpc(InProcess(app, runner)).start())
        return made[-1]

    yield make
    for rpc in made:
        rpc.stop()
