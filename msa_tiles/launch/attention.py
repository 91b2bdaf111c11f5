"""How the attention kernels are launched on CUDA: query windows over one bounded workspace.

A window of queries runs through two kernels: sparse_attention writes one partial result per (query, slot) edge of the
schedule, combine merges the slots. The partial results of a window live in the workspace, [window, topk, Hq, D] and
their LSE [window, topk, Hq]; the next window overwrites them.

Hybrid attention takes the blocks that neighbouring queries share out of the schedule (split_selection); in the place of
combine, shared_attention attends to them and merges the rest with them. The rest of a query stands in its first slots.
Where that pays, it takes some KV heads at a time, so that the workspace holds longer windows: a window reads each of
its blocks once for all its queries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msa_tiles import runtime
from msa_tiles.call import validate
from msa_tiles.call.where import Where
from msa_tiles.launch import lookup, places, workspaces
from msa_tiles.launch.places import Place
from msa_tiles.runtime import CallFacts

LOG2_E = math.log2(math.e)

# Edges, tasks and their counts; what `split_selection` returns.
Schedule = tuple[Tensor, Tensor, Tensor]
Split = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
# What a window's sparse_attention takes: queries, schedule and claims, and the window's number in them.
Turn = tuple[Tensor, tuple[Tensor, ...], int]

# Queries per window: the queries of one head group stay in L2 up to here, and a window is long enough to fill the GPU.
MOST_QUERIES = 4096
WINDOW_MULTIPLE = 128

# Whether calls without a schedule of their own take the hybrid kernels where they exist: on an H100 at 32K 1.5x on
# sticky selections and 1.1x on uniform ones. FILL is how many shared blocks a tile of neighbouring queries takes at
# least, should its queries select so many: each spares partial results and costs products in vain.
HYBRID = True
FILL = 0
# Rows of a tile, the least that a query takes, and the CTAs of shared_attention that share an SM.
TILE_ROWS = 64
LEAST_ROWS = 8
CTAS_PER_SM = 2

# Hybrid attention may take longer windows than MOST_QUERIES, while the queries of a head group stay in L2; with 132 SMs
# this is what eight tiles of one head for each CTA take, four queries each.
LONGEST_WINDOW = 8448
# What `choose_rounds` weighs, in microseconds on an H100: the ends and launches of a window's two kernels, reading a
# megabyte of keys and values, and the schedule's walk over a query.
ROUND_COST, MEGABYTE_COST, WALK_COST = 15.0, 0.35, 0.027

LARGEST_GROUP = 16
LARGEST_HEAD_DIM = 128

# The schedule kernel cuts a block's edges into tasks of at most this many (tile.chunk of its spec).
CHUNK = 128


def window_for(total_q: int, most: int) -> int:
    """Queries per window when ``most`` fit the workspace: as few windows as possible, of nearly equal size."""
    most = min(most, MOST_QUERIES)
    if most >= WINDOW_MULTIPLE:
        most -= most % WINDOW_MULTIPLE
    windows = max(1, -(-total_q // most))
    window = max(1, -(-total_q // windows))
    return min(most, -(-window // WINDOW_MULTIPLE) * WINDOW_MULTIPLE)


def bytes_per_query(topk: int, num_q_heads: int, head_dim: int) -> int:
    """What the partial results of one query take: BF16 outputs and float32 LSE for every slot."""
    return workspaces.partial_bytes(topk, num_q_heads, head_dim)


def choose_window(block_indices: Tensor) -> int:
    """Queries per window of a schedule that is made before its attention is known.

    The largest attention that kernels serve, 16 query heads of dim 128 per KV head, fits the default workspace.
    """
    num_kv_heads, total_q, topk = block_indices.shape
    most = workspaces.WORKSPACE_BYTES // bytes_per_query(
        max(topk, 1), max(num_kv_heads, 1) * LARGEST_GROUP, LARGEST_HEAD_DIM
    )
    return window_for(total_q, max(most, 1))


def allocate_schedule(
    block_indices: Tensor, *, num_requests: int, max_seqlen_k: int | None, block_size: int, window: int
) -> Schedule:
    """Uninitialised edges [windows, Hkv, window * k], tasks [windows, Hkv, most tasks, 4] and counts [windows, Hkv]."""
    num_kv_heads, total_q, topk = block_indices.shape
    windows = (total_q + window - 1) // window
    tasks = _most_blocks(window * topk, num_requests, max_seqlen_k, block_size) + window * topk // CHUNK
    return (
        block_indices.new_empty((windows, num_kv_heads, window * topk)),
        block_indices.new_empty((windows, num_kv_heads, tasks, 4)),
        block_indices.new_empty((windows, num_kv_heads)),
    )


def _most_blocks(edges: int, num_requests: int, max_seqlen_k: int | None, block_size: int) -> int:
    """How many blocks the edges of one window and head can touch."""
    if max_seqlen_k is None:
        return edges
    return min(edges, num_requests * ((max_seqlen_k + block_size - 1) // block_size))


def build_schedule(
    facts: CallFacts,
    block_indices: Tensor,
    where: Place,
    *,
    block_size: int,
    window: int,
    edges: Tensor,
    tasks: Tensor,
    counts: Tensor,
    backend: str = "auto",
) -> None:
    """Fill the tensors of a schedule."""
    kernel = _find(facts, backend, "build_schedule", {"block_size": block_size})
    _schedule(kernel, block_indices, where, window, (edges, tasks, counts))


def _schedule(kernel: Any, block_indices: Tensor, where: Place, window: int, parts: Schedule) -> None:
    kernel(
        block_indices,
        where.cu_seqlens_q,
        where.cu_seqlens_k,
        where.seqused_k,
        where.q_positions,
        *parts,
        where.use_seqused,
        where.use_positions,
        window,
    )


@dataclass(frozen=True)
class Launch:
    """The kernels of an attention call and its windows, ready to run on tensors of certain shapes."""

    scheduler: Any
    attender: Any
    merger: Any
    num_requests: int
    longest_k: int
    block_size: int
    scale_log2: float
    window: int
    num_sms: int

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_indices: Tensor,
        where: Where,
        schedule: Schedule | None,
        workspace: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Fill out and lse, one window of queries after the other."""
        total_q, topk = q.shape[0], block_indices.shape[2]
        at = places.place(where, total_q, k.shape[0], self.block_size, q.device)
        edges, tasks, counts = self.schedule(block_indices, at) if schedule is None else schedule
        partial_out, partial_lse = workspaces.partials(workspace, q, self.window, topk)
        windows = edges.shape[0]
        claims = torch.zeros(windows, dtype=torch.int32, device=q.device)
        # combine reads [splits, queries, heads, dim]: the slots are the splits.
        split_out, split_lse = partial_out.transpose(0, 1), partial_lse.transpose(0, 1)
        for index in range(windows):
            first, count = index * self.window, min(self.window, total_q - index * self.window)
            # A slot without an edge stays empty.
            partial_lse.fill_(-torch.inf)
            parts = (edges, tasks, counts, claims, partial_out, partial_lse)
            self.attender(q, k, v, at.page_table, *parts, self.scale_log2, index, self.num_sms)
            ours = slice(first, first + count)
            self.merger(split_out[:, :count], split_lse[:, :count], out[ours], lse[ours])

    def schedule(self, block_indices: Tensor, at: Place) -> Schedule:
        """Which queries read each block, in windows."""
        parts = allocate_schedule(
            block_indices,
            num_requests=self.num_requests,
            max_seqlen_k=self.longest_k,
            block_size=self.block_size,
            window=self.window,
        )
        _schedule(self.scheduler, block_indices, at, self.window, parts)
        return parts


@dataclass(frozen=True)
class Hybrid(Launch):
    """Blocks that neighbouring queries share on the query side, in the place of the merge; no schedule is given.

    ``heads`` is how many KV heads run at a time; one after the other, they take turns with the workspace.
    """

    splitter: Any
    tile_tokens: int
    fill: int
    heads: int

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_indices: Tensor,
        where: Where,
        schedule: Schedule | None,
        workspace: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        assert schedule is None
        at = places.place(where, q.shape[0], k.shape[0], self.block_size, q.device)
        rest, rest_counts, shared, shared_counts, last_rows = _split(
            self.splitter, block_indices, at, self.tile_tokens, self.fill
        )
        parts = self.schedule(rest, at)
        windows, num_kv_heads, _ = parts[0].shape
        rounds, group = num_kv_heads // self.heads, q.shape[1] // num_kv_heads
        claims = torch.zeros(windows * rounds, dtype=torch.int32, device=q.device)
        results = workspaces.partials(workspace, q[:, : self.heads * group], self.window, block_indices.shape[2])
        if rounds == 1:
            turns: list[Turn] = [(q, (*parts, claims), index) for index in range(windows)]
            self._attend(q, k, v, at, turns, (shared, shared_counts, rest_counts, last_rows), results, out, lse)
            return
        # The rounds of a window stand beside each other, like windows of fewer heads.
        views = (*(part.view(windows * rounds, self.heads, *part.shape[2:]) for part in parts), claims)
        for number in range(rounds):
            kv = slice(number * self.heads, (number + 1) * self.heads)
            heads = slice(kv.start * group, kv.stop * group)
            turns = []
            for index in range(windows):
                turn = index * rounds + number
                turns.append((q[index * self.window :, heads], tuple(view[turn : turn + 1] for view in views), 0))
            blocks = (shared[kv], shared_counts[kv], rest_counts[kv], last_rows)
            self._attend(q[:, heads], k[:, kv], v[:, kv], at, turns, blocks, results, out[:, heads], lse[:, heads])

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        at: Place,
        turns: list[Turn],
        blocks: tuple[Tensor, ...],
        results: tuple[Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Some heads, window after window; each window's partial results overwrite the last one's."""
        for index, (queries, schedule, place) in enumerate(turns):
            self.attender(queries, k, v, at.page_table, *schedule, *results, self.scale_log2, place, self.num_sms)
            merged = (*blocks, *results, out, lse)
            self.merger(q, k, v, at.page_table, *merged, self.scale_log2, index, CTAS_PER_SM * self.num_sms)


def prepare(
    facts: CallFacts,
    backend: str,
    q: Tensor,
    block_indices: Tensor,
    *,
    num_requests: int,
    block_size: int,
    softmax_scale: float,
    longest_k: int,
    schedule_window: int | None,
    workspace_bytes: int,
    out: Tensor,
) -> Launch:
    """Find the kernels of a call. Raises ValueError when the workspace is too small."""
    total_q, num_q_heads, head_dim = q.shape
    num_kv_heads, _, topk = block_indices.shape
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    most = workspace_bytes // bytes_per_query(topk, num_q_heads, head_dim)
    given = schedule_window is not None
    scheduler = None if given else _find(facts, backend, "build_schedule", {"block_size": block_size})
    attender = _find(facts, backend, "sparse_attention", facts.variant)
    sizes = (num_requests, longest_k, block_size, softmax_scale * LOG2_E)
    tile_tokens = TILE_ROWS // max(num_q_heads // num_kv_heads, LEAST_ROWS)
    shares = HYBRID and not given and most >= tile_tokens and lookup.aligned(out)
    if shares and _serves(facts, backend, "shared_attention"):
        merger = _find(facts, backend, "shared_attention", facts.variant)
        block_bytes = 4 * block_size * head_dim
        heads, window = choose_rounds(
            total_q, most, topk, num_kv_heads, longest_k, block_size, block_bytes, tile_tokens, num_sms
        )
        splitter = _find_splitter(facts, backend, block_size, tile_tokens)
        return Hybrid(scheduler, attender, merger, *sizes, window, num_sms, splitter, tile_tokens, FILL, heads)
    least = 1 if schedule_window is None else schedule_window
    if most < least:
        wanted = least * bytes_per_query(topk, num_q_heads, head_dim)
        wanted_text = f"at least {wanted} for a window of {least} queries"
        validate.refuse("workspace", f"{workspace_bytes} bytes", wanted_text)
    merger = _find(facts, backend, "combine", {"head_dim": head_dim})
    window = window_for(total_q, most) if schedule_window is None else schedule_window
    return Launch(scheduler, attender, merger, *sizes, window, num_sms)


def split_selection(
    facts: CallFacts, backend: str, block_indices: Tensor, where: Place, *, block_size: int, tile_tokens: int, fill: int
) -> Split:
    """Rest [Hkv, T, k] and its counts [Hkv, T], shared blocks [Hkv, tiles, 4 k // 3, 2] and their counts [Hkv, tiles],
    and the row of the last key that each query sees [T].
    """
    return _split(_find_splitter(facts, backend, block_size, tile_tokens), block_indices, where, tile_tokens, fill)


def _find_splitter(facts: CallFacts, backend: str, block_size: int, tile_tokens: int) -> Any:
    return _find(facts, backend, "split_selection", {"block_size": block_size, "tile_tokens": tile_tokens})


def _split(kernel: Any, block_indices: Tensor, where: Place, tile_tokens: int, fill: int) -> Split:
    num_kv_heads, total_q, topk = block_indices.shape
    tiles = (total_q + tile_tokens - 1) // tile_tokens
    outputs = (
        block_indices.new_empty((num_kv_heads, total_q, topk)),
        block_indices.new_empty((num_kv_heads, total_q)),
        block_indices.new_empty((num_kv_heads, tiles, max(4 * topk // 3, 1), 2)),
        block_indices.new_empty((num_kv_heads, tiles)),
        block_indices.new_empty((total_q,)),
    )
    kernel(
        block_indices,
        where.cu_seqlens_q,
        where.cu_seqlens_k,
        where.seqused_k,
        where.q_positions,
        *outputs,
        where.use_seqused,
        where.use_positions,
        fill,
    )
    return outputs


@functools.lru_cache(maxsize=4096)
def choose_rounds(
    total_q: int,
    most: int,
    topk: int,
    num_kv_heads: int,
    longest_k: int,
    block_size: int,
    block_bytes: int,
    tile_tokens: int,
    num_sms: int,
) -> tuple[int, int]:
    """KV heads at a time, a divisor of their number, and queries per window, where ``most`` queries with all heads fit
    the workspace. ``block_bytes`` is what keys and values of one block take, ``longest_k`` how many a query may see.
    """
    blocks = -(-longest_k // block_size)
    least, choice = math.inf, (0, 0)
    for heads in (heads for heads in range(num_kv_heads, 0, -1) if num_kv_heads % heads == 0):
        rounds = num_kv_heads // heads
        for longest in (MOST_QUERIES, LONGEST_WINDOW):
            window = even_window(total_q, min(most * rounds, longest), tile_tokens, heads, CTAS_PER_SM * num_sms)
            windows = -(-total_q // window)
            # A block with many edges is read once for every CHUNK of them.
            edges = min(window, total_q) * topk
            reads = windows * num_kv_heads * max(min(blocks, edges), edges // CHUNK)
            waves = -(-windows * num_kv_heads // num_sms)
            cost = (
                windows * rounds * ROUND_COST
                + reads * block_bytes / 1e6 * MEGABYTE_COST
                + waves * min(window, total_q) * WALK_COST
            )
            # Of equals the first: more heads at a time, shorter windows.
            if cost < least:
                least, choice = cost, (heads, window)
    return choice


def even_window(total_q: int, most: int, tile_tokens: int, num_kv_heads: int, num_ctas: int) -> int:
    """Queries per window when ``most`` fit the workspace, a multiple of ``tile_tokens``.

    Where possible the tiles of a window come out even on the CTAs that take them in turn; of a single window there are
    as many as there are queries for.
    """
    step = tile_tokens * (num_ctas // math.gcd(num_ctas, num_kv_heads))
    if step > most:
        step = tile_tokens
    most -= most % step
    windows = max(1, -(-total_q // most))
    if windows == 1:
        step = tile_tokens
    return min(most, -(-total_q // (windows * step)) * step)


def combine(
    facts: CallFacts, backend: str, partial_out: Tensor, partial_lse: Tensor, *, out: Tensor, lse: Tensor
) -> None:
    """Fill out and lse from partial results and their LSE."""
    kernel = _find(facts, backend, "combine", {"head_dim": out.shape[2]})
    kernel(partial_out, partial_lse, out, lse)


def _find(facts: CallFacts, backend: str, op: str, variant: Mapping[str, int]) -> Any:
    return lookup.part_kernel(facts, backend, op, variant, _features_of(facts, op))


def _serves(facts: CallFacts, backend: str, op: str) -> bool:
    part = lookup.part_facts(facts, op, facts.variant, _features_of(facts, op))
    return runtime.serves(op, part, backend=backend, helper=True)


def _features_of(facts: CallFacts, op: str) -> frozenset[str]:
    # The features of an attention call are about q, k and v; the schedule and the partial results are our own.
    return facts.features if op in (facts.op, "shared_attention") else frozenset()
