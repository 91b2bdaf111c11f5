"""Calls of attention over selected blocks, forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from msa_tiles.call import backends, contents, formats, scales, validate
from msa_tiles.call.schedule import Schedule, WindowSchedule, of_call
from msa_tiles.call.where import Where, page_size
from msa_tiles.call.workspace import workspace_or_bytes
from msa_tiles.quant import FP8, QuantizedTensor


class Attention(NamedTuple):
    """What attention reads: q [T, Hq, D]; k, v [Tk, Hkv, D] or [pages, Hkv, page, D]; ids int32 [Hkv, T, k].

    The scales are those of quantised tensors, the global ones of those of 4 bits.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    block_indices: Tensor
    where: Where
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    schedule: WindowSchedule | None = None
    k_global_scale: Tensor | None = None
    v_global_scale: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All but the schedule."""
        return (
            self.q, self.k, self.v, self.block_indices, *self.where.tensors(), self.q_scale, self.k_scale, self.v_scale,
            self.k_global_scale, self.v_global_scale,
        )  # fmt: skip


class AttentionCall(NamedTuple):
    """A validated call of attention. ``deterministic`` is about gradients, ``batch_invariant`` about results."""

    operands: Attention
    block_size: int
    softmax_scale: float
    workspace_bytes: int
    deterministic: bool
    backend: str
    batch_invariant: bool = False

    @property
    def device(self) -> torch.device:
        return self.operands.q.device


class Gradients(NamedTuple):
    """A validated call of the backward, on flat keys."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    block_indices: Tensor
    dlse: Tensor | None
    where: Where
    schedule: WindowSchedule | None
    block_size: int
    softmax_scale: float
    workspace_bytes: int
    deterministic: bool
    backend: str

    @property
    def device(self) -> torch.device:
        return self.q.device


class CombineCall(NamedTuple):
    """A validated call of combine."""

    partial_out: Tensor
    partial_lse: Tensor
    backend: str

    @property
    def device(self) -> torch.device:
        return self.partial_out.device


def operands_of(
    q: Any, k: Any, v: Any, block_indices: Tensor, where: Where, q_scale: Any, k_scale: Any, v_scale: Any
) -> Attention:
    """The operands of a call that is not checked yet, quantised tensors taken apart."""
    k_global = v_global = None
    if QuantizedTensor in (type(q), type(k), type(v)):
        q, q_scale = scales.unpacked("q", q, q_scale, "q_scale")
        k, k_scale, k_global = scales.unpacked_keys("k", k, k_scale, "k_scale")
        v, v_scale, v_global = scales.unpacked_keys("v", v, v_scale, "v_scale")
    elif formats.is_packed(k) or formats.is_packed(v):
        scales.refuse_bytes("k", k)
        scales.refuse_bytes("v", v)
    return Attention(q, k, v, block_indices, where, q_scale, k_scale, v_scale, None, k_global, v_global)


def validated(
    operands: Attention,
    *,
    check: bool,
    block_size: int,
    softmax_scale: float | None,
    schedule: Schedule | None,
    workspace: int | Tensor | None,
    deterministic: bool,
    backend: str,
    batch_invariant: bool,
) -> tuple[AttentionCall, Tensor | None]:
    """Check everything; the call, and the caller's scratch tensor, if any."""
    block_size, operands = validate.plain(block_size), operands._replace(where=operands.where.plain())
    q, k, v, block_indices, where, q_scale, k_scale, v_scale, _, k_global, v_global = operands
    check_tensors(q, k, v, where, block_size, quantised=True)
    check_scales(q, k, v, where, q_scale, k_scale, v_scale)
    total_q, _, head_dim = q.shape
    validate.int32("block_indices", block_indices, [k.shape[1], total_q, None], "[Hkv, T, k]", q, "q")
    backends.check(backend, q.device)
    validate.boolean("batch_invariant", batch_invariant)
    where.validate(total_q, q, "q", k)
    if validate.boolean("check", check):
        contents.check_where(where, total_q, k)
        contents.check_offsets(where, block_size, backend, q.device)
        contents.check_block_indices(block_indices, where, block_size, k)
        of_keys = {"k_scale": k_scale, "v_scale": v_scale, "k.global_scale": k_global, "v.global_scale": v_global}
        contents.check_scales(where, q, k, {"q_scale": q_scale}, of_keys)
    made = of_call(schedule, block_indices, block_size, where, k.shape[0])
    if check:
        contents.check_schedule(made, block_indices, where, block_size, k)
    scratch, scratch_bytes = workspace_or_bytes(workspace, q, "q")
    scale = validate.softmax_scale(softmax_scale, head_dim)
    call = AttentionCall(
        operands._replace(schedule=made), block_size, scale, scratch_bytes, deterministic, backend, batch_invariant
    )  # fmt: skip
    return call, scratch


def check_tensors(q: Any, k: Any, v: Any, where: Where, block_size: int, *, quantised: bool = False) -> None:
    """Check q, k and v, their head ratio and the page size. Where they may be quantised, v is stored as k is."""
    further: tuple[torch.dtype, ...] = (FP8,) if quantised else ()
    _, num_q_heads, head_dim = validate.floating("q", q, "[T, Hq, D]", further=further).shape
    if head_dim == 0:
        validate.refuse("q", "head dim 0", "at least 1")
    paged = where.page_table is not None
    decoded = quantised and isinstance(k, Tensor) and formats.is_quantised(k)
    if decoded:
        further = (FP8, formats.BYTES)
    elif quantised and isinstance(k, Tensor) and k.dtype not in (q.dtype, *validate.FLOATS):
        validate.refuse_type("k", f"dtype {k.dtype}", f"{q.dtype} like q, {FP8}, or 4 bits from msa_tiles.quant")
    for name, value in (("k", k), ("v", v)):
        keys_dims = validate.keys_dims(name, value, "[Tk, Hkv, D]", "[pages, Hkv, page, D]", paged)
        if decoded:
            validate.floating(name, value, keys_dims, k, "k", further)
            validate.same_device(name, value, q, "q")
        else:
            validate.floating(name, value, keys_dims, q, "q", further)
        if formats.width(value) != head_dim:
            validate.refuse(name, f"head dim {formats.width(value)}", f"{head_dim} like q")
    if v.shape != k.shape:
        validate.refuse("v", f"shape {validate.shape_text(v.shape)}", f"{validate.shape_text(k.shape)} like k")
    num_kv_heads = k.shape[1]
    if paged and num_kv_heads and num_q_heads % num_kv_heads and k.shape[2] and num_q_heads % k.shape[2] == 0:
        hint = "pages that lie token by token come as views, k.transpose(1, 2)"
        wanted = f"{keys_dims} with Hkv a divisor of the {num_q_heads} heads of q; {hint}"
        validate.refuse("k", f"shape {validate.shape_text(k.shape)}", wanted)
    if num_kv_heads == 0 or num_q_heads % num_kv_heads != 0:
        validate.refuse("q", f"{num_q_heads} heads", f"a multiple of the {num_kv_heads} KV heads of k")
    validate.integer("block_size", block_size, 1, validate.LARGEST_BLOCK)
    if paged:
        page_size("k", k, block_size)


def check_scales(q: Tensor, k: Tensor, v: Tensor, where: Where, q_scale: Any, k_scale: Any, v_scale: Any) -> None:
    """Check that quantised tensors have their scales, and others none."""
    paged = where.page_table is not None
    scales.of_queries("q_scale", q_scale, q, "q", "Hq", required=True)
    scales.of_keys("k_scale", k_scale, k, "k", paged)
    scales.of_keys("v_scale", v_scale, v, "v", paged)
    if (came := formats.stored(v, v_scale)) != (wanted := formats.stored(k, k_scale)):
        validate.refuse_type("v", f"format {came!r}", f"{wanted!r} like k")


def refuse_quantised(operands: Attention) -> None:
    """Refuse quantised tensors in a call whose gradients are recorded."""
    for name, value in (("q", operands.q), ("k", operands.k), ("v", operands.v)):
        if formats.is_quantised(value):
            wanted = "bfloat16, float32 or float64 where gradients are recorded: quantised tensors have none"
            validate.refuse_type(name, f"dtype {value.dtype}", wanted)


def destinations(q: Tensor, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """The caller's buffers, checked, and new ones in the place of those that were not given."""
    dtype = formats.output_dtype(q)
    if out is None:
        out = q.new_empty(q.shape, dtype=dtype)
    else:
        validate.destination("out", out, list(q.shape), "[T, Hq, D]", dtype, q, "q")
    if lse is None:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    else:
        validate.destination("lse", lse, list(q.shape[:2]), "[T, Hq]", torch.float32, q, "q")
    return out, lse
