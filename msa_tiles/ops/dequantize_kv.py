"""dequantize_kv: what quantised keys and values stand for, in bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import caches as calls
from msa_tiles.call import validate
from msa_tiles.call.caches import Whole
from msa_tiles.launch import dequantize
from msa_tiles.library import registration
from msa_tiles.quant import QuantizedTensor


def dequantize_kv(
    k: Tensor | QuantizedTensor,
    v: Tensor | QuantizedTensor,
    *,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_out: Tensor | None = None,
    v_out: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Quantised keys and values as flat ones of bfloat16, times their scales: elements [rows, Hkv, D] of each.

    ``k``, ``v`` torch.float8_e4m3fn [Tk, Hkv, D], or [pages, Hkv, page, D] with ``page_table``, of any strides but a
    unit last one, with float32 ``k_scale`` and ``v_scale``, each [], [Hkv] or [Tk, Hkv] (paged: [pages, Hkv, page]).
    Or both are a `QuantizedTensor`, of format "e4m3", "nvfp4" or "mxfp4", whose scales are linear, or interleaved on
    pages. The answer is `msa_tiles.quant.dequantize`'s: products of float32, rounded to bfloat16 once, to nearest even.
    Elements times scales of groups are exact, and so are scales that are powers of two; NaN stays NaN.

    Flat keys give as many rows, Tk. Of pages, those of request b come in the order of its row of ``page_table`` int32
    [B, max_pages], and begin at row b * max_pages * page of B * max_pages * page. So with ``cu_seqlens_k`` of these
    beginnings and the same ``seqused_k``, `sparse_attention` takes the rows as flat keys. Rows from ``seqused_k`` int32
    [B] on are not written: they hold what the memory held. Entries behind a request's pages are not looked at, and
    where one that is needed names no page, its rows are 0.

    ``k_out``, ``v_out`` bfloat16 [rows, Hkv, D] are the caller's buffers, of any strides but a unit last one. Nothing
    synchronises; a captured graph serves other tables and lengths at the same addresses. No gradient passes.
    """
    call = calls.dequantize_kv(
        k, v, page_table=page_table, seqused_k=seqused_k, k_scale=k_scale, v_scale=v_scale, backend=backend
    )
    if k_out is None and v_out is None:
        keys, values = _OPERATOR.functional(call)
        return keys, values
    found = []
    for name, out in (("k_out", k_out), ("v_out", v_out)):
        if out is None:
            out = _new(call)
        else:
            validate.destination(name, out, list(call.shape), "[rows, Hkv, D]", torch.bfloat16, call.k, "k")
        found.append(out)
    _OPERATOR.mutating(call, *found)
    return found[0], found[1]


def _new(call: Whole) -> Tensor:
    return call.k.new_empty(call.shape, dtype=torch.bfloat16)


def _allocate(call: Whole) -> tuple[Tensor, ...]:
    return _new(call), _new(call)


def _by_reference(call: Whole, k_out: Tensor, v_out: Tensor) -> None:
    """Fill both in plain torch."""
    reference.dequantize_kv(
        call.k,
        call.v,
        k_out,
        v_out,
        page_table=call.page_table,
        seqused_k=call.seqused_k,
        k_scale=call.k_scale,
        v_scale=call.v_scale,
        k_global_scale=call.k_global_scale,
        v_global_scale=call.v_global_scale,
    )


_OPERATOR: registration.Operator[Whole] = registration.define(
    "dequantize_kv",
    Whole,
    ("k_out", "v_out"),
    allocate=_allocate,
    reference=_by_reference,
    kernels=dequantize.run,
)
