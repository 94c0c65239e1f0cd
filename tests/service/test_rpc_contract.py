"""proto/engram.proto: its numbers stay, its stubs are its own, its verbs are all served."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from engram_client.proto import engram_pb2 as pb
from engram_core.engine_types import Output
from service.problems import PROBLEMS
from service.rpc.messages import OUTPUTS
from service.rpc.unary import VERBS

ROOT = Path(__file__).parents[2]

NUMBERS = {
    "GetInfoRequest": "",
    "Info": "json 1",
    "OpenSessionRequest": "session_id 1, position 2, lookback 3, fork_of 4, epoch 5, owner 6",
    "GetSessionRequest": "session_id 1",
    "CloseSessionRequest": "session_id 1, epoch 2, owner 3",
    "Closed": "sessions 1",
    "RewindRequest": "session_id 1, position 2, epoch 3",
    "PushRequest": "session_id 1, position 2, token_ids 3, mask 4, epoch 5, truncate 6, ahead 7",
    "Pushed": "session_id 1, length 2, base 3, epoch 4, appended 5, removed 6",
    "Session": "session_id 1, length 2, base 3, epoch 4, owner 5, compressed_lookback 6, "
    "expires_in_s 7, created 8",
    "Tensor": "dtype 1, shape 2, data 3",
    "StepRequest": "request_id 1, output 2, layers 3, stored 4, truncate 5, wait_ms 6, ahead 7, "
    "tensors 8",
    "StepReply": "request_id 1, problem 2, tensors 3",
    "Problem": "code 1, grpc_status 2, detail 3, retry_after_ms 4, json 5",
}
"""Frozen: a number once given away never means anything else. New fields are added here, too."""

OUTPUT_NUMBERS = {"NONE": 1, "RESIDUAL": 2, "KV": 3, "ROWS": 4, "HASH_IDS": 5}


@pytest.mark.parametrize("name", NUMBERS)
def test_field_numbers_stay(name: str) -> None:
    fields = pb.DESCRIPTOR.message_types_by_name[name].fields
    told = {field.name: field.number for field in fields}
    frozen = dict(pair.split() for pair in NUMBERS[name].split(", ")) if NUMBERS[name] else {}
    assert told == {field: int(number) for field, number in frozen.items()}


def test_no_message_is_unfrozen() -> None:
    assert set(pb.DESCRIPTOR.message_types_by_name) == set(NUMBERS)


def test_output_numbers_stay() -> None:
    numbers = {name.removeprefix("OUTPUT_"): n for name, n in pb.Output.items() if n}
    assert numbers == OUTPUT_NUMBERS
    assert {OUTPUTS[n]: n for n in OUTPUTS} == {Output[name]: n for name, n in numbers.items()}


def test_every_rpc_is_served_with_its_own_message() -> None:
    methods = pb.DESCRIPTOR.services_by_name["Engram"].methods
    unary = {m.name: m.input_type.name for m in methods if m.name != "Stream"}
    assert {name: verb.request.DESCRIPTOR.name for name, verb in VERBS.items()} == unary


def test_every_refusal_has_a_grpc_status() -> None:
    assert all(kind.grpc in grpc.StatusCode.__members__ for kind in PROBLEMS.values())


def test_stubs_are_those_of_the_contract(tmp_path: Path) -> None:
    tools = pytest.importorskip("grpc_tools.protoc", reason="protoc comes with the extra [dev]")
    source = "engram_client/proto/engram.proto"
    tools.main(["", f"-Iengram_client/proto={ROOT}/proto", f"--python_out={tmp_path}", source])
    fresh = (tmp_path / source.replace(".proto", "_pb2.py")).read_text()
    assert Path(pb.__file__).read_text() == fresh, "engram.proto has changed: run make setup"
