"""Strictness of names, integers and JSON."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engram_core.errors import BadRequest, SchemaError
from service import strict
from service.schemas import OpenSession, PushTokens


def test_unknown_name_names_the_nearest() -> None:
    error = strict.unknown("field", "positon", ["position", "token_ids"])
    assert (error.expected, error.got) == ("position", "positon")
    assert "position" in error.message


def test_unknown_name_without_a_like_one_lists_all() -> None:
    assert strict.unknown("field", "xyzzy", ["position"]).expected == ["position"]


@pytest.mark.parametrize("text", ["0", "7", "-7", "9223372036854775807", "-9223372036854775808"])
def test_integer_is_read(text: str) -> None:
    assert strict.integer(text, "n") == int(text)


@pytest.mark.parametrize(
    "text", ["", "+5", "05", "5.0", "5_0", " 5", "5 ", "-0", "1e3", "٣", "9223372036854775808"]
)
def test_integer_spelled_otherwise_is_refused(text: str) -> None:
    with pytest.raises(SchemaError):
        strict.integer(text, "n")


def test_query_is_read_once_and_whole() -> None:
    assert strict.query(b"a=1&b=x%2Cy", ["a", "b"], ["a"]) == {"a": "1", "b": "x,y"}
    assert strict.query(b"", ["a"], []) == {}


@pytest.mark.parametrize("raw", [b"a=1&a=2", b"c=1", b"a", b"a=1&", b"\xff=1", b"b=%ff&a=1"])
def test_query_that_is_not_understood_is_refused(raw: bytes) -> None:
    with pytest.raises(SchemaError):
        strict.query(raw, ["a", "b"], ["a"])


def test_missing_query_parameter_is_refused() -> None:
    with pytest.raises(SchemaError, match="position"):
        strict.query(b"", ["position"], ["position"])


@given(st.text("ab_=&,.-0Z", max_size=20))
def test_a_plain_query_is_read_as_any_other(text: str) -> None:
    raw, known = text.encode(), ["a", "b", "_", "ab"]
    with pytest.MonkeyPatch.context() as patch:
        found = [_outcome(raw, known)]
        patch.setattr(strict, "_PLAIN_QUERY", re.compile("(?!)"))
        found.append(_outcome(raw, known))
    assert found[0] == found[1]


def _outcome(raw: bytes, known: list[str]) -> object:
    try:
        return strict.query(raw, known, [])
    except SchemaError as error:
        return error.message, error.expected, error.got


def test_headers_of_others_are_not_looked_at() -> None:
    headers = [(b"accept", b"*/*"), (b"x-engram-table", b" t ")]
    assert strict.engram_headers(headers, ["x-engram-table"]) == {"x-engram-table": "t"}


@pytest.mark.parametrize("name", [b"x-engram-tabel", b"x-engram-", b"x-engram-dead"])
def test_unknown_engram_header_is_refused(name: bytes) -> None:
    with pytest.raises(SchemaError):
        strict.engram_headers([(name, b"t")], ["x-engram-table"])


@pytest.mark.parametrize("body", [b"{", b"", b"\xff", b'{"a":1,"a":1}', b"[NaN]", b"[1e999]"])
def test_what_is_no_json_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest):
        strict.load_json(body)


def test_json_nested_beyond_reason_is_a_bad_request() -> None:
    with pytest.raises(BadRequest):
        strict.load_json(b"[" * 100_000)


@pytest.mark.parametrize("number", [b"9223372036854775808", b"-0", b"1" * 5000])
def test_integer_beyond_int64_in_json_is_a_schema_error(number: bytes) -> None:
    with pytest.raises(SchemaError):
        strict.load_json(b"[" + number + b"]")


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"position": 0, "token_ids": None},
        {"position": 0, "token_ids": [1.0]},
        {"position": 0, "token_ids": [True]},
        {"position": 0, "token_ids": ["1"]},
        {"position": -1, "token_ids": []},
        {"position": True, "token_ids": []},
        {"position": 0, "token_ids": [], "mask": [1]},
        {"position": 0, "token_ids": [], "ahead": "true"},
        {"position": 0, "token_ids": [], "on_conflict": "replace"},
        {"position": 0, "token_ids": [], "epoch": 1.5},
        {"position": 0, "tokens": []},
    ],
)
def test_push_document_that_is_not_as_described_is_refused(value: Any) -> None:
    with pytest.raises(SchemaError):
        strict.parse_model(PushTokens, value)


@pytest.mark.parametrize("session_id", [7, "0", "-1", "07", "+7", "9223372036854775808", "7\n"])
def test_session_id_is_a_decimal_string_of_an_int64(session_id: Any) -> None:
    with pytest.raises(SchemaError) as caught:
        strict.parse_model(OpenSession, {"session_id": session_id})
    assert str(caught.value.expected) in ("a decimal string of an int64 above 0", "a valid string")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"position": 0, "token_ids": [1, "x"]}, "token_ids[1]: expected a valid integer, got 'x'"),
        (
            {"position": -1, "token_ids": []},
            "position: expected greater than or equal to 0, got -1",
        ),
        (
            {"position": 0, "token_ids": [], "on_conflict": "cut"},
            "on_conflict: expected 'truncate', got 'cut'",
        ),
        ({"token_ids": []}, "field 'position' is missing"),
    ],
)
def test_refusal_of_a_document_names_place_and_what_is_expected(value: Any, said: str) -> None:
    with pytest.raises(SchemaError) as caught:
        strict.parse_model(PushTokens, value)
    assert caught.value.message == said


def test_open_document_becomes_the_engines() -> None:
    document = strict.parse_model(OpenSession, {"session_id": "7", "lookback": [1, None]})
    assert document.request().session_id == 7
    assert document.request().lookback == (1, None)


@pytest.mark.parametrize("field", ["token_ids", "mask"])
def test_first_fault_of_a_long_list_is_enough(field: str) -> None:
    """A body has room for 200,000 of them, and its check runs on the event loop."""
    document = {"position": 0, "token_ids": [1], field: ["x"] * 3}
    with pytest.raises(ValidationError) as caught:
        PushTokens.model_validate(document)
    assert caught.value.error_count() == 1


def test_refusal_by_a_pattern_reads_as_a_sentence() -> None:
    with pytest.raises(SchemaError) as caught:
        strict.parse_model(OpenSession, {"owner": "a b"})
    assert caught.value.message == ("owner: expected text that matches '^[!-~]{1,128}$', got 'a b'")
