"""One tensor out of the pieces that a call is made in."""

from __future__ import annotations

from engram_client.arrays import empty_view
from engram_client.wire import TensorView


class Assembly:
    """One tensor of `total` rows out of the pieces that it comes in.

    A single piece is returned as it came; of several, the first is copied into new memory and the
    others are received into it.
    """

    def __init__(self, total: int, out: TensorView | None) -> None:
        self._total = total
        self._whole = out
        if out is not None and out.shape[:1] != (total,):
            raise ValueError(f"out: expected {total} rows, got shape {list(out.shape)}")

    def rows(self, begin: int, end: int) -> TensorView | None:
        """Return where a piece is to be received, None: in new memory."""
        return None if self._whole is None else rows_of(self._whole, begin, end)

    def take(self, begin: int, piece: TensorView) -> None:
        """Note a piece that came."""
        if self._whole is None:
            if piece.shape[0] == self._total:
                self._whole = piece
                return
            self._whole = empty_view((piece.dtype, (self._total, *piece.shape[1:])))
            rows_of(self._whole, begin, begin + piece.shape[0]).data[:] = piece.data

    def view(self) -> TensorView:
        """Return the whole."""
        assert self._whole is not None
        return self._whole


def rows_of(view: TensorView, begin: int, end: int) -> TensorView:
    """Return rows begin .. end - 1 of a tensor, the same memory."""
    count = view.shape[0]
    if (begin, end) == (0, count):
        return view
    row_bytes = view.data.nbytes // count
    data = view.data[begin * row_bytes : end * row_bytes]
    return TensorView(view.dtype, (end - begin, *view.shape[1:]), data)
