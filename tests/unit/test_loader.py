"""From a checkpoint to a backend: placements, weights of every type, refusals."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch

from engram_core import loader
from engram_core.backends import cuda
from engram_core.backends.cuda_backend import NEAR_LANES
from engram_core.backends.native import INLINE_TOKENS
from engram_core.checkpoint import Checkpoint, open_checkpoint
from engram_core.errors import CheckpointError, EngramError, MemoryShort, SchemaError
from engram_core.loader import ledger_on_cpu, load, needs_of, weights_from_source
from engram_core.memory import Budget, Memory, Placement
from engram_core.tools.synth import FORMATS, synth


def opened(tmp_path: Path, fmt: str = "gguf", quant: str = "Q2_K") -> Checkpoint:
    synth(tmp_path / "c", preset="tiny", fmt=fmt, quant=quant, seed=1)
    return open_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("quant", FORMATS["gguf"])
def test_wkv_is_what_the_gguf_package_decodes_rounded_once(tmp_path: Path, quant: str) -> None:
    checkpoint = opened(tmp_path, quant=quant)
    reader = gguf.GGUFReader(tmp_path / "c")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for layer in checkpoint.layers:
        held = tensors[f"blk.{layer.layer_id}.engram_wkv.weight"]
        values = gguf.quants.dequantize(held.data, held.tensor_type)
        expected = values.astype(ml_dtypes.bfloat16).view(np.uint16)
        weights = weights_from_source(layer, checkpoint.geometry)
        assert np.array_equal(weights.wkv.view(torch.uint16).numpy(), expected)
        assert not weights.requantize_input


def test_fp8_wkv_is_exact_in_bfloat16(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, "safetensors", "FP8")
    for layer in checkpoint.layers:
        wkv, scale = layer.wkv, layer.wkv.scale
        assert scale is not None
        raw = wkv.path.read_bytes()
        codes = np.frombuffer(raw, ml_dtypes.float8_e4m3fn, wkv.num_bytes, wkv.offset)
        scales = np.frombuffer(raw, ml_dtypes.float8_e8m0fnu, scale.num_bytes, scale.offset)
        blocks = scales.astype(np.float32).reshape(6, 48).repeat(32, 0).repeat(32, 1)
        expected = codes.astype(np.float32).reshape(192, 1536) * blocks
        weights = weights_from_source(layer, checkpoint.geometry)
        assert np.array_equal(weights.wkv.float().numpy(), expected)
        assert weights.requantize_input


def test_chunks_do_not_change_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = opened(tmp_path, "safetensors", "FP8")
    whole = weights_from_source(checkpoint.layers[0], checkpoint.geometry)
    monkeypatch.setattr("engram_core.checkpoint.dense.CHUNK_VALUES", 1)
    pieces = weights_from_source(checkpoint.layers[0], checkpoint.geometry)
    assert torch.equal(whole.wkv, pieces.wkv)
    assert torch.equal(whole.qk, pieces.qk)


@pytest.mark.parametrize("placement", ["auto", "host", "disk"])
@pytest.mark.parametrize(("fmt", "quant"), [("gguf", "Q2_K"), ("safetensors", "FP8")])
def test_rows_do_not_depend_on_the_placement(
    tmp_path: Path, fmt: str, quant: str, placement: str
) -> None:
    checkpoint = opened(tmp_path, fmt, quant)
    backend = load(checkpoint, placement=placement, num_slots=4)
    ids = np.arange(72).reshape(12, 6)
    out = torch.empty((12, 6, checkpoint.layers[0].table.row_bytes), dtype=torch.uint8)
    backend.rows(0, ids, out, stored=True)
    backend.self_check()
    backend.close()
    expected = [
        np.fromfile(part.path, np.uint8, 72 * part.row_bytes, offset=part.offset).reshape(72, -1)
        for part in checkpoint.layers[0].table.parts
    ]
    assert np.array_equal(out.numpy().reshape(72, -1), np.concatenate(expected, axis=1))


def test_progress_reaches_every_total(tmp_path: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}

    def progress(what: str, done: int, total: int) -> None:
        seen[what] = (done, total)

    checkpoint = opened(tmp_path)
    load(checkpoint, placement="host", num_slots=4, progress=progress).close()
    assert set(seen) == {f"layer {i} {what}" for i in (1, 14) for what in ("table", "wkv")}
    assert all(done == total for done, total in seen.values())


def test_a_table_leaves_no_second_copy_in_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report E2: what was read of a file that becomes resident is dropped behind."""
    dropped: list[tuple[int, int]] = []

    def advise(_: int, begin: int, num_bytes: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            dropped.append((begin, begin + num_bytes))

    checkpoint = opened(tmp_path)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    load(checkpoint, placement="host", num_slots=4).close()
    for layer in checkpoint.layers:
        (part,) = layer.table.parts
        at, end = part.offset, part.offset + layer.table.num_rows * part.row_bytes
        for begin, stop in sorted(dropped):
            if begin == at:
                at = stop
        assert at == end


def test_a_table_that_shrank_after_opening_is_refused(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path)
    with open(tmp_path / "c", "r+b") as file:
        file.truncate(checkpoint.layers[0].table.parts[0].offset + 84)
    for placement in ("host", "disk"):
        with pytest.raises(CheckpointError, match="file"):
            load(checkpoint, placement=placement, num_slots=4)


def test_lanes_of_the_asking_thread_are_in_a_gpus_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a piece of a residual on the device, and as much pinned."""
    checkpoint = opened(tmp_path)
    needs = cuda.needs_of(checkpoint, num_slots=4, budget=Budget())
    monkeypatch.setattr(cuda, "NEAR_LANES", 0)
    without = cuda.needs_of(checkpoint, num_slots=4, budget=Budget())
    geometry = checkpoint.geometry
    lanes = NEAR_LANES * INLINE_TOKENS * geometry.hc_mult * geometry.dim * 4
    assert needs.workspaces - without.workspaces == lanes > 0
    assert needs.in_flight - without.in_flight == lanes


def test_auto_takes_the_disk_when_memory_is_short(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, quant="F32")
    needs = needs_of(checkpoint, num_slots=4, budget=Budget(reserve_bytes=0))
    short = Memory(needs.wkv + needs.kv_store + needs.workspaces + needs.tables // 2)
    budget = Budget(reserve_bytes=0)
    ledger = ledger_on_cpu(checkpoint, num_slots=4, budget=budget, memory=short)
    assert ledger.placement is Placement.DISK


def test_a_plan_that_does_not_fit_loads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = opened(tmp_path)
    monkeypatch.setattr(loader, "host_available_bytes", lambda: 1 << 20)
    with pytest.raises(MemoryShort, match="do not fit"):
        load(checkpoint, num_slots=4, progress=lambda *_: pytest.fail("loaded"))


def test_needs_count_what_is_in_flight_and_held(tmp_path: Path) -> None:
    budget = Budget(in_flight_bytes=7, held_tokens=5, reserve_bytes=3)
    needs = needs_of(opened(tmp_path), num_slots=10, budget=budget)
    assert (needs.in_flight, needs.held_ids, needs.reserve) == (7, 20, 3)
    assert needs.tables == (72 + 204) * 84
    assert needs.kv_store == 10 * 3 * 64 * 2


def test_unknown_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="device: expected cpu or cuda:N, got 'tpu'"):
        load(opened(tmp_path), device="tpu", num_slots=4)


def test_cuda_without_a_cuda_backend_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_CUDA_MODULE", "engram_core.backends.no_such_module")
    with pytest.raises(EngramError, match="no CUDA backend"):
        load(opened(tmp_path), device="cuda:0", num_slots=4)


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_cuda_is_told_where_and_whether_by_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: str
) -> None:
    told: dict[str, object] = {}
    monkeypatch.setattr(loader, "_cuda_loader", lambda: lambda _, **named: told.update(named))
    load(opened(tmp_path), device="cuda:1", placement="disk", num_slots=4, graphs=graphs)
    assert (told["device"], told["placement"], told["num_slots"]) == ("cuda:1", "disk", 4)
    assert told["graphs"] == graphs
