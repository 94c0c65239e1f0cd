"""The token map: which token ids share a compressed id, from a tokenizer.json.

Tokens that differ only in case, accents, width or kind of white space hash alike.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, normalizers

from engram_core.errors import CheckpointError

MAX_TOKENIZER_BYTES = 256 << 20
MAX_VOCAB_SIZE = 1 << 24

_REPLACEMENT = "\ufffd"
"""What decoding shows for bytes that are no whole UTF-8 character."""

_SENTINEL = "\ue000"
"""Private-use character that carries "exactly one space" through Strip."""


def token_map_from_tokenizer(path: Path) -> NDArray[np.int32]:
    """Number the tokens of a tokenizer.json by their normalised text.

    Returns: int32 [vocab]  token id -> compressed id, in order of first appearance, so that each
        is at most one above the largest before it

    Raises: CheckpointError.
    Source: engram-format 2.1 (`inference/engram.py` of DeepSeek-V4.1-Flash).
    """
    return token_map_of(read_tokenizer(path), path)


def token_map_of(tokenizer: Tokenizer, path: Path) -> NDArray[np.int32]:
    """As `token_map_from_tokenizer`, of one that has been read; path names it in a refusal."""
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    if not 0 < vocab_size <= MAX_VOCAB_SIZE:
        raise CheckpointError(
            f"{path}: expected 1..{MAX_VOCAB_SIZE} tokens, got {vocab_size}",
            expected=f"1..{MAX_VOCAB_SIZE}",
            got=vocab_size,
        )
    texts = tokenizer.decode_batch([[i] for i in range(vocab_size)], skip_special_tokens=False)
    normalizer = _normalizer()
    numbers: dict[str, int] = {}
    token_map = np.empty(vocab_size, dtype=np.int32)
    for token_id, text in enumerate(texts):
        token = tokenizer.id_to_token(token_id) if not text or _REPLACEMENT in text else text
        if token is None:
            raise CheckpointError(
                f"{path}: expected a token for every id 0..{vocab_size - 1}, none has {token_id}",
                expected=f"ids 0..{vocab_size - 1}",
                got=f"none with {token_id}",
            )
        key = token if _REPLACEMENT in text else normalizer.normalize_str(text) or text
        token_map[token_id] = numbers.setdefault(key, len(numbers))
    return token_map


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json. Raises: CheckpointError."""
    try:
        with open(path, "rb") as file:
            # Never more than the file holds: `read(n)` takes n bytes of memory first.
            most = min(os.fstat(file.fileno()).st_size, MAX_TOKENIZER_BYTES)
            content = file.read(most + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return tokenizer_of(content, path)


def tokenizer_of(content: bytes, path: Path) -> Tokenizer:
    """Parse the bytes of a tokenizer.json; path names it in a refusal. Raises: CheckpointError."""
    if len(content) > MAX_TOKENIZER_BYTES:
        raise CheckpointError(f"{path}: expected at most {MAX_TOKENIZER_BYTES} bytes")
    try:
        return Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises bare Exception
        raise CheckpointError(f"{path}: not a tokenizer.json: {error}") from error


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SENTINEL),
            normalizers.Strip(),
            normalizers.Replace(_SENTINEL, " "),
        ]
    )
