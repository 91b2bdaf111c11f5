"""select_blocks: scores and top-k in one, without the score matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import contents, validate
from msa_tiles.call.scales import Indexer, has_key_scales, indexer, kernel_scales
from msa_tiles.call.selection import ORDERS, selection
from msa_tiles.call.where import ARGUMENTS, Where, page_size
from msa_tiles.launch import lookup, places, shards
from msa_tiles.library import registration, remember
from msa_tiles.ops.topk_select import allocate_ids
from msa_tiles.quant import FP8, QuantizedTensor


def select_blocks(
    idx_q: Tensor | QuantizedTensor,
    idx_k: Tensor | QuantizedTensor,
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
    num_kv_heads: int | None = None,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    order: str = "ascending",
    k_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The answer of ``topk_select(index_score(idx_q, idx_k), topk)``: int32 [Hkv, T, topk].

    Tensors as in `index_score`, parameters as in `topk_select`. Extra memory is proportional to T * topk. ``out`` is
    the caller's buffer for the ids.

    Of the scales of quantised queries and keys, kernels read those that can change a ranking: not one scale for all
    keys, and queries' only where a KV head has several index heads, whose scores are compared with each other.
    """
    where = Where(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    call = None
    if out is not None and not check and k_offset is None:
        tensors = (idx_q, idx_k, *where.tensors(), q_scale, k_scale, out)
        scalars = (
            topk,
            max_seqlen_q,
            max_seqlen_k,
            num_kv_heads,
            block_size,
            init_blocks,
            local_blocks,
            order,
            backend,
        )
        call = remember.signature(tensors, scalars)
        launch = _SEEN.get(call)
        if launch is not None:
            launch(idx_q, idx_k, where, q_scale, k_scale, out)
            registration.written((out,))
            return out
    idx_q, idx_k, q_scale, k_scale = indexer(idx_q, q_scale, idx_k, k_scale, page_table is not None)
    num_heads = idx_q.shape[1]
    num_kv_heads = selection("idx_q", num_heads, topk, num_kv_heads, block_size, init_blocks, local_blocks, order)
    validate.backend(backend, idx_q.device)
    if page_table is not None:
        page_size("idx_k", idx_k, block_size)
    where.validate(idx_q.shape[0], idx_q, "idx_q", idx_k)
    if check:
        contents.check_where(where, idx_q.shape[0], idx_k)
        shards.check_offsets(where, block_size, backend, idx_q.device)
        contents.check_scales(where, idx_q, q_scale, idx_k, k_scale)
    arguments = (
        idx_q,
        idx_k,
        topk,
        *where.arguments(),
        num_kv_heads,
        block_size,
        init_blocks,
        local_blocks,
        order,
        q_scale,
        k_scale,
        backend,
    )
    if out is None:
        return _OPERATOR.functional(*arguments)
    shape = [num_kv_heads, idx_q.shape[0], topk]
    validate.destination("out", out, shape, "[Hkv, T, topk]", torch.int32, idx_q, "idx_q")
    _OPERATOR.mutating(*arguments, out)
    if call is not None:
        _SEEN.keep(call, _prepare(*arguments, out))
    return out


def _allocate(idx_q: Tensor, idx_k: Tensor, topk: int, *rest: Any) -> tuple[Tensor, ...]:
    return (allocate_ids(idx_q, rest[8], idx_q.shape[0], topk),)


@dataclass(frozen=True)
class _Launch:
    """A kernel ready to rank the blocks of tensors of certain shapes."""

    kernel: Any
    block_size: int
    heads_per_group: int
    parameters: tuple[int, int, int]

    def __call__(
        self,
        idx_q: Tensor,
        idx_k: Tensor,
        where: Where,
        q_scale: Tensor | None,
        k_scale: Tensor | None,
        out: Tensor,
    ) -> None:
        at = places.place(where, idx_q.shape[0], idx_k.shape[0], self.block_size, idx_q.device)
        call = Indexer(idx_q, idx_k, q_scale, k_scale)
        scales = kernel_scales(call, self.heads_per_group, at.cu_seqlens_q)
        self.kernel(
            idx_q,
            idx_k,
            at.page_table,
            at.cu_seqlens_q,
            at.cu_seqlens_k,
            at.seqused_k,
            at.q_positions,
            *scales.tensors,
            out,
            at.use_seqused,
            at.use_positions,
            *scales.flags,
            *self.parameters,
        )


def _prepare(idx_q: Tensor, idx_k: Tensor, topk: int, *rest: Any) -> _Launch | None:
    """What runs the kernel of a validated call; None on the reference, and where a size is 0."""
    where, rest = Where(*rest[:8]), rest[8:]
    num_kv_heads, block_size, init_blocks, local_blocks, order, _, k_scale, backend, out = rest
    if lookup.runs_reference(backend, idx_q.device):
        return None
    heads_per_group = idx_q.shape[1] // num_kv_heads
    variant = {
        "head_dim": idx_q.shape[2],
        "block_size": block_size,
        "topk": topk,
        "heads_per_group": heads_per_group,
        "pages_per_block": lookup.pages_per_block(where, idx_k, block_size),
    }
    if idx_q.dtype == FP8:
        variant["key_scales"] = int(has_key_scales(k_scale))
    facts = lookup.call_facts(
        "select_blocks",
        where,
        idx_q.device,
        lookup.precision(query=idx_q, index_key=idx_k),
        variant,
        (idx_q, idx_k),
        lookup.oversized_table(where, block_size),
        queries=idx_q.shape[0],
        heads=idx_q.shape[1],
    )
    kernel = lookup.find_kernel(facts, backend)
    if out.numel() == 0 or idx_k.numel() == 0 or where.num_requests == 0:
        return None
    return _Launch(kernel, block_size, heads_per_group, (init_blocks, local_blocks, ORDERS[order]))


def _write(idx_q: Tensor, idx_k: Tensor, topk: int, *rest: Any) -> None:
    where = Where(*rest[:8])
    num_kv_heads, block_size, init_blocks, local_blocks, order, q_scale, k_scale, backend, out = rest[8:]
    if lookup.runs_reference(backend, idx_q.device):
        out.copy_(
            reference.select_blocks(
                idx_q,
                idx_k,
                topk,
                num_kv_heads=num_kv_heads,
                block_size=block_size,
                init_blocks=init_blocks,
                local_blocks=local_blocks,
                order=order,
                q_scale=q_scale,
                k_scale=k_scale,
                **where.keywords(),
            )
        )
        return
    launch = _prepare(idx_q, idx_k, topk, *rest)
    if launch is None:
        out.fill_(-1)
    else:
        launch(idx_q, idx_k, where, q_scale, k_scale, out)


_SEEN: remember.Remembered[Callable[..., None]] = remember.Remembered()
_OPERATOR = registration.define(
    "select_blocks",
    f"Tensor idx_q, Tensor idx_k, SymInt topk, {ARGUMENTS}, SymInt num_kv_heads, SymInt block_size, "
    "SymInt init_blocks, SymInt local_blocks, str order, Tensor? q_scale, Tensor? k_scale, str backend",
    ("out",),
    _allocate,
    shards.selection(_write),
)
