"""How the attention kernels are launched on CUDA: query windows over one bounded workspace.

A window of queries runs through two kernels: sparse_attention writes one partial result per (query, slot) edge of the
schedule, combine merges the slots. The partial results of a window live in the workspace, [window, topk, Hq, D] and
their LSE [window, topk, Hq]; the next window overwrites them.

Hybrid attention takes the blocks that neighbouring queries share out of the schedule (split_selection); in the place of
combine, shared_attention attends to them and merges the rest with them. The rest of a query stands in its first slots.
Where that pays, it takes some KV heads at a time, so that the workspace holds longer windows: a window reads each of
its blocks once for all its queries.

Quantised keys and values may become bfloat16 first (`msa_tiles.launch.copied`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msa_tiles.call import backends, formats, validate
from msa_tiles.call.attention import Attention, AttentionCall, CombineCall
from msa_tiles.call.schedule import WindowSchedule
from msa_tiles.call.where import Where
from msa_tiles.launch import copied, lookup, operands, places, schedules, windows, workspaces
from msa_tiles.launch.places import Place
from msa_tiles.runtime import CallFacts
from msa_tiles.runtime.facts import multiprocessors

LOG2_E = math.log2(math.e)

# Whether calls without a schedule of their own take the hybrid kernels where they exist: on an H100 at 32K 1.5x on
# sticky selections and 1.1x on uniform ones. None leaves out keys and values of 4 bits where heads take turns: many
# queries read a block of the KV-outer kernel then, and tiles of four decode it anew. On an H200, 8K queries on 1M keys
# of NVFP4 take 2.51 ms for 2.70 on sticky selections so, 2.44 for 2.36 on uniform ones. FILL is how many blocks a
# tile of neighbouring queries takes at least, should its queries select so many: each spares partial results and costs
# products in vain.
HYBRID: bool | None = None
FILL = 0
# Whether calls on quantised keys and values attend to a copy of them in bfloat16 where one fits the workspace: None
# where it pays (see `msa_tiles.launch.copied`).
COPY: bool | None = None
# Rows of a tile, and the least that a query takes.
TILE_ROWS = 64
LEAST_ROWS = 8


class Split(NamedTuple):
    """What `split_selection` returns.

    The rest [Hkv, T, k] and its counts [Hkv, T], shared blocks [Hkv, tiles, 4 k // 3, 2] and their counts [Hkv, tiles],
    and the row of the last key that each query sees [T].
    """

    rest: Tensor
    rest_counts: Tensor
    shared: Tensor
    shared_counts: Tensor
    last_rows: Tensor


@dataclass(frozen=True)
class Round:
    """Some KV heads of a call, and what is theirs of everything that has heads."""

    kv: slice
    q: Tensor
    keys: tuple[Tensor, ...]
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Launch:
    """The kernels of an attention call and its windows, ready to run on tensors of certain shapes.

    ``heads`` is how many KV heads run at a time; one after the other, they take turns with the workspace.
    """

    scheduler: Any
    attender: Any
    merger: Any
    num_requests: int
    longest_k: int
    block_size: int
    scale_log2: float
    heads: int
    window: int
    num_sms: int

    def __call__(self, given: Attention, workspace: Tensor | None, out: Tensor, lse: Tensor) -> None:
        """Fill out and lse, one window of queries after the other."""
        at = places.place(given.where, given.q.shape[0], given.k.shape[0], self.block_size, given.q.device)
        made = self.schedule(given.block_indices, at) if given.schedule is None else given.schedule

        def merge(of: Round, index: int, results: tuple[Tensor, Tensor]) -> None:
            ours = slice(index * self.window, min((index + 1) * self.window, of.q.shape[0]))
            # combine reads [splits, queries, heads, dim]: the slots are the splits.
            parts = (part[: ours.stop - ours.start].transpose(0, 1) for part in results)
            self.merger(*parts, of.out[ours], of.lse[ours])

        self.attend(given, at, made, merge, workspace, out, lse)

    def schedule(self, block_indices: Tensor, at: Place) -> WindowSchedule:
        """Which queries read each block, in windows."""
        made = schedules.allocate(
            block_indices,
            num_requests=self.num_requests,
            max_seqlen_k=self.longest_k,
            block_size=self.block_size,
            window=self.window,
        )
        schedules.build(self.scheduler, block_indices, at, made)
        return made

    def attend(
        self,
        given: Attention,
        at: Place,
        made: WindowSchedule,
        merge: Callable[[Round, int, tuple[Tensor, Tensor]], None],
        workspace: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Some heads after the other, each window after window, whose partial results overwrite the last one's."""
        q, keys = given.q, operands.keys_and_values(given)
        number, num_kv_heads, _ = made.edges.shape
        rounds, group = num_kv_heads // self.heads, q.shape[1] // num_kv_heads
        claims = torch.zeros(number * rounds, dtype=torch.int32, device=q.device)
        some = out[:, : self.heads * group]
        results = workspaces.partials(workspace, some, self.window, given.block_indices.shape[2])
        views: tuple[Tensor, ...] = (made.edges, made.tasks, made.counts, claims)
        if rounds > 1:
            # The rounds of a window stand beside each other, like windows of fewer heads.
            views = (*(part.view(number * rounds, self.heads, *part.shape[2:]) for part in views[:3]), claims)
        for turn in range(rounds):
            of = Round(slice(None), q, keys, out, lse)
            if rounds > 1:
                kv = slice(turn * self.heads, (turn + 1) * self.heads)
                heads = slice(kv.start * group, kv.stop * group)
                of = Round(kv, q[:, heads], operands.of_heads(keys, kv), out[:, heads], lse[:, heads])
            for index in backends.turns(range(number)):
                queries, window, place = of.q, views, index
                if rounds > 1:
                    place = index * rounds + turn
                    window = tuple(view[place : place + 1] for view in views)
                    queries, place = of.q[index * self.window :], 0
                self._begin(results)
                self.attender(
                    queries, *of.keys, at.page_table, *window, *results, self.scale_log2, place, self.num_sms
                )  # fmt: skip
                merge(of, index, results)

    def _begin(self, results: tuple[Tensor, Tensor]) -> None:
        """Before the partial results of a window."""
        # A slot without an edge stays empty.
        results[1].fill_(-torch.inf)


@dataclass(frozen=True)
class Hybrid(Launch):
    """Blocks that neighbouring queries share on the query side, in the place of the merge; no schedule is given."""

    splitter: Any
    tile_tokens: int
    fill: int

    def __call__(self, given: Attention, workspace: Tensor | None, out: Tensor, lse: Tensor) -> None:
        assert given.schedule is None
        at = places.place(given.where, given.q.shape[0], given.k.shape[0], self.block_size, given.q.device)
        split = _split(self.splitter, given.block_indices, at, self.tile_tokens, self.fill)

        def merge(of: Round, index: int, results: tuple[Tensor, Tensor]) -> None:
            blocks = (split.shared[of.kv], split.shared_counts[of.kv], split.rest_counts[of.kv], split.last_rows)
            merged = (*blocks, *results, of.out, of.lse)
            ctas = windows.CTAS_PER_SM * self.num_sms
            self.merger(of.q, *of.keys, at.page_table, *merged, self.scale_log2, index, ctas)

        self.attend(given, at, self.schedule(split.rest, at), merge, workspace, out, lse)

    def _begin(self, results: tuple[Tensor, Tensor]) -> None:
        """Nothing: the rest of a query stands in its first slots, and there are counts of it."""


def prepare(call: AttentionCall, out: Tensor) -> Launch | copied.Copied | None:
    """What runs the kernels of a call of sparse_attention into ``out`` [T, Hq, D], of a unit last stride.

    None where kernels have nothing to do: on the reference, and where a size is 0, though a kernel must be there for
    that call too. It looks at what `remember.signature` holds and no further, and serves every call of that signature.
    """
    if backends.runs_reference(call.backend, call.device):
        return None
    facts = operands.facts("sparse_attention", call)
    if operands.is_empty(call.operands):
        lookup.find_kernel(facts, call.backend)
        return None
    return _find_copied(facts, call, out) or find(facts, call, out)


def _find_copied(facts: CallFacts, call: AttentionCall, out: Tensor) -> copied.Copied | None:
    """What attends to a copy of quantised keys and values, where the call is served so."""
    made = copied.copied_call(call, COPY)
    if made is None:
        return None
    behind, columns = made
    wide = operands.facts("sparse_attention", behind)
    if not copied.is_made(call, facts, columns, COPY) or not lookup.serves(wide, call.backend):
        return None
    return copied.Copied(copied.maker_of(call, facts, columns), columns, find(wide, behind, out))


def run(call: AttentionCall, out: Tensor, lse: Tensor, workspace: Tensor | None = None) -> None:
    """Fill out and lse of a call of sparse_attention."""
    launch = prepare(call, out)
    if launch is None:
        out.zero_()
        lse.fill_(-torch.inf)
    else:
        launch(call.operands, workspace, out, lse)


def run_combine(call: CombineCall, out: Tensor, lse: Tensor) -> None:
    """Fill out and lse from partial results and their LSE."""
    partial_out, partial_lse, backend = call
    precision = lookup.precision(output=partial_out)
    variant = {"head_dim": partial_out.shape[3]}
    facts = lookup.call_facts(
        "combine",
        Where(),
        call.device,
        precision,
        variant,
        (partial_out,),
        queries=partial_out.shape[1],
        heads=partial_out.shape[2],
    )
    kernel = lookup.find_kernel(facts, backend)
    if partial_out.numel() == 0:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    kernel(partial_out, partial_lse, out, lse)


def find(facts: CallFacts, call: AttentionCall, out: Tensor) -> Launch:
    """Find the kernels of a call. Raises ValueError when the workspace is too small."""
    given, backend, block_size = call.operands, call.backend, call.block_size
    total_q, num_q_heads, head_dim = given.q.shape
    num_kv_heads, _, topk = given.block_indices.shape
    num_sms = multiprocessors(call.device)
    most = call.workspace_bytes // workspaces.partial_bytes(topk, num_q_heads, head_dim)
    attender = _find(facts, backend, "sparse_attention", facts.variant)
    scheduler = None if given.schedule is not None else schedules.find(facts, backend, block_size)
    longest_k = operands.longest_k(given)
    sizes = (given.where.num_requests, longest_k, block_size, call.softmax_scale * LOG2_E)
    tile_tokens = TILE_ROWS // max(num_q_heads // num_kv_heads, LEAST_ROWS)
    # Which blocks a tile shares depends on the neighbours; a block's partial results, and their order, on nothing.
    shares = not call.batch_invariant and given.schedule is None and most >= tile_tokens and lookup.aligned(out)
    block_bytes = block_size * sum(each.shape[-1] * each.element_size() for each in (given.k, given.v))
    room = (total_q, most, topk, num_kv_heads, longest_k, block_size, block_bytes)
    heads, window = windows.choose_rounds(*room, tile_tokens, num_sms) if shares else (num_kv_heads, 0)
    wanted = HYBRID if HYBRID is not None else heads == num_kv_heads or not formats.is_packed(given.k)
    if shares and wanted and lookup.part_serves(facts, backend, "shared_attention", facts.variant, facts.features):
        merger = _find(facts, backend, "shared_attention", facts.variant)
        splitter = _find_splitter(facts, backend, block_size, tile_tokens)
        return Hybrid(scheduler, attender, merger, *sizes, heads, window, num_sms, splitter, tile_tokens, FILL)
    least = 1 if given.schedule is None else given.schedule.window
    if most < least:
        wanted_bytes = least * workspaces.partial_bytes(topk, num_q_heads, head_dim)
        wanted_text = f"at least {wanted_bytes} for a window of {least} queries"
        validate.refuse("workspace", f"{call.workspace_bytes} bytes", wanted_text)
    merger = _find(facts, backend, "combine", {"head_dim": head_dim})
    if given.schedule is None:
        heads, window = windows.choose_rounds(*room, 1, num_sms)
        if heads == num_kv_heads:
            window = windows.window_for(total_q, most)
    else:
        heads, window = num_kv_heads, given.schedule.window
    return Launch(scheduler, attender, merger, *sizes, heads, window, num_sms)


def split_selection(
    facts: CallFacts, backend: str, block_indices: Tensor, at: Place, *, block_size: int, tile_tokens: int, fill: int
) -> Split:
    """Which blocks the queries of a tile share, and what is left of each query's."""
    return _split(_find_splitter(facts, backend, block_size, tile_tokens), block_indices, at, tile_tokens, fill)


def _find_splitter(facts: CallFacts, backend: str, block_size: int, tile_tokens: int) -> Any:
    return _find(facts, backend, "split_selection", {"block_size": block_size, "tile_tokens": tile_tokens})


def _split(kernel: Any, block_indices: Tensor, at: Place, tile_tokens: int, fill: int) -> Split:
    num_kv_heads, total_q, topk = block_indices.shape
    tiles = (total_q + tile_tokens - 1) // tile_tokens
    made = Split(
        block_indices.new_empty((num_kv_heads, total_q, topk)),
        block_indices.new_empty((num_kv_heads, total_q)),
        block_indices.new_empty((num_kv_heads, tiles, max(4 * topk // 3, 1), 2)),
        block_indices.new_empty((num_kv_heads, tiles)),
        block_indices.new_empty((total_q,)),
    )
    kernel(
        block_indices,
        at.cu_seqlens_q,
        at.cu_seqlens_k,
        at.seqused_k,
        at.q_positions,
        *made,
        at.use_seqused,
        at.use_positions,
        fill,
    )
    return made


def _find(facts: CallFacts, backend: str, op: str, variant: Mapping[str, int]) -> Any:
    # The features of an attention call are about q, k and v; the schedule and the partial results are our own.
    features = facts.features if op in (facts.op, "shared_attention") else frozenset()
    return lookup.part_kernel(facts, backend, op, variant, features)
