"""Calls of the kernels of training in the simulator, compared with the reference."""

from __future__ import annotations

import math

import simulated_calls
import torch
from simulated_calls import TOKEN_MAJOR, Call

from msa_tiles import reference
from msa_tiles.ops import _training_kernels
from msa_tiles.verify import compare
from msa_tiles.verify.inputs import spread

OPERATORS = ("sparse_attention_backward",)
LOG2_E = math.log2(math.e)


def sparse_attention_backward(
    call: Call,
    *,
    head_dim: int,
    block_size: int,
    group: int,
    topk: int,
    heads: int = 1,
    window: int | None = None,
    ctas: int = 2,
    tasks: int = 1,
    sticky: bool = False,
) -> None:
    """The main kernel over all windows; its parts are added by torch."""
    q = call.tensor(call.total_q, heads * group, head_dim)
    k, v = call.tensor(call.total_k, heads, head_dim), call.tensor(call.total_k, heads, head_dim)
    ids = call.source.selection(call.lengths, heads, topk, block_size, sticky)
    ids = torch.cat([ids, torch.zeros((heads, call.rows_behind, topk), dtype=torch.int32)], 1)
    ids = spread(ids, TOKEN_MAJOR) if call.strided else ids
    at, _, where = call.place(block_size)
    options = {"block_size": block_size, **where}
    out, lse = reference.sparse_attention(q.float(), k.float(), v.float(), ids, **options)
    empty = lse == -math.inf
    dout = call.tensor(call.total_q, heads * group, head_dim)
    dout.masked_fill_(empty[..., None], math.nan)
    dlse = call.source.values(lse.shape, torch.float32)
    delta = (out * dout.float()).sum(-1) - dlse
    rows = torch.stack((lse * LOG2_E, delta), -1)
    window = call.total_q if window is None else window
    made = simulated_calls.make_schedule(call, at, ids, block_size, window)
    work, counts = _training_kernels.group_tasks(made.tasks, made.counts, tasks)
    most = _training_kernels.most_chunks(window * topk, heads, simulated_calls.CHUNK, tasks)
    claims = torch.zeros(len(made.edges), dtype=torch.int32)
    marks = torch.zeros((window, heads, topk), dtype=torch.int32)
    sums = torch.zeros((2, call.total_k, heads, head_dim))
    dq = torch.zeros(q.shape)
    scale = head_dim**-0.5
    variant = {"head_dim": head_dim, "block_size": block_size, "group": group}
    for index in range(len(made.edges)):
        partial = torch.full((window, topk, heads * group, head_dim), math.nan).bfloat16()
        chunks = torch.full((max(most, 1), 2, block_size, head_dim), math.nan)
        call.run(
            "sparse_attention_backward", variant, q, dout, k, v, rows, made.edges, work, counts, claims, partial,
            marks, sums, chunks, scale, scale * LOG2_E, index, ctas,
        )  # fmt: skip
        first, count = index * window, min(window, call.total_q - index * window)
        marked = (marks == index + 1).repeat_interleave(group, 1).transpose(1, 2)[..., None]
        dq[first : first + count] = partial.float().masked_fill(~marked, 0.0).sum(1)[:count]
        for head in range(heads):
            for row, _, _, extent, chunk in work[index, head, : int(counts[index, head])].tolist():
                if chunk >= 0:
                    sums[:, row : row + (extent >> 1), head] += chunks[chunk, :, : extent >> 1]
    wanted = reference.sparse_attention_backward(
        dout.float(), q.float(), k.float(), v.float(), out, lse, ids, dlse=dlse, **options
    )
    for name, got, want, limit in zip(("dq", "dk", "dv"), (dq, *sums), wanted, (0.05, 0.1, 0.1), strict=True):
        compare.numbers(name, got, want, limit)
