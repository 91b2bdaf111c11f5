"""Attention of few queries over their selected blocks, split over the blocks: the decode twin of sparse_attention.

Grid: (query, KV head, split). A CTA takes an equal share of the query's slots and walks those whose block the query
sees with a running softmax; the shares are merged by `combine`. One split writes the answer itself.

A and B of the products are swapped: S^T = K Q^T and O^T = V^T P^T, keys and columns of V as the 64 rows of the tensor
cores and the query's heads as 8 or 16 columns, so that no work is spent on rows without a head.

With scored_blocks > 0 the ids are not given but chosen first, by the whole CTA, from the scores of the row, as
msa_tiles.dsl.cutedsl.threshold describes; every split of a row chooses the same, and the first one writes the ids.
"""

# % set pieces = declared.key_value.get("PIECES")
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from msa_tiles.dsl.cutedsl import softmax, threshold, tma, wgmma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.gather import Rows
from msa_tiles.dsl.cutedsl.operands import plain as key_value  # <- operands.key_value
from msa_tiles.dsl.cutedsl.pipeline import following
from msa_tiles.dsl.cutedsl.scores import pick_float
from msa_tiles.dsl.cutedsl.shared import make_barriers, make_buffers
from msa_tiles.dsl.cutedsl.topk import pick
from msa_tiles.dsl.cutedsl.varlen import key_length, last_visible
from msa_tiles.dsl.cutedsl.warp import ballot, first_bit, request_of
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import WARP, Pipeline, Role, Table, buffer, declares, lane

OUTPUT = "bfloat16"  # <- precision.output
STAGES = 3  # <- tile.stages
WARPS = 4  # of the consumer warpgroup  # % if not pieces
WARPS = 4  # of a consumer warpgroup  # % if pieces
CHOOSERS = 3  # warps
LEAST_COLUMNS = 8  # of a product
LIST = 64
# Stands for a maximum over nothing: finite, so that differences with it are no NaN.
LOWEST = -1.0e30


def sparse_decode(
    head_dim: int,
    block_size: int,
    group: int,
    pages_per_block: int,
    scored_blocks: int,
    token_scales: int,  # % if "token_scales" in plan.variants
):
    """Build the kernel for one head dim, block size, group, page size, and rows of so many scores (0: ids are given).

    q [total_q, num_q_heads, head_dim], k and v [total_k, num_kv_heads, head_dim], or [pages, num_kv_heads, page,
    head_dim] with pages_per_block > 0 and page_table [requests, max_pages], block_indices [num_kv_heads, total_q, topk]
    -> partial_out [splits, total_q, num_q_heads, head_dim] and partial_lse [splits, total_q, num_q_heads] (natural
    logarithm); a share without a visible key gives 0 and -inf. scale_log2 is the softmax scale times log2(e). With
    scored_blocks > 0, score [num_index_heads, total_q, width] is ranked, topk <= LIST, and block_indices is an output.

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = SparseDecode(
        head_dim,
        block_size,
        group,
        pages_per_block,
        scored_blocks,
        token_scales=token_scales,  # % if "token_scales" in plan.variants
    )
    return kernel, kernel.arguments()


@declares
def cta(head_dim, block_size, group, pages_per_block, scored_blocks, **scales):
    """What a thread block is made of."""
    columns = max(group, LEAST_COLUMNS)
    keys, values = (
        key_value.parts(name, head_dim, block_size, STAGES, producer="producer", readers="consumer", **scales)
        for name in "kv"
    )
    # % if pieces
    pieces = block_size // ROWS
    all_warps = pieces * WARPS + 1 + CHOOSERS
    # % endif
    choice = (
        buffer("counts", "int32", warps=WARPS + 1 + CHOOSERS, sums=2, turns=2),  # % if not pieces
        buffer("candidates", "int32", threads=WARP * (WARPS + 1 + CHOOSERS), id_and_key=2),  # % if not pieces
        buffer("counts", "int32", warps=all_warps, sums=2, turns=2),  # % if pieces
        buffer("candidates", "int32", threads=WARP * all_warps, id_and_key=2),  # % if pieces
        buffer("list", "int32", ids=LIST, note="the chosen blocks"),
    )
    return Table(
        roles=(
            # % if pieces
            Role("consumer", pieces * WARPS, "S^T = K Q^T, softmax, O^T += V^T P^T of 64 keys of a block a warpgroup"),
            # % else
            Role("consumer", WARPS, "S^T = K Q^T, softmax, O^T += V^T P^T, one block after the other"),
            # % endif
            Role("producer", 1, "loads Q once, then K and V of one block a stage; its lanes look up ids and pages"),
            Role("chooser", CHOOSERS, "with scores, helps to choose the ids and writes them; else idle"),
        ),
        pipelines=(
            Pipeline("q", 1, (lane("producer"),), fills=("queries",), bytes=2 * group * head_dim),
            *keys.pipelines,
            *values.pipelines,
        ),
        buffers=(
            *keys.buffers,
            *values.buffers,
            buffer(
                "queries", key_value.multiplied("k", **scales), align=1024,
                note="laid out as msa_tiles.dsl.cutedsl.gather says", columns=columns, head_dim=head_dim,
            ),
            # % if pieces
            buffer(
                "weights", key_value.multiplied("v", **scales), align=1024, note="P, swizzled, of 64 keys",
                columns=columns, keys=ROWS, pieces=pieces,
            ),
            buffer(
                "maxima", "float32", note="of each consumer warp's rows", warps=WARPS, columns=columns, pieces=pieces,
            ),
            buffer("sums", "float32", note="likewise, of the first piece", warps=WARPS, columns=columns),
            buffer(
                "others", "float32", note="maxima, sums and O of the pieces behind the first, a row for each thread",
                threads=WARP * WARPS, values=columns // 2 + head_dim * columns // (WARP * WARPS),
                pieces=max(pieces - 1, 1),
            ),
            # % else
            buffer(
                "weights", key_value.multiplied("v", **scales), align=1024, note="P, swizzled, in panels of 64 keys",
                columns=columns, block_size=block_size,
            ),
            buffer("maxima", "float32", warps=WARPS, columns=columns, note="of each consumer warp's rows"),
            buffer("sums", "float32", warps=WARPS, columns=columns, note="likewise"),
            # % endif
            *(choice if scored_blocks else ()),
        ),
    )  # fmt: skip


class Shared(NamedTuple):
    """What the CTA keeps in shared memory."""

    queries: Any
    keys: Any
    values: Any
    weights: Any
    maxima: Any
    sums: Any
    others: Any  # % if pieces
    best: Any
    q_full: Any


class Share(NamedTuple):
    """What a CTA works on: some slots of one row, and what its query sees of its request."""

    head: Any
    token: Any
    first_slot: Any
    last_slot: Any
    wanted: Any  # slots that were filled, where ids are chosen here
    ids: Any  # block_indices[head, token]
    first_ids: Any  # the ids of the first 32 slots, one a lane, where they are given
    request: Any
    limit: Any  # the last visible key


class SparseDecode:
    """
    # <- cta

    # % if pieces
    A consumer warpgroup takes 64 keys of every block, with maxima and sums of its own: they are merged at the end. It
    decodes values while the product of keys runs, and keys of the next block while that of values does.
    # % endif
    A warp holds 16 of every 64 rows, that is keys, of S^T: the maxima of a column go through shared memory, the sums
    only at the end. Two barriers a block: maxima written, and P written, which also parts the readers of the maxima
    from the writers of the next ones. Columns past the group hold stale data; no column depends on another, and theirs
    are dropped.

    # <- Left of operands.key_value
    """

    def __init__(self, head_dim, block_size, group, pages_per_block, scored_blocks, **scales):
        self.cta = cta(head_dim, block_size, group, pages_per_block, scored_blocks, **scales)
        self.keys, self.values = (
            key_value.Left(
                name, self.cta, head_dim, block_size, pages_per_block,
                readers="consumer", transposed=name == "v", **scales,
            )
            for name in "kv"
        )  # fmt: skip
        self.head_dim = head_dim
        self.block_size = block_size
        self.group = group
        self.pages_per_block = pages_per_block
        self.scored_blocks = scored_blocks
        self.pieces = block_size // ROWS  # % if pieces
        self.rows = Rows(self.keys.element, head_dim, group)
        self.columns = self.rows.rows_per_token

    def arguments(self):
        """Stand-ins for cute.compile: tensors, 5 scalars and the stream."""
        total_q, q_heads, kv_heads = cute.sym_int(), cute.sym_int(), cute.sym_int()
        splits = cute.sym_int()
        # Without scores any tensor of their rank stands in, of any strides.
        score_stride = 1 if self.scored_blocks else cute.sym_int64()

        return (
            stand_in(self.keys.element, total_q, q_heads, self.head_dim, align=tma.BYTES),
            *self.keys.arguments(kv_heads),
            *self.values.arguments(kv_heads),
            stand_in(Int32, cute.sym_int(), cute.sym_int()),
            stand_in(Int32, kv_heads, total_q, cute.sym_int(), last=cute.sym_int64()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Float32, cute.sym_int(), cute.sym_int(), cute.sym_int(), last=score_stride),
            stand_in(ELEMENTS[OUTPUT], splits, total_q, q_heads, self.head_dim),
            stand_in(Float32, splits, total_q, q_heads, last=cute.sym_int64()),
            Float32(0.0),
            *(Int32(0) for _ in range(4)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,  # <- tensors of operands.key_value
        v: cute.Tensor,  # <- tensors of operands.key_value
        page_table: cute.Tensor,
        block_indices: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        seqused_k: cute.Tensor,
        q_positions: cute.Tensor,
        score: cute.Tensor,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        scale_log2: Float32,
        use_seqused: Int32,
        use_positions: Int32,
        init_blocks: Int32,
        local_blocks: Int32,
        stream,
    ):
        """Launch, as early as the kernel before allows. An absent tensor is any other of its rank and type."""
        q_atom, mQ = self.rows.atom(cpasync.CopyBulkTensorTileG2SOp(), self.rows.described(q))
        keys = self.keys.stored(
            k,  # <- tensors of operands.key_value
        )
        values = self.values.stored(
            v,  # <- tensors of operands.key_value
        )
        self.kernel(
            q_atom, mQ, keys, values, page_table, block_indices, cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions,
            score, partial_out, partial_lse, scale_log2, use_seqused, use_positions, init_blocks, local_blocks,
        ).launch(
            # Queries may be more than 65,535, heads and splits are not.
            grid=(block_indices.shape[1], block_indices.shape[0], partial_out.shape[0]),
            block=(self.cta.threads, 1, 1),
            # One CTA fills the shared memory: it may have all registers.
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q_atom: cute.CopyAtom, mQ: cute.Tensor, k: tuple, v: tuple, page_table: cute.Tensor,
        block_indices: cute.Tensor, cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor,
        q_positions: cute.Tensor, score: cute.Tensor, partial_out: cute.Tensor, partial_lse: cute.Tensor,
        scale_log2: Float32, use_seqused: Int32, use_positions: Int32, init_blocks: Int32, local_blocks: Int32,
    ):  # fmt: skip
        token, head, split = cute.arch.block_idx()
        _, num_kv_heads, splits = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        producer, chooser = self.cta.first_warp("producer"), self.cta.first_warp("chooser")
        shared = self.allocate(SmemAllocator(), (q_atom, *self.keys.atoms(k), *self.values.atoms(v)))
        topk = Int32(block_indices.shape[2])
        # Slots split * topk / splits and on: shares differ by one slot at most.
        first_slot, last_slot = split * topk // splits, (split + 1) * topk // splits
        heads = Int32(score.shape[0]) // num_kv_heads
        if cutlass.const_expr(self.scored_blocks == 0):
            cute.arch.griddepcontrol_wait()
        # With scores, the kernel before is the one that writes them and nothing else, and it began when all before it
        # was there: only the scores are waited for.
        if warp_index == producer:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(shared.q_full, self.cta.bytes_of("q"))
            boxes = self.rows.boxes(shared.queries, 1)[None, None, None, None, None, 0, 0]
            self.rows.load(q_atom, mQ, token, head, boxes, shared.q_full)
        # Given ids are on their way while the request is looked up.
        first_ids = Int32(-1)
        if cutlass.const_expr(self.scored_blocks == 0):
            if first_slot + cute.arch.lane_idx() < last_slot:
                first_ids = block_indices[head, token, first_slot + cute.arch.lane_idx()]
        request, limit = self.see(cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, use_seqused, use_positions, token)
        wanted = topk
        if cutlass.const_expr(self.scored_blocks > 0):
            cute.arch.griddepcontrol_wait()
        # The kernel behind may come up, and wait in turn.
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.scored_blocks > 0):
            row = threshold.Row(score, head * heads, heads, token)
            valid = cutlass.min((limit + self.block_size) // self.block_size, Int32(score.shape[2]))
            wanted = cutlass.min(topk, valid)
            read = cute.make_rmem_tensor(self.scored_blocks // self.cta.threads, Float32)  # % if not pieces
            read = cute.make_rmem_tensor(-(-self.scored_blocks // self.cta.threads), Float32)  # % if pieces
            read.fill(Float32.nan)
            threshold.read_scores(row, valid, read, self.cta.threads)
            keys = threshold.keys_of(read, valid, init_blocks, local_blocks, self.cta.threads)
            threshold.list_best(keys, wanted, valid, shared.best, self.cta.threads)
        share = Share(
            head, token, first_slot, last_slot, wanted, block_indices[head, token, None], first_ids, request, limit
        )
        if warp_index < producer:
            out = partial_out[split, token, None, None]
            lse = partial_lse[split, token, None]
            self.consume(k, v, shared, share, scale_log2, warp_index, out, lse)
        elif warp_index < chooser:
            self.produce(k, v, page_table, cu_seqlens_k, shared, share)
        elif cutlass.const_expr(self.scored_blocks > 0):
            if split == 0:
                threshold.write_row(shared.best, thread - WARP * chooser, wanted, share.ids)

    @cute.jit
    def allocate(self, memory: SmemAllocator, atoms: tuple):
        """Shared memory, with barriers ready for use on return."""
        atom, of_weights = (
            warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, operand.element)
            for operand in (self.keys, self.values)
        )
        layouts = {
            "queries": cute.tile_to_shape(atom, (self.columns, self.head_dim, 1), order=(1, 0, 2)),
            # % if not pieces
            "weights": cute.tile_to_shape(of_weights, (self.columns, self.block_size, 1), order=(0, 1, 2)),
            # % endif
            **self.keys.layouts(),
            **self.values.layouts(),
        }
        # % if pieces
        layouts["weights"] = cute.tile_to_shape(of_weights, (self.columns, ROWS, self.pieces), order=(0, 1, 2))
        # % endif
        found = make_buffers(self.cta, memory, layouts)
        barriers = make_barriers(self.cta, memory, atoms)
        best = None
        if cutlass.const_expr(self.scored_blocks > 0):
            best = threshold.Best(found["counts"], found["candidates"], found["list"])
        return Shared(
            found["queries"], self.keys.held(found, barriers), self.values.held(found, barriers), found["weights"],
            found["maxima"], found["sums"], best, barriers + self.cta.place("q_full"),  # % if not pieces
            found["maxima"], found["sums"], found["others"], best, barriers + self.cta.place("q_full"),  # % if pieces
        )  # fmt: skip

    @cute.jit
    def see(
        self, cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor, q_positions: cute.Tensor,
        use_seqused: Int32, use_positions: Int32, token: Int32,
    ):  # fmt: skip
        """Request and the last visible key of a token; -1 for none. All lanes of a warp must call it.

        Tokens past the last request belong to nobody and see nothing.
        """
        limit = Int32(-1)
        request = request_of(cu_seqlens_q, token)
        if token < cu_seqlens_q[cute.size(cu_seqlens_q) - 1]:
            length = key_length(cu_seqlens_k, seqused_k, use_seqused, request)
            end_token = cu_seqlens_q[request + 1]
            limit = last_visible(q_positions, use_positions, token, end_token, length, length)
        return request, cutlass.max(limit, -1)

    @cute.jit
    def blocks_of_lanes(self, shared: Shared, share: Share, first: Int32):
        """The block of slot `first` + lane, 0 if unseen, and which of the 32 slots the query sees, one bit each."""
        slot = first + cute.arch.lane_idx()
        block = share.first_ids
        if cutlass.const_expr(self.scored_blocks > 0):
            if slot < cutlass.min(share.last_slot, share.wanted):
                block = shared.best.ids[slot]
        elif first > share.first_slot:
            block = Int32(-1)
            if slot < share.last_slot:
                block = share.ids[slot]
        seen = (block >= 0) & (block < (share.limit + self.block_size) // self.block_size)
        return pick(seen, block, 0), ballot(seen)

    @cute.jit
    def pages_of_lane(self, page_table: cute.Tensor, share: Share, block: Int32, seen: Int32):
        """The pages of the lane's block; nothing for flat keys, and nothing is read where no lane has a block."""
        found = []
        for p in cutlass.range_constexpr(self.pages_per_block):
            page = Int32(0)
            if seen != 0:
                entry = block * self.pages_per_block + p
                page = page_table[share.request, cutlass.min(entry, Int32(page_table.shape[1]) - 1)]
            found.append(page)
        return found

    @cute.jit
    def produce(
        self, k: tuple, v: tuple, page_table: cute.Tensor, cu_seqlens_k: cute.Tensor, shared: Shared, share: Share
    ):
        """The producer warp: keys and values of one block a stage."""
        stage = Int32(0)
        phase = Int32(1)
        for first in cutlass.range(share.first_slot, share.last_slot, WARP, unroll=1):
            block, left = self.blocks_of_lanes(shared, share, first)
            pages = self.pages_of_lane(page_table, share, block, left)
            while left != 0:
                lane = first_bit(left)
                left = left & (left - 1)
                row = Int32(0)
                if cutlass.const_expr(self.pages_per_block == 0):
                    row = cu_seqlens_k[share.request] + cute.arch.shuffle_sync(block, lane) * self.block_size
                of_block = [cute.arch.shuffle_sync(page, lane) for page in pages]
                self.keys.load(k, row, of_block, share.head, shared.keys, stage, phase)
                self.values.load(v, row, of_block, share.head, shared.values, stage, phase)
                stage, phase = following(stage, phase, STAGES)

    @cute.jit
    def consume(
        self, k: tuple, v: tuple, shared: Shared, share: Share, scale_log2: Float32, member: Int32, out: cute.Tensor,
        lse: cute.Tensor,
    ):  # fmt: skip
        """A consumer warp, of rows 16 member to 16 member + 15 of every 64."""
        # % if pieces
        all_threads, _, _ = cute.arch.thread_idx()
        thread = all_threads % (WARP * WARPS)
        piece, member = member // WARPS, member % WARPS
        # % else
        thread, _, _ = cute.arch.thread_idx()
        # % endif
        lane = cute.arch.lane_idx()
        score, weigh = self.keys.product(self.columns), self.values.product(self.columns)
        keys = self.keys.operand(score, shared.keys)
        queries = wgmma.operand_b(score, shared.queries)[None, None, None, 0]
        values = self.values.operand(weigh, shared.values)
        weights = wgmma.operand_b(weigh, shared.weights)[None, None, None, 0]  # % if not pieces
        weights = wgmma.operand_b(weigh, shared.weights)[None, None, None, piece]  # % if pieces
        S = self.keys.accumulator(score, self.columns)
        part = self.values.accumulator(weigh, self.columns)
        scale_log2 = self.keys.fold(scale_log2, k, share.head)
        # What the products write only they may write: the running sum, which is rescaled, stands beside.
        O = cute.make_rmem_tensor(part.layout, Float32)
        O.fill(0.0)
        of_lane = cute.make_layout((2, self.columns // 8))  # its columns 2 (lane % 4), the next one, and 8 further on
        row_max = cute.make_rmem_tensor(of_lane, Float32)
        row_sum = cute.make_rmem_tensor(of_lane, Float32)
        scale = cute.make_rmem_tensor(of_lane, Float32)
        row_max.fill(LOWEST)
        row_sum.fill(0.0)
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, self.columns // 4), self.values.element)
        staging = cute.make_tiled_copy_C(stmatrix, score[0]).get_slice(thread)
        # % if pieces
        of_piece = shared.weights[None, None, piece]
        by_key = cute.make_tensor(of_piece.iterator, cute.select(of_piece.layout, mode=[1, 0]))
        maxima = shared.maxima[None, None, piece]
        # % else
        by_key = cute.make_tensor(shared.weights.iterator, cute.select(shared.weights.layout, mode=[1, 0]))
        # % endif
        staged = staging.partition_D(by_key)
        first_row = self.keys.row_of(member, lane, 0)
        stage = Int32(0)
        phase = Int32(0)
        cute.arch.mbarrier_wait(shared.q_full, 0)
        self.keys.prepare(shared.queries, thread)  # % if not pieces
        self.keys.prepare(shared.queries, all_threads)  # % if pieces
        for first in cutlass.range(share.first_slot, share.last_slot, WARP, unroll=1):
            blocks, left = self.blocks_of_lanes(shared, share, first)
            # % if pieces
            if left != 0:
                self.keys.take(keys, shared.keys, stage, phase, None, thread, member, piece)
            # % endif
            while left != 0:
                first_key = cute.arch.shuffle_sync(blocks, first_bit(left)) * self.block_size
                left = left & (left - 1)
                first_key = first_key + ROWS * piece  # % if pieces
                of_keys = self.keys.factors(shared.keys, stage, phase, first_row)
                tile = self.keys.take(keys, shared.keys, stage, phase, None, thread)  # % if not pieces
                self.keys.multiply(score, S, tile, queries)  # % if not pieces
                self.keys.multiply(score, S, keys, queries)  # % if pieces
                of_values = self.values.factors(shared.values, stage, phase, first_row)
                # Hidden values weigh 0, which NaN and infinity would not be worth.
                valid = share.limit + 1 - first_key
                # % if pieces
                tile = self.values.take(values, shared.values, stage, phase, valid, thread, member, piece)
                # A wait that is over ends the basic block: in one with the next wait, ptxas decodes behind that.
                self.values.wait(shared.values, stage, phase)
                # % else
                if cutlass.const_expr(self.values.ahead):
                    tile = self.values.take(values, shared.values, stage, phase, valid, thread)
                # % endif
                warpgroup.wait_group(0)
                self.keys.release(shared.keys, stage)
                exact = cute.make_rmem_tensor(S.layout, Float32)
                room = share.limit - first_key - first_row
                factors = of_keys, of_values
                # % if pieces
                self.softmax(S, factors, exact, row_max, row_sum, scale, room, maxima, member, piece, scale_log2)
                # % else
                self.softmax(S, factors, exact, row_max, row_sum, scale, room, shared.maxima, member, scale_log2)
                # % endif
                rounded = cute.make_rmem_tensor(S.layout, self.values.element)
                rounded.store(exact.load().to(self.values.element))
                cute.copy(stmatrix, staging.retile(rounded), staged)
                # % if not pieces
                if cutlass.const_expr(not self.values.ahead):
                    tile = self.values.take(values, shared.values, stage, phase, valid, thread)
                # % endif
                cute.arch.fence_view_async_shared()
                self.meet()  # % if not pieces
                self.meet(piece)  # % if pieces
                self.values.multiply(weigh, part, tile, weights)
                # % if pieces
                if left != 0:
                    next_stage, next_phase = following(stage, phase, STAGES)
                    self.keys.take(keys, shared.keys, next_stage, next_phase, None, thread, member, piece)
                # % endif
                warpgroup.wait_group(0)
                self.values.release(shared.values, stage)
                for m in cutlass.range_constexpr(self.head_dim // ROWS):
                    for j in cutlass.range_constexpr(self.columns // 8):
                        for half in cutlass.range_constexpr(2):
                            for c in cutlass.range_constexpr(2):
                                place = self.place(c, half, j, m)
                                O[place] = O[place] * scale[c, j] + part[place]
                stage, phase = following(stage, phase, STAGES)
        # % if pieces
        if cutlass.const_expr(self.pieces > 1):
            self.merge(shared, O, row_max, row_sum, scale_log2, piece, thread)
        if piece == 0:
            self.emit(v, shared, share, O, row_max, row_sum, scale_log2, member, out, lse)
        # % else
        self.emit(v, shared, share, O, row_max, row_sum, scale_log2, member, out, lse)
        # % endif

    def place(self, c, half, j, m):
        """Where an accumulator has column 2 (lane % 4) + c + 8 j of the row 64 m + 16 warp + lane // 4 + 8 half."""
        return c + 2 * half + 4 * j + self.columns // 2 * m

    # % if pieces
    def meet(self, piece):
        """Until the consumers of a piece are here."""
        threads = self.cta.threads_of("consumer")
        cute.arch.barrier(barrier_id=1 + piece, number_of_threads=threads // self.pieces)

    def meet_all(self):
        """Until all consumers are here."""
        cute.arch.barrier(barrier_id=1 + self.pieces, number_of_threads=self.cta.threads_of("consumer"))

    # % else
    def meet(self):
        """Until all consumers are here."""
        cute.arch.barrier(barrier_id=1, number_of_threads=self.cta.threads_of("consumer"))

    # % endif
    @cute.jit
    def softmax(
        self, S: cute.Tensor, factors, exact: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor,
        scale: cute.Tensor, room: Int32, maxima: cute.Tensor, member: Int32,
        piece: Int32,  # % if pieces
        scale_log2: Float32,
    ):  # fmt: skip
        """exact = exp2((S - row_max) * scale_log2), with maxima over all blocks up to this one.

        Before, S takes the factors of its keys, and behind the sum exact takes those of their values, if there are any.
        The lane's first row sees the block's keys up to `room` rows further down. row_sum takes up the exponentials
        of the lane's own rows; `scale` is what earlier sums and products are worth now.
        """
        lane = cute.arch.lane_idx()
        tiles = self.block_size // ROWS  # % if not pieces
        tiles = 1  # % if pieces
        for j in cutlass.range_constexpr(self.columns // 8):
            for c in cutlass.range_constexpr(2):
                largest = -Float32.inf
                for m in cutlass.range_constexpr(tiles):
                    for half in cutlass.range_constexpr(2):
                        seen = room >= m * ROWS + half * 8
                        score = self.scaled(S[self.place(c, half, j, m)], factors[0], m, half)
                        largest = cute.arch.fmax(largest, pick_float(seen, score, -Float32.inf))
                for level in cutlass.range_constexpr(2, 5):
                    largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1 << level))
                if lane < 4:
                    maxima[member, 8 * j + 2 * lane + c] = largest
        self.meet()  # % if not pieces
        self.meet(piece)  # % if pieces
        for j in cutlass.range_constexpr(self.columns // 8):
            for c in cutlass.range_constexpr(2):
                of_warps = maxima[None, 8 * j + 2 * (lane % 4) + c].load()
                largest = row_max[c, j]
                for w in cutlass.range_constexpr(WARPS):
                    largest = cute.arch.fmax(largest, of_warps[w])
                scale[c, j] = cute.math.exp2((row_max[c, j] - largest) * scale_log2, fastmath=True)
                row_max[c, j] = largest
                shift = largest * scale_log2
                total = row_sum[c, j] * scale[c, j]
                for m in cutlass.range_constexpr(tiles):
                    for half in cutlass.range_constexpr(2):
                        seen = room >= m * ROWS + half * 8
                        score = self.scaled(S[self.place(c, half, j, m)], factors[0], m, half)
                        weight = cute.math.exp2(score * scale_log2 - shift, fastmath=True)
                        total = total + pick_float(seen, weight, Float32(0.0))
                        weight = self.scaled(weight, factors[1], m, half)
                        exact[self.place(c, half, j, m)] = pick_float(seen, weight, Float32(0.0))
                row_sum[c, j] = total

    def scaled(self, value, factors, m, half):
        """Times the factor of row 64 m + 8 half of a lane, if rows have any."""
        return value if factors is None else value * factors[2 * m + half]

    # % if pieces
    @cute.jit
    def merge(
        self, shared: Shared, O: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, scale_log2: Float32,
        piece: Int32, thread: Int32,
    ):  # fmt: skip
        """The first piece's maxima, sums and O take up those of the others, which leave them in shared memory."""
        if piece > 0:
            for i in cutlass.range_constexpr(cute.size(row_max)):
                shared.others[thread, 2 * i, piece - 1] = row_max[i]
                shared.others[thread, 2 * i + 1, piece - 1] = row_sum[i]
            for i in cutlass.range_constexpr(cute.size(O)):
                shared.others[thread, 2 * cute.size(row_max) + i, piece - 1] = O[i]
        self.meet_all()
        if piece == 0:
            for p in cutlass.range_constexpr(self.pieces - 1):
                for j in cutlass.range_constexpr(self.columns // 8):
                    for c in cutlass.range_constexpr(2):
                        number = 2 * (2 * j + c)
                        other_max = shared.others[thread, number, p]
                        largest = cute.arch.fmax(row_max[c, j], other_max)
                        own = cute.math.exp2((row_max[c, j] - largest) * scale_log2, fastmath=True)
                        other = cute.math.exp2((other_max - largest) * scale_log2, fastmath=True)
                        row_max[c, j] = largest
                        row_sum[c, j] = row_sum[c, j] * own + shared.others[thread, number + 1, p] * other
                        for m in cutlass.range_constexpr(self.head_dim // ROWS):
                            for half in cutlass.range_constexpr(2):
                                place = self.place(c, half, j, m)
                                its = shared.others[thread, 2 * cute.size(row_max) + place, p]
                                O[place] = O[place] * own + its * other

    # % endif
    @cute.jit
    def emit(
        self, v: tuple, shared: Shared, share: Share, O: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor,
        scale_log2: Float32, member: Int32, out: cute.Tensor, lse: cute.Tensor,
    ):  # fmt: skip
        """Add up the sums of all rows, normalise, and write out [heads, head_dim] and lse [heads] of the split."""
        lane = cute.arch.lane_idx()
        for j in cutlass.range_constexpr(self.columns // 8):
            for c in cutlass.range_constexpr(2):
                total = row_sum[c, j]
                for level in cutlass.range_constexpr(2, 5):
                    total = total + cute.arch.shuffle_sync_bfly(total, 1 << level)
                if lane < 4:
                    shared.sums[member, 8 * j + 2 * lane + c] = total
        self.meet()  # % if not pieces
        self.meet(0)  # % if pieces
        for j in cutlass.range_constexpr(self.columns // 8):
            for c in cutlass.range_constexpr(2):
                column = 8 * j + 2 * (lane % 4) + c
                of_warps = shared.sums[None, column].load()
                total = Float32(0.0)
                for w in cutlass.range_constexpr(WARPS):
                    total = total + of_warps[w]
                inverse = Float32(0.0)
                log = -Float32.inf
                if total != 0.0:  # NaN goes on
                    inverse = self.values.fold(cute.arch.rcp_approx(total), v, share.head)
                    log = softmax.log_sum(row_max[c, j], total, scale_log2)
                if column < self.group:
                    row = out[share.head * self.group + column, None]
                    for m in cutlass.range_constexpr(self.head_dim // ROWS):
                        for half in cutlass.range_constexpr(2):
                            place = m * ROWS + self.values.row_of(member, lane, half)  # % if not pieces
                            place = self.values.column_of(member, lane, half, m)  # % if pieces
                            row[place] = (O[self.place(c, half, j, m)] * inverse).to(ELEMENTS[OUTPUT])
                    if (member == 0) & (lane < 4):
                        lse[share.head * self.group + column] = log
