"""msa_attention: select, attend and teach the indexer; the differentiable whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from msa_tiles.call import validate
from msa_tiles.call.attention import check_tensors
from msa_tiles.call.step import check_beside
from msa_tiles.call.where import Where
from msa_tiles.library import autograd
from msa_tiles.ops.index_kl import index_kl
from msa_tiles.ops.select_blocks import select_blocks
from msa_tiles.ops.sparse_attention import sparse_attention


def msa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx_q: Tensor,
    idx_k: Tensor,
    topk: int,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_positions: Tensor | None = None,
    k_offset: Tensor | None = None,
    check: bool = False,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    softmax_scale: float | None = None,
    index_scale: float | None = None,
    token_weights: Tensor | None = None,
    workspace: int | None = None,
    return_lse: bool = False,
    return_kl: bool = False,
    return_block_indices: bool = False,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """`select_blocks`, then `sparse_attention` over what it chose, and the `index_kl` that trains the choice.

    ``q`` [T, Hq, D]; ``k``, ``v`` [Tk, Hkv, D]; ``idx_q`` [T, Hi, Di]; ``idx_k`` [Tk, Di]; without ``return_kl`` keys
    may be paged. Returns out [T, Hq, D], and behind it what is asked for, in this order: with ``return_lse`` lse
    float32 [T, Hq], with ``return_kl`` the KL loss (a scalar; needs Hi = Hkv and flat keys), with
    ``return_block_indices`` the selection int32 [Hkv, T, topk].

    ``out`` and ``lse`` are differentiable in q, k and v, the loss in idx_q and idx_k, and neither in the others: the
    selection has no gradient, and the teacher of the loss is detached. A replay of activation checkpointing selects
    the same blocks, for the selection is deterministic. The other arguments are those of the three operators;
    ``batch_invariant`` is about out and lse. Under ``torch.autocast`` the five tensors are cast.
    """
    q, k, v, idx_q, idx_k = autograd.autocast(q, k, v, idx_q, idx_k)
    where: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "page_table": page_table,
        "seqused_k": seqused_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "q_positions": q_positions,
        "k_offset": k_offset,
    }
    check_tensors(q, k, v, Where(**where), block_size)
    validate.floating("idx_q", idx_q, "[T, Hi, Di]", q, "q")
    validate.floating("idx_k", idx_k, "[Tk, Di]" if page_table is None else "[pages, page, Di]", k, "k")
    check_beside(idx_q, idx_k, q, k, page_table is not None)
    # What a call without the loss does not need is an argument all the same.
    validate.softmax_scale(index_scale, 1, "index_scale")
    if token_weights is not None:
        validate.float32("token_weights", token_weights, [q.shape[0]], "[T]", q, "q")
    for name, flag in (
        ("return_lse", return_lse),
        ("return_kl", return_kl),
        ("return_block_indices", return_block_indices),
    ):
        validate.boolean(name, flag)
    if workspace is not None:
        validate.integer("workspace", workspace, 1, validate.LARGEST_MEMORY)
    where |= {"block_size": block_size}
    selected = select_blocks(
        idx_q.detach(),
        idx_k.detach(),
        topk,
        num_kv_heads=k.shape[1],
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        check=check,
        backend=backend,
        **where,
    )
    # Every pass makes the schedule that suits it: forward without one is faster by more than making it takes.
    options: dict[str, Any] = {
        **where,
        "softmax_scale": softmax_scale,
        "workspace": workspace,
        "deterministic": deterministic,
        "backend": backend,
    }
    out, lse = sparse_attention(
        q, k, v, selected, return_lse=True, check=check, batch_invariant=batch_invariant, **options
    )  # fmt: skip
    results = [out]
    if return_lse:
        results.append(lse)
    if return_kl:
        results.append(
            index_kl(
                q, k, lse, idx_q, idx_k, selected, index_scale=index_scale, token_weights=token_weights, **options
            )
        )  # fmt: skip
    if return_block_indices:
        results.append(selected)
    return tuple(results) if len(results) > 1 else out
