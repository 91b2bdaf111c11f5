"""FlashInfer's ``msa_*`` operators by name, signature and layout, over ours.

    from msa_tiles.compat.flashinfer import msa_proxy_score, msa_sparse_attention, msa_topk_select

After flashinfer-python 0.7.4. Served besides what it serves: any number of selected blocks, an LSE and BF16 keys on
every GPU, flat keys, keys of any strides (K and V in one cache), ``out=`` everywhere, no workspace. Undefined there and
defined here: equal scores (the lower block), rows that see nothing (out 0, LSE -inf), float ``-inf`` scores of valid
blocks (they are chosen last), more forced blocks than slots (the first ones win). Not served, with a sentence: float16,
NVFP4 attention with scales in tiles of 128x4, and the ``msa_icp_*`` family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from msa_tiles import ops
from msa_tiles.call import validate
from msa_tiles.compat import arguments, kept, packed
from msa_tiles.compat.flashinfer_scores import check_output, msa_proxy_score, msa_proxy_score_fp4

__all__ = [
    "SUPPORTS_PACKED_KV",
    "msa_proxy_score",
    "msa_proxy_score_fp4",
    "msa_sparse_attention",
    "msa_sparse_decode_attention",
    "msa_topk_select",
    "prepare_msa_nvfp4_sparse_decode",
    "supports_packed_kv",
]

SUPPORTS_PACKED_KV = True
# What an error of our operators calls a parameter, and a selection of scores calls it.
SELECTING = {
    "score": "max_score",
    "num_valid_blocks": "num_valid_pages",
    "out": "output",
    "init_blocks": "force_begin_blocks",
    "local_blocks": "force_end_blocks",
}


def supports_packed_kv(device: torch.device | str) -> bool:
    """Whether K and V may be views of one cache on ``device``: everywhere, since strides are read.

    Raises ``RuntimeError`` for what is no device.
    """
    torch.device(device)
    return True


@arguments.told(**SELECTING)
@torch.no_grad()
def msa_topk_select(
    max_score: Tensor,
    topk: int,
    num_valid_pages: int | Tensor | None = None,
    output: Tensor | None = None,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
) -> Tensor:
    """The ``topk`` best of each query's first ``num_valid_pages`` blocks: int32 [T, H, topk], ascending, -1 behind.

    ``max_score`` float32 [H, tiles, T]. ``num_valid_pages`` is an integer, int32 or int64 [T], or None for all; beyond
    ``tiles`` it stands for all. The ``force_begin_blocks`` first and the ``force_end_blocks`` last valid blocks are
    always in. ``output`` is the caller's buffer. Scores of which a query's blocks lie together (`msa_proxy_score`) are
    read in place, others are copied. Raises ``ValueError`` or ``TypeError`` for what does not fit.
    """
    if max_score.dim() != 3:
        raise ValueError(f"max_score: got shape {list(max_score.shape)}; wanted [heads, tiles, T]")
    score = max_score.transpose(1, 2)
    return select(score, topk, num_valid_pages, output, force_begin_blocks, force_end_blocks)


def select(
    score: Tensor, topk: int, num_valid: int | Tensor | None, output: Tensor | None, begin: int, end: int
) -> Tensor:
    """The same of scores [H, T, tiles]."""
    heads, total_q, tiles = score.shape
    validate.integer("topk", topk, 1, validate.LARGEST_TOPK)
    if score.stride(-1) != 1:
        score = score.contiguous()
    wanted = (total_q, heads, topk)
    if output is None:
        output = score.new_empty(wanted, dtype=torch.int32)
    else:
        check_output(output, wanted, torch.int32)
    if isinstance(num_valid, Tensor):
        num_valid = num_valid.to(torch.int32).clamp(0, tiles)
    elif num_valid is not None:
        num_valid = min(num_valid, tiles)
    ops.topk_select(
        score,
        topk,
        num_kv_heads=heads,
        num_valid_blocks=tiles if num_valid is None else num_valid,
        block_size=packed.BLOCK,
        init_blocks=begin,
        local_blocks=end,
        out=output.transpose(0, 1),
    )
    return output


@arguments.told(block_indices="q2k_indices", q_positions="q_offset")
@torch.no_grad()
def msa_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_indices: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_softmax_lse: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_global_scale: float | None = None,
    v_global_scale: float | None = None,
    q_offset: int | Tensor | None = None,
    return_temperature_lse: bool = False,
    lse_temperature_scale: float = 1.0,
    workspace: None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Attention over the blocks of 128 keys that each query selected: out [T, Hq, D] in q's dtype (BF16 for e4m3).

    ``q`` [T, Hq, D] bfloat16, float32, float64 or e4m3; ``k``, ``v`` of q's dtype or e4m3, flat [Tk, Hkv, D] with
    ``cu_seqlens_k``, or paged [pages, Hkv, 128, D] with ``page_table`` int32 [B, pages] and ``seqused_k`` int32 [B];
    ``cu_seqlens_q`` int32 [B + 1]; ``q2k_indices`` int32 [Hkv, T, topk], -1 for none. ``softmax_scale`` defaults to
    ``D ** -0.5``. Not causal by default, as there: a query then sees all of its
    blocks. ``q_offset`` (an integer, or int32 [B]) is where a request's first query sits. ``k_global_scale`` and
    ``v_global_scale`` multiply all keys and values. ``out`` is written in place and returned.

    NVFP4 comes in the planar pages of FlashInfer's SM100 kernels: ``k``, ``v`` uint8 [pages, Hkv, 128, D / 2], and
    ``k_scale``, ``v_scale`` e4m3 or its bytes [pages, Hkv, 128, D / 16], contiguous for each page and head, those of
    values with four tokens of a group beside each other.

    Returns out, with ``return_softmax_lse`` also the LSE float32 [T, Hq] (natural log), and with
    ``return_temperature_lse`` a third one, of scores times ``lse_temperature_scale``, for which attention runs twice.

    Raises ``ValueError`` for a ``workspace`` and for NVFP4 in another layout, and ``ValueError`` or ``TypeError`` for
    what does not fit.
    """
    packed.check_queries(q)
    _refuse_workspace(workspace)
    if return_temperature_lse:
        packed.check_temperature(lse_temperature_scale)
    keys, values = packed.keys_and_values(k, v, k_scale, v_scale, k_global_scale, v_global_scale)
    where = packed.places(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, causal, q_offset, q.shape[0])
    options: dict[str, Any] = {"few": False, "k_scale": k_global_scale, "v_scale": v_global_scale}
    result, lse = packed.attend(q, keys, values, q2k_indices, where, softmax_scale, out=out, **options)
    if not return_temperature_lse:
        return (result, lse) if return_softmax_lse else result
    if lse_temperature_scale == 1.0:
        return result, lse, lse
    scale = (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale) * lse_temperature_scale
    return result, lse, packed.attend(q, keys, values, q2k_indices, where, scale, **options)[1]


@arguments.told(block_indices="q2k_indices", q_positions="q_offset")
@torch.no_grad()
def msa_sparse_decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_indices: Tensor,
    *,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqlen_q: int = 1,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_softmax_lse: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_global_scale: float | None = None,
    v_global_scale: float | None = None,
    q_offset: int | Tensor | None = None,
    partial_dtype: torch.dtype | None = None,
    force_fused: bool | None = None,
    workspace: None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`msa_sparse_attention` for requests of ``seqlen_q`` queries each: ``q`` [B * seqlen_q, Hq, D]; causal.

    ``partial_dtype`` and ``force_fused`` are about FlashInfer's kernels and have no effect. Returns out [T, Hq, D],
    with ``return_softmax_lse`` also the LSE float32 [T, Hq]. Raises as there.
    """
    packed.check_queries(q)
    _refuse_workspace(workspace)
    if seqlen_q < 1 or q.shape[0] % seqlen_q:
        raise ValueError(f"seqlen_q: got {seqlen_q}; wanted a divisor of the {q.shape[0]} rows of q")
    requests = q.shape[0] // seqlen_q
    keys, values = packed.keys_and_values(k, v, k_scale, v_scale, k_global_scale, v_global_scale)
    starts = kept.multiples(seqlen_q, requests + 1, q.device)
    where = packed.places(starts, cu_seqlens_k, page_table, seqused_k, causal, q_offset, q.shape[0])
    result, lse = packed.attend(
        q,
        keys,
        values,
        q2k_indices,
        where | {"max_seqlen_q": seqlen_q},
        softmax_scale,
        few=seqlen_q <= packed.FEW_QUERIES,
        k_scale=k_global_scale,
        v_scale=v_global_scale,
        out=out,
    )
    return (result, lse) if return_softmax_lse else result


@arguments.told()
def prepare_msa_nvfp4_sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_indices: Tensor,
    *,
    k_scale: Tensor,
    v_scale: Tensor,
    page_table: Tensor,
    seqused_k: Tensor,
    k_global_scale: float,
    v_global_scale: float,
    seqlen_q: int = 1,
    softmax_scale: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    use_cache_hit: bool | str = "auto",
    backend: str = "cake",
) -> Callable[[], Tensor]:
    """A function that runs `msa_sparse_decode_attention` of NVFP4 pages on these tensors, and returns ``out``.

    It reads them when it is called. ``out`` [B * seqlen_q, Hq, D] and ``lse`` float32 [B * seqlen_q, Hq] are the
    caller's; an ``out`` that is not given is made here and returned by every call. ``use_cache_hit`` and ``backend``
    are about FlashInfer's kernels and have no effect. Raises ``ValueError`` or ``TypeError`` for what does not fit,
    some of it when the function is called.
    """
    packed.check_queries(q)
    result = q.new_empty(q.shape, dtype=torch.bfloat16 if q.dtype == packed.FP8 else q.dtype) if out is None else out

    validate.int32("page_table", page_table, [None, None], "[B, pages]", q, "q")
    validate.int32("seqused_k", seqused_k, [page_table.shape[0]], "[B]", q, "q")
    if lse is not None:
        check_output(lse, tuple(q.shape[:2]), torch.float32, "lse")

    def run() -> Tensor:
        found = msa_sparse_decode_attention(
            q, k, v, q2k_indices, page_table=page_table, seqused_k=seqused_k, seqlen_q=seqlen_q, out=result,
            softmax_scale=softmax_scale, return_softmax_lse=True, k_scale=k_scale, v_scale=v_scale,
            k_global_scale=k_global_scale, v_global_scale=v_global_scale,
        )  # fmt: skip
        if lse is not None:
            lse.copy_(found[1])
        return result

    return run


def __getattr__(name: str) -> Any:
    if name.startswith("msa_icp_") or name == "prepare_msa_icp_indexer":
        raise AttributeError(f"{name}: not here; shards of the keys are k_offset of msa_tiles.ops")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _refuse_workspace(workspace: object) -> None:
    if workspace is not None:
        came = type(workspace).__name__
        raise ValueError(f"workspace: got a {came}; wanted None: calls allocate a bounded workspace, under capture too")
