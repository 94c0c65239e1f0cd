"""The table of refusals is complete, and says what API.md says."""

from __future__ import annotations

import json

import numpy as np
import pytest

from engram_core import errors
from engram_core.errors import EngramError, Gap, StepRefused, UnknownSession
from service import problems
from service.openapi import codes_of
from service.operations import OPERATIONS
from service.problems import PROBLEMS, code_of, document, encode

API = {
    400: "bad_request bad_tensor token_out_of_range row_out_of_range duplicate_session",
    401: "unauthenticated",
    403: "forbidden",
    404: "unknown_session unknown_layer not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "gap conflict stale_epoch not_pushed history_truncated session_exists",
    411: "length_required",
    412: "wrong_table",
    413: "body_too_large too_many_tokens too_many_positions",
    415: "media_type",
    421: "misdirected",
    422: "schema",
    429: "too_many_sessions held_tokens_full overloaded",
    500: "internal",
    503: "loading draining shard_down",
}
STATUS = {code: status for status, codes in API.items() for code in codes.split()}

GRPC = {
    400: {"INVALID_ARGUMENT"},
    404: {"NOT_FOUND"},
    409: {"FAILED_PRECONDITION", "ALREADY_EXISTS"},
    429: {"RESOURCE_EXHAUSTED"},
    503: {"UNAVAILABLE"},
    500: {"INTERNAL"},
}


OURS = ("engram_core.errors", "service.problems")


def classes() -> list[type[EngramError]]:
    found, open_classes = [], [EngramError]
    while open_classes:
        children = open_classes.pop().__subclasses__()
        open_classes += children
        found += [child for child in children if child.__module__ in OURS]
    return [kind for kind in found if kind is not StepRefused]


def test_every_class_is_mapped_and_nothing_else() -> None:
    assert set(classes()) == set(PROBLEMS)


@pytest.mark.parametrize("kind", PROBLEMS, ids=lambda kind: kind.__name__)
def test_every_class_has_the_codes_and_statuses_of_the_interface(kind: type[EngramError]) -> None:
    code = code_of(kind("why"))
    assert STATUS[code] == PROBLEMS[kind].status
    assert PROBLEMS[kind].grpc in GRPC.get(STATUS[code], {PROBLEMS[kind].grpc})
    assert (PROBLEMS[kind].retry_after_ms is not None) == (STATUS[code] in (429, 503))


def test_class_of_a_start_is_internal() -> None:
    class Unsupported(EngramError):
        code = "unsupported"

    assert (problems.kind_of(Unsupported("why")).status, code_of(Unsupported("why"))) == (
        500,
        "internal",
    )


def test_every_code_of_the_interface_has_a_class() -> None:
    assert {code_of(kind("why")) for kind in PROBLEMS} == set(STATUS)


def test_every_code_of_a_route_can_be_told() -> None:
    told = {code for op in OPERATIONS for codes in codes_of(op).values() for code in codes}
    assert set(STATUS) - told == {"method_not_allowed"}


def test_document_carries_expected_got_and_details() -> None:
    told = document(Gap("why", expected=3, got=5, length=np.int64(3), session_id=1 << 62))
    assert (told["expected"], told["got"], told["length"]) == (3, 5, 3)
    assert told["session_id"] == str(1 << 62)
    assert told["type"] == "urn:engram:problem:gap"


def test_refused_step_is_told_like_its_first_segment_and_lists_all() -> None:
    error = StepRefused([(2, UnknownSession("gone")), (5, Gap("late", length=np.int64(4)))])
    status, _, body = encode(error)
    told = json.loads(body)
    assert (status, told["code"]) == (404, "unknown_session")
    assert [segment["index"] for segment in told["segments"]] == [2, 5]
    assert told["segments"][1]["length"] == 4


def test_details_cannot_replace_the_code() -> None:
    assert document(Gap("why", title="x", code="y"))["code"] == "gap"


def test_fault_of_a_start_is_internal() -> None:
    assert code_of(errors.CheckpointError("why")) == "internal"
    assert problems.kind_of(errors.MemoryShort("why")).status == 500
