"""Tables of any size made on the GPU from a counter, row by row repeatable on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_STEP, _MIX = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_PIECE = 1 << 26


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def on_device(num_bytes: int) -> torch.Tensor:
    """Make uint8 [num_bytes, rounded up to 8, and 16 more] on the GPU."""
    words = torch.empty(num_bytes // 8 + 3, dtype=torch.int64, device="cuda")
    for first in range(0, len(words), _PIECE):
        piece = words[first : first + _PIECE]
        torch.arange(first, first + len(piece), out=piece)
        piece.mul_(_signed(_STEP))
        # The shift copies the sign: the mask takes it off again.
        piece.bitwise_xor_((piece >> 29).bitwise_and_((1 << 35) - 1))
        piece.mul_(_signed(_MIX))
        piece.bitwise_xor_((piece >> 32).bitwise_and_((1 << 32) - 1))
    torch.cuda.synchronize()
    return words.view(torch.uint8)


def on_host(first_byte: int, num_bytes: int) -> NDArray[np.uint8]:
    """The same bytes of a table, uint8 [num_bytes] from first_byte on."""
    begin, end = first_byte // 8, (first_byte + num_bytes + 7) // 8
    words = np.arange(begin, end, dtype=np.uint64) * np.uint64(_STEP)
    words ^= words >> np.uint64(29)
    words *= np.uint64(_MIX)
    words ^= words >> np.uint64(32)
    return words.view(np.uint8)[first_byte - begin * 8 :][:num_bytes]


def rows_on_host(rows: NDArray[np.int64], row_bytes: int) -> NDArray[np.uint8]:
    """Rows of a table of row_bytes each: uint8 [len(rows), row_bytes]."""
    return np.stack([on_host(int(row) * row_bytes, row_bytes) for row in rows])
