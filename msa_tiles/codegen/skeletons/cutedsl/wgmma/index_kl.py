"""KV-outer index KL over one query window: loss and partial gradients of the index branch from one pass of the scores.

Grid: one persistent CTA per SM. A task is one KV block of one KV head with a run of the edges (query, slot) that
selected it; tasks are claimed through one atomic counter, head after head, so that the window's queries of the head in
work stay in L2. Everything is transposed, keys along the rows of an accumulator: consumer w owns the keys 64 w to
64 w + 63 of the block, with K in registers.

Edges are taken EDGES at a time, a chunk, in tiles of 64 query rows: 64 // rows_per_query queries, each with its `group`
heads in the first of rows_per_query rows. Of a tile, S = K Q^T and exp2 give the heads' probabilities, which a lane
adds up for its own columns and then with the three others of its row: the teacher P [keys, edges]. Of a chunk, the
index scores idx_k idx_q^T give the student Q in the same layout; then with dS = weight (Q - P) in BF16

  d_idx_k [keys, index_dim] += dS idx_q          kept in registers until the task ends
  d_idx_q^T [index_dim, edges] = idx_k^T dS      stored for every edge; 64 rows of it are one consumer's

Edges and tasks are laid out as the sparse_attention kernel documents them.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from msa_tiles.dsl.cutedsl import tma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.gather import ATOM
from msa_tiles.dsl.cutedsl.kl.consumers import Consumers
from msa_tiles.dsl.cutedsl.kl.layout import PREPARERS, WARPS
from msa_tiles.dsl.cutedsl.kl.producers import Producers
from msa_tiles.dsl.cutedsl.kl.results import Results
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import Pipeline, Role, Table, buffer, declares, lane, warps

ELEMENT = "bfloat16"  # <- precision.multiply
STAGES = 6  # <- tile.stages
EDGES = 16  # <- tile.edges
CHUNKS = 3  # <- tile.chunks
PRODUCER_REGISTERS = 40  # <- tile.producer_registers
CONSUMER_REGISTERS = 232  # <- tile.consumer_registers


def index_kl(head_dim: int, index_dim: int, block_size: int, group: int, prefix: int):
    """Build the kernel for one head dim, index dim, block size and number of query heads per KV head.

    q [total_q, num_q_heads, head_dim], k [total_k, num_kv_heads, head_dim], lse [total_q, num_q_heads] and index_lse
    [total_q, num_kv_heads] (natural logarithms), idx_q [total_q, num_kv_heads, index_dim], idx_k [total_k, index_dim],
    weights [total_q], the window's schedule -> losses [num_kv_heads, num_tasks, block_size], to which every task adds
    what its keys give, and with `gradients`, both times `factor`, partial_dq [window, topk, num_kv_heads, index_dim] of
    every edge, with present [window, topk, num_kv_heads] set to 1, and partial_dk [num_kv_heads, num_tasks,
    block_size, index_dim] of every task. With prefix all KV heads share one schedule, that of a head 0. scale_log2 and
    index_scale_log2 are the scales times log2(e).

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = IndexKl(head_dim, index_dim, block_size, group, prefix)
    return kernel, kernel.arguments()


@declares
def cta(head_dim, index_dim, block_size, group, prefix):
    """What a thread block is made of."""
    swizzled = "swizzled by 128 bytes, in panels of 64 columns"
    rows = max(group, ATOM)
    return Table(
        roles=(
            Role(
                "consumer", block_size // ROWS * WARPS, "64 keys a warpgroup; all of them take every tile",
                CONSUMER_REGISTERS,
            ),
            Role("claimer", 1, "claims tasks, loads K and idx_k", PRODUCER_REGISTERS),
            Role("gatherer", 1, "gathers the query rows of every tile, by TMA", PRODUCER_REGISTERS),
            Role(
                "preparer", PREPARERS, "a part of every chunk each: its index queries and what is known of its edges",
                PRODUCER_REGISTERS,
            ),
        ),
        pipelines=(
            Pipeline("task", 2, (lane("claimer"),)),
            Pipeline(
                "task_gathered", 1, (lane("gatherer"), warps("preparer")),
                note="as each comes to the task's last chunk",
            ),
            Pipeline("k", 1, (lane("claimer"),), (warps("consumer"),), ("k_tile",)),
            Pipeline("keys", 2, (lane("claimer"),), (warps("consumer"),), ("keys",)),
            Pipeline("q", STAGES, (lane("gatherer"),), (warps("consumer"),), ("ring",)),
            Pipeline("chunk", CHUNKS, (warps("preparer"),), (warps("consumer"),)),
            Pipeline(
                "exchanged", CHUNKS, (warps("consumer"),), note="once the warp's keys of a chunk's dS are written"
            ),
        ),
        buffers=(
            buffer(
                "k_tile", ELEMENT, align=1024, note=f"{swizzled}: K on its way to registers",
                block_size=block_size, head_dim=head_dim,
            ),
            buffer(
                "keys", ELEMENT, align=1024, note=f"{swizzled}: idx_k of two tasks",
                stages=2, block_size=block_size, index_dim=index_dim,
            ),
            buffer(
                "ring", ELEMENT, align=1024, note="queries, laid out as msa_tiles.dsl.cutedsl.gather says",
                stages=STAGES, rows=ROWS, head_dim=head_dim,
            ),
            buffer(
                "index_queries", ELEMENT, align=1024, note=swizzled, chunks=CHUNKS, edges=EDGES, index_dim=index_dim
            ),
            buffer("dS", ELEMENT, align=1024, note=swizzled, chunks=CHUNKS, edges=EDGES, block_size=block_size),
            buffer(
                "lse", "float32", note="what the four lanes of a row need of an edge: neighbours in the accumulators",
                heads=rows // 4, lanes=4, edges=EDGES, chunks=CHUNKS,
            ),
            buffer("edges", "int32", note="or -1, in the order of accumulators' columns", chunks=CHUNKS, edges=EDGES),
            buffer("index_lse", "float32", note="likewise", chunks=CHUNKS, edges=EDGES),
            buffer("weights", "float32", note="likewise", chunks=CHUNKS, edges=EDGES),
            buffer(
                "headers", "int32", note="bits or -1 at the end, head, task, valid rows, how many tasks came before",
                chunks=CHUNKS, numbers=5,
            ),
            buffer(
                "tasks", "int32", note="first edge, edges or -1 at the end, head, valid rows, task",
                tasks=2, numbers=5,
            ),
        ),
    )  # fmt: skip


class IndexKl(Producers, Consumers):
    """
    # <- cta

    A task is claimed when the last chunk of the one before is on its way: as late as the rings allow, so that no CTA
    hoards work. Its entry is overwritten two tasks later, when all who read it have left it behind.

    The chunks of all tasks are one stream to the consumers, whose headers say where a task begins and ends: the first
    tiles of a task are multiplied while the chunk before is being finished. The gathering warps fill every tile of a
    chunk, though the last ones of a task may have no query.

    A chunk of a consumer, S of its second tile ready and the first one's exponentials taken: what is started in order,
    each before the exponentials that it hides behind
      S of the third tile | exponentials of the second, and so on to the last tile; d_idx_q of chunk c - 2 is stored
      scores, S of the first tile of chunk c + 1 | exponentials of the last tile, Q, dS
      d_idx_k of chunk c, d_idx_q of chunk c - 1, S of the second tile of chunk c + 1 | exponentials of its first
    Two score tiles take turns. Nothing is under way where the loop closes, because ptxas cannot follow accumulators
    over it. d_idx_q comes a chunk late, so that no consumer waits for the others' keys of dS. A chunk's buffer is free
    once that is stored, idx_k once that of the task's last chunk is multiplied.
    """

    def __init__(self, head_dim, index_dim, block_size, group, prefix):
        table = cta(head_dim, index_dim, block_size, group, prefix)
        super().__init__(table, head_dim, index_dim, block_size, group, prefix)

    def arguments(self):
        """Stand-ins for cute.compile: 15 tensors, 7 scalars and the stream."""
        total_q, total_k, kv_heads = cute.sym_int(), cute.sym_int(), cute.sym_int()
        windows, scheduled, num_tasks = cute.sym_int(), cute.sym_int(), cute.sym_int()
        rows, topk = cute.sym_int(), cute.sym_int()
        q_heads = cute.sym_int()

        return (
            stand_in(self.element, total_q, q_heads, self.head_dim, align=tma.BYTES),
            stand_in(self.element, total_k, kv_heads, self.head_dim, align=tma.BYTES),
            stand_in(Float32, total_q, q_heads, last=cute.sym_int64()),
            stand_in(self.element, total_q, kv_heads, self.index_dim, align=tma.BYTES),
            stand_in(self.element, total_k, self.index_dim, align=tma.BYTES),
            stand_in(Float32, total_q, kv_heads),
            stand_in(Float32, total_q),
            stand_in(Int32, windows, scheduled, cute.sym_int()),
            stand_in(Int32, windows, scheduled, num_tasks, 4),
            stand_in(Int32, windows, scheduled),
            stand_in(Int32, windows),
            stand_in(Int32, rows, topk, kv_heads),
            stand_in(Float32, kv_heads, num_tasks, self.block_size),
            stand_in(Float32, rows, topk, kv_heads, self.index_dim, align=tma.BYTES),
            stand_in(Float32, kv_heads, cute.sym_int(), self.block_size, self.index_dim, align=tma.BYTES),
            *(Float32(0.0) for _ in range(3)),
            *(Int32(0) for _ in range(4)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, lse: cute.Tensor, idx_q: cute.Tensor, idx_k: cute.Tensor,
        index_lse: cute.Tensor, weights: cute.Tensor, edges: cute.Tensor, tasks: cute.Tensor, counts: cute.Tensor,
        claims: cute.Tensor, present: cute.Tensor, losses: cute.Tensor, partial_dq: cute.Tensor,
        partial_dk: cute.Tensor, scale_log2: Float32, index_scale_log2: Float32, factor: Float32, gradients: Int32,
        window: Int32, window_index: Int32, num_ctas: Int32, stream,
    ):  # fmt: skip
        """Launch. The schedule and the partial results are contiguous."""
        q_atom, mQ = self.rows.atom(cpasync.CopyBulkTensorTileG2SOp(), self.rows.described(q))
        k_atom, mK = self.blocks.described(k)
        index_atom, mIndex = tma.box_atom(tma.described(idx_k, (0, 1)), self.block_size)
        results = Results(present, losses, partial_dq, partial_dk, factor)
        self.kernel(
            q_atom, mQ, k_atom, mK, index_atom, mIndex, lse, idx_q, index_lse, weights, edges, tasks, counts, claims,
            results, scale_log2, index_scale_log2, gradients, window, window_index,
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(self.cta.threads, 1, 1),
            # Without it the compiler does not know how many registers a thread starts with, and ignores setmaxnreg.
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q_atom: cute.CopyAtom, mQ: cute.Tensor, k_atom: cute.CopyAtom, mK: cute.Tensor,
        index_atom: cute.CopyAtom, mIndex: cute.Tensor, lse: cute.Tensor, idx_q: cute.Tensor, index_lse: cute.Tensor,
        weights: cute.Tensor, edges: cute.Tensor, tasks: cute.Tensor, counts: cute.Tensor, claims: cute.Tensor,
        results: Results, scale_log2: Float32, index_scale_log2: Float32, gradients: Int32, window: Int32,
        window_index: Int32,
    ):  # fmt: skip
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        claimer, gatherer, preparer = map(self.cta.first_warp, ("claimer", "gatherer", "preparer"))
        shared = self.allocate(SmemAllocator())
        if warp_index >= claimer:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == claimer:
                heads = Int32(results.losses.shape[0])
                self.claim(k_atom, mK, index_atom, mIndex, shared, tasks, counts, claims, window_index, heads)
            elif warp_index == gatherer:
                self.gather(q_atom, mQ, shared, edges, results.present, window_index, window_index * window, gradients)
            else:
                given = (idx_q, lse, index_lse, weights)
                self.prepare(given, shared, edges, window_index, window_index * window, warp_index - preparer)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            if gradients > 0:
                self.consume(True, shared, results, scale_log2, index_scale_log2, warp_index)
            else:
                self.consume(False, shared, results, scale_log2, index_scale_log2, warp_index)
