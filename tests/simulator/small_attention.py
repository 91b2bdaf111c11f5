"""A small attention kernel with everything that the simulator has to get right; the fault tests break copies of it.

Each tile of 64 queries reads the key blocks that its row of ids names; a negative id names none. A producer warpgroup
loads Q, K and V by TMA, a consumer warpgroup multiplies, keeps an online softmax, and stores through shared memory.
"""

# ruff: noqa: E741

import tilelang.language as T

ROWS = 64
BLOCK = 64
DIM = 64
STAGES = 2


def attention():
    total_q, total_k, tiles, count, blocks = T.dynamic("total_q, total_k, tiles, count, blocks")

    @T.prim_func
    def main(
        q: T.Tensor((total_q, DIM), "bfloat16"),
        k: T.Tensor((total_k, DIM), "bfloat16"),
        v: T.Tensor((total_k, DIM), "bfloat16"),
        ids: T.Tensor((tiles, count), "int32"),
        visible: T.Tensor((blocks,), "int32"),
        out: T.Tensor((total_q, DIM), "bfloat16"),
        scale_log2: T.float32,
    ):
        with T.Kernel(1, threads=256):
            Q_shared = T.alloc_shared([ROWS, DIM], "bfloat16")
            K_shared = T.alloc_shared([STAGES, BLOCK, DIM], "bfloat16")
            V_shared = T.alloc_shared([STAGES, BLOCK, DIM], "bfloat16")
            O_shared = T.alloc_shared([ROWS, DIM], "bfloat16")
            q_full = T.alloc_barrier(arrive_count=128)
            q_free = T.alloc_barrier(arrive_count=128)
            k_full = T.alloc_barrier(arrive_count=[128] * STAGES)
            v_full = T.alloc_barrier(arrive_count=[128] * STAGES)
            kv_free = T.alloc_barrier(arrive_count=[128] * STAGES)
            S = T.alloc_fragment([ROWS, BLOCK], "float32")
            P = T.alloc_fragment([ROWS, BLOCK], "bfloat16")
            O = T.alloc_fragment([ROWS, DIM], "float32")
            row_max = T.alloc_fragment([ROWS], "float32")
            old_max = T.alloc_fragment([ROWS], "float32")
            row_sum = T.alloc_fragment([ROWS], "float32")
            part = T.alloc_fragment([ROWS], "float32")
            stage = T.alloc_var("int32")
            phase = T.alloc_var("int32")
            tx = T.get_thread_binding()
            stage = 0
            phase = 0
            if tx >= 128:
                T.set_max_nreg(24, 0)
                for tile in T.serial(tiles):
                    T.barrier_wait(q_free, (tile & 1) ^ 1)
                    T.tma_copy(q[tile * ROWS : tile * ROWS + ROWS, :], Q_shared, barrier=q_full)
                    T.barrier_arrive(q_full)
                    for n in T.serial(count):
                        first = T.max(ids[tile, n], 0) * BLOCK
                        T.barrier_wait(kv_free[stage], phase ^ 1)
                        T.tma_copy(k[first : first + BLOCK, :], K_shared[stage, :, :], barrier=k_full[stage])
                        T.barrier_arrive(k_full[stage])
                        T.tma_copy(v[first : first + BLOCK, :], V_shared[stage, :, :], barrier=v_full[stage])
                        T.barrier_arrive(v_full[stage])
                        stage = stage + 1
                        if stage == STAGES:
                            stage = 0
                            phase = phase ^ 1
            else:
                T.set_max_nreg(240, 1)
                for tile in T.serial(tiles):
                    T.fill(row_max, -T.infinity("float32"))
                    T.fill(row_sum, 0.0)
                    T.barrier_wait(q_full, tile & 1)
                    for n in T.serial(count):
                        id = ids[tile, n]
                        keys = T.if_then_else(id < 0, 0, visible[T.max(id, 0)])
                        T.barrier_wait(k_full[stage], phase)
                        T.wgmma_gemm(Q_shared, K_shared[stage, :, :], S, transpose_B=True, clear_accum=True)
                        T.wait_wgmma(0)
                        if n == count - 1:
                            T.barrier_arrive(q_free)
                        for i, j in T.Parallel(ROWS, BLOCK):
                            S[i, j] = T.if_then_else(j < keys, S[i, j], T.float32(-1e30))
                        T.copy(row_max, old_max)
                        T.reduce_max(S, row_max, dim=1, clear=False)
                        for i, j in T.Parallel(ROWS, BLOCK):
                            S[i, j] = T.exp2((S[i, j] - row_max[i]) * scale_log2)
                        T.reduce_sum(S, part, dim=1)
                        for i in T.Parallel(ROWS):
                            old_max[i] = T.exp2((old_max[i] - row_max[i]) * scale_log2)
                        for i in T.Parallel(ROWS):
                            row_sum[i] = row_sum[i] * old_max[i] + part[i]
                        if n > 0:
                            for i, j in T.Parallel(ROWS, DIM):
                                O[i, j] = O[i, j] * old_max[i]
                        T.copy(S, P)
                        T.barrier_wait(v_full[stage], phase)
                        T.wgmma_gemm(P, V_shared[stage, :, :], O, clear_accum=n == 0)
                        T.wait_wgmma(0)
                        T.barrier_arrive(kv_free[stage])
                        stage = stage + 1
                        if stage == STAGES:
                            stage = 0
                            phase = phase ^ 1
                    for i, j in T.Parallel(ROWS, DIM):
                        O[i, j] = O[i, j] / row_sum[i]
                    T.tma_store_wait(0)
                    T.sync_threads(8, 128)
                    T.copy(O, O_shared)
                    T.fence_proxy_async()
                    T.sync_threads(8, 128)
                    T.tma_copy(O_shared, out[tile * ROWS : tile * ROWS + ROWS, :])
                T.tma_store_wait(0)

    return main
