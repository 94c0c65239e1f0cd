"""Every known spelling of keys and tensor names: data, and two functions that look it up.

Letters are those of the table in docs/formats.md: GGUF layouts as they are in the wild.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import get_close_matches

GGUF_PREFIXES = (
    "{arch}.engram.",
    "deepseek41.engram.",
    "deepseek4.engram.",
    "deepseek4-engram.",  # G: side files of an architecture of their own
)
"""Where the keys stand. `{arch}` is `general.architecture`."""

EPS_KEYS = ("{arch}.attention.layer_norm_rms_epsilon", "{arch}.rms_norm_eps")
"""eps of the gate: the first in every llama.cpp file, the raw name in B."""

GGUF_KEYS = {
    "layer_ids": "layer_ids",  # A, B, E, F
    "layers": "layer_ids",  # C, D, G
    "max_ngram_size": "max_ngram_size",  # A, D, E, F, G
    "ngram_size": "max_ngram_size",  # C
    "head_count": "num_heads",  # A, C, D, F, G
    "n_heads": "num_heads",  # E
    "key_length": "head_dim",  # A, F
    "head_dim": "head_dim",  # C, D, E, G
    "multipliers": "multipliers",  # A, B, C, E
    "hash_multipliers": "multipliers",  # D, F, G
    "primes": "primes",  # A, B, E
    "head_bucket_sizes": "primes",  # C, D
    "hash_primes": "primes",  # G
    "offsets": "offsets",  # A, E
    "head_offsets": "offsets",  # C, D
    "hash_offsets": "offsets",  # G
    "token_map": "token_map",  # all
    "pad_id": "pad_id",  # A, B: COMPRESSED
    "compressed_pad_id": "pad_id",  # G: COMPRESSED
    "pad_token_id": "pad_token_id",  # C, D, E, F, G: TOKEN
    "compressed_vocab_size": "compressed_vocab_size",  # B to G
    "rows": "table_rows",  # B
    "embedding_counts": "table_rows",  # C
    "table_rows": "table_rows",  # D
    "num_embeddings": "table_rows",  # E
    "row_counts": "table_rows",  # G
    "vocab_size": "base_size",  # F, G
    "encoding": "encoding",  # B
    "ngram_count": "num_orders",  # G
    "identity": "identity",  # written by `engram extract`, as are the next two
    "image_token_id": "image_token_id",
    "manifest_bytes": "manifest_bytes",
}
"""Key behind the prefix -> what it means."""

GGUF_UNUSED = (
    "checkpoint_variant",  # G, as are the next three
    "language.block_count",
    "language.embedding_length",
    "language.vocab_size",
    "hash_contract_sha256",  # of a fork: a digest over what only its converter knows
)
"""Keys that say nothing a table's rows depend on."""

GGUF_LAYOUTS = {
    "A": "layer_ids head_count key_length max_ngram_size multipliers primes offsets token_map "
    "pad_id",
    "B": "encoding layer_ids rows compressed_vocab_size pad_id token_map primes multipliers",
    "C": "layers ngram_size head_count head_dim compressed_vocab_size pad_token_id "
    "embedding_counts head_bucket_sizes head_offsets multipliers token_map",
    "D": "layers max_ngram_size head_count head_dim pad_token_id compressed_vocab_size table_rows "
    "hash_multipliers head_offsets head_bucket_sizes token_map",
    "E": "layer_ids n_heads head_dim max_ngram_size pad_token_id compressed_vocab_size "
    "num_embeddings primes offsets multipliers token_map",
    "F": "head_count key_length max_ngram_size layer_ids vocab_size pad_token_id "
    "compressed_vocab_size token_map hash_multipliers",
    "G": "layers row_counts max_ngram_size ngram_count head_count head_dim vocab_size "
    "compressed_vocab_size pad_token_id compressed_pad_id",
}
"""Letter -> the keys its converter writes; only for the name that `inspect` shows."""

GGUF_TENSOR = re.compile(r"blk\.(\d{1,6})\.(engram_\w+)\.weight")
GGUF_TENSORS = {
    "engram_embd": "table",  # A, B, C, D, F
    "engram_embed": "table",  # E
    "engram_embd_scale": "table_scale",  # C
    "engram_wkv": "wkv",  # A, D, E, F
    "engram_wkv_scale": "wkv_scale",  # `engram extract`, of an FP8 wkv
    "engram_kv": "wkv",  # B, C
    "engram_q": "q",  # A, D, E, F
    "engram_q_norm": "q",  # B
    "engram_q_weight": "q",  # C
    "engram_k": "k",
    "engram_k_norm": "k",
    "engram_k_weight": "k",
}
"""Stem of the tensor name -> its role."""

GGUF_CONSTANT = re.compile(r"engram\.(\w+)")
"""Hash constants kept as tensors (G); the name behind the dot is one of GGUF_KEYS."""

GGUF_MANIFEST = "engram.manifest"
"""I8 [32, n]: SHA-256 of each piece of the file before it (`engram extract`)."""

ROW_ENCODINGS = {
    "e4m3_e8m0_32_row264": "E4M3_E8M0_32",  # B
    "e4m3_f32_32_row288": "E4M3_F32_32",  # `engram extract`, of float32 scales
}
"""Value of `encoding` -> the row format of the I8 table."""

SAFETENSORS_TENSOR = re.compile(r"(?:model\.)?layers\.(\d{1,6})\.engram\.([\w.]+)")
SAFETENSORS_TENSORS = {
    "embed.weight": "table",
    "embed_tokens.weight": "table",
    "embed.scale": "table_scale",
    "embed.weight_scale_inv": "table_scale",
    "embed_tokens.scale": "table_scale",
    "embed_tokens.weight_scale_inv": "table_scale",
    "wkv.weight": "wkv",
    "wkv.scale": "wkv_scale",
    "wkv.weight_scale_inv": "wkv_scale",
    "q_weight": "q",
    "k_weight": "k",
}
"""Official names, and the renames of inference engines. GGUF layout G uses them too."""

CONFIG_KEYS = {
    "layer_ids": ("engram_layer_ids",),
    "table_rows": ("engram_num_embeddings",),
    "max_ngram_size": ("engram_max_ngram_size",),
    "base_size": ("engram_vocab_size",),
    "num_heads": ("engram_n_heads",),
    "head_dim": ("engram_head_dim",),
    "pad_token_id": ("engram_pad_token_id", "engram_pad_id"),
    "compressed_vocab_size": ("engram_compressed_vocab_size",),
    "dim": ("hidden_size", "dim"),
    "hc_mult": ("hc_mult",),
    "eps": ("rms_norm_eps", "norm_eps"),
    "image_token_id": ("image_token_id",),
}
"""What is meant -> its spellings in config.json, at the top or under `text_config`."""


def gguf_layout(keys: Collection[str]) -> str:
    """Name the layout whose keys these are, for people."""
    if "manifest_bytes" in keys:
        return "GGUF A, extracted"
    for letter, known in GGUF_LAYOUTS.items():
        if sorted(known.split()) == sorted(keys):
            return f"GGUF {letter}"
    return "GGUF, mixed spellings"


def nearest(name: str, known: Collection[str]) -> str:
    """Say which known name an unknown one is nearest to."""
    close = get_close_matches(name, list(known), n=1)
    return f"the nearest known one is {close[0]!r}" if close else f"known: {', '.join(known)}"
