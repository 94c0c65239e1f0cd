"""One sequence over gRPC: `python examples/grpc_step.py [127.0.0.1:8322 [KEY]]`."""

from __future__ import annotations

import json
import sys
from typing import Any

import grpc
import numpy as np

from engram_client import wire
from engram_client.proto import engram_pb2 as pb
from engram_client.proto import engram_pb2_grpc, message_options


def tensor(array: Any) -> pb.Tensor:
    view = wire.as_view(array)
    return pb.Tensor(dtype=view.dtype, shape=view.shape, data=bytes(view.data))


def main(target: str = "127.0.0.1:8322", key: str = "") -> None:
    metadata = [("authorization", f"Bearer {key}")] if key else []
    # -1: the server's limit holds; without it gRPC's own, 4 MB, does.
    with grpc.insecure_channel(target, options=message_options(-1)) as channel:
        engram = engram_pb2_grpc.EngramStub(channel)
        info = json.loads(engram.GetInfo(pb.GetInfoRequest(), metadata=metadata).json)
        sizes = info["geometry"]
        session = engram.OpenSession(pb.OpenSessionRequest(), metadata=metadata)
        steps = [
            pb.StepRequest(
                request_id=position,
                output=pb.OUTPUT_RESIDUAL,
                layers=[sizes["layer_ids"][0]],
                tensors={
                    "count": tensor(np.array([1], np.int32)),
                    "position": tensor(np.array([position])),
                    "session_id": tensor(np.array([session.session_id])),
                    "token_ids": tensor(np.array([position % 5])),
                    "residual": tensor(np.ones((1, sizes["hc_mult"], sizes["dim"]), np.float32)),
                },
            )
            for position in range(4)
        ]
        for reply in engram.Stream(iter(steps), metadata=metadata):
            if reply.HasField("problem"):
                print(f"step {reply.request_id}: {reply.problem.code}: {reply.problem.detail}")
            else:
                told = {name: list(tensor.shape) for name, tensor in reply.tensors.items()}
                print(f"step {reply.request_id}: {told}")
        engram.CloseSession(
            pb.CloseSessionRequest(session_id=session.session_id), metadata=metadata
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
