"""Calls of the generated kernels as msa_tiles.ops makes them, run by the simulator and compared with the reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call.where import Where
from msa_tiles.launch import packed, places
from msa_tiles.quant import FP8, QuantizedTensor, dequantize, quantize_nvfp4
from msa_tiles.reference.batch import read_batch
from msa_tiles.runtime.registry import Cell, default_registry
from msa_tiles.simulator import simulate
from msa_tiles.verify import compare
from msa_tiles.verify.inputs import Buffer, Lengths, Source, paged, placed, spread
from msa_tiles.verify.packed import keys_of

TOKEN_MAJOR = (1, 0, 2)
# Formats of precisions of 4 bits.
FOUR_BITS = {
    "q16k4": "nvfp4", "q16kmx4": "mxfp4", "q8k4": "nvfp4", "q8kmx4": "mxfp4", "q16kv4": "nvfp4", "q16kvmx4": "mxfp4",
}  # fmt: skip
# How the kernels count edges.
CHUNK = 128
WARP = 32
QUERY_SHIFT, SLOT_SHIFT, SLOTS, LAST_KEY = 13, 7, 63, 127
# Kernels that are launched while the one before ends: until pdl_sync every tensor is that one's, if not said otherwise.
DEPENDENT = (
    "append_index", "append_kv", "combine", "decode_score", "decode_topk", "dequantize_kv",
    "norm_rope_append", "sparse_decode",
)  # fmt: skip


@dataclass
class Scaled:
    """Keys or values of a call, with their scales where they have some."""

    data: Tensor
    scale: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a kernel takes of them."""
        return (self.data,) if self.scale is None else (self.data, self.scale)

    def values(self) -> Tensor:
        return dequantize(self.data, self.scale)

    def unit(self, group: int) -> Tensor:
        """What errors of each query head [Hq, 1] are counted in: the largest scale of its values, if there is one."""
        if self.scale is None:
            return torch.ones(1, 1)
        largest = self.scale.nan_to_num(0.0)
        while largest.dim() > 1:
            # [total_k, heads], or [pages, heads, page].
            largest = largest.amax(-1 if largest.dim() > 2 else 0)
        return largest.masked_fill(largest == 0, 1.0).repeat_interleave(group)[:, None]


@dataclass
class Packed:
    """Keys or values of 4 bits, and what a kernel takes of them."""

    stored: QuantizedTensor
    tensors: tuple[Tensor, ...]

    def values(self) -> Tensor:
        return self.stored.dequantize()

    def unit(self, group: int) -> Tensor:
        """What errors are counted in: the largest number, or 1 where there is no telling."""
        largest = self.values().nan_to_num(0.0, 0.0, 0.0).abs().max()
        return torch.full((1, 1), max(float(largest), 1e-30) / 4)


@dataclass
class Call:
    """What a test varies. `sequences` are (queries, keys) of the packed requests."""

    sequences: Sequence[tuple[int, int]]
    seed: int = 0
    late: bool = True
    values: str = "normal"  # or "integer": exact, with ties
    strided: bool = False
    spoilt: tuple[str, float] | None = None  # "k" or "v", and what some of its elements are
    zeros: bool = False  # the first head's scales are 0, or every third one of tokens
    loose: bool = False  # dimensions of size 1 have a stride that is no multiple of 16 bytes
    shortened: bool = False  # requests use a part of their keys
    used: Sequence[int] | None = None  # that many of them
    rows_behind: int = 0  # query rows that belong to no request
    pages_per_block: int = 0  # keys in pages of a pool
    positions: bool = False  # a position for every query instead of the rule
    target: str = "sm90"

    def __post_init__(self) -> None:
        self.source = Source(torch.device("cpu"), self.seed, self.values)
        self.lengths: Lengths = self.source.lengths(self.sequences, self.shortened)
        if self.used is not None:
            self.lengths = replace(self.lengths, seqused_k=torch.tensor(self.used, dtype=torch.int32))
        self.total_q = sum(queries for queries, _ in self.sequences) + self.rows_behind
        self.total_k = sum(keys for _, keys in self.sequences)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        values = self.source.values(shape, dtype)
        if self.loose:
            steps = zip(values.shape, values.stride(), strict=True)
            return values.as_strided(values.shape, [7 if size == 1 else stride for size, stride in steps])
        return spread(values) if self.strided else values

    def keys_and_values(
        self, heads: int, head_dim: int, block_size: int, **scaled: int
    ) -> tuple[places.Place, tuple[Scaled, Scaled], dict[str, Any]]:
        """`place` of keys and values, of e4m3 if they are `scaled`."""
        dtype = FP8 if scaled else torch.bfloat16
        k, v = (self.tensor(self.total_k, heads, head_dim, dtype=dtype) for _ in range(2))
        self.spoil(k, v)
        at, stored, where = self.place(block_size, k, v)
        keys, values = (Scaled(part, self.scales(heads, block_size, **scaled) if scaled else None) for part in stored)
        return at, (keys, values), where

    def packed_keys_and_values(
        self, format: str, heads: int, head_dim: int, block_size: int, outer: float | None
    ) -> tuple[places.Place, tuple[Packed, Packed], dict[str, Any]]:
        """The same of 4 bits; `outer` is the global scale of both, where not the one that fits them."""
        k, v = (self.tensor(self.total_k, heads, head_dim) for _ in range(2))
        self.spoil(k, v)
        at, stored, where = self.place(block_size, k, v)
        (keys, values), _ = keys_of(format, stored, (k, v), self.strided)  # type: ignore[arg-type]
        if outer is not None:
            keys, values = (quantize_nvfp4(part * outer, outer) for part in stored)
        if self.zeros:
            for part in (keys, values):
                part.scale.view(torch.uint8)[:, 0] = 0
        made = []
        for part in (keys, values):
            made.append(Packed(part, packed.of_groups(part.data, part.scale, part.global_scale)))
        return at, (made[0], made[1]), where

    def scales(self, heads: int, block_size: int, token_scales: int) -> Tensor:
        """Scales of keys or values: one a head or one for each of its tokens.

        The last head's are a thousand times the others'. Those of tokens lie as `place` has laid the keys; what belongs
        to no key is NaN.
        """
        if not token_scales:
            scales = self.source.scales((heads,)) * torch.tensor([1.0] * (heads - 1) + [1000.0])
            scales[: int(self.zeros)] = 0.0
            return scales
        # The others' are small: scores of thousands would show how keys were rounded, and nothing else.
        scales = self.source.scales((self.total_k, heads)) * torch.tensor([0.001] * (heads - 1) + [1.0])
        if self.zeros:
            scales[::3] = 0.0
        if not self.pages_per_block:
            self.poison_behind(scales)
            return spread(scales) if self.strided else scales
        page_size = block_size // self.pages_per_block
        pairs = torch.stack((scales, torch.full_like(scales, math.nan)), -1)
        return paged(self.source, pairs, self.lengths, page_size).pool[..., 0].transpose(1, 2)

    def spoil(self, k: Tensor, v: Tensor) -> None:
        """Put the spoilt elements into flat keys or values, where some queries of a request see them, others do not."""
        if self.spoilt is None:
            return
        which, value = self.spoilt
        starts = self.lengths.cu_seqlens_k.tolist()
        for start, end in itertools.pairwise(starts):
            for number, place in enumerate((end - 1, end - 2, (start + end) // 2)):
                {"k": k, "v": v}[which][max(place, start), :, 7 + number : 9 + number] = value

    def agree(self, name: str, got: Tensor, wanted: Tensor, tolerance: float) -> None:
        """Numbers that agree. What is made of spoilt elements is infinite or NaN, in the same places and no others."""
        if self.spoilt is not None:
            assert name != "out" or not wanted.isfinite().all(), "somebody sees what is spoilt"
            got, wanted = (part.masked_fill(~part.isfinite(), math.nan) for part in (got, wanted))
        compare.numbers(name, got, wanted, tolerance)

    def output(self, shape: Sequence[int], dtype: torch.dtype) -> Buffer:
        """Poisoned; token-major when `strided`."""
        order = TOKEN_MAJOR if self.strided and len(shape) == 3 else None
        return Buffer(shape, dtype, torch.device("cpu"), order)

    def place(self, block_size: int, *flat: Tensor) -> tuple[places.Place, tuple[Tensor, ...], dict[str, Any]]:
        """Where queries and keys stand, as kernels take it; the keys as stored; the same for the reference.

        What lies behind the keys of a request that uses a part of them is NaN from here on.
        """
        for tensor in flat:
            self.poison_behind(tensor)
        options, stored = placed(self.source, self.lengths, self.pages_per_block, block_size, False, *flat)
        if self.positions:
            behind = torch.zeros(self.rows_behind, dtype=torch.int32)
            options["q_positions"] = torch.cat([self.source.positions(self.lengths), behind])
        where = Where(**options)
        at = places.place(where, self.total_q, self.total_k, block_size, torch.device("cpu"))
        return at, stored if flat else (), options

    def poison_behind(self, keys: Tensor) -> None:
        """NaN in the rows of flat keys or values [total_k, …] that no request uses."""
        if self.lengths.seqused_k is not None:
            starts = self.lengths.cu_seqlens_k
            for start, used, end in zip(starts, self.lengths.seqused_k, starts[1:], strict=False):
                keys[start + used : end] = math.nan

    def run(
        self,
        op: str,
        variant: Mapping[str, int],
        *arguments: Any,
        precision: str = "bf16",
        awaited: Collection[str] | None = None,
    ) -> None:
        function = kernel(op, precision, self.target, **variant)
        if awaited is None:
            every = [str(function.buffer_map[parameter].name) for parameter in function.params
                     if parameter in function.buffer_map]  # fmt: skip
            awaited = every if op in DEPENDENT else ()
        simulate(function, *arguments, seed=self.seed, late=self.late, awaited=awaited)


def name_of(cell: Cell) -> str:
    """The function below that calls a cell."""
    return cell.op if cell.precision == "bf16" else f"{cell.op}_{cell.precision}"


def kernel(op: str, precision: str = "bf16", target: str = "sm90", **variant: int) -> Any:
    """The PrimFunc of a generated kernel, built once."""
    key = (op, precision, target, *sorted(variant.items()))
    if key not in _kernels:
        (cell,) = default_registry().select(op, "tilelang", target, precision)
        _kernels[key] = cell.function(**variant)
    return _kernels[key]


_kernels: dict[tuple[Any, ...], Any] = {}


def tied(shape: Sequence[int], first: int) -> Tensor:
    """Scores that are 0 from a block on and -1 before."""
    return (torch.arange(shape[-1]) >= first).float().sub(1.0).expand(*shape).contiguous()


@dataclass
class Made:
    """A schedule of the build_schedule kernel."""

    edges: Tensor
    tasks: Tensor
    counts: Tensor
    window: int


def make_schedule(call: Call, at: places.Place, ids: Tensor, block_size: int, window: int) -> Made:
    heads, total_q, topk = ids.shape
    windows = -(-total_q // window)
    most = window * topk + window * topk // CHUNK
    edges = torch.full((windows, heads, window * topk), -1, dtype=torch.int32)
    tasks = torch.full((windows, heads, most, 4), -1, dtype=torch.int32)
    counts = torch.full((windows, heads), -1, dtype=torch.int32)
    variant = {"block_size": block_size}
    scalars = (at.use_seqused, at.use_positions, window)
    call.run("build_schedule", variant, ids, *at[:3], at.q_positions, edges, tasks, counts, *scalars)
    return Made(edges, tasks, counts, window)


def check_schedule(call: Call, where: dict[str, Any], made: Made, ids: Tensor, block_size: int) -> None:
    """Every visible id is one edge of a task of its block, in the order of the queries, and there is nothing else."""
    batch = read_batch(call.total_q, ids.device, **where)
    starts = call.lengths.cu_seqlens_k.tolist()
    for window in range(made.edges.shape[0]):
        for head in range(ids.shape[0]):
            got = []
            for task in range(int(made.counts[window, head])):
                row, first, number, extent = made.tasks[window, head, task].tolist()
                assert 0 < number <= CHUNK
                members = [(edge >> QUERY_SHIFT) + window * made.window
                           for edge in made.edges[window, head, first : first + number].tolist()]  # fmt: skip
                # Rows of more than a warp's lanes are taken in parts, several queries at a time.
                assert members == sorted(members) or ids.shape[2] > WARP, "a block's queries ascend"
                cut = False
                for edge, query in zip(made.edges[window, head, first : first + number].tolist(), members, strict=True):
                    got.append((query, (edge >> SLOT_SHIFT) & SLOTS, row, (edge & LAST_KEY) + 1))
                    cut |= (edge & LAST_KEY) + 1 < block_size
                assert extent & 1 >= int(cut) and extent >> 1 > 0
            wanted = []
            for query in range(window * made.window, min((window + 1) * made.window, call.total_q)):
                request, limit = int(batch.request[query]), int(batch.limit[query])
                for slot, block in enumerate(ids[head, query].tolist()):
                    if request >= 0 and 0 <= block * block_size <= limit:
                        visible = min(limit - block * block_size + 1, block_size)
                        wanted.append((query, slot, starts[request] + block * block_size, visible))
            assert sorted(got) == sorted(wanted)


def build_schedule(
    call: Call, *, block_size: int, topk: int, window: int, heads: int = 1, sticky: bool = False
) -> None:
    ids = call.source.selection(call.lengths, heads, topk, block_size, sticky)
    ids = torch.cat([ids, torch.zeros((heads, call.rows_behind, topk), dtype=torch.int32)], 1)
    ids = spread(ids, TOKEN_MAJOR) if call.strided else ids
    at, _, where = call.place(block_size)
    check_schedule(call, where, make_schedule(call, at, ids, block_size, window), ids, block_size)


def combine(call: Call, *, head_dim: int, splits: int, heads: int) -> None:
    tokens = call.total_q
    partial_lse = call.source.values((splits, tokens, heads), torch.float32)
    empty = call.source.chance(0.2, partial_lse.shape) | call.source.chance(0.1, partial_lse.shape[1:])
    partial_lse = partial_lse.masked_fill(empty, -torch.inf)
    partial_out = call.source.values((splits, tokens, heads, head_dim), torch.bfloat16)
    partial_out = partial_out.masked_fill(empty[..., None], torch.nan)
    if call.strided:
        partial_out = spread(partial_out, (1, 0, 2, 3))
    out = Buffer((tokens, heads, head_dim), torch.bfloat16, torch.device("cpu"))
    lse = torch.full((tokens, heads), torch.nan)
    call.run("combine", {"head_dim": head_dim}, partial_out, partial_lse, out.view, lse)
    out.check_gaps("out")
    wanted, wanted_lse = reference.combine(partial_out.float(), partial_lse)
    compare.numbers("lse", lse, wanted_lse, 1e-5)
    compare.numbers("out", out.view, wanted, 0.03)


Attend = Callable[..., None]


def sparse_attention(
    call: Call,
    *,
    head_dim: int,
    block_size: int,
    group: int,
    topk: int,
    heads: int = 1,
    window: int | None = None,
    ctas: int = 2,
    sticky: bool = False,
    attend: Attend | None = None,
    precision: str = "bf16",
    outer: float | None = None,
    **scaled: int,
) -> None:
    """Schedule, attention and merge of all windows; `attend` stands in for the attention kernel."""
    q = call.tensor(call.total_q, heads * group, head_dim).div_(outer or 1.0)
    at, (k, v), where = stored_keys(call, precision, heads, head_dim, block_size, outer, **scaled)
    ids = call.source.selection(call.lengths, heads, topk, block_size, sticky)
    ids = torch.cat([ids, torch.zeros((heads, call.rows_behind, topk), dtype=torch.int32)], 1)
    out, lse = torch.full(q.shape, torch.nan).bfloat16(), torch.full(q.shape[:2], torch.nan)
    window = call.total_q if window is None else window
    made = make_schedule(call, at, ids, block_size, window)
    claims = torch.zeros(len(made.edges), dtype=torch.int32)
    scale = head_dim**-0.5
    variant = {"head_dim": head_dim, "block_size": block_size, "group": group, **scaled}
    variant["pages_per_block"] = call.pages_per_block
    for index in range(len(made.edges)):
        partial_out = torch.full((window, topk, heads * group, head_dim), torch.nan).bfloat16()
        partial_lse = torch.full((window, topk, heads * group), -torch.inf)
        arguments = (
            q, *k.tensors, *v.tensors, at.page_table, made.edges, made.tasks, made.counts, claims, partial_out,
            partial_lse, scale * math.log2(math.e), index, ctas,
        )  # fmt: skip
        if attend is None:
            call.run("sparse_attention", variant, *arguments, precision=precision)
        else:
            attend(*arguments)
        rows = slice(index * window, min((index + 1) * window, call.total_q))
        count = rows.stop - rows.start
        splits = partial_out.transpose(0, 1)[:, :count], partial_lse.transpose(0, 1)[:, :count]
        out[rows], lse[rows] = reference.combine(*splits)
    wanted, wanted_lse = reference.sparse_attention(
        q.float(), k.values(), v.values(), ids, block_size=block_size, **where
    )
    call.agree("lse", lse, wanted_lse, 2e-3)
    call.agree("out", out / v.unit(group), wanted / v.unit(group), 0.04)


def sparse_attention_q16kv4(call: Call, **arguments: Any) -> None:
    sparse_attention(call, precision="q16kv4", **arguments)


def sparse_attention_q16kvmx4(call: Call, **arguments: Any) -> None:
    sparse_attention(call, precision="q16kvmx4", **arguments)


def sparse_attention_q16kv8(call: Call, **arguments: int) -> None:
    sparse_attention(call, precision="q16kv8", **arguments)  # type: ignore[arg-type]


def stored_keys(
    call: Call, precision: str, heads: int, head_dim: int, block_size: int, outer: float | None, **scaled: int
) -> Any:
    if precision in FOUR_BITS:
        return call.packed_keys_and_values(FOUR_BITS[precision], heads, head_dim, block_size, outer)
    return call.keys_and_values(heads, head_dim, block_size, **scaled)


def sparse_decode(
    call: Call,
    *,
    head_dim: int,
    block_size: int,
    group: int,
    topk: int,
    heads: int = 1,
    splits: int = 1,
    sticky: bool = False,
    scored_blocks: int = 0,
    heads_per_group: int = 1,
    init_blocks: int = 0,
    local_blocks: int = 1,
    ties_from: int | None = None,
    precision: str = "bf16",
    outer: float | None = None,
    **scaled: int,
) -> None:
    """Every split, merged by the reference; with `scored_blocks` the ids are chosen from scores first.

    Those are random, or equal from block `ties_from` on.
    """
    q = call.tensor(call.total_q, heads * group, head_dim).div_(outer or 1.0)
    at, (k, v), where = stored_keys(call, precision, heads, head_dim, block_size, outer, **scaled)
    partial_out = torch.full((splits, *q.shape), torch.nan).bfloat16()
    partial_lse = torch.full((splits, *q.shape[:2]), torch.nan)
    if scored_blocks:
        blocks = max(-(-call.lengths.longest_k // block_size), 1)
        score = call.source.values((heads * heads_per_group, call.total_q, blocks), torch.float32)
        score = score.masked_fill(call.source.chance(0.1, score.shape), math.nan)
        if ties_from is not None:
            score = tied(score.shape, ties_from)
        chosen = call.output((heads, call.total_q, topk), torch.int32)
        ids = chosen.view
    else:
        score = partial_lse[:1]
        ids = call.source.selection(call.lengths, heads, topk, block_size, sticky)
        ids = torch.cat([ids, torch.zeros((heads, call.rows_behind, topk), dtype=torch.int32)], 1)
        ids = spread(ids, TOKEN_MAJOR) if call.strided else ids
    variant = {"head_dim": head_dim, "block_size": block_size, "group": group}
    variant |= {"pages_per_block": call.pages_per_block, "scored_blocks": scored_blocks, **scaled}
    arguments = (
        q,
        *k.tensors,
        *v.tensors,
        at.page_table,
        ids,
        *at[:3],
        at.q_positions,
        score,
        partial_out,
        partial_lse,
    )
    scalars = (head_dim**-0.5 * math.log2(math.e), at.use_seqused, at.use_positions, init_blocks, local_blocks)
    # decode_score lets this kernel begin when all but the scores is there.
    awaited = ("score",) if scored_blocks else None
    call.run("sparse_decode", variant, *arguments, *scalars, precision=precision, awaited=awaited)
    assert call.spoilt or bool(partial_out.isfinite().all()), "a share without keys is zero"
    if scored_blocks:
        chosen.check_gaps("block_indices")
        options = {"block_size": block_size, "init_blocks": init_blocks, "local_blocks": local_blocks, **where}
        compare.same("block_indices", ids, reference.topk_select(score, topk, num_kv_heads=heads, **options))
    out, lse = reference.combine(partial_out.float(), partial_lse)
    wanted, wanted_lse = reference.sparse_attention(
        q.float(), k.values(), v.values(), ids, block_size=block_size, **where
    )
    call.agree("lse", lse, wanted_lse, 2e-3)
    call.agree("out", out / v.unit(group), wanted / v.unit(group), 0.04)


def sparse_decode_q16kv4(call: Call, **arguments: Any) -> None:
    sparse_decode(call, precision="q16kv4", **arguments)


def sparse_decode_q16kvmx4(call: Call, **arguments: Any) -> None:
    sparse_decode(call, precision="q16kvmx4", **arguments)


def sparse_decode_q16kv8(call: Call, **arguments: int) -> None:
    sparse_decode(call, precision="q16kv8", **arguments)  # type: ignore[arg-type]
