"""msa_decode: a whole decode step of MiniMax Sparse Attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import attention as calls
from msa_tiles.call import backends, indexer, step, validate
from msa_tiles.call.attention import AttentionCall
from msa_tiles.call.step import StepCall
from msa_tiles.call.where import Where
from msa_tiles.call.workspace import WORKSPACE_BYTES
from msa_tiles.launch import decode
from msa_tiles.library import registration, remember
from msa_tiles.ops.sparse_attention import by_reference
from msa_tiles.quant import FP8, QuantizedTensor


def msa_decode(
    q: Tensor | QuantizedTensor,
    k: Tensor | QuantizedTensor,
    v: Tensor | QuantizedTensor,
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
    check: bool = False,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    softmax_scale: float | None = None,
    index_q_scale: Tensor | None = None,
    index_k_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    workspace: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    block_indices: Tensor | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Score the blocks, choose ``topk`` for each query and KV head, attend: for few queries (1 to 32) per request.

    ``q`` [T, Hq, D]; ``k``, ``v`` [Tk, Hkv, D] or [pages, Hkv, page, D]; ``idx_q`` [T, Hi, Di]; ``idx_k`` [Tk, Di] or
    [pages, page, Di]; paged keys share one ``page_table``. Returns out [T, Hq, D], with ``return_lse`` also lse float32
    [T, Hq] (natural log), as `sparse_attention` over the ids of `select_blocks` would.

    Keys and values may be quantised as there (``k_scale``, ``v_scale``), and so may, by themselves, the queries and
    keys of the indexer, as in `index_score` (``index_q_scale``, ``index_k_scale``; None stands for 1): any format of
    the one with any of the other.

    ``out``, ``lse`` and ``block_indices`` int32 [Hkv, T, topk] are the caller's buffers, ``workspace`` a uint8 tensor
    of `decode_workspace_bytes`: with all of them, cu_seqlens_q, and cu_seqlens_k or pages, a call allocates nothing.
    The grids depend on shapes and ``max_seqlen_k`` alone, so that a captured graph serves other lengths and tables.
    ``batch_invariant`` is that of `sparse_decode`, for calls of one bound of the keys; ids never depend on the batch.
    """
    where = Where(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, max_seqlen_q, max_seqlen_k, q_positions)
    given = step.operands_of(
        q, k, v, idx_q, idx_k, where, q_scale, k_scale, v_scale, index_q_scale, index_k_scale
    )  # fmt: skip
    validate.boolean("return_lse", return_lse)
    known = None
    if not (check or workspace is None or out is None or lse is None or block_indices is None):
        buffers = (workspace, out, lse, block_indices)
        blocks = (block_size, init_blocks, local_blocks)
        scalars = (topk, max_seqlen_q, max_seqlen_k, *blocks, softmax_scale, backend, batch_invariant)
        known = remember.signature((*given.tensors(), *buffers), scalars)
        launch = _SEEN.get(known)
        if launch is not None:
            launch(given, workspace, out, lse, block_indices)
            registration.written(buffers)
            return (out, lse) if return_lse else out
    call = step.validated(
        given,
        topk,
        check=check,
        block_size=block_size,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        softmax_scale=softmax_scale,
        backend=backend,
        batch_invariant=batch_invariant,
    )
    if out is None and lse is None and block_indices is None and workspace is None:
        out, lse, _ = _OPERATOR.functional(call)
        return (out, lse) if return_lse else out
    if workspace is not None:
        validate.scratch("workspace", workspace, given.q, "q")
    out, lse = calls.destinations(given.q, out, lse)
    if block_indices is None:
        block_indices = indexer.new_ids(given.q, call.num_kv_heads, given.q.shape[0], topk)
    else:
        shape = [call.num_kv_heads, given.q.shape[0], topk]
        validate.destination("block_indices", block_indices, shape, "[Hkv, T, topk]", torch.int32, given.q, "q")
    _OPERATOR.mutating(call, out, lse, block_indices, workspace)
    if known is not None:
        _SEEN.keep(known, decode.prepare_step(call))
    return (out, lse) if return_lse else out


def decode_workspace_bytes(
    q: Tensor,
    topk: int,
    num_kv_heads: int,
    *,
    idx_q: Tensor | None = None,
    max_seqlen_k: int = 0,
    block_size: int = 128,
    batch_invariant: bool = False,
    device: str | torch.device | None = None,
) -> int:
    """Bytes of the ``workspace`` of a decode call on CUDA tensors of these shapes; 0 where it needs none.

    ``topk`` and ``num_kv_heads`` are those of its ``block_indices`` [Hkv, T, topk], ``block_size`` the call's. For
    `sparse_decode` ``q`` [T, Hq, D] is enough besides; for `msa_decode` also ``idx_q`` [T, Hi, Di] and
    ``max_seqlen_k``, the bound that the call gives (without one: the rows of flat keys, or max_pages times the page
    size). ``batch_invariant`` is the call's.

    ``device`` is where the call will run, as `msa_tiles.explain` takes it: a target such as ``"sm90"``, a card such as
    ``"H100"``, or a torch device; None: that of ``q``. GPUs of other sizes need other workspaces. CPU tensors need
    none, and tensors on the meta device must come with a ``device``. Raises ValueError for one that nobody knows, and
    for heads that ``num_kv_heads`` does not divide.
    """
    validate.floating("q", q, "[T, Hq, D]", further=(FP8,))
    topk, num_kv_heads = validate.plain(topk), validate.plain(num_kv_heads)
    max_seqlen_k, block_size = validate.plain(max_seqlen_k), validate.plain(block_size)
    validate.boolean("batch_invariant", batch_invariant)
    validate.integer("topk", topk, 1, validate.LARGEST_TOPK)
    validate.integer("num_kv_heads", num_kv_heads, 1)
    if q.shape[1] % num_kv_heads:
        validate.refuse("num_kv_heads", str(num_kv_heads), f"a divisor of the {q.shape[1]} heads of q")
    validate.integer("max_seqlen_k", max_seqlen_k, 0)
    validate.integer("block_size", block_size, 1, validate.LARGEST_BLOCK)
    if device is not None and not isinstance(device, str | torch.device):
        validate.refuse_type("device", type(device).__name__, "a name, a torch.device or None")
    if device is None and q.is_meta and not backends.rehearsed():
        validate.refuse(
            "device", "None for tensors on meta", "where the call will run, such as 'sm90', 'cuda' or 'cpu'"
        )
    like = q if idx_q is None else validate.floating("idx_q", idx_q, "[T, Hi, Di]", further=(FP8,))
    if device is None and not backends.has_kernels(q.device):
        return 0
    num_blocks = 0 if idx_q is None else -(-max_seqlen_k // block_size)
    return decode.bytes_on(device, q, like, topk, num_kv_heads, num_blocks, batch_invariant)


def _allocate(call: StepCall) -> tuple[Tensor, ...]:
    q = call.operands.q
    out, lse = calls.destinations(q, None, None)
    return out, lse, indexer.new_ids(q, call.num_kv_heads, q.shape[0], call.topk)


def _by_reference(
    call: StepCall, out: Tensor, lse: Tensor, block_indices: Tensor, workspace: Tensor | None = None
) -> None:
    given = call.operands
    idx_k, k_scale = indexer.reference_keys(given.of_indexer)
    q_scale, total_q = given.index_q_scale, given.q.shape[0]
    everything: tuple[slice, dict[str, Any]] = (slice(0, total_q), given.where.keywords())
    parts = [everything]
    if call.batch_invariant:
        parts = reference.each_alone(total_q, given.k, **given.where.keywords())
    for rows, where in parts:
        block_indices[:, rows] = reference.select_blocks(
            given.idx_q[rows],
            idx_k,
            call.topk,
            num_kv_heads=call.num_kv_heads,
            block_size=call.block_size,
            init_blocks=call.init_blocks,
            local_blocks=call.local_blocks,
            q_scale=q_scale[rows] if q_scale is not None and q_scale.dim() == 2 else q_scale,
            k_scale=k_scale,
            **where,
        )
    attention = given.of_attention(block_indices)
    by_reference(
        AttentionCall(
            attention, call.block_size, call.softmax_scale, WORKSPACE_BYTES, False, call.backend, call.batch_invariant
        ),
        out,
        lse,
    )


_SEEN: remember.Remembered[decode.StepLaunch] = remember.Remembered()
_OPERATOR = registration.define(
    "msa_decode",
    StepCall,
    ("out", "lse", "block_indices"),
    allocate=_allocate,
    reference=_by_reference,
    kernels=decode.run_step,
    scratch="workspace",
)
