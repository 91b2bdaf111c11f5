"""sparse_attention_backward: the gradients of sparse_attention, for callers that run their own autograd."""

from __future__ import annotations

from torch import Tensor

from msa_tiles.ops import _contents, _dispatch, _gradients, _shard, _training, _validate
from msa_tiles.ops._where import Where
from msa_tiles.ops.schedule import Schedule
from msa_tiles.ops.sparse_attention import attention_tensors

_OPERATOR = _gradients.OPERATOR


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
    where = Where(cu_seqlens_q, cu_seqlens_k, None, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    attention_tensors(q, k, v, where, block_size)
    total_q, num_q_heads, _ = q.shape
    for name, value in (("dout", dout), ("out", out)):
        _validate.floating(name, value, "[T, Hq, D]", q, "q")
        if value.shape != q.shape:
            _validate.refuse(name, f"shape {_validate.shape_text(value.shape)}", f"{_validate.shape_text(q.shape)}")
    _validate.float32("lse", lse, [total_q, num_q_heads], "[T, Hq]", q, "q")
    if dlse is not None:
        _validate.float32("dlse", dlse, [total_q, num_q_heads], "[T, Hq]", q, "q")
    _validate.int32("block_indices", block_indices, [k.shape[1], total_q, None], "[Hkv, T, k]", q, "q")
    _validate.backend(backend, q.device)
    where.validate(total_q, q, "q", k, check)
    if check:
        _shard.check_offsets(where, block_size, backend, q.device)
        _contents.check_block_indices(block_indices, where, block_size, k)
    return _OPERATOR.functional(
        dout,
        q,
        k,
        v,
        out,
        lse,
        block_indices,
        dlse,
        *where.arguments(),
        block_size,
        _validate.softmax_scale(softmax_scale, q.shape[2]),
        *schedule_parts(schedule, block_indices, block_size, where, k.shape[0]),
        workspace_bytes(workspace),
        _training.deterministic(deterministic),
        backend,
    )


def schedule_parts(
    schedule: Schedule | None, block_indices: Tensor, block_size: int, where: Where, total_k: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
    """A schedule as operators take it, checked against the call."""
    if schedule is None:
        return None, None, None, 0
    if not isinstance(schedule, Schedule):
        _validate.refuse_type("schedule", type(schedule).__name__, "a Schedule of build_schedule, or None")
    schedule.validate(block_indices, block_size, where, total_k)
    return schedule.edges, schedule.tasks, schedule.counts, schedule.window


def workspace_bytes(value: int | None) -> int:
    """The bound of partial results."""
    if value is None:
        return _dispatch.WORKSPACE_BYTES
    _validate.integer("workspace", value, 1)
    return value
