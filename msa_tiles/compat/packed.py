"""Attention over selected blocks as serving packages call it: packed queries, keys that are flat or in pages of 128."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor

from msa_tiles import ops
from msa_tiles.call import validate
from msa_tiles.compat import four_bits, kept, positions
from msa_tiles.quant import QuantizedTensor

BLOCK = 128
Stored: TypeAlias = "Tensor | QuantizedTensor"
FEW_QUERIES = 32  # up to so many for each request the decode operators serve
FP8 = torch.float8_e4m3fn


def places(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    page_table: Tensor | None,
    seqused_k: Tensor | None,
    causal: bool,
    q_offset: int | Tensor | None,
    total_q: int,
) -> dict[str, Any]:
    """The operators' keyword arguments for the places of queries and keys.

    ``q_offset``, an integer or int32 [B], is where a request's first query sits; by default its last one sits on the
    last key. Without ``causal`` every query sees all keys of its request.

    Raises ``ValueError`` or ``TypeError`` for other shapes, with the operators' names: ``q_positions`` is ``q_offset``.
    """
    if page_table is None and cu_seqlens_k is None:
        raise ValueError("cu_seqlens_k: got None without page_table; wanted int32 [B + 1], where keys begin")
    requests = num_requests(cu_seqlens_q)
    lengths = key_lengths(cu_seqlens_k, page_table, seqused_k, requests)
    found: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q}
    if page_table is None:
        found["cu_seqlens_k"] = cu_seqlens_k
    else:
        found |= {"page_table": page_table, "seqused_k": lengths.contiguous()}
    if not causal:
        found["q_positions"] = positions.last(lengths, cu_seqlens_q, total_q)
    elif q_offset is not None:
        if isinstance(q_offset, Tensor) and q_offset.dim():  # one of no dimensions is an integer
            validate.shaped("q_positions", q_offset, [requests], "[B]")
        found["q_positions"] = positions.at(q_offset, cu_seqlens_q, total_q)
    return found


def num_requests(cu_seqlens_q: Tensor) -> int:
    """B of ``cu_seqlens_q`` [B + 1]. Raises ``ValueError`` or ``TypeError`` for another shape."""
    starts = validate.tensor("cu_seqlens_q", cu_seqlens_q, "[B + 1]").shape[0]
    if starts == 0:
        validate.refuse("cu_seqlens_q", "shape [0]", "[B + 1], at least one element")
    return starts - 1


def key_lengths(
    cu_seqlens_k: Tensor | None, page_table: Tensor | None, seqused_k: Tensor | None, requests: int
) -> Tensor:
    """How many keys each of so many requests has: int32 [B]."""
    if page_table is not None and seqused_k is not None:
        return validate.shaped("seqused_k", seqused_k, [requests], "[B]")
    if cu_seqlens_k is None:
        raise ValueError("seqused_k: got None with page_table; wanted int32 [B], the keys of each request")
    return validate.shaped("cu_seqlens_k", cu_seqlens_k, [requests + 1], "[B + 1]").diff()


def table_of(pages: Tensor, starts: Tensor, width: int) -> Tensor:
    """int32 [B, width]: request b has ``pages[starts[b] : starts[b + 1]]``; what it lacks is any page or 0.

    Raises ``ValueError`` or ``TypeError`` that names ``kv_indices`` for pages of more or fewer dimensions.
    """
    validate.tensor("kv_indices", pages, "[pages]")
    places = starts[:-1, None] + torch.arange(width, dtype=torch.int32, device=starts.device)
    return pages[places.clamp(max=max(pages.shape[0] - 1, 0)).long()] if pages.numel() else places * 0


def keys_and_values(
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_global: float | Tensor | None,
    v_global: float | Tensor | None,
) -> tuple[Stored, Stored]:
    """Keys and values as the operators take them: of planar NVFP4 pages (uint8, with block scales) views of both.

    Raises ``ValueError`` for block scales of other tensors, or of another layout, and ``ValueError`` or ``TypeError``
    for a global scale that is no number.
    """
    if torch.uint8 not in (k.dtype, v.dtype):
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None:
                raise ValueError(
                    f"{name}: got a tensor, the block scales of NVFP4, beside k of {k.dtype}; wanted None: one number "
                    f"for all is {name[0]}_global_scale"
                )
        return k, v
    if k.dtype != v.dtype:
        raise ValueError(f"v: got dtype {v.dtype} beside k of {k.dtype}; wanted NVFP4 for both or neither")
    return tuple(
        four_bits.of_pages(
            name, stored, scale, _global_scale(f"{name}_global_scale", number, k.device), turned=name == "v"
        )
        for name, stored, scale, number in (("k", k, k_scale, k_global), ("v", v, v_scale, v_global))
    )  # type: ignore[return-value]


def _global_scale(name: str, number: float | Tensor | None, device: torch.device) -> Tensor | None:
    """float32 [] of a number, or of a tensor of one element."""
    if number is None or not isinstance(number, Tensor):
        return None if number is None else kept.scalar(float(number), device)
    if number.numel() != 1:
        validate.refuse(name, f"shape {validate.shape_text(number.shape)}", "one element")
    if number.dtype != torch.float32:
        validate.refuse_type(name, f"dtype {number.dtype}", "torch.float32")
    return number.reshape(())


def check_queries(q: Tensor) -> None:
    """Refuse float16, and what is no [T, heads, D]."""
    if q.dim() != 3:
        raise ValueError(f"q: got shape {list(q.shape)}; wanted [T, heads, D]")
    if q.dtype == torch.float16:
        raise TypeError("q: got dtype torch.float16; wanted torch.bfloat16, which all kernels here take")


def check_temperature(scale: float) -> None:
    """Refuse what scores cannot be multiplied or divided by."""
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"lse_temperature_scale: got {scale}; wanted a finite number above 0")


def attend(
    q: Tensor,
    k: Stored,
    v: Stored,
    block_indices: Tensor,
    where: dict[str, Any],
    softmax_scale: float | None,
    *,
    few: bool,
    k_scale: float | None = None,
    v_scale: float | None = None,
    block_size: int = BLOCK,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [T, Hq, D] and lse [T, Hq], with one scale for all keys and one for all values.

    Elements of e4m3 tensors without a scale stand for themselves. Scores of other keys take their scale by way of
    ``softmax_scale``, outputs of other values are multiplied once more. Quantised tensors have theirs.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    scales: dict[str, Any] = {}
    for name, stored, number in (("q_scale", q, None), ("k_scale", k, k_scale), ("v_scale", v, v_scale)):
        if isinstance(stored, Tensor) and stored.dtype == FP8:
            scales[name] = kept.scalar(1.0 if number is None else float(number), q.device)
    if isinstance(k, Tensor) and k.dtype != FP8 and k_scale is not None:
        scale *= float(k_scale)
    call = ops.sparse_decode if few else ops.sparse_attention
    out, lse = call(
        q, k, v, block_indices, block_size=block_size, softmax_scale=scale, return_lse=True, out=out, lse=lse,
        **where, **scales,
    )  # fmt: skip
    if isinstance(v, Tensor) and v.dtype != FP8 and v_scale is not None:
        out.mul_(float(v_scale))
    return out, lse
