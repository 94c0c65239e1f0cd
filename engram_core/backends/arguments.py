"""What a backend refuses before any copy or launch: dtypes, shapes, slots, rows."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.errors import BadTensor, RowOutOfRange

_SHORT = 64
"""numpy's reductions take longer than a list of so many."""


def require(
    name: str, array: NDArray[np.generic], dtype: type[np.generic], shape: tuple[int, ...]
) -> None:
    """Raises: BadTensor: another dtype or shape."""
    if array.dtype != dtype or array.shape != shape:
        expected = f"{np.dtype(dtype)} {list(shape)}"
        got = f"{array.dtype} {list(array.shape)}"
        raise BadTensor(f"{name}: expected {expected}, got {got}", expected=expected, got=got)


def require_tensor(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]
) -> None:
    """Raises: BadTensor: another dtype or shape, not contiguous, or not on the CPU."""
    fits = tensor.dtype in dtypes and tensor.shape == shape and tensor.is_contiguous()
    if not fits or not tensor.is_cpu:
        expected = f"contiguous {' or '.join(map(str, dtypes))} {list(shape)} on the CPU"
        got = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        raise BadTensor(f"{name}: expected {expected}, got {got}", expected=expected, got=got)


def require_slots(slots: NDArray[np.int64], num_slots: int) -> None:
    """Raises: BadTensor: not int64 [T], or a slot outside the store."""
    require("slots", slots, np.int64, (len(slots),))
    if not slots.size:
        return
    if slots.size <= _SHORT:
        values = slots.tolist()
        lowest, highest = min(values), max(values)
    else:
        lowest, highest = int(slots.min()), int(slots.max())
    if lowest < 0 or highest >= num_slots:
        got = [lowest, highest]
        expected = f"0..{num_slots - 1}"
        raise BadTensor(f"slots: expected {expected}, got {got}", expected=expected, got=got)


def live_slots(
    slots: NDArray[np.int64], dead: NDArray[np.bool_], num_slots: int
) -> NDArray[np.int64]:
    """Check slots; those of dead positions become 0 and are never read. Raises: BadTensor."""
    require("slots", slots, np.int64, (len(slots),))
    require("dead", dead, np.bool_, (len(slots),))
    if not dead.any():
        require_slots(slots, num_slots)
        return np.ascontiguousarray(slots)
    require_slots(slots[~dead], num_slots)
    return np.where(dead, 0, slots)


def require_rows(hash_ids: NDArray[np.int64], num_rows: int) -> None:
    """Raises: RowOutOfRange. The device does not look: such an id would end the context."""
    if hash_ids.size and not (hash_ids.min() >= 0 and hash_ids.max() < num_rows):
        got = [int(hash_ids.min()), int(hash_ids.max())]
        expected = f"0..{num_rows - 1}"
        raise RowOutOfRange(f"row ids: expected {expected}, got {got}", expected=expected, got=got)
