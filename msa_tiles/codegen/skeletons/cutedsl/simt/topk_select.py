"""Exact top-k over block scores: a warp for each row, every score read once.

Grid: (run of consecutive tokens, KV head), runs on the axis that may be longer than 65,535, the last tokens first,
since theirs may be the longest rows. A warp takes ROWS tokens one after another, fewer where rows are few. How it
chooses is told in msa_tiles.dsl.cutedsl.candidates. Blocks past a row's valid count are never looked at. With
several index heads per KV head, the maximum over the heads counts; it ignores NaN unless every head has NaN.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.candidates import SHARE, Lengths, Lists, Row, rank, select_topk, slots_of, valid_blocks
from msa_tiles.dsl.cutedsl.shared import make_buffers
from msa_tiles.dsl.table import WARP, Role, Table, buffer, declares

WARPS = 8  # <- tile.warps
ROWS = 8  # <- tile.rows
# Warps per SM for each list capacity: a chunk and a share of the list are kept in registers.
RESIDENT = {8: 32, 16: 32, 32: 24, 64: 16}


def topk_select(topk: int):
    """Build the kernel for one list capacity (topk).

    score [num_index_heads, total_q, max_blocks] float32 -> out [num_kv_heads, total_q, k] int32, k <= topk. How many
    blocks a row may choose from: valid_mode 0 by the query's position, 1 num_valid_scalar, 2 num_valid[token].

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = TopkSelect(topk)
    return kernel, kernel.arguments()


@declares
def cta(topk):
    """What a thread block is made of."""
    entries = SHARE * slots_of(topk)
    return Table(
        roles=(Role("all", WARPS, "rows of their own; none waits for another"),),
        pipelines=(),
        buffers=(
            buffer("pools", "int32", candidates=WARP * slots_of(topk), warps=WARPS),
            buffer("ids", "int32", entries=entries, warps=WARPS, note="of a warp's list"),
            buffer("keys", "int32", entries=entries, warps=WARPS, note="of the same"),
        ),
    )


class TopkSelect:
    """
    # <- cta
    """

    def __init__(self, topk):
        self.cta = cta(topk)
        self.topk = topk
        self.slots = slots_of(topk)

    def arguments(self):
        """Stand-ins for cute.compile: 7 tensors, 9 scalars and the stream."""
        total_q, starts = cute.sym_int(), cute.sym_int()

        return (
            stand_in(Float32, cute.sym_int(), total_q, cute.sym_int()),
            stand_in(Int32, starts),
            stand_in(Int32, starts),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int(), total_q, cute.sym_int()),
            *(Int32(0) for _ in range(9)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self, score: cute.Tensor, cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor,
        q_positions: cute.Tensor, num_valid: cute.Tensor, out: cute.Tensor, use_seqused: Int32, use_positions: Int32,
        valid_mode: Int32, num_valid_scalar: Int32, block_size: Int32, init_blocks: Int32, local_blocks: Int32,
        order: Int32, lanes_log2: Int32, stream,
    ):  # fmt: skip
        """Launch. An absent tensor is any other of its rank and type; order counts as in candidates.rank.

        A warp takes ROWS >> lanes_log2 rows, one at least: 0 is for calls whose rows alone fill a GPU.
        """
        rows = cutlass.max(Int32(ROWS) >> lanes_log2, 1)
        tokens = WARPS * rows
        heads = Int32(score.shape[0]) // Int32(out.shape[0])
        self.kernel(
            score, cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, num_valid, out, use_seqused, use_positions,
            valid_mode, num_valid_scalar, block_size, init_blocks, local_blocks, order, heads, rows,
        ).launch(
            grid=((out.shape[1] + tokens - 1) // tokens, out.shape[0], 1),
            block=(self.cta.threads, 1, 1),
            min_blocks_per_mp=RESIDENT[self.topk] // WARPS,
            # Left to the driver: else the DSL asks the GPU at hand how much shared memory it has.
            preferred_smem_carveout=-1,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, score: cute.Tensor, cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor,
        q_positions: cute.Tensor, num_valid: cute.Tensor, out: cute.Tensor, use_seqused: Int32, use_positions: Int32,
        valid_mode: Int32, num_valid_scalar: Int32, block_size: Int32, init_blocks: Int32, local_blocks: Int32,
        order: Int32, heads: Int32, rows: Int32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        tile, head, _ = cute.arch.block_idx()
        tiles, _, _ = cute.arch.grid_dim()
        found = make_buffers(self.cta, SmemAllocator(), {})
        pools, ids, keys = (found[name] for name in self.cta.buffers)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % WARP
        lists = Lists(pools[None, warp], ids[None, warp], keys[None, warp])
        lengths = Lengths(
            cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, use_seqused, use_positions, block_size, valid_mode,
            num_valid_scalar, num_valid,
        )  # fmt: skip
        total_q = Int32(out.shape[1])
        first_token = ((tiles - 1 - tile) * WARPS + warp) * rows
        # Lane i finds the valid count of the warp's row i.
        counted = Int32(0)
        if (lane < rows) & (first_token + lane < total_q):
            counted = valid_blocks(lengths, first_token + lane, Int32(score.shape[2]))
        for i in cutlass.range(cutlass.min(rows, total_q - first_token), unroll=1):
            token = first_token + i
            valid = cute.arch.shuffle_sync(counted, i)
            row = Row(score, head * heads, heads, token, valid, init_blocks, local_blocks)
            kept = select_topk(row, lists, Int32(0), valid, Int32(out.shape[2]), lane)
            self.write(lists, kept, Int32(out.shape[2]), order, lane, out[head, token, None])

    @cute.jit
    def write(self, lists: Lists, kept: Int32, topk: Int32, order: Int32, lane: Int32, row: cute.Tensor):
        """Write the list to row[:topk] in the wanted order, padded with -1."""
        for s in cutlass.range_constexpr((self.topk + WARP - 1) // WARP):
            entry = WARP * s + lane
            if entry < topk:
                block = Int32(-1)
                place = entry
                if entry < kept:
                    block = lists.ids[entry]
                    if order != 0:
                        place = rank(lists.ids, lists.keys, kept, entry, order)
                row[place] = block
