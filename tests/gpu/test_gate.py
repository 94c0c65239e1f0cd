"""The gate and the kv read-out on the device: intervals through the reference, bits, dead, NaN."""

from __future__ import annotations

from ctypes import byref

import numpy as np
import pytest
import torch

from engram_core.backends import native as abi
from engram_core.errors import BadTensor
from tests.gpu.arrays import Arrays, same_bits
from tests.oracle import Interval, explained_by_one_gate, gate_interval, residual_interval

DTYPES = [torch.bfloat16, torch.float32]
SHAPES = [(4, 5120), (4, 1024), (2, 64), (1, 256), (3, 7168), (4, 8192), (2, 2056)]


class Inputs:
    """residual [T, hc, dim], kv [slots, hc + 1, dim], qk, slots and dead flags."""

    def __init__(
        self, num_tokens: int, hc_mult: int, dim: int, dtype: torch.dtype, seed: int = 1
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (num_tokens, hc_mult, dim)
        scale = torch.exp2(torch.randint(-3, 6, (num_tokens, hc_mult, 1), generator=generator))
        self.residual = (torch.randn(shape, generator=generator) * scale).to(dtype)
        self.num_slots = num_tokens + 3
        kv = torch.randn((self.num_slots, hc_mult + 1, dim), generator=generator)
        self.kv = kv.to(torch.bfloat16)
        self.qk = 1 + 0.05 * torch.randn((hc_mult, dim), generator=generator)
        order = torch.randperm(self.num_slots, generator=generator)
        self.slots = order[:num_tokens].numpy().astype(np.int64)
        self.dead = np.zeros(num_tokens, dtype=np.bool_)

    def keep(self, tokens: list[int] | slice) -> Inputs:
        """Some tokens, in the order given."""
        some = object.__new__(Inputs)
        some.residual = self.residual[tokens]
        some.num_slots, some.kv, some.qk = self.num_slots, self.kv, self.qk
        some.slots = np.ascontiguousarray(self.slots[tokens])
        some.dead = np.ascontiguousarray(self.dead[tokens])
        return some


def gate(arrays: Arrays, x: Inputs, *, in_place: bool = True, eps: float = 1e-20) -> torch.Tensor:
    num_tokens, hc_mult, dim = x.residual.shape
    residual = arrays.up(x.residual)
    num_bytes = x.residual.numel() * x.residual.element_size()
    out = residual if in_place else arrays.empty(num_bytes)
    is_inline = num_tokens <= abi.INLINE_TOKENS
    params = abi.Gate(
        kv=arrays.up(x.kv).address,
        slots=x.slots.ctypes.data if is_inline else arrays.up(x.slots).address,
        is_dead=x.dead.ctypes.data if is_inline else arrays.up(x.dead).address,
        qk=arrays.up(x.qk).address,
        residual=residual.address,
        out=out.address,
        num_tokens=num_tokens,
        dim=dim,
        hc_mult=hc_mult,
        eps=eps,
        is_f32=int(x.residual.dtype == torch.float32),
        stream=arrays.stream.handle,
    )
    arrays.native.gate(byref(params))
    return arrays.down(out, x.residual.dtype, tuple(x.residual.shape))


def permitted(x: Inputs, eps: float = 1e-20) -> tuple[Interval, Interval]:
    """The gates and the results the reference's formula permits for exactly these keys."""
    hc_mult = x.residual.shape[1]
    kv = x.kv[torch.from_numpy(x.slots)]
    keys = Interval(kv[:, :hc_mult], kv[:, :hc_mult])
    value = Interval(kv[:, hc_mult], kv[:, hc_mult])
    gates = gate_interval(x.residual, keys, x.qk, eps)
    return gates, residual_interval(x.residual, gates, value, torch.from_numpy(x.dead))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hc_mult", "dim"), SHAPES)
def test_results_lie_in_the_interval_of_the_reference(
    arrays: Arrays, dtype: torch.dtype, hc_mult: int, dim: int
) -> None:
    x = Inputs(33, hc_mult, dim, dtype)
    x.dead[[3, 32]] = True
    got = gate(arrays, x)
    assert not permitted(x)[1].outside(got).any()


def test_product_and_sum_are_rounded_one_after_the_other(arrays: Arrays) -> None:
    x = Inputs(4, 4, 1024, torch.float32)
    got = gate(arrays, x)
    value = x.kv[torch.from_numpy(x.slots)][:, 4]
    assert explained_by_one_gate(x.residual, value, permitted(x)[0], got).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 7, 8, 16, 33, 64, 65, 256, 1000])
def test_a_token_has_the_same_bits_in_every_batch(
    arrays: Arrays, dtype: torch.dtype, count: int
) -> None:
    x = Inputs(1000, 4, 5120, dtype)
    x.dead[::7] = True
    together = gate(arrays, x)
    tail = slice(1000 - count, 1000)
    assert same_bits(gate(arrays, x.keep(tail)), together[tail])
    head = list(range(count))[::-1]
    assert same_bits(gate(arrays, x.keep(head)), together[head])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [5, 100])
def test_in_place_and_apart_give_the_same_bits(
    arrays: Arrays, dtype: torch.dtype, num_tokens: int
) -> None:
    x = Inputs(num_tokens, 4, 5120, dtype)
    x.dead[1] = True
    assert same_bits(gate(arrays, x, in_place=False), gate(arrays, x, in_place=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [True, False])
def test_dead_positions_keep_their_bits_whatever_the_slot_holds(
    arrays: Arrays, dtype: torch.dtype, in_place: bool
) -> None:
    x = Inputs(6, 4, 1024, dtype)
    x.dead[2] = True
    x.kv[x.slots[2]] = torch.nan
    x.residual[2, 0, :4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-39])
    got = gate(arrays, x, in_place=in_place)
    kind = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(got[2].view(kind), x.residual[2].view(kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["residual", "key"])
def test_what_is_not_finite_spoils_its_stream_only(
    arrays: Arrays, dtype: torch.dtype, bad: float, where: str
) -> None:
    x = Inputs(3, 4, 5120, dtype)
    clean = gate(arrays, x)
    target = x.residual[1, 2] if where == "residual" else x.kv[x.slots[1], 2]
    target[777] = bad
    got = gate(arrays, x)
    assert got[1, 2].isnan().all()
    got[1, 2] = clean[1, 2] = 0
    assert same_bits(got, clean)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_value_element_spoils_that_element_of_every_stream(
    arrays: Arrays, dtype: torch.dtype, bad: float
) -> None:
    x = Inputs(3, 4, 5120, dtype)
    clean = gate(arrays, x)
    x.kv[x.slots[1], 4, 99] = bad
    got = gate(arrays, x)
    assert not got[1, :, 99].isfinite().any()
    got[1, :, 99] = clean[1, :, 99] = 0
    assert same_bits(got, clean)


@pytest.mark.parametrize("zero", ["residual", "key", "both"])
def test_zero_streams_pass_the_gate_of_plus_zero(arrays: Arrays, zero: str) -> None:
    x = Inputs(1, 1, 64, torch.float32)
    x.kv[:, 1] = 2.0
    if zero in ("residual", "both"):
        x.residual[:] = 0.0
    if zero in ("key", "both"):
        x.kv[:, 0] = 0.0
    got = gate(arrays, x)
    added = (got - x.residual) / 2.0
    assert torch.allclose(added, torch.tensor(0.5002499999791666), rtol=1e-5)


def test_minus_zero_has_a_gate_below_one_half(arrays: Arrays) -> None:
    x = Inputs(1, 1, 8, torch.float32)
    x.residual[:], x.kv[:] = 0.0, 1.0
    x.residual[:] = -0.0  # every product is -0, but sums of them start from +0
    plus = gate(arrays, x)
    x.residual[0, 0, 0] = -1e-38
    minus = gate(arrays, x)
    assert float(plus[0, 0, 1]) > 0.5 > float(minus[0, 0, 1])


@pytest.mark.parametrize("num_tokens", [3, 64, 65, 200])
def test_kv_comes_back_by_slot_and_dead_as_zeros(arrays: Arrays, num_tokens: int) -> None:
    x = Inputs(num_tokens, 4, 1024, torch.bfloat16)
    x.dead[[0, num_tokens - 1]] = True
    out = arrays.empty(num_tokens * 5 * 1024 * 2)
    is_inline = num_tokens <= abi.INLINE_TOKENS
    params = abi.ReadKv(
        kv=arrays.up(x.kv).address,
        slots=x.slots.ctypes.data if is_inline else arrays.up(x.slots).address,
        is_dead=x.dead.ctypes.data if is_inline else arrays.up(x.dead).address,
        out=out.address,
        num_tokens=num_tokens,
        dim=1024,
        hc_mult=4,
        stream=arrays.stream.handle,
    )
    arrays.native.read_kv(byref(params))
    want = x.kv[torch.from_numpy(x.slots)].clone()
    want[torch.from_numpy(x.dead), :4], want[torch.from_numpy(x.dead), 4] = 0.0, -0.0
    assert same_bits(arrays.down(out, torch.bfloat16, (num_tokens, 5, 1024)), want)


@pytest.mark.parametrize("hc_mult", [0, 5])
def test_a_number_of_streams_outside_1_to_4_is_refused(arrays: Arrays, hc_mult: int) -> None:
    params = abi.Gate(num_tokens=1, dim=64, hc_mult=hc_mult, eps=1e-20)
    with pytest.raises(BadTensor, match=f"hc_mult 1..4, got {hc_mult}"):
        arrays.native.gate(byref(params))


def test_no_tokens_are_no_launch(arrays: Arrays) -> None:
    assert gate(arrays, Inputs(0, 4, 64, torch.float32)).shape == (0, 4, 64)
