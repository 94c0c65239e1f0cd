"""The constants of a synthetic checkpoint, as each format writes them."""

from __future__ import annotations

from tokenizers import Tokenizer

from engram_core.checkpoint.gguf_header import GgufValue
from engram_core.geometry import EngramHashTables
from engram_core.tools.layout_a import layout_a_keys
from engram_core.tools.presets import Preset


def gguf_metadata(
    sizes: Preset, tables: EngramHashTables, tokenizer: bytes
) -> dict[str, GgufValue]:
    """Give the keys of layout A, with the types its converter gives them."""
    metadata = layout_a_keys(tables, head_dim=sizes.head_dim, dim=sizes.dim, eps=sizes.eps)
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
