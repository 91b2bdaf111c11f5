"""sparse_decode: sparse_attention for few queries per request."""

from __future__ import annotations

import functools

from torch import Tensor

from msa_tiles.call import validate
from msa_tiles.call.schedule import Schedule
from msa_tiles.call.where import Where
from msa_tiles.launch import decode, shards
from msa_tiles.library import registration, remember
from msa_tiles.ops.sparse_attention import (
    SCHEMA,
    Launch,
    allocate_attention,
    attention_arguments,
    prepare_attention,
    run,
    run_again,
    signature,
    write_attention,
)


def sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The answer of `sparse_attention`, made for requests of few queries (1 to 32).

    Arguments, results and errors are those of `sparse_attention`, except that there is no schedule to hand in. Each
    query reads its blocks by itself; few queries are split over their blocks and merged. With ``cu_seqlens_q``, paged
    keys or ``cu_seqlens_k``, ``out``, ``lse`` and a ``workspace`` tensor of `decode_workspace_bytes`, a call allocates
    nothing. It never synchronises; the grid depends on shapes alone, so that a captured graph serves other lengths.
    """
    if schedule is not None:
        validate.refuse("schedule", "a Schedule", "None: decoding walks block_indices themselves")
    where = Where(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    scales = (q_scale, k_scale, v_scale)
    call = None
    if out is not None and not check:
        call = signature(q, k, v, block_indices, where, block_size, softmax_scale, scales, workspace, out, lse, backend)
        launch = _SEEN.get(call)
        if launch is not None:
            return run_again(launch, q, k, v, block_indices, where, workspace, out, lse, return_lse)
    arguments, scratch = attention_arguments(
        q, k, v, block_indices, where, check, block_size, softmax_scale, scales, None, workspace, backend
    )
    result = run(_OPERATOR, arguments, scratch, q, out, lse, return_lse)
    if call is not None:
        _SEEN.keep(call, _PREPARE(*arguments, out))
    return result


_SEEN: remember.Remembered[Launch] = remember.Remembered()
_PREPARE = functools.partial(prepare_attention, "sparse_decode", {"scored_blocks": 0}, decode.prepare)
_OPERATOR = registration.define(
    "sparse_decode",
    SCHEMA,
    ("out", "lse"),
    allocate_attention,
    shards.attention(functools.partial(write_attention, _PREPARE)),
    scratch="workspace",
)
