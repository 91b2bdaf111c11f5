"""Prefill over quantised keys and values through a copy of them in bfloat16, made once a call.

The query side decodes a block once for every tile of queries that reads it, `dequantize_kv` each once. Behind it the
kernels of bfloat16 run, on flat keys: those of a paged cache stand in the order of the table, request after request.
Scales are multiplied in, and products rounded to bfloat16, as torch would hold such keys: kernels that read the storage
apply scales of heads, and global ones, to sums in float32 instead. Where scales are powers of two, nothing is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msa_tiles.call import formats
from msa_tiles.call.attention import Attention, AttentionCall
from msa_tiles.call.caches import Whole
from msa_tiles.launch import dequantize, lookup
from msa_tiles.runtime import CallFacts

# A copy costs 0.9 ns a key of four heads of 128 values: 1 KB read and 2 KB written at 3.5 TB/s. Of 165 ns a query of
# 64 heads that selects 2,048 keys it spares 6% where keys are e4m3 (10 ns) and 8 to 25% where they have 4 bits (13 to
# 40 ns). So it pays for up to 11 keys a query, and for 15 to 45; these leave room.
KEYS_PER_QUERY = {8: 8, 4: 16}  # by bits of an element
SELECTED_KEYS = 2048  # of a query, for which these hold: what is spared grows with them
# Fewer queries spare less than a launch takes, 5 us.
LEAST_QUERIES = 1024


@dataclass(frozen=True)
class Copied:
    """Attention to a copy: the kernel that makes it, the columns of the table that it takes, and what follows."""

    maker: Any
    columns: int
    launch: Any

    def __call__(self, given: Attention, workspace: Tensor | None, out: Tensor, lse: Tensor) -> None:
        """Fill out and lse."""
        whole = _whole(given, self.columns)
        rows, heads, head_dim = whole.shape
        # A block of a head lies together.
        parts = torch.empty((2, heads, rows, head_dim), dtype=torch.bfloat16, device=given.q.device)
        k, v = parts.transpose(1, 2).unbind()
        self.maker(*dequantize.arguments(whole, k, v))
        self.launch(_of_copies(given, self.columns, k, v, starts=True), workspace, out, lse)


def copied_call(call: AttentionCall, wanted: bool | None) -> tuple[AttentionCall, int] | None:
    """The call of the kernels of bfloat16 behind a copy, and the columns of the table; None where there is no copy.

    ``wanted`` says whether there is one where it is possible; None leaves that to what it costs and spares. What is
    looked at is known on the host. The keys of the call that is returned have no memory.
    """
    given = call.operands
    if wanted is False or not _possible(call):
        return None
    columns = _columns(given)
    shape = _whole(given, columns).shape
    copy_bytes = 2 * 2 * shape[0] * shape[1] * shape[2]
    if copy_bytes > call.workspace_bytes:
        return None
    if wanted is None and not pays(given, shape[0], call.block_size):
        return None
    keys = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return call._replace(operands=_of_copies(given, columns, keys, keys, starts=False)), columns


def pays(given: Attention, rows: int, block_size: int) -> bool:
    """Whether a copy of so many rows costs less than it spares."""
    queries, topk = given.q.shape[0], given.block_indices.shape[2]
    selected = min(topk * block_size, rows)
    most = KEYS_PER_QUERY[4 if formats.is_packed(given.k) else 8] * queries * selected // SELECTED_KEYS
    return queries >= LEAST_QUERIES and rows <= most


def is_made(call: AttentionCall, facts: CallFacts, columns: int, wanted: bool | None) -> bool:
    """Whether a kernel makes the copy: one that has run on its GPU, or any where the copy is ``wanted``."""
    of_copy = dequantize.facts(_whole(call.operands, columns))
    asked = (of_copy.op, of_copy.variant, of_copy.features)
    return not of_copy.refusals and lookup.part_serves(facts, call.backend, *asked, verified=wanted is None)


def maker_of(call: AttentionCall, facts: CallFacts, columns: int) -> Any:
    """That kernel."""
    of_copy = dequantize.facts(_whole(call.operands, columns))
    return lookup.part_kernel(facts, call.backend, of_copy.op, of_copy.variant, of_copy.features)


def _possible(call: AttentionCall) -> bool:
    """Whether rows and blocks of a copy are those of the call.

    With batch_invariant the kernels may not follow from lengths. A schedule of pages counts rows as their table has
    them, and a copy has no room for those that no page is as long as.
    """
    given = call.operands
    quantised = formats.is_quantised(given.k) and given.q.dtype == torch.bfloat16
    return quantised and not call.batch_invariant and (given.schedule is None or given.where.page_table is None)


def _columns(given: Attention) -> int:
    """How many pages of a request may have keys."""
    table, longest = given.where.page_table, given.where.max_seqlen_k
    if table is None:
        return 0
    return table.shape[1] if longest is None else min(table.shape[1], -(-longest // given.k.shape[2]))


def _whole(given: Attention, columns: int) -> Whole:
    where = given.where
    table = None if where.page_table is None else where.page_table[:, :columns]
    lengths = None if table is None else where.seqused_k
    assert given.k_scale is not None and given.v_scale is not None
    scales = (given.k_scale, given.v_scale, given.k_global_scale, given.v_global_scale)
    return Whole(given.k, given.v, table, lengths, *scales, "auto")


def _of_copies(given: Attention, columns: int, k: Tensor, v: Tensor, *, starts: bool) -> Attention:
    """The operands with the copy in the place of keys and values; where they begin only with ``starts``."""
    where = given.where
    if where.page_table is not None:
        span = columns * given.k.shape[2]
        begins = None
        if starts:
            end = (where.num_requests + 1) * span
            begins = torch.arange(0, end, span, dtype=torch.int32, device=given.q.device)
        longest = span if where.max_seqlen_k is None else min(where.max_seqlen_k, span)
        where = where._replace(page_table=None, cu_seqlens_k=begins, max_seqlen_k=longest)
    return given._replace(
        k=k, v=v, where=where, k_scale=None, v_scale=None, k_global_scale=None, v_global_scale=None
    )  # fmt: skip
