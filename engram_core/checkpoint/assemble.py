"""From named tensors to a checkpoint: every shape is held against the constants of the hash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engram_core.checkpoint.files import Named, naming, refusal, tensor_refusal
from engram_core.checkpoint.identity import identity_of
from engram_core.checkpoint.sources import Checkpoint, LayerSource
from engram_core.geometry import EngramHashTables, Geometry

ROLES = ("table", "wkv", "q", "k")


@dataclass(frozen=True)
class Constants:
    """What is known before any tensor is looked at. eps: of the gate's means."""

    hash_tables: EngramHashTables
    head_dim: int
    eps: float
    dim: int | None = None
    hc_mult: int | None = None
    image_token_id: int | None = None


def check_layers(
    path: Path, layer_ids: Sequence[int], found: Mapping[int, Mapping[str, object]]
) -> None:
    """Refuse a declared layer without all its tensors, and tensors of a layer not declared."""
    for layer_id in layer_ids:
        missing = [role for role in ROLES if role not in found.get(layer_id, {})]
        if missing:
            where = f"layer {layer_id}"
            got = f"no {', '.join(missing)}"
            raise refusal(path, where, expected=f"tensors {', '.join(ROLES)}", got=got)
    extra = sorted(set(found) - set(layer_ids))
    if extra:
        where = f"layer {extra[0]}"
        got = "Engram tensors of a layer that the constants do not list"
        raise refusal(path, where, expected=f"layers {list(layer_ids)}", got=got)


def geometry_from(constants: Constants, q: Named) -> Geometry:
    """Take dim and hc_mult from the shape of q, the rest from the constants."""
    if len(q.shape) not in (1, 2):
        raise _shape_refusal(q, "[hc_mult, dim]")
    dim, hc_mult = q.shape[-1], q.shape[0] if len(q.shape) == 2 else 1
    for name, said, got in (("dim", constants.dim, dim), ("hc_mult", constants.hc_mult, hc_mult)):
        if said not in (None, got):
            raise _shape_refusal(q, f"[hc_mult, dim] with {name} {said}")
    tables = constants.hash_tables
    with naming(q.path):
        return Geometry(
            layer_ids=tables.layer_ids,
            max_ngram_size=tables.max_ngram_size,
            num_heads=tables.num_heads,
            head_dim=constants.head_dim,
            dim=dim,
            hc_mult=hc_mult,
            eps=constants.eps,
            table_rows=tables.table_rows,
        )


def expect_shape(tensor: Named, *shape: int) -> None:
    """Refuse a tensor of another shape; a leading 1 may be left out."""
    if tensor.shape != shape and not (shape[0] == 1 and tensor.shape == shape[1:]):
        raise _shape_refusal(tensor, list(shape))


def finish(
    path: Path,
    file_format: str,
    layout: str,
    constants: Constants,
    geometry: Geometry,
    layers: tuple[LayerSource, ...],
) -> Checkpoint:
    """Put the checkpoint together: notes, identity."""
    return Checkpoint(
        path=path,
        format=file_format,
        layout=layout,
        geometry=geometry,
        hash_tables=constants.hash_tables,
        image_token_id=constants.image_token_id,
        identity=identity_of(geometry, constants.hash_tables, layers),
        layers=layers,
        notes=tuple(_notes(layers)),
    )


def _notes(layers: Sequence[LayerSource]) -> list[str]:
    return [
        f"layer {layer.layer_id}: wkv is stored as {layer.wkv.type} and rounded to bfloat16"
        for layer in layers
        if layer.wkv.type in ("F16", "F32")
    ]


def _shape_refusal(tensor: Named, expected: object) -> Exception:
    return tensor_refusal(tensor, expected=f"shape {expected}", got=f"shape {list(tensor.shape)}")
