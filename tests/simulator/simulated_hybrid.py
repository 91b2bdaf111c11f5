"""Calls of the kernels of hybrid attention in the simulator, compared with the reference."""

from __future__ import annotations

import math
from typing import Any

import simulated_calls
import torch
from simulated_calls import TOKEN_MAJOR, Call
from torch import Tensor

from msa_tiles import reference
from msa_tiles.launch import places
from msa_tiles.verify import compare
from msa_tiles.verify.hybrid import defined_parts
from msa_tiles.verify.inputs import POISON_INT, spread

# What shared_attention may not touch while the window's sparse_attention ends.
AWAITED = ("partial_out", "partial_lse", "out", "lse")
Split = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def selection(call: Call, heads: int, topk: int, block_size: int, sticky: bool, close: bool) -> Tensor:
    """Ids of the call; `close` ones are those of the query before, three times out of four."""
    ids = call.source.selection(call.lengths, heads, topk, block_size, sticky)
    ids = torch.cat([ids, torch.zeros((heads, call.rows_behind, topk), dtype=torch.int32)], 1)
    if close:
        for query in range(1, call.total_q):
            again = call.source.chance(0.75, (heads, 1)).expand(-1, topk)
            ids[:, query] = torch.where(again, ids[:, query - 1].flip(-1), ids[:, query])
    return spread(ids, TOKEN_MAJOR) if call.strided else ids


def make_split(call: Call, at: places.Place, ids: Tensor, block_size: int, tile_tokens: int, fill: int) -> Split:
    heads, total_q, topk = ids.shape
    tiles = -(-total_q // tile_tokens)
    shapes = (ids.shape, (heads, total_q), (heads, tiles, max(4 * topk // 3, 1), 2), (heads, tiles), (total_q,))
    rest, rest_counts, shared, shared_counts, last_rows = (
        torch.full(shape, POISON_INT, dtype=torch.int32) for shape in shapes
    )
    variant = {"block_size": block_size, "tile_tokens": tile_tokens}
    outputs = (rest, rest_counts, shared, shared_counts, last_rows)
    scalars = (at.use_seqused, at.use_positions, fill)
    call.run("split_selection", variant, ids, *at[:3], at.q_positions, *outputs, *scalars)
    return outputs


def split_selection(
    call: Call,
    *,
    block_size: int,
    tile_tokens: int,
    topk: int,
    heads: int = 1,
    fill: int = 0,
    sticky: bool = False,
    close: bool = False,
    repeated: bool = False,
) -> None:
    ids = selection(call, heads, topk, block_size, sticky, close)
    if repeated:
        ids[..., -1] = ids[..., 0]
    at, _, where = call.place(block_size)
    made = make_split(call, at, ids, block_size, tile_tokens, fill)
    wanted = reference.split_selection(ids, tile_tokens=tile_tokens, block_size=block_size, fill=fill, **where)
    names = ("rest", "rest_counts", "shared", "shared_counts", "last_rows")
    for name, got, value in zip(names, defined_parts(made), wanted, strict=True):
        compare.same(name, got, value)


def shared_attention(
    call: Call,
    *,
    head_dim: int,
    block_size: int,
    group: int,
    topk: int,
    heads: int = 1,
    window: int | None = None,
    ctas: int = 2,
    fill: int = 0,
    sticky: bool = False,
    close: bool = False,
    scale: float | None = None,
    precision: str = "bf16",
    outer: float | None = None,
    **scaled: int,
) -> None:
    """Split, schedule, attention of the rest and merge of all windows."""
    q = call.tensor(call.total_q, heads * group, head_dim).div_(outer or 1.0)
    at, (k, v), where = simulated_calls.stored_keys(call, precision, heads, head_dim, block_size, outer, **scaled)
    ids = selection(call, heads, topk, block_size, sticky, close)
    out = call.output(q.shape, torch.bfloat16)
    lse = torch.full(q.shape[:2], torch.nan)
    window = call.total_q if window is None else window
    rest, rest_counts, shared, shared_counts, last_rows = make_split(
        call, at, ids, block_size, 64 // max(group, 8), fill
    )
    made = simulated_calls.make_schedule(call, at, rest, block_size, window)
    claims = torch.zeros(len(made.edges), dtype=torch.int32)
    scale = head_dim**-0.5 if scale is None else scale
    variant = {"head_dim": head_dim, "block_size": block_size, "group": group, **scaled}
    variant["pages_per_block"] = call.pages_per_block
    for index in range(len(made.edges)):
        partial_out = torch.full((window, topk, heads * group, head_dim), torch.nan).bfloat16()
        partial_lse = torch.full((window, topk, heads * group), torch.nan)
        common = (scale * math.log2(math.e), index, ctas)
        keys = (q, *k.tensors, *v.tensors, at.page_table)
        call.run(
            "sparse_attention", variant, *keys, made.edges, made.tasks, made.counts, claims, partial_out, partial_lse,
            *common, precision=precision,
        )  # fmt: skip
        call.run(
            "shared_attention", variant, *keys, shared, shared_counts, rest_counts, last_rows, partial_out, partial_lse,
            out.view, lse, *common, precision=precision, awaited=AWAITED,
        )  # fmt: skip
    out.check_gaps("out")
    wanted, wanted_lse = reference.sparse_attention(
        q.float(), k.values(), v.values(), ids, block_size=block_size, softmax_scale=scale, **where
    )
    # Keys are rounded with the scales of tokens.
    call.agree("lse", lse, wanted_lse, 5e-3 if scaled.get("token_scales") else 2e-3)
    call.agree("out", out.view / v.unit(group), wanted / v.unit(group), 0.04)


def shared_attention_q16kv8(call: Call, **arguments: Any) -> None:
    shared_attention(call, precision="q16kv8", **arguments)


def shared_attention_q16kv4(call: Call, **arguments: Any) -> None:
    shared_attention(call, precision="q16kv4", **arguments)


def shared_attention_q16kvmx4(call: Call, **arguments: Any) -> None:
    shared_attention(call, precision="q16kvmx4", **arguments)
