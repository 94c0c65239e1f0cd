"""What runs, compared with what is promised: done once at start, before anything is served."""

from __future__ import annotations

import torch

from engram_core.backends.cpu import TokenGate
from engram_core.backends.gate import sigmoid
from engram_core.backends.projection import (
    PROJECT_TOKENS,
    Projection,
    rounding_bound,
    unequal_batch,
)
from engram_core.errors import SelfCheckFailed
from engram_core.geometry import Geometry

_CHECKED_TOKENS = (1, 2, 3, 7, 15, 16, 17, 33, 64, 100)
_CHECKED_SIGMOIDS = (*_CHECKED_TOKENS, 8200)
_BOUND_TOKENS, _BOUND_OUTPUTS = 16, 64


def check_sigmoid(generator: torch.Generator) -> None:
    """Compare the sigmoid over numbers of values. Raises: SelfCheckFailed."""
    values = torch.randn(max(_CHECKED_SIGMOIDS), generator=generator)
    whole = sigmoid(values)
    for count in _CHECKED_SIGMOIDS:
        _require_equal("sigmoid", count, sigmoid(values[-count:]), whole[-count:])


def check_projection(project: Projection, generator: torch.Generator) -> None:
    """Compare bits over batch sizes, and values with float64. Raises: SelfCheckFailed."""
    in_features = project.wkv.shape[1]
    rows = torch.randn((PROJECT_TOKENS, in_features), generator=generator).to(torch.bfloat16)
    if (found := unequal_batch(project, rows)) is not None:
        raise _depends_on_batch("wkv", *found)
    whole = project(rows)
    x = rows[:_BOUND_TOKENS].double()
    wkv = project.wkv[:_BOUND_OUTPUTS].double()
    got = whole[:_BOUND_TOKENS, : len(wkv)].double()
    outside = (got - x @ wkv.t()).abs() > rounding_bound(got, x, wkv)
    if outside.any():
        count = int(outside.sum())
        raise SelfCheckFailed(
            f"wkv: {count} of {outside.numel()} values differ from float64 by more than one "
            "float32 accumulation and one rounding allow",
            expected=0,
            got=count,
        )


def check_gate(gate: TokenGate, geometry: Geometry, generator: torch.Generator) -> None:
    """Compare bits over batch sizes. Raises: SelfCheckFailed."""
    most = max(_CHECKED_TOKENS)
    residual = torch.randn((most, geometry.hc_mult, geometry.dim), generator=generator)
    kv = torch.randn((most, geometry.hc_mult + 1, geometry.dim), generator=generator)
    kv = kv.to(torch.bfloat16)
    whole = gate(residual, kv)
    for count in _CHECKED_TOKENS:
        _require_equal("gate", count, gate(residual[-count:], kv[-count:]), whole[-count:])


def _require_equal(what: str, count: int, got: torch.Tensor, expected: torch.Tensor) -> None:
    bits = torch.int16 if got.element_size() == 2 else torch.int32
    unequal = got.contiguous().view(bits) != expected.contiguous().view(bits)
    if unequal.any():
        raise _depends_on_batch(what, count, int(unequal.sum()))


def _depends_on_batch(what: str, count: int, num_unequal: int) -> SelfCheckFailed:
    return SelfCheckFailed(
        f"{what}: {num_unequal} values of a batch of {count} differ from the same values in a "
        "larger batch; expected 0. This CPU (or build of torch) is not supported",
        expected=0,
        got=num_unequal,
        batch=count,
    )
