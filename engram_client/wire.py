"""Bytes on the wire: tensors as safetensors files, integers, ranges and shapes as text.

The one definition of both ends: `service` imports it too. Standard library, numpy and ml_dtypes
(torch only when a torch tensor is handed in or asked for). Everything here is strict, since what
arrives was written by somebody else: sizes are capped, offsets contiguous, byte counts exact, and
a refusal says what was expected and what came.

Source: the safetensors format (8 bytes of head size, little-endian; a JSON object; the data).
"""

from __future__ import annotations

import json
import math
import re
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

TABLE = "X-Engram-Table"
OWNER = "X-Engram-Owner"
LENGTH = "X-Engram-Length"
BASE = "X-Engram-Base"
EPOCH = "X-Engram-Epoch"
SHAPE = "X-Engram-Shape"
DTYPE = "X-Engram-Dtype"
ENCODING = "X-Engram-Encoding"
DEAD = "X-Engram-Dead"
"""Ranges of indices into the answer (0 = its first position), see `format_ranges`."""

SHARED_BODY = "X-Engram-Shared-Body"
"""Where in the connection's shared memory the body lies: `offset,bytes`."""
SHARED_ANSWER = "X-Engram-Shared-Answer"
"""In a request, where the answer may be put: `offset,bytes`. In an answer, what of it lies there:
`offset,bytes,at`, to be inserted at byte `at` of what came over the socket."""

UNIX_SEND_BYTES = 1 << 20
"""What both ends ask a Unix socket to hold of what they send, as far as the machine allows
(`net.core.wmem_max`). Linux gives 208 KiB: 650 KB then take three turns of both processes, not one.
"""

_REMEMBERED, _SHORT_HEAD_BYTES = 256, 1024
"""Heads whose meaning is remembered, and the longest of them."""

JSON_MEDIA = "application/json"
PROBLEM_MEDIA = "application/problem+json"
TENSOR_MEDIA = "application/octet-stream"
"""Of single tensors and of safetensors bodies alike."""

ITEMSIZE: Mapping[str, int] = {
    "BF16": 2,
    "F32": 4,
    "F16": 2,
    "I64": 8,
    "I32": 4,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of an element, by the dtype names of safetensors."""

MAX_HEAD_BYTES = 64 << 10
MAX_RANK = 8
ALIGNMENT = 64
"""Data starts at a multiple of this many bytes from the start of an encoded file."""

_NUMPY: Mapping[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_NAME_OF_NUMPY = {dtype: name for name, dtype in _NUMPY.items()}
_TORCH = {
    "BF16": "bfloat16",
    "F32": "float32",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}
_NAME_OF_TORCH = {f"torch.{torch_name}": name for name, torch_name in _TORCH.items()}

_INT = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1

TensorSpec = tuple[str, tuple[int, ...]]
"""A dtype name and a shape."""


class WireError(ValueError):
    """Bytes or text that are not what the wire format asks for."""

    def __init__(self, message: str, expected: object, got: object) -> None:
        super().__init__(f"{message}: expected {expected}, got {got}")
        self.message = message
        self.expected = expected
        self.got = got


class IntegerError(WireError):
    """Text that is not a strict integer of int64."""


@dataclass(frozen=True)
class TensorView:
    """A tensor as its bytes; owns nothing, the buffer behind `data` must outlive it.

    dtype: name as in ITEMSIZE; shape: dims; data: memoryview of bytes, C order, little-endian
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape."""
        return self.dtype, self.shape


def num_bytes(spec: TensorSpec) -> int:
    """Return the bytes of a tensor of this dtype and shape. Raises WireError: unknown dtype."""
    dtype, shape = spec
    if dtype not in ITEMSIZE:
        raise WireError(f"unknown dtype {dtype!r}", expected=list(ITEMSIZE), got=dtype)
    return math.prod(shape) * ITEMSIZE[dtype]


def encode_head(specs: Mapping[str, TensorSpec]) -> tuple[bytes, list[str]]:
    """Return the head of a file and the names in the order of their data, largest first.

    Raises WireError: an unknown dtype, or a head above MAX_HEAD_BYTES.
    """
    head, order = _encoded_head(tuple(specs), tuple(specs.values()))
    return head, [*order]


@lru_cache(_REMEMBERED)
def _encoded_head(
    names: tuple[str, ...], values: tuple[TensorSpec, ...]
) -> tuple[bytes, tuple[str, ...]]:
    specs = dict(zip(names, values, strict=True))
    sizes = {name: num_bytes(spec) for name, spec in specs.items()}
    order = sorted(specs, key=lambda name: -sizes[name])
    entries: dict[str, Any] = {}
    end = 0
    for name in order:
        begin, end = end, end + sizes[name]
        dtype, shape = specs[name]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEAD_BYTES:
        raise WireError(
            "too many tensors for one head", expected=f"<= {MAX_HEAD_BYTES} bytes", got=len(text)
        )
    return struct.pack("<Q", len(text)) + text, tuple(order)


def encoded_size(specs: Mapping[str, TensorSpec]) -> int:
    """Return how many bytes `encode_tensors` gives for tensors of these dtypes and shapes."""
    head, _ = encode_head(specs)
    return len(head) + sum(num_bytes(spec) for spec in specs.values())


def encode_tensors(tensors: Mapping[str, TensorView]) -> list[bytes | memoryview]:
    """Return a safetensors file as buffers to be sent in order; the data is not copied.

    Raises WireError: a view whose bytes are not what its dtype and shape say.
    """
    for name, view in tensors.items():
        if view.data.nbytes != num_bytes(view.spec):
            raise WireError(
                f"tensor {name!r}: {view.dtype} {list(view.shape)} with other bytes",
                expected=num_bytes(view.spec),
                got=view.data.nbytes,
            )
    head, order = encode_head({name: view.spec for name, view in tensors.items()})
    return [head, *(tensors[name].data for name in order if tensors[name].data.nbytes)]


def view_of(name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> TensorView:
    """Return a tensor of bytes that came with its dtype and shape.

    Raises WireError: an unknown dtype, a shape that is none, other bytes than they say.
    """
    if len(shape) > MAX_RANK or any(size < 0 for size in shape):
        raise WireError(
            f"tensor {name!r}: shape", expected=f"at most {MAX_RANK} integers >= 0", got=[*shape]
        )
    size = num_bytes((dtype, shape))
    if len(data) != size:
        raise WireError(
            f"tensor {name!r}: {dtype} {[*shape]} with other bytes", expected=size, got=len(data)
        )
    return TensorView(dtype, shape, memoryview(data))


def decode_tensors(buf: memoryview | bytes | bytearray) -> dict[str, TensorView]:
    """Return the tensors of a safetensors file, as views into `buf`.

    Raises WireError: a head above MAX_HEAD_BYTES or cut short, not a JSON object, a duplicate,
    unknown or missing key, metadata, an unknown dtype, offsets that leave a hole, overlap or end
    elsewhere than the file, bytes that are not dtype and shape.
    """
    file = memoryview(buf).cast("B") if len(buf) else memoryview(b"")
    head, data = _split_head(file)
    return {
        name: TensorView(dtype, shape, data[begin:end])
        for name, ((dtype, shape), begin, end) in decode_head(head, data.nbytes).items()
    }


def decode_head(head: bytes, data_bytes: int) -> dict[str, tuple[TensorSpec, int, int]]:
    """Return the dtype, shape, first and last offset of each tensor, in the order of their data.

    head: the JSON text; data_bytes: of what follows it
    Raises WireError.
    """
    # A runner's heads are the same from step to step.
    return dict((_known_head if len(head) <= _SHORT_HEAD_BYTES else _read_head)(head, data_bytes))


def _read_head(head: bytes, data_bytes: int) -> dict[str, tuple[TensorSpec, int, int]]:
    entries = load_json(head)
    if not isinstance(entries, dict) or head[0] != ord("{"):
        raise WireError("the head is not a JSON object", expected="{name: {...}}", got="other")
    found = {name: _read_entry(name, entry) for name, entry in entries.items()}
    found = dict(sorted(found.items(), key=lambda item: item[1][1:]))
    at = 0
    for name, (_, begin, end) in found.items():
        if begin != at:
            raise WireError(
                f"tensor {name!r} leaves a hole or overlaps", expected=f"offset {at}", got=begin
            )
        at = end
    if at != data_bytes:
        raise WireError("the data ends elsewhere than the file", expected=at, got=data_bytes)
    return found


_known_head = lru_cache(_REMEMBERED)(_read_head)


def _split_head(file: memoryview) -> tuple[bytes, memoryview]:
    if file.nbytes < 8:
        raise WireError(
            "no safetensors file: it has no head", expected=">= 8 bytes", got=file.nbytes
        )
    (size,) = struct.unpack_from("<Q", file)
    if not 2 <= size <= MAX_HEAD_BYTES:
        raise WireError(
            "no safetensors file: the head's size", expected=f"2..{MAX_HEAD_BYTES}", got=size
        )
    if size > file.nbytes - 8:
        raise WireError("the head is cut short", expected=size, got=file.nbytes - 8)
    return bytes(file[8 : 8 + size]), file[8 + size :]


def _read_entry(name: str, entry: object) -> tuple[TensorSpec, int, int]:
    """Return the spec, first and last offset of one tensor of a head."""
    if name == "__metadata__":
        raise WireError("metadata is not taken", expected="tensors only", got=name)
    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or entry.keys() != keys:
        got = sorted(entry) if isinstance(entry, dict) else entry
        raise WireError(f"tensor {name!r}: its keys", expected=sorted(keys), got=got)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise WireError(f"tensor {name!r}: dtype", expected=list(ITEMSIZE), got=dtype)
    if not _is_sizes(shape) or len(shape) > MAX_RANK:
        raise WireError(
            f"tensor {name!r}: shape", expected=f"at most {MAX_RANK} integers >= 0", got=shape
        )
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise WireError(f"tensor {name!r}: data_offsets", expected="[begin, end]", got=offsets)
    spec = (dtype, tuple(shape))
    begin, end = offsets
    if end - begin != num_bytes(spec):
        raise WireError(
            f"tensor {name!r}: {dtype} {shape} with other bytes",
            expected=num_bytes(spec),
            got=end - begin,
        )
    return spec, begin, end


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def load_json(text: bytes | str) -> Any:
    """Return the value of a JSON text. Raises WireError: malformed, not UTF-8, a duplicate key,
    a non-finite number, an integer outside int64 or spelled oddly, or nested too deeply."""
    try:
        if isinstance(text, bytes):
            text = text.decode()
        return json.loads(
            text,
            object_pairs_hook=_distinct,
            parse_constant=_refuse_constant,
            parse_int=lambda digits: parse_int(digits, "a JSON integer"),
            parse_float=_parse_finite,
        )
    except WireError:
        raise
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}", expected="JSON", got=type(error).__name__) from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise WireError(f"duplicate key {twice!r}", expected="each key once", got=twice)
    return record


def _refuse_constant(text: str) -> NoReturn:
    raise WireError("a number that is not finite", expected="finite numbers", got=text)


def _parse_finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_constant(text)


def parse_int(text: str, name: str) -> int:
    """Return the integer that `text` spells, exactly `0|-?[1-9][0-9]{0,18}` and inside int64.

    name: what it is, for the message. Raises WireError.
    """
    if _INT.fullmatch(text) and _INT64_MIN <= (value := int(text)) <= _INT64_MAX:
        return value
    raise IntegerError(
        f"{name}: not an integer of int64", expected="an int64 in decimal, such as 17", got=text
    )


def format_shape(shape: Iterable[int]) -> str:
    """Return a shape as header text: (2, 4, 5120) -> "2,4,5120"."""
    return ",".join(map(str, shape))


def parse_shape(text: str) -> tuple[int, ...]:
    """Return the shape of a header text. Raises WireError."""
    parts = text.split(",", MAX_RANK)
    shape = tuple(parse_int(part, "shape") for part in parts)
    if len(shape) > MAX_RANK or min(shape) < 0:
        raise WireError("shape", expected=f"at most {MAX_RANK} integers >= 0", got=text)
    return shape


def format_ranges(indices: Iterable[int] | NDArray[np.int64]) -> str:
    """Return ascending distinct indices as text, runs of three or more with a dash.

    [3, 4, 9, 10, 11, 12] -> "3,4,9-12"; none -> "".
    """
    array = np.asarray(indices if isinstance(indices, np.ndarray) else [*indices], np.int64)
    cuts = np.flatnonzero(np.diff(array) != 1) + 1
    parts: list[str] = []
    for run in np.split(array, cuts):
        if len(run) >= 3:
            parts.append(f"{run[0]}-{run[-1]}")
        else:
            parts.extend(map(str, run))
    return ",".join(parts)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype. Raises KeyError: it has none here."""
    return _NAME_OF_TORCH[str(dtype)]


def is_torch(value: object) -> bool:
    """Tell whether a value is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_view(value: NDArray[Any] | torch.Tensor) -> TensorView:
    """Return an array's bytes; copies only what is not C-contiguous.

    value: numpy array (ml_dtypes.bfloat16 too) or torch CPU tensor, of a dtype in ITEMSIZE
    Raises WireError: another dtype, kind of object or device.
    """
    if is_torch(value):
        return _view_of_torch(value)  # type: ignore[arg-type]
    if not isinstance(value, np.ndarray):
        kind = type(value).__name__
        raise WireError("array", expected="a numpy array or a torch tensor", got=kind)
    dtype = _NAME_OF_NUMPY.get(value.dtype)
    if dtype is None:
        raise _other_dtype(str(value.dtype))
    flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return TensorView(dtype, value.shape, flat.data)


def _other_dtype(got: str) -> WireError:
    expected = f"{', '.join(ITEMSIZE)} on the CPU, little-endian"
    return WireError("array", expected=expected, got=got)


def _view_of_torch(tensor: torch.Tensor) -> TensorView:
    dtype = _NAME_OF_TORCH.get(str(tensor.dtype))
    if dtype is None or tensor.device.type != "cpu":
        raise _other_dtype(f"{tensor.dtype} on {tensor.device}")
    import torch

    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return TensorView(dtype, tuple(tensor.shape), flat.numpy().data)


def to_numpy(view: TensorView) -> NDArray[Any]:
    """Return a numpy array over the view's bytes; copies only if they are unaligned.

    Raises WireError: a BOOL byte other than 0 and 1.
    """
    dtype = _NUMPY[view.dtype]
    array = np.frombuffer(view.data, dtype=dtype).reshape(view.shape)
    if view.dtype == "BOOL" and array.size and array.view(np.uint8).max() > 1:
        raise WireError("a BOOL byte", expected="0 or 1", got=int(array.view(np.uint8).max()))
    return array if array.flags.aligned else array.copy()


def to_torch(view: TensorView) -> torch.Tensor:
    """Return a torch tensor over the view's bytes; copies only if unaligned or read-only."""
    import torch

    array = to_numpy(view)
    if not array.flags.writeable:
        array = array.copy()
    bits = array.view(np.int16) if view.dtype == "BF16" else array
    return torch.from_numpy(bits).view(getattr(torch, _TORCH[view.dtype]))
