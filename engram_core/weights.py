"""One layer's weights, as every backend takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engram_core.errors import BadTensor, CheckpointError
from engram_core.geometry import Geometry


@dataclass(frozen=True, eq=False)
class EngramLayerWeights:
    """A layer's projection and gate weights.

    layer_id: the model's id
    wkv: bfloat16 [out_features, in_features]  rows: hc_mult keys of dim outputs, then the value
    qk: float32 [hc_mult, dim]  q_weight * k_weight (exact: a product of two bfloat16)
    requantize_input: the checkpoint's wkv is FP8, so its input is rounded as in the official model

    Source: `EngramLayerWeights` of the reference modules.
    """

    layer_id: int
    wkv: torch.Tensor
    qk: torch.Tensor
    requantize_input: bool

    def require(self, geometry: Geometry) -> None:
        """Check dtypes and shapes. Raises: BadTensor, UnknownLayer, CheckpointError."""
        geometry.layer_index(self.layer_id)
        _require(
            f"layer {self.layer_id} wkv",
            self.wkv,
            torch.bfloat16,
            (geometry.out_features, geometry.in_features),
        )
        qk_shape = (geometry.hc_mult, geometry.dim)
        _require(f"layer {self.layer_id} qk", self.qk, torch.float32, qk_shape)
        if self.requantize_input and geometry.in_features % 32:
            raise CheckpointError(
                f"layer {self.layer_id}: an FP8 wkv needs inputs in groups of 32, "
                f"got {geometry.in_features}",
                expected="a multiple of 32",
                got=geometry.in_features,
            )


def _require(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        expected = f"{dtype} {list(shape)}"
        got = f"{tensor.dtype} {list(tensor.shape)}"
        raise BadTensor(f"{name}: expected {expected}, got {got}", expected=expected, got=got)
