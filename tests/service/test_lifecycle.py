"""Loading, ready, draining and the end over real sockets, held for as long as a test looks."""

from __future__ import annotations

from pathlib import Path

import pytest

from engram_core.errors import MemoryShort, SelfCheckFailed
from service.lifecycle import EXIT_FAILED, EXIT_START, STUCK_S
from tests.integration.door import refusal, wait_until
from tests.service.life import life


def test_alive_with_progress_while_it_loads_and_ready_after(small_gguf: Path) -> None:
    with life(small_gguf) as made, made.client() as client:
        made.report("layer 1 table", 3, 10)
        assert client.get("/livez").status_code == 200
        answer = client.get("/readyz")
        assert refusal(answer) == (503, "loading")
        assert (answer.json()["stage"], answer.json()["done"]) == ("layer 1 table", 3)
        assert refusal(client.post("/v1/sessions", json={})) == (503, "loading")
        wait_until(client, "engram_load_stage_ratio", lambda ratio: ratio == 0.3)
        made.finish_loading()
        wait_until(client, "engram_ready", lambda ready: ready == 1)
        assert client.get("/readyz").status_code == 200
        made.signal()
        assert made.end() == 0


def test_what_cannot_be_loaded_ends_the_process_with_1(small_gguf: Path) -> None:
    with life(small_gguf) as made:
        made.finish_loading(MemoryShort("tables, weights and store do not fit"))
        assert made.end() == EXIT_START
        assert isinstance(made.server.start_error, MemoryShort)


def test_failed_self_check_ends_the_process_with_70(small_gguf: Path) -> None:
    """It is no mistake of the operator's: the machine computes wrong (DESIGN 4, fail stop)."""
    with life(small_gguf) as made:
        made.finish_loading(SelfCheckFailed("kv: 3 values differ"))
        made._thread.join(60)
        assert made.server.exit_status == EXIT_FAILED
        assert made.server.start_error is None


def test_batch_that_does_not_end_is_a_failure(
    small_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch unfinished after 30 s: stacks in the log, exit 70."""
    dumped: list[object] = []
    monkeypatch.setattr("faulthandler.dump_traceback", lambda file: dumped.append(file))
    with life(small_gguf) as made, made.client() as client:
        made.finish_loading()
        wait_until(client, "engram_ready", lambda ready: ready == 1)
        engine = type(made.state.model.engine)
        monkeypatch.setattr(engine, "running_s", property(lambda _: STUCK_S - 0.1))
        assert client.get("/readyz").status_code == 200
        monkeypatch.setattr(engine, "running_s", property(lambda _: STUCK_S))
        made._thread.join(60)
        assert made.server.exit_status == EXIT_FAILED
        assert dumped


def test_signal_while_it_loads_does_not_wait_for_the_load(small_gguf: Path) -> None:
    with life(small_gguf) as made:
        made.signal()
        made._thread.join(60)
        assert not made._thread.is_alive()
        assert not made.server.close(), "a thread is left: the process ends without it"


def test_drain_ends_at_its_time_with_a_request_still_in_flight(
    small_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with life(small_gguf) as made, made.client() as client:
        made.finish_loading()
        wait_until(client, "engram_ready", lambda ready: ready == 1)
        with made.half_a_body():
            wait_until(client, "engram_in_flight_bytes", lambda held: held > 0)
            made.signal()
            made.server._drain_until = 0.0
            assert made.end() == 0


def test_failed_engine_ends_the_process_with_70(small_gguf: Path) -> None:
    with life(small_gguf) as made, made.client() as client:
        made.finish_loading()
        wait_until(client, "engram_ready", lambda ready: ready == 1)
        made.fail("the device is gone")
        assert refusal(client.get("/readyz")) == (503, "shard_down")
        assert client.get("/livez").status_code == 200
        made.server.lasts = False
        made._thread.join(60)
        assert made.server.exit_status == EXIT_FAILED
