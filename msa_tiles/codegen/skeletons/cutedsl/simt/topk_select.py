"""Exact top-k over block scores: lists in registers, every score read once.

Grid: (KV head, THREADS // lanes consecutive tokens). lanes = 2 ** lanes_log2 neighbours in a warp share a row: one
where rows abound, more where rows are few and long; their lists are merged at the end.

The CTA's warps bring a piece of COLUMNS scores per thread into shared memory with whole-line reads, already turned
into keys. Each thread then marks, in one mask, which scores of its piece beat the tail of its list, and inserts only
those: a warp spends as many insertions as its luckiest lane needs, not one for every column in which some lane has a
candidate. Blocks past a row's valid count are never looked at. With several index heads per KV head, the maximum over
the heads is taken on the way into shared memory; it ignores NaN unless every head has NaN.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from msa_tiles.dsl.cutedsl import topk as top
from msa_tiles.dsl.cutedsl.varlen import key_length, last_at_most, last_visible

THREADS = 128  # <- tile.threads
BATCH = 8  # <- tile.batch
WARP = 32
COLUMNS = 32
WARPS = THREADS // WARP


def topk_select(topk: int):
    """Build the kernel for one list capacity (topk).

    score [num_index_heads, total_q, max_blocks] float32 -> out [num_kv_heads, total_q, k] int32, k <= topk. How many
    blocks a row may choose from: valid_mode 0 by the query's position, 1 num_valid_scalar, 2 num_valid[token].

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = TopkSelect(topk)
    return kernel, kernel.arguments()


@cute.jit
def bits_below(count: Int32) -> Int32:
    """The lowest `count` of 32 bits; none or all where count is out of range."""
    return top.pick(count <= 0, 0, top.pick(count >= 32, -1, (Int32(1) << count) - 1))


class TopkSelect:
    """All warps alike: they read for each other, and a thread keeps the list of its share of a row.

    Shared memory: the piece in work, [THREADS, COLUMNS + 1] keys, a row for each thread and padded so that reading a
    row each is free of conflicts; the longest row of every warp. Barriers part the readers of a piece from the writers
    of the next one.
    """

    def __init__(self, topk):
        self.topk = topk

    def arguments(self):
        """Stand-ins for cute.compile: 7 tensors, 9 scalars and the stream."""
        total_q, starts = cute.sym_int(), cute.sym_int()

        def tensor(element, *shape):
            # The strides of what may be large are 64-bit, whatever the lengths.
            return make_fake_tensor(element, shape, (*(cute.sym_int64() for _ in shape[1:]), 1))

        return (
            tensor(Float32, cute.sym_int(), total_q, cute.sym_int()),
            tensor(Int32, starts),
            tensor(Int32, starts),
            tensor(Int32, cute.sym_int()),
            tensor(Int32, cute.sym_int()),
            tensor(Int32, cute.sym_int()),
            tensor(Int32, cute.sym_int(), total_q, cute.sym_int()),
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
        """Launch. An absent tensor is any other of its rank and type; order counts as in topk.emit."""
        rows = Int32(THREADS) >> lanes_log2
        grid = (out.shape[0], (out.shape[1] + rows - 1) // rows, 1)
        self.kernel(
            score, cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, num_valid, out, use_seqused, use_positions,
            valid_mode, num_valid_scalar, block_size, init_blocks, local_blocks, order, lanes_log2,
        ).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, score: cute.Tensor, cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor,
        q_positions: cute.Tensor, num_valid: cute.Tensor, out: cute.Tensor, use_seqused: Int32, use_positions: Int32,
        valid_mode: Int32, num_valid_scalar: Int32, block_size: Int32, init_blocks: Int32, local_blocks: Int32,
        order: Int32, lanes_log2: Int32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        head, tile, _ = cute.arch.block_idx()
        memory = SmemAllocator()
        piece = memory.allocate_tensor(Int32, cute.make_layout((THREADS, COLUMNS), stride=(COLUMNS + 1, 1)), 16)
        longest = memory.allocate_tensor(Int32, cute.make_layout(WARPS), 4)
        total_q = Int32(out.shape[1])
        lanes = Int32(1) << lanes_log2
        place = thread & (lanes - 1)
        warp = thread // WARP
        first_token = tile * (Int32(THREADS) >> lanes_log2)
        token = first_token + (thread >> lanes_log2)
        valid = Int32(0)
        # Tokens past the last request belong to nobody and choose nothing.
        if token < cutlass.min(total_q, cu_seqlens_q[cute.size(cu_seqlens_q) - 1]):
            if valid_mode == 0:
                request = last_at_most(cu_seqlens_q, token)
                length = key_length(cu_seqlens_k, seqused_k, use_seqused, request)
                first_limit = length - cu_seqlens_q[request + 1] + token
                limit = last_visible(q_positions, use_positions, token, token, first_limit, length)
                valid = (cutlass.max(limit + 1, 0) + block_size - 1) // block_size
            elif valid_mode == 1:
                valid = num_valid_scalar
            else:
                valid = num_valid[token]
            valid = cutlass.max(cutlass.min(valid, Int32(score.shape[2])), 0)
        longest[warp] = Int32(cute.arch.warp_redux_sync(valid, "max"))
        cute.arch.sync_threads()
        most = Int32(0)
        for w in cutlass.range_constexpr(WARPS):
            most = cutlass.max(most, longest[w])
        keys = cute.make_rmem_tensor(self.topk, Int32)
        ids = cute.make_rmem_tensor(self.topk, Int32)
        top.clear(keys, ids)
        for step in cutlass.range((most + COLUMNS * lanes - 1) // (COLUMNS * lanes), unroll=1):
            cute.arch.sync_threads()
            self.read(score, piece, head, first_token, step, warp, lanes_log2, Int32(out.shape[0]))
            cute.arch.sync_threads()
            first = (step * lanes + place) * COLUMNS
            wanted = self.candidates(piece, keys, thread)
            wanted = wanted | bits_below(init_blocks - first) | ~bits_below(valid - local_blocks - first)
            wanted = wanted & bits_below(valid - first)
            while wanted != 0:
                column = Int32(cute.arch.popc(~wanted & (wanted - 1)))
                wanted = wanted & (wanted - 1)
                block = first + column
                key = top.forced_key(piece[thread, column], block, valid, init_blocks, local_blocks)
                top.insert(keys, ids, key, block)
        for level in cutlass.range(lanes_log2, unroll=1):
            top.merge(keys, ids, Int32(1) << level, (place & ((Int32(2) << level) - 1)) == 0)
        if (place == 0) & (token < total_q):
            top.emit(keys, ids, valid, Int32(out.shape[2]), order, out[head, token, None])

    @cute.jit
    def read(
        self, score: cute.Tensor, piece: cute.Tensor, head: Int32, first_token: Int32, step: Int32, warp: Int32,
        lanes_log2: Int32, num_kv_heads: Int32,
    ):  # fmt: skip
        """Fill the rows of one warp's threads, COLUMNS keys each, one row after another.

        Loads come first, at clamped places, so that a batch is in flight; what lies outside is masked later.
        """
        heads_per_group = Int32(score.shape[0]) // num_kv_heads
        lanes = Int32(1) << lanes_log2
        lane = cute.arch.lane_idx()
        for batch in cutlass.range(WARP // BATCH, unroll=1):
            best = cute.make_rmem_tensor(BATCH, Float32)
            got = cute.make_rmem_tensor(BATCH, Float32)
            # No number: the first head takes its place.
            best.fill(Float32.nan)
            for r in cutlass.range(heads_per_group, unroll=1):
                for i in cutlass.range_constexpr(BATCH):
                    reader = warp * WARP + batch * BATCH + i
                    token = cutlass.min(first_token + (reader >> lanes_log2), Int32(score.shape[1]) - 1)
                    block = (step * lanes + (reader & (lanes - 1))) * COLUMNS + lane
                    block = cutlass.min(block, Int32(score.shape[2]) - 1)
                    got[i] = score[head * heads_per_group + r, token, block]
                for i in cutlass.range_constexpr(BATCH):
                    best[i] = cute.arch.fmax(best[i], got[i])
            for i in cutlass.range_constexpr(BATCH):
                piece[warp * WARP + batch * BATCH + i, lane] = top.order_key(best[i])

    @cute.jit
    def candidates(self, piece: cute.Tensor, keys: cute.Tensor, thread: Int32) -> Int32:
        """Which of a thread's COLUMNS keys beat the tail of its list: one bit for each."""
        tail = keys[self.topk - 1]
        wanted = Int32(0)
        for c in cutlass.range_constexpr(COLUMNS):
            wanted = wanted | top.pick(piece[thread, c] > tail, 1 << c if c < 31 else -(1 << 31), 0)
        return wanted
