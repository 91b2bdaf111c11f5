"""The consumer warps of the index_kl kernel: the order of their products and of what hides behind them."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from msa_tiles.dsl.cutedsl.kl.grading import Grading
from msa_tiles.dsl.cutedsl.kl.layout import FIRST, GROUP, LAST, Shared
from msa_tiles.dsl.cutedsl.kl.results import Results, Writers
from msa_tiles.dsl.cutedsl.kl.tile import Tile, Tiles
from msa_tiles.dsl.cutedsl.pipeline import arrive, following, preceding


class Consumers(Tiles, Grading, Writers):
    """What a warp of a consumer warpgroup does."""

    @cute.jit
    def consume(
        self, gradients: cutlass.Constexpr, shared: Shared, results: Results, scale_log2: Float32,
        index_scale_log2: Float32, warp_index: Int32,
    ):  # fmt: skip
        """A warp of a consumer."""
        cute.arch.mbarrier_wait(shared.chunk_full, 0)
        if shared.headers[0, 0] >= 0:
            tile = self.tile(shared, scale_log2, index_scale_log2, warp_index)
            self.load_keys(shared, tile, Int32(0))
            slot = Int32(0)
            phase = Int32(0)
            real = Int32(1)
            cute.arch.mbarrier_wait(shared.q_full, 0)
            self.multiply_tile(tile, 0, slot)
            warpgroup.wait_group(0)
            slot, phase = self.release_tile(shared, real, slot, phase)
            cute.arch.mbarrier_wait(shared.q_full + slot, phase)
            self.multiply_tile(tile, 1, slot)
            self.teacher_columns(tile, 0, shared.lse[None, None, None, 0])
            warpgroup.wait_group(0)
            slot, phase = self.release_tile(shared, real, slot, phase)
            number = Int32(0)
            buffer = Int32(0)
            chunk_phase = Int32(0)
            while real > 0:
                slot, phase, buffer, chunk_phase, real = self.step(
                    gradients, shared, results, tile, slot, phase, number, buffer, chunk_phase
                )
                number = number + 1
            if cutlass.const_expr(gradients):
                # What the loop has left for later.
                before, phase_before = preceding(buffer, chunk_phase, self.chunks)
                self.finish(shared, results, tile, number, before)
                cute.arch.mbarrier_wait(shared.exchanged_full + before, phase_before)
                self.multiply_keys_transposed(tile, before, shared.headers[before, 4] & 1)
                warpgroup.wait_group(0)
                self.store_queries(shared, results, tile, before)

    @cute.jit
    def step(
        self, gradients: cutlass.Constexpr, shared: Shared, results: Results, tile: Tile, slot: Int32, phase: Int32,
        number: Int32, buffer: Int32, chunk_phase: Int32,
    ):  # fmt: skip
        """One chunk, S of its second tile done and its first one taken in, and as much of the next chunk."""
        bits = shared.headers[buffer, 0]
        turn = shared.headers[buffer, 4]
        before, phase_before = preceding(buffer, chunk_phase, self.chunks)
        after, phase_after = following(buffer, chunk_phase, self.chunks)
        real = Int32(1)  # whether there is a next chunk
        for t in cutlass.range_constexpr(1, self.tiles):
            if cutlass.const_expr(t + 1 == self.tiles):
                if (bits & FIRST) != 0:
                    self.receive_index_keys(shared, tile, shared.headers[buffer, 3], turn)
                left, right = tile.keys[None, tile.consumer, None, turn & 1], tile.index_queries[None, 0, None, buffer]
                multiply(tile.score_product, tile.scores[None, 0, 0], left, right)
                if cutlass.const_expr(gradients and self.tiles == 2):
                    self.finish(shared, results, tile, number, before)
                cute.arch.mbarrier_wait(shared.chunk_full + after, phase_after)
                bits_after = shared.headers[after, 0]
                if bits_after < 0:
                    real = Int32(0)
                elif (bits_after & FIRST) != 0:
                    self.load_keys(shared, tile, shared.headers[after, 4] & 1)
            if real > 0:
                cute.arch.mbarrier_wait(shared.q_full + slot, phase)
            # Past the end of the stream this multiplies a stale tile and the result is dropped: waits stay uniform.
            self.multiply_tile(tile, (t + 1) % 2, slot)
            if cutlass.const_expr(gradients and t == 1 and self.tiles > 2):
                self.finish(shared, results, tile, number, before)
            self.teacher_columns(tile, t, shared.lse[None, None, None, buffer])
            if cutlass.const_expr(t + 1 < self.tiles):
                warpgroup.wait_group(0)
                slot, phase = self.release_tile(shared, real, slot, phase)
        warpgroup.wait_group(1)
        self.score_gradients(shared, tile, buffer)
        if (bits & LAST) != 0:
            self.store_loss(shared, results, tile, buffer)
        if cutlass.const_expr(gradients):
            # Whoever has written dS of the chunk before is done with the one that stands where this one goes.
            if number > 0:
                cute.arch.mbarrier_wait(shared.exchanged_full + before, phase_before)
            self.stage(tile, buffer)
            arrive(shared.exchanged_full + buffer)
            self.multiply_queries(tile, buffer, (bits & FIRST) == 0)
            # Before the first chunk this multiplies anything, and the result is dropped.
            self.multiply_keys_transposed(tile, before, shared.headers[before, 4] & 1)
            warpgroup.wait_group(1 + self.own_tiles)
        else:
            warpgroup.wait_group(0)
            arrive(shared.chunk_free + buffer)
            if (bits & LAST) != 0:
                arrive(shared.keys_free + (turn & 1))
        slot, phase = self.release_tile(shared, real, slot, phase)
        if real > 0:
            cute.arch.mbarrier_wait(shared.q_full + slot, phase)
        self.multiply_tile(tile, 1, slot)
        self.teacher_columns(tile, 0, shared.lse[None, None, None, after])
        warpgroup.wait_group(0)
        slot, phase = self.release_tile(shared, real, slot, phase)
        if cutlass.const_expr(gradients):
            if number > 0:
                if (shared.headers[before, 0] & LAST) != 0:
                    arrive(shared.keys_free + (shared.headers[before, 4] & 1))
        return slot, phase, after, phase_after, real

    @cute.jit
    def release_tile(self, shared: Shared, real: Int32, slot: Int32, phase: Int32):
        """A slot's tile is multiplied: the next slot and its phase. Past the end of the stream nothing changes."""
        if real > 0:
            arrive(shared.q_free + slot)
            slot, phase = following(slot, phase, self.stages)
        return slot, phase

    @cute.jit
    def load_keys(self, shared: Shared, tile: Tile, parity: Int32):
        """K of a task -> registers."""
        cute.arch.mbarrier_wait(shared.k_full, parity)
        atom, loading, block = tile.loading
        cute.copy(atom, block[None, tile.consumer, None, 0], loading.retile(tile.K)[None, 0, None])
        arrive(shared.k_free)

    @cute.jit
    def receive_index_keys(self, shared: Shared, tile: Tile, valid: Int32, turn: Int32):
        """Wait for a task's index keys, and clear what is behind those of the request."""
        cute.arch.mbarrier_wait(shared.keys_full + (turn & 1), (turn >> 1) & 1)
        if valid < self.block_size:
            # All rows, though those of other consumers too are cleared by them: d_idx_q needs all.
            thread = cute.arch.thread_idx()[0] % GROUP
            self.index_blocks.clear_rows(shared.keys[None, None, turn & 1], valid, thread, GROUP)
            cute.arch.barrier(barrier_id=1 + tile.consumer, number_of_threads=GROUP)

    def multiply_tile(self, tile, odd, slot):
        """Start S of the tile in a slot."""
        multiply(tile.score, tile.S[odd][None, 0, 0], tile.K[None, 0, None], tile.queries[None, 0, None, slot])

    @cute.jit
    def stage(self, tile: Tile, buffer: Int32):
        """This warp's keys of dS -> shared memory, for the products of all consumers."""
        atom, staging, target = tile.staging
        rounded = cute.make_tensor(tile.dS.iterator, tile.scores.layout)
        cute.copy(atom, staging.retile(rounded)[None, 0, None], target[None, tile.consumer, None, buffer])
        cute.arch.fence_view_async_shared()

    @cute.jit
    def multiply_queries(self, tile: Tile, buffer: Int32, further: Boolean):
        """Start dk = dS idx_q, added to what was there if `further`."""
        # Made here, because a multiplication that is told at run time what to do is a new value, which cannot leave
        # the loop.
        first, rest = self.sum_keys()
        first.set(warpgroup.Field.ACCUMULATE, further)
        right = tile.index_columns[None, 0, None, buffer]
        multiply((first, rest), tile.dk[None, 0, 0], tile.dS[None, 0, None], right)

    @cute.jit
    def multiply_keys_transposed(self, tile: Tile, buffer: Int32, keys: Int32):
        """Start dq = idx_k^T dS for this consumer's rows of it."""
        for own in cutlass.range_constexpr(self.own_tiles):
            left = tile.key_columns[None, self.tile_of(tile.consumer, own), None, keys]
            multiply(tile.query_product, tile.dq[None, own, 0], left, tile.weights[None, 0, None, buffer])

    @cute.jit
    def finish(self, shared: Shared, results: Results, tile: Tile, number: Int32, before: Int32):
        """Once the chunk in `before` is done: store d_idx_q of the one before it, and d_idx_k if its task is done."""
        if number > 1:
            place, _ = preceding(before, Int32(0), self.chunks)
            self.store_queries(shared, results, tile, place)
            arrive(shared.chunk_free + place)
        if number > 0:
            if (shared.headers[before, 0] & LAST) != 0:
                self.store_keys(shared, results, tile, before)


@cute.jit
def multiply(multiplications, into: cute.Tensor, left: cute.Tensor, right: cute.Tensor):
    """Start into = left x right for one tile of each, operands [values, steps], and close the group."""
    warpgroup.fence()
    total = cute.append_ones(into, 3)
    for step in cutlass.range_constexpr(cute.size(left, mode=[1])):
        mma = multiplications[0] if cutlass.const_expr(step == 0) else multiplications[1]
        cute.gemm(mma, total, cute.append_ones(left[None, step]), cute.append_ones(right[None, step]), total)
    warpgroup.commit_group()
