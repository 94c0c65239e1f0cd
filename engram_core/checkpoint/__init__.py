"""Checkpoints: headers read and checked, weights and rows left where they are."""

from __future__ import annotations

from pathlib import Path

from engram_core.checkpoint.files import refusal
from engram_core.checkpoint.gguf_checkpoint import open_gguf
from engram_core.checkpoint.safetensors_checkpoint import open_safetensors
from engram_core.checkpoint.sources import Checkpoint, LayerSource, TensorSource
from engram_core.tables import Part, TableSource

__all__ = [
    "Checkpoint",
    "LayerSource",
    "Part",
    "TableSource",
    "TensorSource",
    "open_checkpoint",
]


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a checkpoint: read its headers and constants, check every shape and extent.

    path: a GGUF file (any shard of a split one), a folder that holds one, or a folder of
        config.json, tokenizer.json and safetensors shards

    Raises: CheckpointError naming path, tensor or key, expected and got.
    """
    # Not resolved: the shards of a download cache are links that lie beside each other.
    path = Path(path)
    if path.suffix == ".safetensors" and not path.is_dir():
        expected = "a GGUF file, or the folder of a safetensors checkpoint"
        raise refusal(path, "path", expected=expected, got="one of its shards")
    if not path.is_dir():
        return open_gguf(path)
    has_gguf, has_safetensors = any(path.glob("*.gguf")), any(path.glob("*.safetensors"))
    if has_gguf == has_safetensors:
        got = "both" if has_gguf else "neither"
        advice = "name the GGUF file to be opened"
        expected = "GGUF or safetensors files"
        raise refusal(path, "folder", expected=expected, got=got, advice=advice)
    return open_gguf(path) if has_gguf else open_safetensors(path)
