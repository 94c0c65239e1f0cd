"""`Engram` as a torch module whose table lives in the service: a drop-in for the reference's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from engram_client.client import EngramClient
from engram_client.segments import Segment


class RemoteEngram(nn.Module):
    """One layer, for inference: nothing here has parameters or gradients.

    Source: `Engram` of the reference module, whose `forward` this one has.
    """

    def __init__(self, client: EngramClient, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id
        self._client = client

    def forward(
        self, x: torch.Tensor, hash_ids: torch.Tensor, token_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the updated residual, on the device of `x`. Nothing is stored by the service.

        x: bfloat16 or float32 [B, L, hc_mult, dim]
        hash_ids: int [B, L, n_hash_cols]  rows of this layer's table
        token_mask: bool [B, L]  False = passes through untouched
        Raises ValueError: shapes, or gradients asked for; EngramProblem, EngramUnavailable.
        """
        if x.ndim != 4 or hash_ids.shape[:2] != x.shape[:2]:
            raise ValueError(
                "forward: expected x [B, L, hc_mult, dim] and hash_ids [B, L, n_hash_cols], got "
                f"{list(x.shape)} and {list(hash_ids.shape)}"
            )
        segment = Segment(
            hash_ids=hash_ids.flatten(0, 1).unsqueeze(1),
            mask=None if token_mask is None else token_mask.flatten(),
        )
        return self.forward_segments(x.flatten(0, 1), [segment]).view(x.shape)

    def forward_segments(
        self, residual: torch.Tensor, segments: Sequence[Segment], *, wait_ms: int = 0
    ) -> torch.Tensor:
        """Return the updated residual [T, hc_mult, dim] of segments of sessions.

        residual: bfloat16 or float32 [T, hc_mult, dim], in the order of the segments
        """
        if residual.requires_grad and torch.is_grad_enabled():
            raise ValueError("RemoteEngram: expected no_grad or inference mode, it has no backward")
        answer = self._client.step(
            segments, (self.layer_id,), "residual", residual=residual, wait_ms=wait_ms
        )
        updated = answer.tensors[self.layer_id]
        assert isinstance(updated, torch.Tensor)
        return updated

    def extra_repr(self) -> str:
        """Tell the layer in the module's repr."""
        return f"layer_id={self.layer_id}"
