"""Log-sum-exp of the index scores of every edge (query, slot) of a schedule, over the tokens of its block.

Grid: (task, KV head, window), a CTA for every place in the lists of tasks; those past the end of a list leave at once.
One warpgroup: idx_k of the task's block stays in shared memory, tiles of 64 edges go by, one a row. The queries are
gathered with 16-byte copies into two buffers in turn, a tile ahead; several CTAs share an SM and hide each other's
latencies.

Edges and tasks are laid out as the sparse_attention kernel documents them.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl import softmax, tma, wgmma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.scores import fold, pick_float
from msa_tiles.dsl.cutedsl.shared import make_barriers, make_buffers
from msa_tiles.dsl.cutedsl.vector import BYTES, VECTOR, wide
from msa_tiles.dsl.table import WARP, Pipeline, Role, Table, buffer, declares, lane
from msa_tiles.dsl.words import last_column_of, query_of, slot_of

ELEMENT = "bfloat16"  # <- precision.multiply
ROWS = 64  # <- tile.rows
WARPS = 4
WARP_ROWS = 16


def index_lse(index_dim: int, block_size: int):
    """Build the kernel for one index dim and block size.

    idx_q [total_q, num_kv_heads, index_dim], idx_k [total_k, index_dim] and a schedule -> partial_lse [rows, topk,
    num_kv_heads] (natural logarithm) of every edge of the windows from first_window on; row 0 is the first query of
    that window. Of slots without an edge nothing is written. scale_log2 is the scale times log2(e), positive. Heads
    past the schedule's last one share that.

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = IndexLse(index_dim, block_size)
    return kernel, kernel.arguments()


@declares
def cta(index_dim, block_size):
    """What a thread block is made of."""
    swizzled = "swizzled by 128 bytes, in panels of 64 columns"
    return Table(
        roles=(Role("all", WARPS, "gather the queries of a tile, S = Q K^T of the tile before, sums of its rows"),),
        pipelines=(Pipeline("keys", 1, (lane("all"),), fills=("keys",)),),
        buffers=(
            buffer("keys", ELEMENT, align=1024, note=swizzled, block_size=block_size, index_dim=index_dim),
            buffer("tiles", ELEMENT, align=1024, note=f"queries, {swizzled}", turns=2, rows=ROWS, index_dim=index_dim),
        ),
    )


class IndexLse:
    """
    # <- cta
    """

    def __init__(self, index_dim, block_size):
        self.cta = cta(index_dim, block_size)
        self.element = ELEMENTS[ELEMENT]
        self.index_dim = index_dim
        self.block_size = block_size

    def arguments(self):
        """Stand-ins for cute.compile: 6 tensors, 4 scalars and the stream."""
        total_q, kv_heads = cute.sym_int(), cute.sym_int()
        windows, scheduled, num_tasks = cute.sym_int(), cute.sym_int(), cute.sym_int()

        return (
            stand_in(self.element, total_q, kv_heads, self.index_dim, align=BYTES),
            stand_in(self.element, cute.sym_int(), self.index_dim, align=BYTES),
            stand_in(Int32, windows, scheduled, cute.sym_int()),
            stand_in(Int32, windows, scheduled, num_tasks, 4),
            stand_in(Int32, windows, scheduled),
            stand_in(Float32, cute.sym_int(), cute.sym_int(), kv_heads),
            Float32(0.0),
            *(Int32(0) for _ in range(3)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self, idx_q: cute.Tensor, idx_k: cute.Tensor, edges: cute.Tensor, tasks: cute.Tensor, counts: cute.Tensor,
        partial_lse: cute.Tensor, scale_log2: Float32, window: Int32, first_window: Int32, windows: Int32, stream,
    ):  # fmt: skip
        """Launch. The schedule and the result are contiguous."""
        k_atom, mK = tma.box_atom(tma.described(idx_k, (0, 1)), self.block_size)
        self.kernel(
            k_atom, mK, idx_q, edges, tasks, counts, partial_lse, scale_log2, window, first_window
        ).launch(
            grid=(tasks.shape[2], idx_q.shape[1], windows),
            block=(self.cta.threads, 1, 1),
            # Stated, because the compiler would ask the GPU of this machine otherwise.
            preferred_smem_carveout=100,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, k_atom: cute.CopyAtom, mK: cute.Tensor, idx_q: cute.Tensor, edges: cute.Tensor, tasks: cute.Tensor,
        counts: cute.Tensor, partial_lse: cute.Tensor, scale_log2: Float32, window: Int32, first_window: Int32,
    ):  # fmt: skip
        task, head, part = cute.arch.block_idx()
        window_index = first_window + part
        listed = cutlass.min(head, Int32(counts.shape[1]) - 1)
        if task < counts[window_index, listed]:
            place = tasks[window_index, listed, task, None]
            self.measure(
                k_atom, mK, place[0], edges[window_index, listed, None], place[1], place[2],
                idx_q[None, head, None], window_index * window, partial_lse[None, None, head], part * window,
                scale_log2,
            )  # fmt: skip

    @cute.jit
    def measure(
        self, k_atom: cute.CopyAtom, mK: cute.Tensor, key_row: Int32, edges: cute.Tensor, first_edge: Int32,
        num: Int32, queries: cute.Tensor, first_query: Int32, partial_lse: cute.Tensor, first_row: Int32,
        scale_log2: Float32,
    ):  # fmt: skip
        """One task: edges first_edge to first_edge + num - 1 of one head's, whose query 0 is first_query."""
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        memory = SmemAllocator()
        tiler = (ROWS, self.block_size, self.index_dim)
        layouts = {
            "keys": hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tiler, self.element, 1),
            "tiles": hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tiler, self.element, 2),
        }
        found = make_buffers(self.cta, memory, layouts)
        keys, tiles = found["keys"], found["tiles"]
        keys_full = make_barriers(self.cta, memory, ())
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(keys_full, self.cta.bytes_of("keys"))
            boxes = tma.boxes(keys, self.block_size, self.block_size, self.index_dim, 1)
            for panel in cutlass.range_constexpr(self.index_dim // tma.PANEL):
                tma.load_box(k_atom, mK, key_row, panel, boxes[None, None, 0, panel, 0], keys_full)
        score = wgmma.product(self.element, self.block_size, OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        left = wgmma.operand_a(score, tiles)
        right = wgmma.operand_b(score, keys)[None, None, None, 0]
        S = wgmma.accumulator(score, self.block_size)
        # The first of the lane's two rows; the other one is eight further on.
        row = thread // WARP * WARP_ROWS + lane // 4
        self.gather(queries, edges, first_edge, Int32(0), num, first_query, tiles)
        cute.arch.mbarrier_wait(keys_full, 0)
        for first in cutlass.range(0, num, ROWS, unroll=1):
            buffer = first // ROWS & 1
            cute.arch.cp_async_wait_group(0)
            cute.arch.fence_view_async_shared()
            # Whoever passes has done the products of the last tile, so that its buffer may be filled again.
            cute.arch.sync_threads()
            wgmma.multiply(score, S, left[None, None, None, buffer], right)
            if first + ROWS < num:
                self.gather(queries, edges, first_edge, first + ROWS, num, first_query, tiles)
            own = [edges[first_edge + cutlass.min(first + row + 8 * half, num - 1)] for half in range(2)]
            warpgroup.wait_group(0)
            for half in cutlass.range_constexpr(2):
                value = self.row_lse(S, half, last_column_of(own[half]) - lane % 4 * 2, scale_log2)
                if lane % 4 == 0:
                    partial_lse[first_row + query_of(own[half]), slot_of(own[half])] = value

    @cute.jit
    def gather(
        self, queries: cute.Tensor, edges: cute.Tensor, first_edge: Int32, first: Int32, num: Int32,
        first_query: Int32, tiles: cute.Tensor,
    ):  # fmt: skip
        """Start the copies of the tile that begins with edge `first` of the task; its last edge fills up the rest."""
        thread, _, _ = cute.arch.thread_idx()
        of_row = self.index_dim // VECTOR
        at_once = self.cta.threads // of_row
        base = tiles.iterator.toint() + (first // ROWS & 1) * (ROWS * self.index_dim * BYTES // VECTOR)
        copy = cute.make_copy_atom(cpasync.CopyG2SOp(), self.element, num_bits_per_copy=BYTES * 8)
        for step in cutlass.range_constexpr(ROWS // at_once):
            row = step * at_once + thread // of_row
            query = first_query + query_of(edges[first_edge + cutlass.min(first + row, num - 1)])
            address = base + self.place(row, thread % of_row) * BYTES
            target = cute.make_ptr(self.element, address, cute.AddressSpace.smem, assumed_align=BYTES)
            cute.copy(
                copy, wide(queries[query, None], thread % of_row), cute.make_tensor(target, cute.make_layout(VECTOR))
            )
        cute.arch.cp_async_commit_group()

    def place(self, row, vector):
        """Where the vector-th 16 bytes of a row lie in a tile, in units of 16 bytes.

        Rows of a panel are 128 bytes apart; the swizzle exchanges the vectors of a row by its number in the atom.
        """
        of_panel = tma.PANEL // VECTOR
        return vector // of_panel * (ROWS * of_panel) + row * of_panel + (vector % of_panel ^ row % 8)

    @cute.jit
    def row_lse(self, S: cute.Tensor, half: cutlass.Constexpr, room: Int32, scale_log2: Float32) -> Float32:
        """Natural logarithm of the sum of exponentials of a row, over the columns up to `room` of the lane's."""
        largest = cute.make_rmem_tensor(2, Float32)
        largest.fill(-Float32.inf)
        fold(S, largest, half, room)
        most = softmax.quad_max(largest[half])
        shift = most * scale_log2
        # Two chains, so that one addition need not wait for the last.
        sums = [Float32(0.0), Float32(0.0)]
        for j in cutlass.range_constexpr(self.block_size // 8):
            for column in cutlass.range_constexpr(2):
                term = cute.math.exp2(S[(column, half, j), 0, 0] * scale_log2 - shift, fastmath=True)
                sums[column] = sums[column] + pick_float(room >= 8 * j + column, term, Float32(0.0))
        return softmax.log_sum(most, softmax.quad_sum(sums[0] + sums[1]), scale_log2)
