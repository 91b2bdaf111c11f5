"""Exact top-k over block scores for few rows: a CTA for each row, every score read once.

Grid: (token, KV head), tokens on the axis that may be longer than 65,535. The row is cut into a run of blocks for each
warp, which keeps the best k of it, as msa_tiles.dsl.cutedsl.candidates tells, and sorts them. A block's rank in the row
is its place in its own run and, by binary search, how many of each other run stand above it. With several index heads
per KV head, the maximum over the heads counts; it ignores NaN unless every head has NaN.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.candidates import Lengths, Lists, Row, rank, select_topk, slots_of, valid_blocks
from msa_tiles.dsl.cutedsl.shared import make_buffers
from msa_tiles.dsl.cutedsl.topk import EMPTY, pick
from msa_tiles.dsl.table import WARP, Role, Table, buffer, declares

WARPS = 8  # <- tile.warps
SHORT, LIST = 16, 64  # list capacities: M3's, the largest
AS_RANKED = 1


def decode_topk(max_blocks: int):
    """Build the kernel for rows of at most max_blocks scores, which it takes as a promise only.

    score [num_index_heads, total_q, width] float32 -> out [num_kv_heads, total_q, k] int32, k <= LIST. How many blocks
    a row may choose from: valid_mode 0 by the query's position, 1 num_valid_scalar, 2 num_valid[token]. order: 0
    ascending ids, 1 as ranked (init, local, descending score), 2 init, descending score, local last.

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = DecodeTopk(max_blocks)
    return kernel, kernel.arguments()


@declares
def cta(max_blocks):
    """What a thread block is made of."""
    return Table(
        roles=(Role("all", WARPS, "choose of a share of the row each, then of what all have chosen"),),
        pipelines=(),
        buffers=(
            buffer("pools", "int32", candidates=WARP * slots_of(LIST), warps=WARPS),
            buffer("ids", "int32", entries=LIST, warps=WARPS, note="of a warp's list"),
            buffer("keys", "int32", entries=LIST, warps=WARPS, note="of the same"),
            buffer("sorted_keys", "int32", entries=LIST, warps=WARPS),
            buffer("chosen", "int32", entries=LIST, id_and_key=2, note="of the row"),
        ),
    )


class DecodeTopk:
    """
    # <- cta

    All threads meet between the sorted lists and the searches, and before the row is put in order. Calls with k <=
    SHORT use a quarter of the memory.
    """

    def __init__(self, max_blocks):
        self.cta = cta(max_blocks)

    def arguments(self):
        """Stand-ins for cute.compile: 7 tensors, 8 scalars and the stream."""
        total_q = cute.sym_int()

        return (
            stand_in(Float32, cute.sym_int(), total_q, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int(), total_q, cute.sym_int()),
            *(Int32(0) for _ in range(8)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self, score: cute.Tensor, cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor,
        q_positions: cute.Tensor, num_valid: cute.Tensor, out: cute.Tensor, use_seqused: Int32, use_positions: Int32,
        valid_mode: Int32, num_valid_scalar: Int32, block_size: Int32, init_blocks: Int32, local_blocks: Int32,
        order: Int32, stream,
    ):  # fmt: skip
        """Launch, as early as the kernel before allows. An absent tensor is any other of its rank and type."""
        self.kernel(
            score, cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, num_valid, out, use_seqused, use_positions,
            valid_mode, num_valid_scalar, block_size, init_blocks, local_blocks, order,
            Int32(score.shape[0]) // Int32(out.shape[0]),
        ).launch(
            grid=(out.shape[1], out.shape[0], 1),
            block=(self.cta.threads, 1, 1),
            # Registers for long lists: left alone, the assembler aims at more CTAs and spills.
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, score: cute.Tensor, cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor,
        q_positions: cute.Tensor, num_valid: cute.Tensor, out: cute.Tensor, use_seqused: Int32, use_positions: Int32,
        valid_mode: Int32, num_valid_scalar: Int32, block_size: Int32, init_blocks: Int32, local_blocks: Int32,
        order: Int32, heads: Int32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        token, head, _ = cute.arch.block_idx()
        found = make_buffers(self.cta, SmemAllocator(), {})
        pools, ids, keys, sorted_keys, chosen = (found[name] for name in self.cta.buffers)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        topk = Int32(out.shape[2])
        lengths = Lengths(
            cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, use_seqused, use_positions, block_size, valid_mode,
            num_valid_scalar, num_valid,
        )  # fmt: skip
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        valid = valid_blocks(lengths, token, Int32(score.shape[2]))
        row = Row(score, head * heads, heads, token, valid, init_blocks, local_blocks)
        chosen_row = out[head, token, None]
        parts = (pools, ids, keys, sorted_keys, chosen)
        if topk <= SHORT:
            self.choose_row(row, parts, SHORT, topk, order, warp, thread, chosen_row)
        else:
            self.choose_row(row, parts, LIST, topk, order, warp, thread, chosen_row)

    @cute.jit
    def choose_row(
        self, row: Row, parts: tuple, capacity: cutlass.Constexpr, topk: Int32, order: Int32, warp: Int32,
        thread: Int32, out: cute.Tensor,
    ):  # fmt: skip
        """Write the best topk <= capacity blocks of a row to out[:topk] in the wanted order, padded with -1."""
        pools, ids, keys, sorted_keys, chosen = parts
        lane = thread % WARP
        # Whole groups of lanes, so that runs begin at whole cache lines of an aligned row.
        share = (row.valid + WARPS * WARP - 1) // (WARPS * WARP) * WARP
        begin = cutlass.min(warp * share, row.valid)
        end = cutlass.min(begin + share, row.valid)
        lists = Lists(*(
            cute.make_tensor(whole[None, warp].iterator, cute.make_layout(size))
            for whole, size in ((pools, WARP * slots_of(capacity)), (ids, capacity), (keys, capacity))
        ))  # fmt: skip
        kept = select_topk(row, lists, begin, end, topk, lane)
        entries = (capacity + WARP - 1) // WARP
        places = cute.make_rmem_tensor(entries, Int32)
        for e in cutlass.range_constexpr(entries):
            entry = WARP * e + lane
            places[e] = entry
            key = Int32(EMPTY)
            if entry < kept:
                places[e] = rank(lists.ids, lists.keys, kept, entry, Int32(AS_RANKED))
                key = lists.keys[entry]
            if entry < capacity:
                sorted_keys[places[e], warp] = key
        cute.arch.sync_threads()
        wanted = cutlass.min(topk, row.valid)
        for e in cutlass.range_constexpr(entries):
            entry = WARP * e + lane
            if entry < kept:
                block, key, place = lists.ids[entry], lists.keys[entry], places[e]
                for other in cutlass.range_constexpr(WARPS):
                    # Equal keys of an earlier run have lower ids.
                    bar = key - pick(other < warp, 1, 0)
                    place = place + pick(other != warp, self.count_above(sorted_keys, other, bar, capacity), 0)
                if place < wanted:
                    if order == AS_RANKED:
                        out[place] = block
                    else:
                        chosen[place, 0] = block
                        chosen[place, 1] = key
        if (thread >= wanted) & (thread < topk):
            out[thread] = Int32(-1)
        if order != AS_RANKED:
            cute.arch.sync_threads()
            if thread < wanted:
                out[rank(chosen[None, 0], chosen[None, 1], wanted, thread, order)] = chosen[thread, 0]

    @cute.jit
    def count_above(self, keys: cute.Tensor, run: cutlass.Constexpr, bar: Int32, capacity: cutlass.Constexpr) -> Int32:
        """How many of a run's keys, `capacity` in descending order, a power of two, exceed the bar."""
        count = Int32(0)
        for level in cutlass.range_constexpr(1, capacity.bit_length()):
            half = capacity >> level
            count = count + pick(keys[count + half - 1, run] > bar, half, 0)
        return count + pick(keys[count, run] > bar, 1, 0)
