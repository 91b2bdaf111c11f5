"""Calls of dense attention and of its gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DenseCall(NamedTuple):
    """A validated call of dense_attention: q [T, Hq, D]; k, v [Tk, Hkv, D]; starts of the sequences, or None for one.

    ``backend`` names a library; by ``reference`` runs what has none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    deterministic: bool
    backend: str

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def is_empty(self) -> bool:
        no_sequence = self.cu_seqlens_q is not None and self.cu_seqlens_q.shape[0] == 1
        return self.q.numel() == 0 or self.k.numel() == 0 or no_sequence


class DenseGradients(NamedTuple):
    """The gradients that belong to one."""

    dout: Tensor
    call: DenseCall
    out: Tensor
    lse: Tensor

    @property
    def device(self) -> torch.device:
        return self.call.device

    @property
    def backend(self) -> str:
        return self.call.backend
