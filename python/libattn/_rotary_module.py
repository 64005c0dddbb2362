"""RotaryEmbedding, the torch module behind libattn.layers.rotary, which keeps the tables of cosines and sines."""

from __future__ import annotations

from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from .layers.rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_


class RotaryEmbedding(torch.nn.Module):
    """Rotates the first `dim` head dims, dim pair n at position t by the angle t / base^(2 n / dim).

    scale_base (512 is usual) adds the decay of xPos: q is multiplied by scale^p and k divided by it, with
    p = (t - positions // 2) / scale_base and scale = (2 n / dim + 0.4) / 1.4.
    """

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: Optional[float] = None, device=None
    ):
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else self._decay(device), persistent=False)
        self._tables: Optional[Tuple[Tensor, ...]] = None  # cos, sin of q, cos, sin of k

    def _steps(self, device) -> Tensor:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim

    def _frequencies(self, device) -> Tensor:
        return 1.0 / self.base ** self._steps(device)

    def _decay(self, device) -> Tensor:
        return (self._steps(device) + 0.4) / 1.4

    def _cos_sin(self, positions: int, x: Tensor) -> Tuple[Tensor, ...]:
        """Tables for at least so many positions, in x's dtype and on its device; angles are computed in float32."""
        have = self._tables
        stale = have is None or have[0].shape[0] < positions or have[0].dtype != x.dtype or have[0].device != x.device
        if stale or (self.training and have[0].is_inference()):
            time = torch.arange(positions, device=x.device, dtype=torch.float32)
            # A module that was moved to bfloat16 has lost its frequencies' digits: compute them anew.
            kept = self.inv_freq.dtype == torch.float32
            angles = torch.outer(time, self.inv_freq.to(x.device) if kept else self._frequencies(x.device))
            cos, sin = angles.cos(), angles.sin()
            scale = torch.ones(1, device=x.device)
            if self.scale_base is not None:
                scale = self._decay(x.device) ** ((time - positions // 2) / self.scale_base)[:, None]
            self._tables = tuple(t.to(x.dtype) for t in (cos * scale, sin * scale, cos / scale, sin / scale))
        return self._tables

    def forward(
        self,
        qkv: Tensor,
        kv: Optional[Tensor] = None,
        seqlen_offset: Union[int, Tensor] = 0,
        max_seqlen: Optional[int] = None,
        num_heads_q: Optional[int] = None,
    ) -> Union[Tensor, Tuple[Tensor, Tensor]]:
        """Rotates in place: qkv (batch, seqlen, 3, nheads, headdim), or with num_heads_q (batch, seqlen, nheads + 2 *
        nheads_k, headdim); or, when kv (batch, seqlen, 2, nheads_k, headdim) is given, q (batch, seqlen, nheads, headdim).

        A tensor as seqlen_offset (batch,) wants max_seqlen, the number of positions.
        """
        if max_seqlen is None and not isinstance(seqlen_offset, int):
            raise ValueError("max_seqlen=None: a tensor as seqlen_offset wants it")
        positions = qkv.shape[1] + seqlen_offset if max_seqlen is None else max_seqlen
        cos, sin, cos_k, sin_k = self._cos_sin(positions, qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
