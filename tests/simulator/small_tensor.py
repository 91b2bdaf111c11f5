"""A small kernel that accumulates in tensor memory: the largest product of each query with the keys of each block.

Warps 0 to 3 read, warp 4 loads, warp 5 multiplies. The fault tests break copies of it.
"""

import tilelang.language as T

ROWS = 128
BLOCK = 64
DIM = 64
STAGES = 3


def maxima():
    total_k, blocks = T.dynamic("total_k, blocks")

    @T.prim_func
    def main(
        q: T.Tensor((ROWS, DIM), "bfloat16"),
        k: T.Tensor((total_k, DIM), "bfloat16"),
        out: T.Tensor((blocks, ROWS), "float32"),
    ):
        with T.Kernel(1, threads=256):
            Q_shared = T.alloc_shared([ROWS, DIM], "bfloat16")
            K_shared = T.alloc_shared([STAGES, BLOCK, DIM], "bfloat16")
            S = T.alloc_tmem([2, ROWS, BLOCK], "float32")
            q_full = T.alloc_barrier(arrive_count=32)
            k_full = T.alloc_barrier(arrive_count=[32] * STAGES)
            k_free = T.alloc_barrier(arrive_count=[1] * STAGES)
            s_full = T.alloc_barrier(arrive_count=[1] * 2)
            s_free = T.alloc_barrier(arrive_count=[128] * 2)
            part = T.alloc_fragment([ROWS, BLOCK], "float32")
            row_max = T.alloc_fragment([ROWS], "float32")
            tx = T.get_thread_binding()
            if tx < 128:
                for block in T.serial(blocks):
                    place = block % 2
                    T.barrier_wait(s_full[place], (block // 2) & 1)
                    T.copy(S[place, :, :], part)
                    T.barrier_arrive(s_free[place])
                    T.reduce_max(part, row_max, dim=1)
                    T.copy(row_max, out[block, :])
            if tx >= 128 and tx < 160:
                T.tma_copy(q[0:ROWS, :], Q_shared, barrier=q_full)
                T.barrier_arrive(q_full)
                for block in T.serial(blocks):
                    stage = block % STAGES
                    first = block * BLOCK
                    T.barrier_wait(k_free[stage], ((block // STAGES) & 1) ^ 1)
                    T.tma_copy(k[first : first + BLOCK, :], K_shared[stage, :, :], barrier=k_full[stage])
                    T.barrier_arrive(k_full[stage])
            if tx >= 160 and tx < 192:
                T.barrier_wait(q_full, 0)
                for block in T.serial(blocks):
                    stage = block % STAGES
                    place = block % 2
                    T.barrier_wait(k_full[stage], (block // STAGES) & 1)
                    T.barrier_wait(s_free[place], ((block // 2) & 1) ^ 1)
                    T.tcgen05_gemm(
                        Q_shared, K_shared[stage, :, :], S[place, :, :], transpose_B=True, clear_accum=True, mbar=None
                    )
                    T.tcgen05_mma_arrive(k_free[stage])
                    T.tcgen05_mma_arrive(s_full[place])
            T.sync_threads()

    return main
