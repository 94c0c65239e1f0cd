"""What the running service is: loading, ready, draining or failed, and what it serves.

Owned by the app; touched by the event loop's thread only, but for `progress`, which the loader's
thread replaces as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engram_core.engine_types import EngineLimits
from engram_core.errors import Draining
from engram_core.host_memory import PlainMemory, WarmMemory
from service.access import Access
from service.admission import InFlightPool
from service.metrics import Metrics
from service.problems import Loading, ShardDown
from service.settings import Settings
from service.shm import Regions
from service.versions import versions

if TYPE_CHECKING:
    from engram_core.backends.base import Backend
    from engram_core.checkpoint import Checkpoint
    from engram_core.engine import Engine
    from engram_core.memory import Ledger

JSON_BYTES_BASE, JSON_BYTES_PER_TOKEN = 64 << 10, 64


@dataclass(frozen=True)
class Model:
    """All that is known once the checkpoint is loaded.

    ledger: what is held where; in_flight_bytes: room for bodies and answers
    """

    engine: Engine
    backend: Backend
    checkpoint: Checkpoint
    limits: EngineLimits
    ledger: Ledger
    in_flight_bytes: int

    def close(self) -> None:
        """Stop the engine, then free the device."""
        self.engine.close()
        self.backend.close()


@dataclass(frozen=True)
class Progress:
    """How far loading is: `done` of `total` bytes of a stage."""

    stage: str = "starting"
    done: int = 0
    total: int = 0


class ServiceState:
    """The life of one service."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.access = Access(settings)
        self.metrics = Metrics()
        self.progress = Progress()
        self.num_active = 0
        self.is_draining = False
        self._model: Model | None = None
        self._pool: InFlightPool | None = None
        self._regions: Regions | None = None
        self._warm: WarmMemory | None = None
        self.metrics.active_requests.set_function(lambda: self.num_active)

    @property
    def model(self) -> Model:
        """What is served. Raises Loading, ShardDown."""
        if self._model is None:
            progress = self.progress
            raise Loading(
                f"loading: {progress.stage}", stage=progress.stage,
                done=progress.done, total=progress.total,
            )  # fmt: skip
        if self._model.engine.failure is not None:
            raise ShardDown("the device has failed; the process is about to end")
        return self._model

    @property
    def pool(self) -> InFlightPool:
        """The room for bodies and answers. Raises Loading."""
        self.model  # noqa: B018  refuses while loading and after a failure
        assert self._pool is not None
        return self._pool

    @property
    def regions(self) -> Regions:
        """The shared memory of connections. Raises Loading."""
        self.model  # noqa: B018  refuses while loading and after a failure
        assert self._regions is not None
        return self._regions

    @property
    def is_loaded(self) -> bool:
        """Whether there is a model, failed or not."""
        return self._model is not None

    @property
    def max_json_bytes(self) -> int:
        """The largest JSON body: a push of max_tokens ids and its mask, generously spaced."""
        return JSON_BYTES_BASE + JSON_BYTES_PER_TOKEN * self.settings.max_tokens

    def serve(self, model: Model) -> None:
        """Become ready."""
        memory = model.backend.host_memory
        if isinstance(memory, PlainMemory):
            memory = self._warm = WarmMemory()
        self._pool = InFlightPool(model.in_flight_bytes, memory=memory)
        self._regions = Regions(self.settings.shared_memory_bytes, model.backend.host_memory)
        self._model = model
        metrics = self.metrics
        metrics.watch(lambda: model.engine.counters)
        model.engine.watch_stages(metrics.observe_stage)
        metrics.in_flight_bytes.set_function(lambda: self.pool_bytes)
        metrics.ready.set_function(lambda: float(self.is_ready))
        metrics.build.info({**versions(), "backend": model.backend.name})
        for line in model.ledger.lines:
            metrics.ledger_bytes.labels(line.name, line.pool).set(line.num_bytes)

    @property
    def pool_bytes(self) -> int:
        """Bytes of bodies and answers held now."""
        return self._pool.used_bytes if self._pool else 0

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered."""
        return self.is_loaded and not self.is_draining and self.failure is None

    @property
    def failure(self) -> BaseException | None:
        """Why the engine has stopped for good, if it has."""
        return self._model.engine.failure if self._model else None

    def check_open(self) -> Model:
        """Return the model for new work. Raises Draining, Loading, ShardDown."""
        if self.is_draining:
            raise Draining("the service is about to stop; use another replica")
        return self.model

    def serves(self, model: Model) -> bool:
        """Whether new work is for this model, which has not failed."""
        return self._model is model and not self.is_draining and model.engine.failure is None

    def rest(self) -> None:
        """Give back the memory that is kept for large bodies, if none came for a while."""
        if self._warm is not None:
            self._warm.rest()

    def enter(self) -> None:
        """Count a request in."""
        self.num_active += 1

    def leave(self) -> None:
        """Count a request out."""
        self.num_active -= 1
