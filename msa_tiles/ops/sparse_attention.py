"""sparse_attention: exact attention over each query's selected KV blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles import quant, reference
from msa_tiles.call import attention as calls
from msa_tiles.call import formats, scales, validate
from msa_tiles.call.attention import Attention, AttentionCall, Gradients
from msa_tiles.call.schedule import Schedule
from msa_tiles.call.where import Where
from msa_tiles.launch import attention, copied, shards
from msa_tiles.library import autograd, registration, remember
from msa_tiles.ops.sparse_attention_backward import gradients
from msa_tiles.quant import QuantizedTensor


def sparse_attention(
    q: Tensor | QuantizedTensor,
    k: Tensor | QuantizedTensor,
    v: Tensor | QuantizedTensor,
    block_indices: Tensor,
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
    softmax_scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    schedule: Schedule | None = None,
    workspace: int | Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax over the visible tokens of the selected blocks of (<q, k> * softmax_scale)``, times v.

    ``q`` [T, Hq, D]; ``k``, ``v`` [Tk, Hkv, D], or [pages, Hkv, page, D] with ``page_table``; one dtype,
    or quantised. ``block_indices`` int32 [Hkv, T, k]: blocks of the query's own request, distinct, in any order, -1
    anywhere; an id without a visible token is absent. Returns out [T, Hq, D] in q's dtype, with ``return_lse`` also lse
    float32 [T, Hq] (natural log). A row with nothing visible gives out 0 and lse -inf.

    ``k`` and ``v`` may both be torch.float8_e4m3fn under queries of another dtype, with float32 ``k_scale`` and
    ``v_scale``, or `QuantizedTensor`: the answer is then that of the dequantised values. Each scale is [], [Hkv] or
    [Tk, Hkv] (paged: [pages, Hkv, page]), of any strides; none is optional. Scales are finite and not below 0; others
    leave the rows that they take part in undefined, and ``check=True`` refuses them. ``q`` may be e4m3 too, with
    ``q_scale`` [], [Hq] or [T, Hq]; out is then bfloat16. Or both are `QuantizedTensor` of format "nvfp4" or "mxfp4",
    with scales in linear layout, or on pages in interleaved layout, too; a NaN in a visible group makes its row NaN.

    Long prefills over quantised keys and values attend to a copy of them in bfloat16, which `dequantize_kv` makes:
    scales are then multiplied in before that rounding. Shapes decide, and ``max_seqlen_k`` of pages; `explain` says so.

    ``schedule`` is `build_schedule`'s answer for the same ids and lengths; ``check=True`` alone refuses one of others.
    ``workspace`` bounds the memory of partial results, and that of a copy: bytes, or a uint8 tensor to use for the
    former (default: 1 GiB). ``out`` and ``lse`` are the caller's buffers.

    With ``batch_invariant`` the bits of a query's row depend neither on what else is in the batch, nor on its place in
    it, nor on how many queries there are, among calls that are otherwise alike (slots and order of its ids, dtypes,
    block and page size, scale); values must be finite. Each block is then attended to by itself and merged in the order
    of the slots, which takes longer. On the CPU it goes query by query.

    Differentiable in q, k and v through both results, on flat keys and without the caller's buffers (see
    `sparse_attention_backward`); once. ``deterministic`` is about these gradients: True repeats them bit for bit, None
    follows ``torch.use_deterministic_algorithms``. Under ``torch.autocast`` q, k and v are cast to its dtype. Quantised
    tensors are refused where gradients are recorded.
    """
    q, k, v = autograd.autocast(q, k, v)
    where = Where(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    given = calls.operands_of(q, k, v, block_indices, where, q_scale, k_scale, v_scale)
    validate.boolean("return_lse", return_lse)
    known = None
    if out is not None and not check and schedule is None and k_offset is None:
        knobs = (attention.HYBRID, attention.FILL, attention.COPY)
        further = (softmax_scale, deterministic, batch_invariant, *knobs)
        known = signature(given, block_size, workspace, out, lse, backend, further)
        launch = _SEEN.get(known)
        if launch is not None:
            return run_again(launch, given, workspace, out, lse, return_lse)
    call, scratch = calls.validated(
        given,
        check=check,
        block_size=block_size,
        softmax_scale=softmax_scale,
        schedule=schedule,
        workspace=workspace,
        deterministic=autograd.deterministic(deterministic),
        backend=backend,
        batch_invariant=batch_invariant,
    )
    if autograd.records(given.q, given.k, given.v):
        autograd.no_buffers(out=out, lse=lse, workspace=scratch)
        calls.refuse_quantised(given)
    result = run(_OPERATOR, call, scratch, out, lse, return_lse)
    if known is not None and out is not None:
        _SEEN.keep(known, attention.prepare(call, out))
    return result


def signature(
    given: Attention,
    block_size: int,
    workspace: int | Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    backend: str,
    further: tuple[Any, ...],
) -> Any:
    """What a call of attention without a shard is known by."""
    scratch, most = (workspace, None) if isinstance(workspace, Tensor) else (None, workspace)
    where = given.where
    scalars = (where.max_seqlen_q, where.max_seqlen_k, block_size, most, backend, *further)
    return remember.signature((*given.tensors(), scratch, out, lse), scalars)


def run_again(
    launch: Any,
    given: Attention,
    workspace: int | Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Launch what was remembered of a call."""
    scratch = workspace if isinstance(workspace, Tensor) else None
    if lse is None:
        lse = given.q.new_empty(given.q.shape[:2], dtype=torch.float32)
    launch(given, scratch, out, lse)
    registration.written((out, lse, scratch))
    return (out, lse) if return_lse else out


def run(
    operator: registration.Operator[AttentionCall],
    call: AttentionCall,
    scratch: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Call the operator, into the caller's buffers where there are some."""
    if out is None and lse is None and scratch is None:
        out, lse = operator.functional(call)
    else:
        out, lse = calls.destinations(call.operands.q, out, lse)
        operator.mutating(call, out, lse, scratch)
    return (out, lse) if return_lse else out


def new_results(call: AttentionCall) -> tuple[Tensor, ...]:
    """Uninitialised out and lse."""
    return calls.destinations(call.operands.q, None, None)


def by_reference(call: AttentionCall, out: Tensor, lse: Tensor, workspace: Tensor | None = None) -> None:
    """Fill out and lse in plain torch, on dequantised tensors."""
    given, made = call.operands, call.operands.schedule
    q, k, v = given.q, given.k, given.v
    if formats.is_quantised(k):
        # Computed in float32, and rounded once.
        k = scales.of_values(k, given.k_scale, given.k_global_scale)
        v = scales.of_values(v, given.v_scale, given.v_global_scale)
        q = quant.dequantize(q, given.q_scale)
    options: dict[str, Any] = {"block_size": call.block_size, "softmax_scale": call.softmax_scale}
    if call.batch_invariant:
        for rows, where in reference.each_alone(q.shape[0], k, **given.where.keywords()):
            ids = given.block_indices[:, rows]
            out[rows], lse[rows] = reference.sparse_attention(q[rows], k, v, ids, **options, **where)
        return
    # A schedule of the kernels is not the reference's: on their device it makes its own.
    schedule = None if made is None or call.device.type == "cuda" else made[:3]
    result, result_lse = reference.sparse_attention(
        q, k, v, given.block_indices, schedule=schedule, **options, **given.where.keywords()
    )
    out.copy_(result)
    lse.copy_(result_lse)


def _backward(
    call: AttentionCall, outputs: tuple[Tensor, ...], dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    given, (out, lse) = call.operands, outputs
    return gradients(
        Gradients(
            torch.zeros_like(out) if dout is None else autograd.unit_last_stride(dout),
            given.q,
            given.k,
            given.v,
            out,
            lse,
            given.block_indices,
            dlse,
            given.where,
            given.schedule,
            call.block_size,
            call.softmax_scale,
            call.workspace_bytes,
            call.deterministic,
            call.backend,
        )
    )


_SEEN: remember.Remembered[attention.Launch | copied.Copied] = remember.Remembered()
_OPERATOR = registration.define(
    "sparse_attention",
    AttentionCall,
    ("out", "lse"),
    allocate=new_results,
    reference=by_reference,
    kernels=shards.attention(attention.run),
    scratch="workspace",
)
autograd.register(_OPERATOR, _backward)
