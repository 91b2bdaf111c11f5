"""Calls of kernels that score and select blocks, run by the simulator and compared with the reference."""

from __future__ import annotations

import math
from typing import Any

import torch
from simulated_calls import FOUR_BITS, TOKEN_MAJOR, Call, tied
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call.indexer import Index
from msa_tiles.call.where import Where
from msa_tiles.launch.index import applied_scales, kernel_scales
from msa_tiles.quant import FP8, QuantizedTensor, quantize_nvfp4
from msa_tiles.verify import compare
from msa_tiles.verify.inputs import Buffer, spread
from msa_tiles.verify.packed import index_keys_of
from msa_tiles.verify.quantised import index_scales

# How the kernels count orders.
ORDERS = ("ascending", "score", "local_last")


def scored(
    call: Call,
    op: str,
    blocks: int,
    further: tuple[int, ...],
    *,
    head_dim: int,
    block_size: int,
    heads: int,
    causal: bool,
    precision: str,
    key_scales: int,
    zeros: bool = False,
    outer: float | None = None,
) -> tuple[Buffer, Tensor]:
    """What a kernel writes for all blocks, and what the reference does; with `zeros` some of the scales are 0.

    `outer` is the global scale of keys of 4 bits, where not the one that fits them.
    """
    dtype = FP8 if precision.startswith("q8") else torch.bfloat16
    idx_q = call.tensor(call.total_q, heads, head_dim, dtype=dtype)
    key_dtype = torch.bfloat16 if precision in FOUR_BITS else dtype
    at, (idx_k,), where = call.place(block_size, call.tensor(call.total_k, head_dim, dtype=key_dtype))
    out = call.output((heads, call.total_q, blocks), torch.float32)
    variant = {"head_dim": head_dim, "block_size": block_size, "pages_per_block": call.pages_per_block}
    scales: dict[str, Tensor] = {}
    if dtype == FP8:
        sizes = {"num_index_heads": heads, "total_q": call.total_q, "total_k": call.total_k, "key_scales": key_scales}
        scales = index_scales(call.source, {**variant, **sizes}, call.lengths, call.strided)
        if precision in FOUR_BITS:
            scales.pop("k_scale", None)
        else:
            variant["key_scales"] = key_scales
    for scale in scales.values() if zeros else ():
        scale[::3] = 0.0
    stored, outer_scale, keys = {"k_scale": scales.get("k_scale")}, None, idx_k.float()
    if precision in FOUR_BITS:
        made = four_bit_keys(FOUR_BITS[precision], idx_k, call.strided, outer, zeros)
        idx_k, stored["k_scale"], outer_scale, keys = made.data, made.scale, made.global_scale, made.dequantize()
    given = applied_scales(idx_q, idx_k, scales.get("q_scale"), stored["k_scale"], outer_scale, at.cu_seqlens_q)
    tensors = (idx_q, *given.of_queries, idx_k, *given.of_keys, at.page_table, *at[:3], at.q_positions, out.view)
    scalars = (at.use_seqused, at.use_positions if causal else 0, *given.flags, int(causal), *further)
    call.run(op, variant, *tensors, *scalars, precision=precision)
    out.check_gaps("out")
    wanted = reference.index_score(
        idx_q.float(), keys, block_size=block_size, causal=causal, num_blocks=blocks, **where, **scales
    )
    if outer is not None:
        # Errors are counted in it.
        out.view.div_(outer)
        wanted = wanted / outer
    return out, wanted


def four_bit_keys(format: str, keys: Tensor, strided: bool, outer: float | None, zeros: bool) -> QuantizedTensor:
    """Index keys of 4 bits; with `zeros` every third key's scales are 0."""
    made = index_keys_of(format, keys, strided, False)
    if outer is not None:
        made = quantize_nvfp4(keys * outer, outer)
    if zeros:
        made.scale.view(torch.uint8)[..., ::3, :] = 0
    return made


def index_score(
    call: Call,
    *,
    block_size: int,
    heads: int = 2,
    causal: bool = True,
    width: int | None = None,
    precision: str = "bf16",
    key_scales: int = 0,
    **options: Any,
) -> None:
    blocks = -(-call.lengths.longest_k // block_size) if width is None else width
    options |= {"block_size": block_size, "heads": heads, "causal": causal}
    out, wanted = scored(call, "index_score", blocks, (), precision=precision, key_scales=key_scales, **options)
    compare.numbers("out", out.view, wanted, 1e-4)


def index_score_q8k8(call: Call, **arguments: Any) -> None:
    index_score(call, precision="q8k8", **arguments)


def index_score_q16k4(call: Call, **arguments: Any) -> None:
    index_score(call, precision="q16k4", **arguments)


def index_score_q16kmx4(call: Call, **arguments: Any) -> None:
    index_score(call, precision="q16kmx4", **arguments)


def topk_select(call: Call, *, topk: int, lanes_log2: int = 0, **options: int) -> None:
    ranked(call, "topk_select", {"topk": topk}, (lanes_log2,), **options)


def decode_topk(call: Call, *, max_blocks: int, **options: int) -> None:
    ranked(call, "decode_topk", {"max_blocks": max_blocks}, (), **options)


def ranked(
    call: Call,
    op: str,
    variant: dict[str, int],
    further: tuple[int, ...],
    *,
    k: int,
    blocks: int,
    heads: int = 1,
    group: int = 1,
    block_size: int = 64,
    mode: int = 2,
    ties_from: int | None = None,
    **forced: int,
) -> None:
    """`ties_from`: all blocks from this one on are equal, and better than those before."""
    score = call.source.values((heads * group, call.total_q, blocks), torch.float32)
    for value in (math.nan, math.inf, -math.inf, -0.0):
        score = score.masked_fill(call.source.chance(0.05, score.shape), value)
    if ties_from is not None:
        score = tied(score.shape, ties_from)
    score = spread(score, TOKEN_MAJOR) if call.strided else score
    out = call.output((heads, call.total_q, k), torch.int32)
    counts = call.source.whole(0, blocks + 1, (call.total_q,)).to(torch.int32)
    valid = {0: None, 1: blocks // 2, 2: counts}[mode]
    order = forced.get("order", 0)
    init, local = forced.get("init_blocks", 0), forced.get("local_blocks", 1)
    at, _, where = call.place(block_size)
    scalars = (at.use_seqused, at.use_positions, mode, blocks // 2, block_size, init, local, order, *further)
    call.run(op, variant, score, *at[:3], at.q_positions, counts, out.view, *scalars)
    out.check_gaps("out")
    wanted = reference.topk_select(
        score,
        k,
        num_kv_heads=heads,
        block_size=block_size,
        init_blocks=init,
        local_blocks=local,
        order=ORDERS[order],
        num_valid_blocks=valid,
        **where,
    )
    compare.same("out", out.view, wanted)


def select_blocks(
    call: Call,
    *,
    head_dim: int,
    block_size: int,
    topk: int,
    k: int,
    heads_per_group: int,
    heads: int = 1,
    init_blocks: int = 0,
    local_blocks: int = 1,
    order: int = 0,
    precision: str = "bf16",
    loud: bool = True,
    zeros: bool = False,
    **scaled: int,
) -> None:
    """With lists of `topk` for `k` ids. Values must be exact: the ids are compared one by one."""
    assert call.values == "integer"
    dtype = FP8 if precision == "q8k8" else torch.bfloat16
    idx_q = call.tensor(call.total_q, heads * heads_per_group, head_dim, dtype=dtype)
    keys = call.tensor(call.total_k, head_dim, dtype=dtype)
    at, (idx_k,), where = call.place(block_size, keys)
    out = call.output((heads, call.total_q, k), torch.int32)
    variant = {"head_dim": head_dim, "block_size": block_size, "topk": topk, "heads_per_group": heads_per_group}
    variant["pages_per_block"] = call.pages_per_block
    scales: dict[str, Tensor] = {}
    if dtype == FP8:
        variant |= scaled
        sizes = {"num_index_heads": heads * heads_per_group, "total_q": call.total_q, "total_k": call.total_k}
        scales = index_scales(call.source, {**variant, **sizes}, call.lengths, call.strided, loud)
    operands, seen = Index(idx_q, idx_k, Where(), scales.get("q_scale"), scales.get("k_scale")), idx_k.float()
    if precision in FOUR_BITS:
        made = index_keys_of(FOUR_BITS[precision], idx_k, call.strided, True)
        if zeros:
            made.scale.view(torch.uint8)[..., ::3, :] = 0
        operands, seen = operands._replace(idx_k=made.data, k_scale=made.scale), made.dequantize()
        operands = operands._replace(k_global_scale=made.global_scale)
    given = kernel_scales(operands, heads_per_group, at.cu_seqlens_q)
    keys = (operands.idx_k, *given.of_keys)
    tensors = (idx_q, *keys, at.page_table, *at[:3], at.q_positions, *given.tensors, out.view)
    scalars = (at.use_seqused, at.use_positions, *given.flags, init_blocks, local_blocks, order)
    call.run("select_blocks", variant, *tensors, *scalars, precision=precision)
    out.check_gaps("out")
    wanted = reference.select_blocks(
        idx_q.float(),
        seen,
        k,
        num_kv_heads=heads,
        block_size=block_size,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        order=ORDERS[order],
        **where,
        **scales,
    )
    compare.same("out", out.view, wanted)


def select_blocks_q16k4(call: Call, **arguments: Any) -> None:
    select_blocks(call, precision="q16k4", **arguments)


def select_blocks_q16kmx4(call: Call, **arguments: Any) -> None:
    select_blocks(call, precision="q16kmx4", **arguments)


def select_blocks_q8k8(call: Call, **arguments: int) -> None:
    select_blocks(call, precision="q8k8", **arguments)  # type: ignore[arg-type]


def decode_score(
    call: Call,
    *,
    block_size: int,
    heads: int = 2,
    causal: bool = True,
    ctas: int = 3,
    precision: str = "bf16",
    key_scales: int = 0,
    **options: Any,
) -> None:
    blocks = max(-(-call.lengths.longest_k // block_size), 1)
    options |= {"block_size": block_size, "heads": heads, "causal": causal}
    out, wanted = scored(call, "decode_score", blocks, (ctas,), precision=precision, key_scales=key_scales, **options)
    # What lies behind a request's keys, and the rows of no request, are still poisoned; everything else is written.
    lengths = call.lengths
    keys = lengths.cu_seqlens_k.diff() if lengths.seqused_k is None else lengths.seqused_k
    held = ((keys + block_size - 1) // block_size).repeat_interleave(lengths.cu_seqlens_q.diff().long())
    held = torch.nn.functional.pad(held, (0, call.rows_behind))
    behind = (torch.arange(blocks) >= held[:, None]).expand(out.view.shape)
    assert bool(out.view[behind].isnan().all())
    out.view.masked_fill_(behind, -math.inf)
    compare.numbers("out", out.view, wanted, 1e-4)


def decode_score_q16k4(call: Call, **arguments: Any) -> None:
    decode_score(call, precision="q16k4", **arguments)


def decode_score_q16kmx4(call: Call, **arguments: Any) -> None:
    decode_score(call, precision="q16kmx4", **arguments)


def decode_score_q8k4(call: Call, **arguments: Any) -> None:
    decode_score(call, precision="q8k4", **arguments)


def decode_score_q8kmx4(call: Call, **arguments: Any) -> None:
    decode_score(call, precision="q8kmx4", **arguments)


def decode_score_q8k8(call: Call, **arguments: Any) -> None:
    decode_score(call, precision="q8k8", **arguments)
