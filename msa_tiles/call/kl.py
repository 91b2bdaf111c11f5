"""The call of the loss that teaches the indexer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from msa_tiles.call import validate
from msa_tiles.call.schedule import WindowSchedule
from msa_tiles.call.where import Where


class Divergence(NamedTuple):
    """A validated call of index_kl; without ``block_indices``, of the whole prefix."""

    q: Tensor
    k: Tensor
    lse: Tensor
    idx_q: Tensor
    idx_k: Tensor
    block_indices: Tensor | None
    where: Where
    token_weights: Tensor | None
    schedule: WindowSchedule | None
    block_size: int
    softmax_scale: float
    index_scale: float
    workspace_bytes: int
    gradients: bool
    deterministic: bool
    backend: str

    @property
    def device(self) -> torch.device:
        return self.q.device


def check_tensors(
    q: Tensor, k: Tensor, lse: Tensor, idx_q: Tensor, idx_k: Tensor, token_weights: Tensor | None
) -> None:
    """Check the teacher's and the student's tensors, and the weights."""
    total_q, num_q_heads, head_dim = validate.floating("q", q, "[T, Hq, D]").shape
    total_k, num_kv_heads, key_dim = validate.floating("k", k, "[Tk, Hkv, D]", q, "q").shape
    if head_dim == 0:
        validate.refuse("q", "head dim 0", "at least 1")
    if key_dim != head_dim:
        validate.refuse("k", f"head dim {key_dim}", f"{head_dim} like q")
    if num_kv_heads == 0 or num_q_heads % num_kv_heads != 0:
        validate.refuse("q", f"{num_q_heads} heads", f"a multiple of the {num_kv_heads} KV heads of k")
    validate.float32("lse", lse, [total_q, num_q_heads], "[T, Hq]", q, "q")
    idx_tokens, num_index_heads, index_dim = validate.floating("idx_q", idx_q, "[T, Hi, Di]", q, "q").shape
    if idx_tokens != total_q:
        validate.refuse("idx_q", f"{idx_tokens} tokens", f"{total_q} like q")
    if num_index_heads != num_kv_heads:
        validate.refuse("idx_q", f"{num_index_heads} index heads", f"the {num_kv_heads} KV heads of k, one for each")
    if index_dim == 0:
        validate.refuse("idx_q", "index dim 0", "at least 1")
    validate.floating("idx_k", idx_k, "[Tk, Di]", q, "q")
    if tuple(idx_k.shape) != (total_k, index_dim):
        came, wanted = validate.shape_text(idx_k.shape), validate.shape_text((total_k, index_dim))
        validate.refuse("idx_k", f"shape {came}", f"{wanted}: the tokens of k, the index dim of idx_q")
    if token_weights is not None:
        validate.float32("token_weights", token_weights, [total_q], "[T]", q, "q")
        validate.dense("token_weights", token_weights)
