"""sparse_attention_backward: the gradients of sparse_attention, for callers that run their own autograd."""

from __future__ import annotations

from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import backends, contents, validate
from msa_tiles.call.attention import Gradients, check_tensors
from msa_tiles.call.schedule import Schedule, of_call
from msa_tiles.call.where import Where
from msa_tiles.call.workspace import workspace_bytes
from msa_tiles.launch import backward, shards
from msa_tiles.library import autograd, registration


def sparse_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    *,
    dlse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_positions: Tensor | None = None,
    k_offset: Tensor | None = None,
    check: bool = False,
    block_size: int = 128,
    softmax_scale: float | None = None,
    schedule: Schedule | None = None,
    workspace: int | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [T, Hq, D], dk and dv [Tk, Hkv, D] of `sparse_attention` on flat keys, in the dtypes of q, k and v.

    ``dout`` [T, Hq, D], of q's dtype, and ``dlse`` float32 [T, Hq] (None: zero) are the gradients of the results
    ``out`` and ``lse`` of the forward call; every other argument is that call's own. With ``P = exp(S - lse)``,
    ``delta = <out, dout> - dlse`` and ``dS = P * (<dout, v> - delta) * softmax_scale``: ``dq = dS k``, ``dk = dS' q``,
    ``dv = P' dout``, accumulated in float32 (float64 for float64). Rows with nothing visible get 0 and give nothing,
    whatever their gradients hold; so do keys that nobody selected.

    ``workspace`` bounds the memory of partial results in bytes (default: 1 GiB). ``deterministic`` calls repeat bit for
    bit; None follows ``torch.use_deterministic_algorithms``. `sparse_attention` is differentiable by itself.
    """
    where = Where(
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k=seqused_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        q_positions=q_positions,
        k_offset=k_offset,
    )
    block_size, where = validate.plain(block_size), where.plain()
    check_tensors(q, k, v, where, block_size)
    total_q, num_q_heads, _ = q.shape
    for name, value in (("dout", dout), ("out", out)):
        validate.floating(name, value, "[T, Hq, D]", q, "q")
        if value.shape != q.shape:
            validate.refuse(name, f"shape {validate.shape_text(value.shape)}", f"{validate.shape_text(q.shape)}")
    validate.float32("lse", lse, [total_q, num_q_heads], "[T, Hq]", q, "q")
    if dlse is not None:
        validate.float32("dlse", dlse, [total_q, num_q_heads], "[T, Hq]", q, "q")
    validate.int32("block_indices", block_indices, [k.shape[1], total_q, None], "[Hkv, T, k]", q, "q")
    backends.check(backend, q.device)
    where.validate(total_q, q, "q", k)
    if validate.boolean("check", check):
        contents.check_where(where, total_q, k)
        contents.check_offsets(where, block_size, backend, q.device)
        contents.check_block_indices(block_indices, where, block_size, k)
    made = of_call(schedule, block_indices, block_size, where, k.shape[0])
    if check:
        contents.check_schedule(made, block_indices, where, block_size, k)
    return _OPERATOR.functional(
        Gradients(
            dout,
            q,
            k,
            v,
            out,
            lse,
            block_indices,
            dlse,
            where,
            made,
            block_size,
            validate.softmax_scale(softmax_scale, q.shape[2]),
            workspace_bytes(workspace),
            autograd.deterministic(deterministic),
            backend,
        )
    )


def gradients(call: Gradients) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of a forward call; paged keys have none."""
    if call.where.page_table is not None:
        validate.refuse("page_table", "paged keys in a call that is differentiated", "flat keys with cu_seqlens_k")
    return _OPERATOR.functional(call)


def _allocate(call: Gradients) -> tuple[Tensor, ...]:
    return tuple(part.new_empty(part.shape) for part in (call.q, call.k, call.v))


def _by_reference(call: Gradients, *destinations: Tensor) -> None:
    made = None if call.schedule is None or call.device.type == "cuda" else call.schedule[:3]
    results = reference.sparse_attention_backward(
        call.dout,
        call.q,
        call.k,
        call.v,
        call.out,
        call.lse,
        call.block_indices,
        dlse=call.dlse,
        block_size=call.block_size,
        softmax_scale=call.softmax_scale,
        schedule=made,
        **call.where.flat_keywords(),
    )
    for destination, result in zip(destinations, results, strict=True):
        destination.copy_(result)


_OPERATOR = registration.define(
    "sparse_attention_backward",
    Gradients,
    ("dq", "dk", "dv"),
    allocate=_allocate,
    reference=_by_reference,
    kernels=shards.attention_backward(backward.run),
)
