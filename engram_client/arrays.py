"""numpy and torch at the client's door: what goes in as bytes, and where an answer lands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engram_client.far import FarBuffer, far_buffer, is_far
from engram_client.wire import (
    TensorSpec,
    TensorView,
    as_view,
    is_torch,
    num_bytes,
    to_numpy,
    to_torch,
)

if TYPE_CHECKING:
    import torch

    Array = NDArray[Any] | torch.Tensor
else:
    Array = Any


def sent(value: Array) -> TensorView:
    """Return the bytes of what is sent; those of a tensor on a device stay there until then."""
    if is_torch(value) and is_far(value):
        return _far_view(value.contiguous())  # type: ignore[union-attr]
    return as_view(value.detach() if is_torch(value) else value)  # type: ignore[union-attr]


def _far_view(tensor: Any) -> TensorView:
    like = tensor.new_empty(0, device="cpu")
    data: Any = far_buffer(tensor)
    return TensorView(as_view(like).dtype, tuple(tensor.shape), data)


def as_numpy(value: Array) -> NDArray[Any]:
    """Return an array or tensor as numpy."""
    return to_numpy(as_view(value.detach().cpu() if is_torch(value) else value))  # type: ignore[union-attr]


def torch_of(array: Array) -> torch.Tensor:
    """Return a torch tensor over a numpy array's memory (bfloat16 included); a tensor as it is."""
    return array if is_torch(array) else to_torch(as_view(array))  # type: ignore[return-value]


def empty_view(spec: TensorSpec) -> TensorView:
    """Return new memory for a tensor."""
    return TensorView(*spec, np.empty(num_bytes(spec), np.uint8).data)


class Landing:
    """Where one answer lands: in `out` if that is plain memory, else in new memory of the kind of
    `like`, moved to where `out` or `like` lives at the end.

    A call may have to be repeated after half an answer came, so an answer never lands in memory
    that is being sent (`sources`): that costs a copy at the end.
    """

    def __init__(
        self, out: Array | None, *, like: Array | None = None, sources: tuple[TensorView, ...] = ()
    ) -> None:
        if out is None and is_torch(like) and is_far(like):
            out = like.new_empty(like.shape)  # type: ignore[union-attr]
        self._out = out
        self._like = like
        self.view: TensorView | None = None
        self._lands_there = False
        if out is None:
            return
        if is_torch(out) and is_far(out):
            if out.is_contiguous() and not _shares(out, like):  # type: ignore[union-attr]
                self.view = _far_view(out)
                return
        elif _is_plain(out):
            view = as_view(out)
            if view.data.readonly:
                raise ValueError("out: expected writable memory, got read-only")
            if not any(_overlap(view, source) for source in sources):
                self.view, self._lands_there = view, True
                return
        self.view = empty_view(_spec_of(out))

    def result(self, view: TensorView) -> Array:
        """Return what came as the caller's kind of array."""
        if self._out is None:
            if not is_torch(self._like):
                return to_numpy(view)
            return to_torch(view).to(self._like.device)  # type: ignore[union-attr]
        if isinstance(view.data, FarBuffer):
            view.data.flush()
        elif self._lands_there and view is self.view:
            pass
        elif not _is_same_memory(self._out, view):
            _copy(view, self._out)
        return self._out


def _shares(out: Any, like: Any) -> bool:
    """Tell whether two tensors on devices have memory in common."""
    if like is None or not is_torch(like):
        return False
    same: bool = out.untyped_storage().data_ptr() == like.untyped_storage().data_ptr()
    return same


def _copy(view: TensorView, out: Array) -> None:
    target: Any = out
    if is_torch(out):
        target.copy_(to_torch(view))
    else:
        target[...] = to_numpy(view)


def _is_plain(value: Array) -> bool:
    """Tell whether an array is contiguous memory of the CPU."""
    if is_torch(value):
        return value.device.type == "cpu" and value.is_contiguous()  # type: ignore[union-attr]
    return isinstance(value, np.ndarray) and value.flags.c_contiguous


def _spec_of(value: Array) -> TensorSpec:
    none_of_it: Any = value[:0]  # a strided or far array whose bytes are not wanted
    return as_view(none_of_it.cpu() if is_torch(value) else none_of_it).dtype, tuple(value.shape)


def _span(view: TensorView) -> tuple[int, int]:
    if isinstance(view.data, FarBuffer) or not view.data.nbytes:
        return 0, 0
    begin: int = np.frombuffer(view.data, np.uint8).__array_interface__["data"][0]
    return begin, begin + view.data.nbytes


def _overlap(one: TensorView, other: TensorView) -> bool:
    (a, b), (c, d) = _span(one), _span(other)
    return a < d and c < b


def _is_same_memory(value: Array, view: TensorView) -> bool:
    return _is_plain(value) and _span(as_view(value)) == _span(view)
