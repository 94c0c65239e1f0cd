"""Bytes on the wire: what is written is read back, everything else is refused with its reason."""

from __future__ import annotations

import json
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from engram_client import wire
from engram_client.wire import TensorView, WireError


def file_of(head: Any, data: bytes = b"") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def encode(**arrays: Any) -> bytes:
    views = {name: wire.as_view(array) for name, array in arrays.items()}
    return b"".join(wire.encode_tensors(views))


specs = st.tuples(
    st.sampled_from(sorted(wire.ITEMSIZE)), st.lists(st.integers(0, 4), max_size=4).map(tuple)
)


@given(st.dictionaries(st.text(max_size=8).filter(lambda n: n != "__metadata__"), specs))
def test_what_is_encoded_is_decoded(tensors: dict[str, wire.TensorSpec]) -> None:
    views = {
        name: TensorView(*spec, memoryview(bytes([i % 2]) * wire.num_bytes(spec)))
        for i, (name, spec) in enumerate(tensors.items())
    }
    data = b"".join(wire.encode_tensors(views))
    assert len(data) == wire.encoded_size(tensors)
    back = wire.decode_tensors(data)
    assert {name: (view.spec, bytes(view.data)) for name, view in back.items()} == {
        name: (view.spec, bytes(view.data)) for name, view in views.items()
    }


def test_data_starts_at_64_with_the_largest_tensor() -> None:
    buffers = wire.encode_tensors(
        {"count": wire.as_view(np.ones(3, np.int32)), "big": wire.as_view(np.ones(99, np.int64))}
    )
    assert len(buffers[0]) % wire.ALIGNMENT == 0
    assert [len(buffer) for buffer in buffers[1:]] == [792, 12]


def test_data_is_passed_and_not_copied() -> None:
    array = np.arange(6, dtype=np.int32)
    buffer = wire.encode_tensors({"x": wire.as_view(array)})[1]
    array[0] = 77
    assert np.frombuffer(buffer, np.int32)[0] == 77


def test_files_are_those_of_safetensors_both_ways() -> None:
    bf16 = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    ours = encode(x=bf16, n=np.array([5], np.int64))
    assert torch.equal(safetensors.torch.load(ours)["x"], bf16)
    theirs = wire.decode_tensors(safetensors.numpy.save({"a": np.ones((2, 3), np.float32)}))
    assert np.array_equal(wire.to_numpy(theirs["a"]), np.ones((2, 3), np.float32))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"1234567", "it has no head"),
        (struct.pack("<Q", 1 << 63), "size"),
        (struct.pack("<Q", (64 << 10) + 1) + b"{}" * 40000, "size"),
        (struct.pack("<Q", 100) + b"{}", "cut short"),
        (file_of(b"[]"), "not a JSON object"),
        (file_of(b" {}"), "not a JSON object"),
        (file_of(b'"{"'), "not a JSON object"),
        (file_of(b"{,"), "not JSON"),
        (file_of(b"\xff\xfe{}"), "not JSON"),
        (file_of(b"[" * 60000), "not JSON"),
        (file_of(b'{"a":{},"a":{}}'), "duplicate key 'a'"),
        (file_of({"__metadata__": {"k": "v"}}), "metadata"),
        (file_of({"x": {**entry(), "more": 1}}, b"1234"), "its keys"),
        (file_of({"x": 5}, b"1234"), "its keys"),
        (file_of({"x": entry("F8")}, b"1234"), "unknown dtype"),
        (file_of({"x": {**entry(), "dtype": ["U8"]}}, b"1234"), "dtype"),
        (file_of({"x": entry(shape=[-4])}, b"1234"), "shape"),
        (file_of({"x": entry(shape=[4.0])}, b"1234"), "shape"),
        (file_of({"x": entry(shape=[True, 4])}, b"1234"), "shape"),
        (file_of({"x": entry(shape=[4] + [1] * 8)}, b"1234"), "shape"),
        (file_of({"x": entry(offsets=[0, 4, 4])}, b"1234"), "data_offsets"),
        (file_of({"x": entry(offsets=[-4, 0])}, b"1234"), "data_offsets"),
        (file_of({"x": entry(offsets=[4, 0])}, b"1234"), "other bytes"),
        (file_of({"x": entry(shape=[5])}, b"1234"), "other bytes"),
        (file_of({"x": entry(shape=[1 << 40, 1 << 40])}, b"1234"), "other bytes"),
        (file_of(b'{"x":{"dtype":"U8","shape":[18446744073709551617]}}'), "a JSON integer"),
        (file_of({"x": entry(offsets=[1, 5])}, b"12345"), "hole"),
        (file_of({"x": entry(), "y": entry()}, b"1234"), "hole or overlaps"),
        (file_of({"x": entry()}, b"12345"), "elsewhere"),
        (file_of({"x": entry()}, b"123"), "elsewhere"),
        (file_of({}, b"1"), "elsewhere"),
    ],
)
def test_a_wrong_file_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason) as caught:
        wire.decode_tensors(memoryview(data))
    assert caught.value.expected is not None


@given(st.binary(max_size=200), st.integers(0, 250), st.integers(0, 255))
def test_damaged_files_are_refused_or_whole(tail: bytes, at: int, byte: int) -> None:
    data = bytearray(encode(x=np.arange(5, dtype=np.int32), y=np.ones(3, np.uint8)) + tail[:1])
    data[at % len(data)] = byte
    for candidate in (bytes(data), tail, struct.pack("<Q", len(tail)) + tail):
        try:
            views = wire.decode_tensors(candidate)
        except WireError:
            continue
        assert all(view.data.nbytes == wire.num_bytes(view.spec) for view in views.values())


def test_a_head_above_the_limit_is_not_written() -> None:
    with pytest.raises(WireError, match="too many tensors"):
        wire.encode_head({f"tensor.{i}": ("U8", (1,)) for i in range(2000)})


def test_a_view_with_other_bytes_is_not_written() -> None:
    with pytest.raises(WireError, match="other bytes"):
        wire.encode_tensors({"x": TensorView("F32", (2,), memoryview(b"1234"))})


@pytest.mark.parametrize("text", ["0", "7", "-1", str(2**63 - 1), str(-(2**63))])
def test_integers_are_read(text: str) -> None:
    assert str(wire.parse_int(text, "position")) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-0",
        "00",
        "07",
        "+5",
        "5_0",
        "5.0",
        "5 ",
        " 5",
        "5\n",
        "0x5",
        "1e3",
        "١",
        "true",
        str(2**63),
        str(-(2**63) - 1),
        "9" * 5000,
    ],
)
def test_anything_else_is_no_integer(text: str) -> None:
    with pytest.raises(WireError, match="position"):
        wire.parse_int(text, "position")


@pytest.mark.parametrize(
    "text",
    [
        b"NaN",
        b"-Infinity",
        b"1e400",
        b'{"a":1,"a":1}',
        b"[" * 99999,
        b"99999999999999999999",
        b"",
        b"\xff",
        b"1 2",
        b"-0",
    ],
)
def test_json_is_strict(text: bytes) -> None:
    with pytest.raises(WireError):
        wire.load_json(text)


def test_one_key_twice_among_very_many_is_found_at_once() -> None:
    # Comparing each with each would take minutes here, on a service's event loop.
    keys = b",".join(b'"%d":1' % number for number in [*range(300_000), 299_999])
    with pytest.raises(WireError, match="duplicate key '299999'"):
        wire.load_json(b"{" + keys + b"}")


def test_ranges_are_spelled_with_a_dash_from_three_on() -> None:
    assert wire.format_ranges([3, 4, 9, 10, 11, 12]) == "3,4,9-12"
    assert wire.format_ranges([]) == ""
    assert wire.format_ranges(np.arange(8192)) == "0-8191"


@given(st.sets(st.integers(0, 60)).map(sorted))
def test_ranges_are_read_back(indices: list[int]) -> None:
    read: list[int] = []
    for part in filter(None, wire.format_ranges(indices).split(",")):
        first, _, last = part.partition("-")
        read += range(int(first), int(last or first) + 1)
    assert read == indices


def test_shapes_are_read_back() -> None:
    assert wire.format_shape((2, 4, 5120)) == "2,4,5120"
    assert wire.parse_shape("2,4,5120") == (2, 4, 5120)


@pytest.mark.parametrize("text", ["", "2,", "2, 4", "-1", "2,4,", "(2,)", "1," * 8 + "1"])
def test_wrong_shapes_are_refused(text: str) -> None:
    with pytest.raises(WireError, match="shape"):
        wire.parse_shape(text)


@pytest.mark.parametrize("dtype", sorted(wire.ITEMSIZE))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_arrays_come_back_as_what_they_were(dtype: str, shape: tuple[int, ...]) -> None:
    data = memoryview(bytearray(b"\1" * wire.num_bytes((dtype, shape))))
    view = TensorView(dtype, shape, data)
    for back in (wire.as_view(wire.to_numpy(view)), wire.as_view(wire.to_torch(view))):
        assert (back.spec, bytes(back.data)) == (view.spec, bytes(view.data))


def test_arrays_share_the_memory_of_their_view() -> None:
    data = bytearray(8)
    view = TensorView("I64", (1,), memoryview(data))
    array, tensor = wire.to_numpy(view), wire.to_torch(view)
    data[0] = 9
    assert array[0] == 9
    assert tensor[0] == 9


def test_unaligned_and_strided_arrays_are_copied_right() -> None:
    view = TensorView("I64", (1,), memoryview(b"xyz" + struct.pack("<q", 1234))[3:])
    assert wire.to_numpy(view)[0] == 1234
    assert wire.to_torch(view)[0] == 1234
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    assert np.array_equal(wire.to_numpy(wire.as_view(turned)), turned)


@pytest.mark.parametrize(
    "value",
    [
        np.ones(1, np.float64),
        np.ones(1, ">i4"),
        np.array(["a"]),
        torch.ones(1).double(),
        [1],
        None,
        torch.ones(1, device="meta"),
    ],
)
def test_other_dtypes_kinds_and_devices_are_refused(value: Any) -> None:
    with pytest.raises(WireError, match=r"expected .*, got "):
        wire.as_view(value)


def test_a_bool_byte_of_two_is_refused() -> None:
    with pytest.raises(WireError, match="BOOL"):
        wire.to_numpy(TensorView("BOOL", (2,), memoryview(b"\1\2")))


def test_bfloat16_is_the_same_in_numpy_and_torch() -> None:
    bits = np.arange(0, 65536, 7, dtype=np.uint16)
    numpy_view = wire.as_view(bits.view(ml_dtypes.bfloat16))
    torch_view = wire.as_view(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))
    assert (numpy_view.dtype, bytes(numpy_view.data)) == ("BF16", bytes(torch_view.data))


def test_a_head_that_was_seen_before_is_read_and_written_as_the_first_time() -> None:
    specs = {"count": ("I32", (1,)), "residual": ("BF16", (1, 2, 64))}
    head, order = wire.encode_head(specs)
    order.append("spoiled")
    again, order = wire.encode_head(specs)
    assert (again, order) == (head, ["residual", "count"])
    found = wire.decode_head(head[8:], 260)
    found.clear()
    assert set(wire.decode_head(head[8:], 260)) == {"count", "residual"}
    for _ in range(2):  # refused each time
        with pytest.raises(wire.WireError, match="the data ends elsewhere"):
            wire.decode_head(head[8:], 261)
