"""The constants of a synthetic checkpoint, as each format writes them."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer

from engram_core.checkpoint.write import GgufValue
from engram_core.geometry import EngramHashTables
from engram_core.tools.presets import Preset


def gguf_metadata(
    sizes: Preset, tables: EngramHashTables, tokenizer: bytes
) -> dict[str, GgufValue]:
    """Give the keys of layout A, with the types its converter gives them."""
    metadata: dict[str, GgufValue] = {
        "deepseek41.embedding_length": sizes.dim,
        "deepseek41.attention.layer_norm_rms_epsilon": sizes.eps,
        "deepseek41.engram.layer_ids": np.array(sizes.layer_ids, np.int32),
        "deepseek41.engram.head_count": sizes.num_heads,
        "deepseek41.engram.key_length": sizes.head_dim,
        "deepseek41.engram.max_ngram_size": sizes.max_ngram_size,
        "deepseek41.engram.multipliers": tables.multipliers.reshape(-1).astype(np.uint64),
        "deepseek41.engram.primes": tables.primes.reshape(-1).astype(np.uint64),
        "deepseek41.engram.offsets": tables.offsets.reshape(-1).astype(np.uint64),
        "deepseek41.engram.token_map": tables.token_map,
        "deepseek41.engram.pad_id": tables.pad_id,
    }
    if sizes.is_sparse:  # as in the real file: what a reader has to step over
        vocabulary = Tokenizer.from_buffer(tokenizer)
        ids = range(vocabulary.get_vocab_size())
        metadata["tokenizer.ggml.tokens"] = [vocabulary.id_to_token(i) or "" for i in ids]
    return metadata


def config_json(sizes: Preset, tables: EngramHashTables) -> dict[str, object]:
    """Give the content of config.json under its official keys."""
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": tables.vocab_size,
        "hidden_size": sizes.dim,
        "rms_norm_eps": sizes.eps,
        "hc_mult": sizes.hc_mult,
        "engram_layer_ids": list(sizes.layer_ids),
        "engram_num_embeddings": list(tables.table_rows),
        "engram_max_ngram_size": sizes.max_ngram_size,
        "engram_vocab_size": sizes.base_size,
        "engram_n_heads": sizes.num_heads,
        "engram_head_dim": sizes.head_dim,
        "engram_pad_token_id": sizes.pad_token_id,
        "engram_compressed_vocab_size": tables.compressed_vocab_size,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "pad_token_id": sizes.pad_token_id,
        "image_token_id": sizes.image_token_id,
        "text_config": text,
    }
