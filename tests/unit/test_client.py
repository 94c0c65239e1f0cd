"""The blocking client over real sockets: arrays in and out, threads, failing servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from engram_client import EngramClient, EngramUnavailable, Segment, torch_of
from engram_client.problems import SessionClosed
from engram_client.wire import as_view, to_numpy
from tests.unit.fake_service import COLS, DIM, HC, WIDTH, FakeService, tensor
from tests.unit.raw_server import Peer, RawServer, serving

LOCK = threading.Lock()


@pytest.fixture
def service() -> FakeService:
    return FakeService(max_tokens=64)


@pytest.fixture
def client(service: FakeService) -> Iterator[EngramClient]:
    with RawServer([serving(service, LOCK)]) as server, EngramClient(server.url) as client:
        yield client


def residual(kind: str, count: int) -> Any:
    values = np.arange(count * HC * DIM).reshape(count, HC, DIM) % 64
    match kind:
        case "numpy f32":
            return values.astype(np.float32)
        case "numpy bf16":
            return values.astype(ml_dtypes.bfloat16)
        case "torch f32":
            return torch.from_numpy(values).float()
    return torch.from_numpy(values).bfloat16()


KINDS = ["numpy f32", "numpy bf16", "torch f32", "torch bf16"]


def updated(ids: list[int], begin: int, given: Any, layer: int = 1) -> np.ndarray[Any, Any]:
    windows = [ids[max(at - WIDTH, 0) : at + 1] for at in range(begin, begin + len(given))]
    return to_numpy(tensor("residual", layer, windows, as_view(given))).astype(np.float32)


def plain(value: Any) -> np.ndarray[Any, Any]:
    return to_numpy(as_view(value)).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_what_kind_goes_in_comes_out(client: EngramClient, kind: str) -> None:
    session = client.open_session()
    session.push([5, 6, 7])
    given = residual(kind, 2)
    got = session.apply(1, given)
    assert (type(got), got.dtype) == (type(given), given.dtype)
    assert np.array_equal(plain(got), updated([5, 6, 7], 1, given))
    assert np.array_equal(plain(given), plain(residual(kind, 2)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aliased", [True, False])
def test_out_is_filled_and_returned(client: EngramClient, kind: str, aliased: bool) -> None:
    session = client.open_session()
    session.push(list(range(100)))
    given = residual(kind, 100)
    expected = updated(list(range(100)), 0, given)
    out = given if aliased else residual(kind, 100) * 0
    assert session.apply(1, given, out=out) is out
    assert np.array_equal(plain(out), expected)


def test_a_strided_out_is_filled(client: EngramClient) -> None:
    session = client.open_session()
    session.push([5, 6, 7])
    out = np.zeros((6, HC, DIM), np.float32)[::2]
    tensor_out = torch.zeros((6, HC, DIM))[::2]
    given = residual("numpy f32", 3)
    session.apply(1, given, out=out)
    session.apply(1, torch.from_numpy(given), out=tensor_out)
    assert np.array_equal(out, updated([5, 6, 7], 0, given))
    assert np.array_equal(tensor_out.numpy(), out)


def test_a_strided_residual_is_sent_right(client: EngramClient) -> None:
    session = client.open_session()
    session.push([5, 6, 7])
    given = np.arange(6 * HC * DIM, dtype=np.float32).reshape(6, HC, DIM)[::-2]
    assert np.array_equal(session.apply(1, given), updated([5, 6, 7], 0, given))


def test_a_wrong_residual_or_out_is_refused_before_anything_is_sent(
    client: EngramClient, service: FakeService
) -> None:
    session = client.open_session()
    session.push([1])
    num_requests = len(service.requests)
    good = residual("numpy f32", 1)
    read_only = np.zeros_like(good)
    read_only.flags.writeable = False
    for given, out in (
        (good[0], None),
        (good.astype(np.float16), None),
        (good, np.zeros((2, HC, DIM), np.float32)),
        (good, residual("torch bf16", 1)),
        (good, read_only),
    ):
        with pytest.raises(ValueError, match="expected"):
            session.apply(1, given, out=out)
    assert len(service.requests) == num_requests


@pytest.mark.parametrize("pushes", [False, True])
def test_an_out_that_no_answer_fits_is_refused_before_anything_is_sent(
    client: EngramClient, service: FakeService, pushes: bool
) -> None:
    """A push would have been applied, and its session's own copy would not know."""
    session = client.open_session()
    session.push([5, 6])
    num_requests = len(service.requests)
    segment = Segment(session, token_ids=[7, 8]) if pushes else Segment(session, position=0)
    bf16 = ml_dtypes.bfloat16
    for output, out in (
        ("kv", np.zeros((2, HC + 1, DIM), np.float32)),
        ("kv", np.zeros((2, HC, DIM), bf16)),
        ("kv", np.zeros((2, DIM, HC + 1), bf16)),
        ("rows", np.zeros((2, COLS, 3), bf16)),
        ("rows", np.zeros((2, COLS, 2), np.uint8)),
        ("hash_ids", np.zeros((2, COLS), np.int32)),
        ("hash_ids", np.zeros((2, COLS, 1), np.int64)),
    ):
        with pytest.raises(ValueError, match=rf"^out: expected \w+ \[T, .* for {output}, got "):
            client.step([segment], (1,), output, out=out)
        if not pushes:
            with pytest.raises(ValueError, match=rf"^out: .* for {output}, got "):
                getattr(session, output)(1, 0, 2, out=out)
    with pytest.raises(ValueError, match=r"^out: expected"):
        client.step(
            [segment], (1,), residual=residual("numpy f32", 2), out=residual("torch bf16", 2)
        )
    assert (len(service.requests), session.length) == (num_requests, 2)


def test_what_is_no_list_of_segments_is_said(client: EngramClient) -> None:
    session = client.open_session()
    for given in ([session], Segment(session, token_ids=[1])):
        with pytest.raises(ValueError, match=r"^segments: expected a list of Segment"):
            client.step(given, (1,), "kv")  # type: ignore[arg-type]


def test_kv_rows_and_hash_ids_come_as_numpy_or_into_out(client: EngramClient) -> None:
    session = client.open_session()
    session.push(torch.tensor([5, 6, 7]), np.array([True, False, True]))
    assert session.kv(1).shape == (1, HC + 1, DIM)
    assert session.rows(14, 0).shape == (3, COLS, 2)
    assert session.hash_ids(1, 1, 2).dtype == np.int64
    out = torch.zeros((3, HC + 1, DIM), dtype=torch.bfloat16)
    assert session.kv(1, 0, out=out) is out
    assert torch.equal(out, torch_of(session.kv(1, 0, 3)))


def test_more_of_the_newest_than_a_session_has_is_refused(client: EngramClient) -> None:
    session = client.open_session()
    session.push([1, 2])
    newest = [
        lambda: session.apply(1, residual("numpy f32", 3)),
        lambda: session.kv(1, count=3),
        lambda: client.step([Segment(session, count=3)], (1,), "kv"),
    ]
    for read in newest:
        with pytest.raises(ValueError, match="expected at most 2 positions, its length, got 3"):
            read()


def test_out_of_another_shape_than_the_answer_is_refused(client: EngramClient) -> None:
    session = client.open_session()
    session.push([5, 6])
    with pytest.raises(ValueError, match="out"):
        session.kv(1, 0, out=np.zeros((3, HC + 1, DIM), ml_dtypes.bfloat16))


def test_a_session_goes_the_whole_way(client: EngramClient, service: FakeService) -> None:
    with client.open_session(10, [1, 2, None]) as session:
        session.push([4, 5, 6])
        session.push([7, 8], truncate=True, position=12)
        session.rewind(13)
        with session.fork(12) as fork:
            fork.push([9])
            assert (fork.length, session.length, session.base) == (13, 13, 10)
            assert service.sessions[fork.session_id].ids == [1, 2, -1, 4, 5, 9]
        assert service.sessions[session.session_id].ids == [1, 2, -1, 4, 5, 7]
        assert "length=13, base=10" in repr(session)
    assert service.sessions == {}
    with pytest.raises(SessionClosed):
        session.push([1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reads_into_given_arrays(client: EngramClient, kind: str) -> None:
    sessions = [client.open_session() for _ in range(3)]
    client.step([Segment(s, token_ids=[5, 6, 7]) for s in sessions], output="none")
    given = residual(kind, 6)
    out = residual(kind, 6) * 0
    segments = [Segment(s, count=2) for s in sessions]
    got = client.step(segments, (14,), residual=given, out=out)
    assert got.tensors[14] is out
    expected = updated([5, 6, 7], 1, given[:2], 14)
    assert np.array_equal(plain(out[:2]), expected)
    free = client.step(segments, (14,), residual=given).tensors[14]
    assert type(free) is type(given)
    assert np.array_equal(plain(free), plain(out))


def test_a_split_step_reads_into_given_arrays_by_layer(
    client: EngramClient, service: FakeService
) -> None:
    service.max_tokens = 4
    sessions = [client.open_session() for _ in range(3)]
    outs = {layer: np.zeros((15, HC + 1, DIM), ml_dtypes.bfloat16) for layer in (1, 14)}
    segments = [Segment(s, token_ids=range(5)) for s in sessions]
    got = client.step(segments, output="kv", out=outs)
    assert all(got.tensors[layer] is outs[layer] for layer in outs)
    again = client.step([Segment(s, position=0) for s in sessions], output="kv")
    for layer in outs:
        assert np.array_equal(plain(again.tensors[layer]), plain(outs[layer]))
        alone = np.concatenate([plain(s.kv(layer, 0)) for s in sessions])
        assert np.array_equal(plain(outs[layer]), alone)


@pytest.mark.parametrize(
    "arguments",
    [
        {"output": "residual"},
        {"output": "residual", "residual": residual("numpy f32", 1)},
        {"output": "kv", "residual": residual("numpy f32", 1)},
        {"output": "logits"},
        {"output": "residual", "layers": (1,), "residual": residual("numpy f32", 2)},
        {"output": "kv", "out": np.zeros(1, np.float32)},
        {"output": "kv", "out": {3: np.zeros(1, np.float32)}},
    ],
)
def test_a_step_that_contradicts_itself_is_refused(
    client: EngramClient, arguments: dict[str, Any]
) -> None:
    session = client.open_session()
    with pytest.raises(ValueError, match="expected"):
        client.step([Segment(session, token_ids=[1])], **arguments)
    assert session.length == 0


def test_info_weights_and_owners(client: EngramClient) -> None:
    assert client.info()["geometry"]["dim"] == DIM
    assert client.weights(1, ("qk",))["qk"].tolist() == np.full((HC, DIM), 0.5).tolist()
    client.open_session()
    assert client.close_owner("a former/one") == 1


@pytest.mark.parametrize("owner", ["", "a b", "a\r\nb", "\xe9", "a" * 129])
def test_an_owner_that_no_service_takes_is_refused_at_once(owner: str) -> None:
    with pytest.raises(ValueError, match="owner: expected 1 to 128 visible ASCII"):
        EngramClient("http://127.0.0.1:1", owner=owner)


def test_key_owner_and_table_are_told_with_every_request(service: FakeService) -> None:
    script = serving(service, LOCK)
    with (
        RawServer([script]) as server,
        EngramClient(server.url, "secret", "runner-1") as client,
    ):
        client.open_session().push([1])
    for request in service.requests[1:]:
        headers = dict(request.headers)
        assert headers["Authorization"] == "Bearer secret"
        assert headers["X-Engram-Owner"] == "runner-1"
        assert headers["X-Engram-Table"] == "table"
        assert headers["Host"].startswith("127.0.0.1:")


@pytest.mark.parametrize(
    "arguments", [([],), ("http://x/y",), ("http://x", "a\r\nb"), ("http://x", None, "ä")]
)
def test_a_client_that_cannot_be_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        EngramClient(*arguments)


def losing(service: FakeService, *lost: int) -> Any:
    """Serve, but close the connection instead of giving answers number `lost`."""
    plain_script, count = serving(service, LOCK), iter(range(10**6))

    def script(peer: Peer) -> None:
        send = peer.send

        def maybe(data: bytes) -> None:
            if next(count) in lost:
                raise ConnectionResetError
            send(data)

        peer.send = maybe  # type: ignore[method-assign]
        plain_script(peer)

    return script


def test_lost_answers_are_fetched_again_over_new_connections(service: FakeService) -> None:
    script = losing(service, 1, 3, 5, 7, 9, 11)
    with RawServer([script]) as server, EngramClient(server.url) as client:
        session = client.open_session()
        session.push([5, 6, 7])
        session.push([8, 9], truncate=True, position=1)
        given = residual("torch bf16", 3)
        got = session.apply(1, given)
        assert np.array_equal(plain(got), updated([5, 8, 9], 0, given))
        assert service.sessions[session.session_id].ids == [5, 8, 9]
        assert server.num_connections > 3


def test_another_server_takes_over() -> None:
    one, two = FakeService(), FakeService(first_epoch=10**6)
    second = RawServer([serving(two, LOCK)])
    with second, RawServer([serving(one, LOCK)]) as first:
        client = EngramClient([first.url, second.url])
        session = client.open_session()
        session.push([5, 6])
        first.stop()
        session.push([7])
        assert two.sessions[session.session_id].ids == [5, 6, 7]
        client.close()


def test_nothing_answers() -> None:
    with (
        RawServer([lambda peer: None]) as server,
        EngramClient(server.url, reconnect_s=0.05) as client,
        pytest.raises(EngramUnavailable),
    ):
        client.open_session()


def test_threads_share_a_client(client: EngramClient, service: FakeService) -> None:
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            session, ids = client.open_session(), [seed]
            session.push(ids)
            for token in range(20):
                session.push([token])
                ids.append(token)
                given = residual("numpy f32", 2)
                assert np.array_equal(session.apply(1, given), updated(ids, len(ids) - 2, given))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_threads_that_read_one_expired_session_all_get_their_rows(
    client: EngramClient, service: FakeService
) -> None:
    session = client.open_session()
    session.push(list(range(60)))
    expected = plain(session.kv(1, 0))
    with LOCK:
        service.sessions.clear()
    results: list[Any] = []
    read = lambda: results.append(plain(session.kv(1, 0)))  # noqa: E731
    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    assert all(np.array_equal(result, expected) for result in results)
