"""sparse_decode: sparse_attention for few queries per request."""

from __future__ import annotations

from torch import Tensor

from msa_tiles.call import attention as calls
from msa_tiles.call import validate
from msa_tiles.call.attention import AttentionCall
from msa_tiles.call.schedule import Schedule
from msa_tiles.call.where import Where
from msa_tiles.launch import decode, shards
from msa_tiles.library import registration, remember
from msa_tiles.ops.sparse_attention import by_reference, new_results, run, run_again, signature
from msa_tiles.quant import QuantizedTensor


def sparse_decode(
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
    batch_invariant: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The answer of `sparse_attention`, made for requests of few queries (1 to 32).

    Arguments, results and errors are those of `sparse_attention`, except that there is no schedule to hand in. Each
    query reads its blocks by itself; few queries are split over their blocks and merged. With ``cu_seqlens_q``, paged
    keys or ``cu_seqlens_k``, ``out``, ``lse`` and a ``workspace`` tensor of `decode_workspace_bytes`, a call allocates
    nothing. It never synchronises; the grid depends on shapes alone, so that a captured graph serves other lengths.

    With ``batch_invariant``, as there, the number of splits follows from ``topk`` alone; a ``workspace`` that does not
    hold them is refused.
    """
    if schedule is not None:
        validate.refuse("schedule", "a Schedule", "None: decoding walks block_indices themselves")
    where = Where(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    given = calls.operands_of(q, k, v, block_indices, where, q_scale, k_scale, v_scale)
    validate.boolean("return_lse", return_lse)
    known = None
    if out is not None and not check and k_offset is None:
        known = signature(given, block_size, workspace, out, lse, backend, (softmax_scale, batch_invariant))
        launch = _SEEN.get(known)
        if launch is not None:
            return run_again(launch, given, workspace, out, lse, return_lse)
    call, scratch = calls.validated(
        given,
        check=check,
        block_size=block_size,
        softmax_scale=softmax_scale,
        schedule=None,
        workspace=workspace,
        deterministic=False,
        backend=backend,
        batch_invariant=batch_invariant,
    )
    result = run(_OPERATOR, call, scratch, out, lse, return_lse)
    if known is not None:
        _SEEN.keep(known, decode.prepare(call))
    return result


_SEEN: remember.Remembered[decode.Launch] = remember.Remembered()
_OPERATOR: registration.Operator[AttentionCall] = registration.define(
    "sparse_decode",
    AttentionCall,
    ("out", "lse"),
    allocate=new_results,
    reference=by_reference,
    kernels=shards.attention(decode.run),
    scratch="workspace",
)
