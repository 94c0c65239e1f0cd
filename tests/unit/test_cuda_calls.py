"""The CUDA backend without a GPU: what it asks of the library, and what it refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engram_core.backends import cuda_backend
from engram_core.backends import native as abi
from engram_core.backends.cuda_backend import CudaBackend, Sizes
from engram_core.backends.device import DeviceBuffer, Stream
from engram_core.backends.disk_rows import DiskRows
from engram_core.backends.engram_v41 import DeviceLayer
from engram_core.backends.projections import Projections
from engram_core.engine_types import EPOCH_OPENED, EngineLimits
from engram_core.errors import BadTensor, RowOutOfRange
from engram_core.fence import Asked
from engram_core.hashing import hash_windows
from engram_core.quant import row_format
from engram_core.registry import Opening
from engram_core.sessions import SessionPool
from engram_core.tables import HostTable
from tests.gpu.layers import geometry_of, hash_tables, random_windows
from tests.native.host_library import build_cpu_library

DIM, SLOTS = 64, 500
TABLES = hash_tables(100, num_layers=2)
LAUNCHES = ("copy", "gather", "project_chain", "read_kv", "gate", "gate_host", "replay")
NOBODY_DEAD = np.zeros(300, np.bool_)


class Library:
    """Memory that is real, launches that are written down and do nothing."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._memory: list[Any] = []
        self._handles = 1000

    @property
    def held(self) -> Library:
        return self

    def row_bytes(self, form: int, values: int) -> int:
        name = next(name for name, number in abi.FORMATS.items() if number == form)
        return row_format(name).row_bytes(values)

    def make(self, verb: str, *arguments: Any) -> int:
        if verb not in ("host_alloc", "device_alloc"):
            self._handles += 1
            return self._handles
        self._memory.append(ctypes.create_string_buffer(arguments[0] + 32))
        return -(-ctypes.addressof(self._memory[-1]) // 16) * 16

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*_: Any) -> None:
            self.calls.append(name)

        return call

    def launches(self) -> list[str]:
        """Those since the last time it was asked."""
        found = [name for name in self.calls if name in LAUNCHES]
        self.calls.clear()
        return found


class Bench:
    """Two layers, the second with its table on disk if there is one."""

    def __init__(self, *, on_disk: bool = True, lane_tokens: int = 32) -> None:
        self.library = Library()
        self.geometry = geometry_of(TABLES, dim=DIM)
        self.backend = CudaBackend(
            self.library,  # type: ignore[arg-type]
            self.geometry,
            TABLES,
            [self.layer(0, on_disk=False), self.layer(1, on_disk=on_disk)],
            SLOTS,
            device=abi.Device(num_sms=132),
            sizes=Sizes(chunk_tokens=128, lane_tokens=lane_tokens, num_lanes=3),
        )

    def buffer(self) -> DeviceBuffer:
        return DeviceBuffer(self.library, 64)  # type: ignore[arg-type]

    def layer(self, index: int, *, on_disk: bool) -> DeviceLayer:
        return DeviceLayer(
            encoding="BF16",
            num_rows=TABLES.table_rows[index],
            table_parts=[] if on_disk else [self.buffer()],
            wkv=self.buffer(),
            qk=self.buffer(),
            requantize_input=False,
            on_disk=table_of(index) if on_disk else None,
        )


def table_of(index: int) -> HostTable:
    rows = np.random.default_rng(index).integers(0, 256, (TABLES.table_rows[index], 512), np.uint8)
    return HostTable("BF16", 256, [rows])


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.backend.close()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    ("count", "windows", "ids"),
    [(1, 0, 1), (64, 0, 1), (65, 1, 1), (128, 1, 1)],
)
def test_a_chunk_is_two_launches_and_a_copy_of_what_does_not_fit_a_launch(
    bench: Bench, layer: int, count: int, windows: int, ids: int
) -> None:
    slots, some = np.arange(count), random_windows(count, seed=1)
    hash_ids = hash_windows(some, TABLES, [layer])[:, 0]
    bench.backend.project(layer, slots, windows=some)
    assert bench.library.launches() == ["copy"] * windows + ["gather", "project_chain"]
    bench.backend.project(layer, slots, hash_ids=hash_ids)
    # Ids of a table on disk are read by the CPU; only slots are copied then.
    copies = ids if layer == 0 else windows
    assert bench.library.launches() == ["copy"] * copies + ["gather", "project_chain"]


def test_more_tokens_go_in_chunks(bench: Bench) -> None:
    bench.backend.project(0, np.arange(300), windows=random_windows(300, seed=1))
    assert bench.library.launches().count("project_chain") == 3


def test_rows_of_a_table_on_disk_are_gathered_in_the_order_asked_for() -> None:
    table, library = table_of(1), Library()
    reader = DiskRows(library, table, 24, 64)  # type: ignore[arg-type]
    for seed, count in ((1, 64), (2, 3), (3, 64)):
        ids = np.random.default_rng(seed).integers(0, table.num_rows, (count, 24))
        given = reader.read(ids)
        assert given.num_rows == ids.size
        rows = memory(given.codes, ids.size * 512).reshape(-1, 512)
        assert np.array_equal(rows, table.gather_stored(ids.ravel()))
        places = memory(reader.places, ids.size * 8).view(np.int64)
        assert np.array_equal(places, np.arange(ids.size))
    reader.close()


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("layer", [0, 1])
def test_rows_are_gathered_piece_by_piece_to_their_place(
    bench: Bench, layer: int, stored: bool
) -> None:
    ids = np.random.default_rng(1).integers(0, TABLES.table_rows[layer], (70, 24))
    width, dtype = (512, torch.uint8) if stored else (256, torch.bfloat16)
    out = torch.ones((70, 24, width), dtype=dtype)
    bench.backend.rows(layer, ids, out, stored=stored)
    # Ids of a table on disk are read by the CPU; pageable memory is filled from pinned lanes.
    assert bench.library.launches() == ["copy", "gather"] * 3 if layer == 0 else ["gather"] * 3
    assert not out.any()


@pytest.mark.parametrize(("count", "pieces"), [(0, 0), (1, 1), (32, 1), (70, 3)])
def test_kv_is_copied_out_piece_by_piece_to_its_place(
    bench: Bench, count: int, pieces: int
) -> None:
    out = torch.ones((count, 5, DIM), dtype=torch.bfloat16)
    bench.backend.read_kv(0, np.arange(count), NOBODY_DEAD[:count], out)
    assert bench.library.launches() == ["read_kv"] * pieces
    assert not out.any()


def test_control_arrays_of_a_large_piece_of_kv_are_copied_before_it() -> None:
    made = Bench(on_disk=False, lane_tokens=100)
    out = torch.ones((170, 5, DIM), dtype=torch.bfloat16)
    made.backend.read_kv(0, np.arange(170), NOBODY_DEAD[:170], out)
    assert made.library.launches() == ["copy", "read_kv"] * 2
    made.backend.close()


def test_pinned_memory_is_written_in_place(bench: Bench) -> None:
    pinned = bench.backend.host_buffer(70 * 5 * DIM * 2)
    out = pinned.fill_(1).view(torch.bfloat16).view(70, 5, DIM)
    bench.backend.read_kv(0, np.arange(70), NOBODY_DEAD[:70], out)
    assert bench.library.launches() == ["read_kv"] * 3
    assert (pinned == 1).all()  # the launches that do nothing were told of it


def memory(address: int, num_bytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def test_a_gate_is_one_call(bench: Bench) -> None:
    for count in (1, 33, 300):
        residual = torch.zeros((count, 4, DIM))
        bench.backend.gate(0, np.arange(count), NOBODY_DEAD[:count], residual, residual)
        assert bench.library.launches() == ["gate_host"]


def test_a_graph_replaces_the_launches_of_small_batches() -> None:
    made = Bench(on_disk=False)
    made.backend.capture_graphs("on")
    # Two layers: projections over two descriptors, gates of two residual types.
    assert made.library.calls.count("capture_end") == 2 * 64 * (2 + 2)
    made.library.launches()
    for count, wanted in ((1, ["replay"]), (64, ["replay"])):
        made.backend.project(0, np.arange(count), windows=random_windows(count, seed=1))
        assert made.library.launches() == wanted
    made.backend.project(0, np.arange(65), windows=random_windows(65, seed=1))
    assert "replay" not in made.library.launches()
    made.backend.close()


@pytest.fixture
def near(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """With what the asking thread takes."""
    library = build_cpu_library(tmp_path_factory.mktemp("cpu"), "-O1")
    monkeypatch.setattr(cuda_backend, "find_library", lambda: library)
    made = Bench(on_disk=False)
    made.backend.capture_graphs("on")
    made.backend.pin_in_flight(1 << 20)
    made.backend.offer_near_reads()
    made.library.launches()
    yield made
    made.backend.close()


def test_what_is_missing_is_projected_and_gated_without_a_lane(near: Bench) -> None:
    batches, library = near.backend.near_batches, near.library
    assert batches is not None
    dead = NOBODY_DEAD
    for count, wanted in ((1, ["replay"]), (17, ["replay"]), (64, ["replay"])):
        slots, windows = list(range(count)), random_windows(count, seed=1)
        assert batches.project(0, slots, windows)
        assert library.calls[-1] == "event_wait"  # a lane may find it from now on
        assert library.launches() == wanted
    residual = near.backend.host_memory.tensor((40, 4, DIM), torch.bfloat16)
    batches.gate(1, np.arange(40), dead[:40], residual, residual)
    assert library.launches() == ["gate_host"]
    batches.read_kv(1, np.arange(3), dead[:3], torch.empty((3, 5, DIM), dtype=torch.bfloat16))
    assert library.launches() == ["read_kv"]
    assert not batches.project(0, list(range(65)), random_windows(65, seed=1))
    assert library.launches() == []


def test_without_graphs_what_is_missing_is_launched(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    library = build_cpu_library(tmp_path_factory.mktemp("cpu"), "-O1")
    monkeypatch.setattr(cuda_backend, "find_library", lambda: library)
    made = Bench(on_disk=False)
    made.backend.pin_in_flight(1 << 20)
    made.backend.offer_near_reads()
    assert made.backend.near_batches is not None
    made.library.launches()
    assert made.backend.near_batches.project(0, [1, 2], random_windows(2, seed=1))
    assert made.library.launches() == ["gather", "project_chain"]
    made.backend.close()


def test_little_is_begun_beside_the_chunks_of_a_prefill(
    near: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library here never says that a projection has ended."""
    backend = near.backend
    batches, (read, _) = backend.near_batches, backend.near_reads
    assert batches is not None
    backend.project(0, np.arange(65), windows=random_windows(65, seed=1))
    near.library.launches()
    assert batches.is_ready(np.arange(64))  # soon
    assert batches.project(0, [100], random_windows(1, seed=1))
    assert not batches.project(0, [9], random_windows(1, seed=1))  # a lane writes there
    backend.project(0, np.arange(65, 193), windows=random_windows(128, seed=1))
    near.library.launches()
    assert not batches.is_ready(np.arange(64))
    assert batches.is_ready(np.arange(400, 464))
    assert not batches.project(0, [400], random_windows(1, seed=1))
    assert not read.project([400], [0])
    assert near.library.launches() == []
    # A few tokens over stored weights need no more than what the chunks leave free.
    monkeypatch.setattr(backend.engram, "kernel_of", lambda layer, count: "stored")
    assert batches.project(0, [400] * 8, random_windows(8, seed=1))
    assert not batches.project(0, [400] * 9, random_windows(9, seed=1))
    assert not batches.project(0, [100], random_windows(1, seed=1))  # a lane writes there


def test_a_projection_that_has_ended_is_not_asked_for_again() -> None:
    class Ending(Library):
        """Asked with the interpreter's lock only: another thread may compute for long."""

        ended = 0

        @property
        def held(self) -> Any:
            return SimpleNamespace(event_is_done=self.ask)

        def ask(self, _: int, answer: Any) -> None:
            self.calls.append("event_is_done")
            answer._obj.value = self.ended

    library = Ending()
    projections = Projections(library, SLOTS)  # type: ignore[arg-type]
    number, stream = projections.begin(100), Stream(library)  # type: ignore[arg-type]
    projections.end(number, stream, np.arange(5))
    assert projections.under_way() == 100
    assert projections.are_ended([5, 6])
    assert not projections.are_ended([6, 4])
    library.ended = 1
    assert projections.under_way() == 0
    library.calls.clear()
    assert projections.under_way() == 0
    assert projections.are_ended([4])
    assert projections.of(np.arange(5)) is None
    assert library.calls == []


def test_a_small_read_takes_what_its_keys_say(near: Bench) -> None:
    read = near.backend.near_reads[1]
    limits = EngineLimits(max_sessions=1, max_held_tokens=256)
    pool = SessionPool(limits, 4, clock=lambda: 0.0, wall_clock_us=lambda: 1)
    pool.open("", Opening(1))
    pool.push("", Asked.one(1, 0, 20, EPOCH_OPENED), np.arange(20, dtype=np.int32))
    assert read.judge(pool.address, 7, (0, 10, 5, EPOCH_OPENED), None, begins=True) == 5
    assert read.keys()[0] == np.array([7, 1, 10, 9, 8, 7], np.int32).tobytes()
    assert read.project([40, 41], [1, 4])
    windows = np.frombuffer(read._windows, np.int32)[:8].tolist()  # type: ignore[attr-defined]
    assert windows == [11, 10, 9, 8, 14, 13, 12, 11]
    assert near.library.launches() == ["replay"]
    plain = np.zeros((20, 4, DIM), np.float32)
    pinned = near.backend.host_memory.tensor((20, 4, DIM), torch.float32).data_ptr()
    where = plain.ctypes.data
    assert [read.reaches(where, n, is_f32=True) for n in (16, 17)] == [True, False]
    assert read.reaches(pinned, 20, is_f32=True)
    assert read.gate([40] * 5, [(0, 5, where, True)])
    assert not read.gate([40] * 17, [(0, 17, where, True)])
    assert read.gate([40] * 17, [(0, 17, pinned, True)])
    assert near.library.launches() == ["gate_host"] * 2


def test_residuals_that_lie_apart_are_gated_by_a_launch_each_and_one_wait(near: Bench) -> None:
    read, library, memory = near.backend.near_reads[0], near.library, near.backend.host_memory
    pinned = [memory.tensor((40, 4, DIM), torch.float32) for _ in range(2)]
    one, other = (each.data_ptr() for each in pinned)
    plain = np.zeros((3, 4, DIM), np.float32).ctypes.data
    library.launches()
    assert read.gate([40] * 5, [(0, 2, one, True), (2, 3, other, False)])
    assert library.calls[-1] == "event_wait"
    assert library.launches() == ["gate", "gate"]
    assert not read.gate([40] * 5, [(0, 2, one, True), (2, 3, plain, True)])
    assert not read.gate([40] * 65, [(0, 40, one, True), (40, 25, other, True)])
    near.backend.project(0, np.arange(65), windows=random_windows(65, seed=1))
    library.launches()
    assert not read.gate([1] * 5, [(0, 2, one, True), (2, 3, other, False)])  # a lane's kv
    assert library.launches() == []


def test_rows_on_disk_are_not_waited_for_by_the_asking_thread(bench: Bench) -> None:
    bench.backend.pin_in_flight(1 << 20)
    bench.backend.offer_near_reads()
    if bench.backend.near_batches is not None:  # there is a libengram_cpu
        assert not bench.backend.near_batches.project(0, [1], random_windows(1, seed=1))
        assert not any(read.can_project for read in bench.backend.near_reads)
        assert "on a lane" in bench.backend.numerics["near_reads"]


@pytest.mark.parametrize("mode", ["off", "on"])
def test_there_are_no_graphs_over_a_table_on_disk_or_where_they_are_off(
    bench: Bench, mode: str
) -> None:
    bench.backend.capture_graphs(mode)
    said = {"off": "off", "on": "none: rows are read from disk"}
    assert bench.backend.numerics["graphs"] == said[mode]
    assert "capture_begin" not in bench.library.calls


def test_what_cannot_be_is_refused_before_any_launch(bench: Bench) -> None:
    backend, windows = bench.backend, random_windows(2, seed=1)
    residual = torch.zeros((2, 4, DIM))
    slots = np.array([0, SLOTS])
    with pytest.raises(BadTensor, match=f"slots: expected 0..{SLOTS - 1}"):
        backend.project(0, slots, windows=windows)
    with pytest.raises(BadTensor, match="exactly one of windows and hash_ids"):
        backend.project(0, slots)
    with pytest.raises(BadTensor, match="windows: expected int32"):
        backend.project(0, slots, windows=windows.astype(np.int64))
    with pytest.raises(RowOutOfRange, match=r"row ids: expected 0\.\."):
        backend.project(0, np.arange(2), hash_ids=np.full((2, 24), 10**9))
    with pytest.raises(BadTensor, match="residual: expected contiguous"):
        backend.gate(0, np.arange(2), NOBODY_DEAD[:2], residual.double(), residual)
    with pytest.raises(BadTensor, match="out: expected contiguous"):
        backend.gate(0, np.arange(2), NOBODY_DEAD[:2], residual, residual.bfloat16())
    with pytest.raises(BadTensor, match="dead: expected bool"):
        backend.gate(0, np.arange(2), np.zeros(2, np.int8), residual, residual)
    assert bench.library.launches() == []


def test_a_machine_without_a_driver_is_told_so_in_words() -> None:
    class Bare:
        def engram_last_error(self) -> bytes:
            return b"CUDA driver version is insufficient for CUDA runtime version"

    library = object.__new__(abi.Native)
    library._library = Bare()  # type: ignore[assignment]
    assert "no NVIDIA driver here" in library._error("device_info", 6).message
