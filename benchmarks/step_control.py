"""What a step costs beside its payload: client and server, end to end and stage by stage.

End to end: steps through our client against the service, minus a bare echo of the same bytes over
the same connections (`echo.py`), taken in turns. Stage by stage: both ends in this process, each
function on the data of a real step. Both in CPU time too: on a machine that others use, the wall
clock tells the queue for a core, not the work.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import structlog
import uvloop
from served import Served, echoing, serving

from engram_client import EngramClient, Segment, Session
from engram_client.client import drive
from engram_client.connection import ConnectionPool
from engram_client.http1 import Request, Response, parse_address
from engram_client.protocol import EngramProtocol, StepOptions
from engram_client.segments import Batch, batch_of, step_body
from engram_client.setup import set_up
from engram_client.state import SessionState
from engram_client.verbs import step as step_effects
from engram_core.engine_types import Output
from engram_core.tools.synth import synth
from service import steps
from service.app import create_app
from service.loading import load_model
from service.settings import Settings
from service.state import Model

LAYERS = (1, 14)
OUTPUTS = ("none", "hash_ids", "rows")
NUM_SEGMENTS = 256
CHUNK = 25
"""Steps, then as many echoes: what disturbs the ones disturbs the others."""


@dataclass(frozen=True)
class Control:
    """One output over one transport. wall: p50; client, server, echo: median CPU of a chunk;
    control: both ends' CPU beside the echo's; quiet: the same of the fastest chunks."""

    transport: str
    output: str
    bytes_up: int
    bytes_down: int
    step_wall_us: float
    echo_wall_us: float
    client_cpu_us: float
    server_cpu_us: float
    echo_cpu_us: float
    control_us: float
    quiet_us: float


class Cost:
    """What calls cost: wall of each; by chunk the CPU of this thread and of the other process."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.wall_s: list[float] = []
        self.client_s: list[float] = []
        self.server_s: list[float] = []

    def take(self, call: Callable[[], object], count: int) -> None:
        """Make a call `count` times."""
        before, cpu = self._served.cpu_s(), time.thread_time()
        for _ in range(count):
            wall = time.perf_counter()
            call()
            self.wall_s.append(time.perf_counter() - wall)
        self.client_s.append((time.thread_time() - cpu) / count)
        self.server_s.append((self._served.cpu_s() - before) / count)

    @property
    def both_s(self) -> list[float]:
        return [sum(ends) for ends in zip(self.client_s, self.server_s, strict=True)]


def end_to_end(folder: Path, checkpoint: Path, repeats: int) -> list[Control]:
    """Measure each output over TCP and the Unix socket, tiny geometry, one-token segments."""
    found = []
    with serving(checkpoint, folder / "a") as served, echoing(folder / "b") as echo:
        for transport, url in served.urls.items():
            with EngramClient(url) as client:
                sessions = [client.open_session() for _ in range(NUM_SEGMENTS)]
                for output in OUTPUTS:
                    pair = (served, echo)
                    found.append(_measure(transport, output, client, sessions, pair, repeats))
    return found


def _measure(
    transport: str,
    output: str,
    client: EngramClient,
    sessions: Sequence[Session],
    pair: tuple[Served, Served],
    repeats: int,
) -> Control:
    served, echo = pair
    up, down = _sizes(output)
    pool = ConnectionPool(
        [parse_address(echo.urls[transport])], [b"Host: localhost\r\n"], timeout_s=60
    )
    request = Request("POST", f"/?{down}", [], [bytes(up)], max_answer_bytes=down)
    step_cost, echo_cost = Cost(served), Cost(echo)

    def step() -> None:
        segments = [Segment(session, token_ids=(1,)) for session in sessions]
        client.step(segments, LAYERS, output, ahead=False)

    for _ in range(CHUNK):
        step()
        pool.exchange(request)
    for _ in range(max(1, repeats // CHUNK)):
        step_cost.take(step, CHUNK)
        echo_cost.take(lambda: pool.exchange(request), CHUNK)
    pool.close()
    both, echoed = step_cost.both_s, echo_cost.both_s
    return Control(
        transport=transport,
        output=output,
        bytes_up=up,
        bytes_down=down,
        step_wall_us=median(step_cost.wall_s) * 1e6,
        echo_wall_us=median(echo_cost.wall_s) * 1e6,
        client_cpu_us=median(step_cost.client_s) * 1e6,
        server_cpu_us=median(step_cost.server_s) * 1e6,
        echo_cpu_us=median(echoed) * 1e6,
        control_us=(median(both) - median(echoed)) * 1e6,
        quiet_us=(min(both) - min(echoed)) * 1e6,
    )


def _sizes(output: str) -> tuple[int, int]:
    """Bytes of such a step's body and answer; tiny: 6 columns, rows of 256 bfloat16."""
    up = 256 + NUM_SEGMENTS * (4 + 8 + 8 + 8 + 8)
    cell = {"none": 0, "hash_ids": 8, "rows": 512}[output]
    return up, 320 + NUM_SEGMENTS * (8 + 8 + 1 + len(LAYERS) * 6 * cell)


class InProcess:
    """Both ends in this thread: the client's protocol against the application itself."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.server_s = 0.0
        self._app = create_app(Settings(), model)
        self._loop = uvloop.new_event_loop()
        setup = set_up("http://localhost:1", None, None, 60.0, "socket")
        self.protocol: EngramProtocol = setup.protocol
        self.body: bytes = b""

    def close(self) -> None:
        self._loop.close()

    def run(self, effects: Any) -> Any:
        """Carry out a call."""
        return drive(effects, self._exchange, time.sleep)

    def _exchange(self, request: Request) -> Response:
        self.body = b"".join(request.body)
        begin = time.thread_time()
        response = self._loop.run_until_complete(self._ask(request))
        self.server_s += time.thread_time() - begin
        return response

    async def _ask(self, request: Request) -> Response:
        path, _, query = request.target.partition("?")
        headers = [(b"host", b"localhost"), (b"content-length", b"%d" % len(self.body))]
        headers += [(name.lower().encode(), value.encode()) for name, value in request.headers]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "extensions": {},
        }
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": self.body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        told = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        body = b"".join(message.get("body", b"") for message in sent[1:])
        return Response(sent[0]["status"], told, memoryview(body))


def stage_by_stage(checkpoint: Path, repeats: int) -> dict[str, tuple[float, float]]:
    """Return median and lower decile, CPU us, of each stage of a push alone, by end and name."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    model = load_model(checkpoint, Settings(), lambda *_: None)
    ends = InProcess(model)
    taken: defaultdict[str, list[float]] = defaultdict(list)
    states = [ends.run(ends.protocol.open_session(0, None)) for _ in range(NUM_SEGMENTS)]
    try:
        for _ in range(repeats):
            _one(ends, [_Handle(state) for state in states], taken)
    finally:
        ends.close()
        model.close()
    return {
        name: (median(values) * 1e6, sorted(values)[len(values) // 10] * 1e6)
        for name, values in taken.items()
    }


@dataclass
class _Handle:
    state: SessionState


def _one(ends: InProcess, handles: list[_Handle], taken: dict[str, list[float]]) -> None:
    """Time a step whole, then its pure stages again, one by one."""
    clock = time.thread_time

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begin = clock()
        result = call()
        taken[name].append(clock() - begin)
        return result

    segments = timed(
        "client: make the segments",
        lambda: [Segment(handle, token_ids=(1,)) for handle in handles],
    )
    options = StepOptions(LAYERS, "none", ahead=False)
    batch: Batch = timed("client: segments to arrays", lambda: batch_of(segments, 4))
    timed("client: arrays to a body", lambda: step_body(batch, None))
    before, begin = ends.server_s, clock()
    ends.run(step_effects(ends.protocol, segments, options, None, None))
    server_s = ends.server_s - before
    whole = clock() - begin - server_s
    spent = taken["client: segments to arrays"][-1] + taken["client: arrays to a body"][-1]
    taken["client: needs, locks, answer, history"].append(whole - spent)

    model, body = ends.model, memoryview(bytearray(ends.body))
    views = timed("server: decode", lambda: steps.decode(body))
    asked = steps.StepOptions(Output.NONE, LAYERS, ahead=False)
    request = timed("server: tensors to segments", lambda: steps.request_of(views, asked, model))
    timed("server: size of the answer", lambda: steps.answer_bytes(request, model))
    # The same push again: all of it is in place, which costs what a fresh one does.
    answer = timed("server: engine", lambda: model.engine.step("", request).result())
    timed("server: encode", lambda: steps.encode(request, answer))
    inner = sum(
        taken[name][-1] for name in taken if name.startswith("server: ") and "door" not in name
    )
    taken["server: door, routing, parameters, record"].append(server_s - inner)


def control(folder: Path, repeats: int) -> dict[str, Any]:
    """Measure everything; return it for the table and the JSON line."""
    checkpoint = synth(folder / "tiny.gguf", preset="tiny", fmt="gguf", quant="Q2_K", seed=1).path
    return {
        "segments": NUM_SEGMENTS,
        "end_to_end": end_to_end(folder, checkpoint, repeats),
        "stages_us": stage_by_stage(checkpoint, repeats),
    }


def print_control(found: dict[str, Any]) -> None:
    """Print both tables."""
    print(f"\ncontrol of {NUM_SEGMENTS} one-token segments, us (CPU unless said otherwise)")
    print(
        f"{'':<16}{'wall p50':>10}{'echo wall':>10}{'client':>8}{'server':>8}{'echo':>8}"
        f"{'control':>9}{'quiet':>8}"
    )
    for row in found["end_to_end"]:
        print(
            f"{row.transport + ', ' + row.output:<16}{row.step_wall_us:>10.0f}"
            f"{row.echo_wall_us:>10.0f}{row.client_cpu_us:>8.0f}{row.server_cpu_us:>8.0f}"
            f"{row.echo_cpu_us:>8.0f}{row.control_us:>9.0f}{row.quiet_us:>8.0f}"
        )
    print(f"\n{'stages of a push alone, in one process':<44}{'CPU us':>8}{'quiet':>8}")
    for name, (us, quiet) in found["stages_us"].items():
        print(f"{name:<44}{us:>8.0f}{quiet:>8.0f}")
    for end in ("client: ", "server: "):
        ends = [stage for name, stage in found["stages_us"].items() if name.startswith(end)]
        print(f"{end + 'all':<44}{sum(s[0] for s in ends):>8.0f}{sum(s[1] for s in ends):>8.0f}")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory(prefix="engram-bench-") as name:
        print_control(control(Path(name), 600))
