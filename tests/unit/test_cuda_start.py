"""What a CUDA backend decides when it starts, and when it gives up on its device, without one."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from engram_core.backends import choices
from engram_core.backends import native as abi
from engram_core.backends.device import Event, Stream
from engram_core.backends.engram_v41 import EngramV41, require_image
from engram_core.backends.native import Native, Unsupported
from engram_core.errors import BadTensor, CheckpointError, EngramError, Internal
from tests.gpu.layers import random_windows
from tests.unit.test_cuda_calls import DIM, NOBODY_DEAD, Bench, Library

CSRC = Path(__file__).parents[2] / "csrc"


class Gemms:
    """Stands for the engram: opens the libraries that are there; all layers keep their copies."""

    def __init__(self, *there: str, has_copy: bool = True) -> None:
        self.there, self.opened = there, ""
        self.geometry = SimpleNamespace(num_layers=2)
        self._layer = SimpleNamespace(wkv=object() if has_copy else None)

    def layer(self, _: int) -> Any:
        return self._layer

    def open_gemm(self, library: str, *, num_sms: int) -> int:
        if library not in self.there:
            raise Unsupported(f"{library}: no such library")
        assert num_sms == 124
        self.opened = library
        return 130100

    def close_gemm(self) -> None:
        self.opened = ""


def opened(
    monkeypatch: pytest.MonkeyPatch, gemms: Gemms, differ: dict[str, list[int]]
) -> tuple[bool, dict[str, str]]:
    """Open the first of libraries a, b and c that may serve. differ: T of other bits, by name."""
    numerics: dict[str, str] = {}
    monkeypatch.setattr(choices, "gemm_matches_chain", lambda *_: differ.get(gemms.opened, []))
    is_open = choices.open_gemm(
        cast(EngramV41, gemms), cast(Stream, None), numerics, ["a", "b", "c"], 124
    )
    return is_open, numerics


def test_a_cublaslt_with_other_bits_in_any_class_is_left_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gemms = Gemms("b", "c")
    is_open, numerics = opened(monkeypatch, gemms, {"b": [33]})
    assert (is_open, gemms.opened) == (True, "c")
    assert "cublasLt 130100 above on 124 SMs" in numerics["wkv"]


def test_without_a_right_cublaslt_the_chain_serves_and_the_reasons_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gemms = Gemms("b")
    is_open, numerics = opened(monkeypatch, gemms, {"b": [17, 8192]})
    assert (is_open, gemms.opened) == (False, "")
    assert numerics == {
        "wkv_without_cublaslt": "a: no such library; b: other bits than the chain at "
        "T = [17, 8192]; c: no such library"
    }


def test_without_bf16_copies_no_library_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    is_open, numerics = opened(monkeypatch, Gemms("a", has_copy=False), {})
    assert not is_open
    assert "as stored, in passes of 64 tokens" in numerics["wkv"]


def test_a_device_without_an_image_is_refused_by_name() -> None:
    """Field report E5: no kernel image, found out at the first launch."""
    native = cast(Native, SimpleNamespace(architectures="80 90a 100f 120a 121a"))
    device = abi.Device(name=b"NVIDIA GB10", major=12, minor=1, has_image=1)
    require_image(native, device)
    device.has_image = 0
    with pytest.raises(Unsupported, match=r"80 90a 100f 120a 121a, none .* GB10 .*12\.1"):
        require_image(native, device)


def test_only_a_device_of_its_own_memory_is_asked_what_is_free() -> None:
    """Field report E1: an integrated one counts the page cache as used, or fails."""
    sources = {path.name: path.read_text() for path in CSRC.rglob("*.c[cu]*")}
    assert [name for name, text in sources.items() if "cudaMemGetInfo" in text] == ["device.cc"]
    calls = r"if \(!prop\.integrated\) \{[^}]*?ENGRAM_CUDA\(cudaMemGetInfo\("
    assert len(re.findall(calls, sources["device.cc"])) == 1
    assert sources["device.cc"].count("cudaMemGetInfo(") == 1


class Failing:
    """The shared library, every call of which ends with one status."""

    def __init__(self, status: int) -> None:
        self._status = status
        self.asked: list[tuple[int, ...]] = []

    def engram_last_error(self) -> bytes:
        return b"what it says"

    def __getattr__(self, name: str) -> Any:
        def verb(*arguments: int) -> int:
            self.asked.append(arguments)
            return self._status

        setattr(self, name, verb)
        return verb


def native_of(library: Failing) -> Native:
    native = object.__new__(Native)
    native._library = cast(Any, library)
    return native


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (1, BadTensor),
        (2, Internal),  # a CUDA error, after which the device is not to be trusted
        (3, Unsupported),
        (4, Internal),  # a launch that did not end
        (5, CheckpointError),
        (6, EngramError),
        (99, Internal),
    ],
)
def test_each_status_of_the_library_has_its_error(status: int, kind: type[EngramError]) -> None:
    with pytest.raises(EngramError, match="CUDA event_wait: what it says") as caught:
        native_of(Failing(status)).event_wait(7, 1)
    assert type(caught.value) is kind


def test_a_launch_is_waited_for_30_s() -> None:
    library = Failing(4)
    event = object.__new__(Event)
    event._native, event.handle = native_of(library), 7
    with pytest.raises(Internal):
        event.wait()
    assert library.asked == [(7, 30_000)]


class Timed(Library):
    """Keeps how long each gate may take."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[int] = []

    def gate_host(self, params: Any, *_: Any) -> None:
        self.timeouts.append(ctypes.cast(params, ctypes.POINTER(abi.GateHost))[0].timeout_ms)


class NoGraphs(Library):
    """Captures nothing."""

    def capture_begin(self, *_: Any) -> None:
        raise Internal("CUDA capture_begin: not permitted")


def bench_of(monkeypatch: pytest.MonkeyPatch, library: type[Library]) -> Bench:
    monkeypatch.setattr("tests.unit.test_cuda_calls.Library", library)
    return Bench(on_disk=False)


def test_a_gate_is_waited_for_30_s(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(monkeypatch, Timed)
    for count in (1, 300):
        residual = torch.zeros((count, 4, DIM))
        bench.backend.gate(0, np.arange(count), NOBODY_DEAD[:count], residual, residual)
    assert cast(Timed, bench.library).timeouts == [30_000, 30_000]
    bench.backend.close()


def test_where_nothing_can_be_captured_kernels_are_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Field report F3: a failed capture falls back, and says so once."""
    bench = bench_of(monkeypatch, NoGraphs)
    bench.backend.capture_graphs("on")
    assert bench.backend.numerics["graphs"] == (
        "none, kernels are launched one by one: CUDA capture_begin: not permitted"
    )
    bench.library.launches()
    bench.backend.project(0, np.arange(3), windows=random_windows(3, seed=1))
    assert bench.library.launches() == ["gather", "project_chain"]
    bench.backend.close()
