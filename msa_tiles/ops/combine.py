"""combine: merge the partial results of splits by their LSE."""

from __future__ import annotations

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import backends, validate
from msa_tiles.call.attention import CombineCall
from msa_tiles.launch import attention
from msa_tiles.library import registration


def combine(
    partial_out: Tensor,
    partial_lse: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Merge splits: ``partial_out`` [S, T, Hq, D], ``partial_lse`` float32 [S, T, Hq] -> out [T, Hq, D], lse [T, Hq].

    Logarithms are natural. ``out`` has partial_out's dtype, ``lse`` is float32; both may be the caller's buffers. A
    split with lse -inf is empty, whatever its output holds; a row of empty splits gives out 0 and lse -inf.
    """
    num_splits, total_q, num_heads, head_dim = validate.floating("partial_out", partial_out, "[S, T, Hq, D]").shape
    validate.tensor("partial_lse", partial_lse, "[S, T, Hq]")
    if partial_lse.dtype != torch.float32:
        validate.refuse_type("partial_lse", f"dtype {partial_lse.dtype}", "torch.float32")
    if partial_lse.shape != partial_out.shape[:3]:
        wanted = f"{validate.shape_text((num_splits, total_q, num_heads))} like partial_out"
        validate.refuse("partial_lse", f"shape {validate.shape_text(partial_lse.shape)}", wanted)
    validate.same_device("partial_lse", partial_lse, partial_out, "partial_out")
    backends.check(backend, partial_out.device)
    call = CombineCall(partial_out, partial_lse, backend)
    if out is None and lse is None:
        return _OPERATOR.functional(call)
    new_out, new_lse = _allocate(call)
    if out is not None:
        shape = [total_q, num_heads, head_dim]
        validate.destination("out", out, shape, "[T, Hq, D]", partial_out.dtype, partial_out, "partial_out")
        new_out = out
    if lse is not None:
        validate.destination("lse", lse, [total_q, num_heads], "[T, Hq]", torch.float32, partial_out, "partial_out")
        new_lse = lse
    _OPERATOR.mutating(call, new_out, new_lse)
    return new_out, new_lse


def _allocate(call: CombineCall) -> tuple[Tensor, ...]:
    shape = call.partial_out.shape[1:]
    return call.partial_out.new_empty(shape), call.partial_out.new_empty(shape[:2], dtype=torch.float32)


def _by_reference(call: CombineCall, out: Tensor, lse: Tensor) -> None:
    result, result_lse = reference.combine(call.partial_out, call.partial_lse)
    out.copy_(result)
    lse.copy_(result_lse)


_OPERATOR = registration.define(
    "combine",
    CombineCall,
    ("out", "lse"),
    allocate=_allocate,
    reference=_by_reference,
    kernels=attention.run_combine,
)
