"""The Python side of `proto/engram.proto`, made by the build, for the extra door gRPC."""

from __future__ import annotations


def message_options(max_bytes: int) -> list[tuple[str, int]]:
    """Return the options of a channel or server that sends and takes messages up to `max_bytes`.

    Both ends need them: gRPC's own limit, 4 MB, is 102 tokens of a bfloat16 [4, 5120] residual.
    -1: no limit at this end; the other's holds.
    """
    return [
        ("grpc.max_send_message_length", max_bytes),
        ("grpc.max_receive_message_length", max_bytes),
    ]
