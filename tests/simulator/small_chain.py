"""A small kernel whose second product reads tensor memory: (Q K^T) V for every block of keys, without a softmax.

Warps 0 to 3 store the first product as BF16, warps 4 to 7 read the second, warp 8 loads, warp 9 multiplies: the first
product of a block before the second one of the block before it. Only the first USED rows of Q are ever loaded. The
fault tests break copies of it.
"""

import tilelang.language as T

ROWS = 128
USED = 96
BLOCK = 64
DIM = 64


def chain():
    total_k, blocks = T.dynamic("total_k, blocks")

    @T.prim_func
    def main(
        q: T.Tensor((USED, DIM), "bfloat16"),
        k: T.Tensor((total_k, DIM), "bfloat16"),
        v: T.Tensor((total_k, DIM), "bfloat16"),
        out: T.Tensor((blocks, USED, DIM), "float32"),
    ):
        with T.Kernel(1, threads=384):
            Q_shared = T.alloc_shared([ROWS, DIM], "bfloat16")
            K_shared = T.alloc_shared([2, BLOCK, DIM], "bfloat16")
            V_shared = T.alloc_shared([2, BLOCK, DIM], "bfloat16")
            S = T.alloc_tmem([ROWS, BLOCK], "float32")
            P = T.alloc_tmem([ROWS, BLOCK], "bfloat16")
            PV = T.alloc_tmem([ROWS, DIM], "float32")
            full = T.alloc_barrier(arrive_count=[32] * 2)
            free = T.alloc_barrier(arrive_count=[1] * 2)
            s_full = T.alloc_barrier(arrive_count=1)
            s_free = T.alloc_barrier(arrive_count=128)
            p_full = T.alloc_barrier(arrive_count=128)
            p_free = T.alloc_barrier(arrive_count=1)
            o_full = T.alloc_barrier(arrive_count=1)
            o_free = T.alloc_barrier(arrive_count=128)
            part = T.alloc_fragment([ROWS, BLOCK], "float32")
            rounded = T.alloc_fragment([ROWS, BLOCK], "bfloat16")
            result = T.alloc_fragment([ROWS, DIM], "float32")
            tx = T.get_thread_binding()
            if tx < 128:
                for block in T.serial(blocks):
                    T.barrier_wait(s_full, block & 1)
                    T.copy(S, part)
                    T.barrier_arrive(s_free)
                    T.copy(part, rounded)
                    T.barrier_wait(p_free, (block & 1) ^ 1)
                    T.copy(rounded, P)
                    T.barrier_arrive(p_full)
            elif tx < 256:
                for block in T.serial(blocks):
                    T.barrier_wait(o_full, block & 1)
                    T.copy(PV, result)
                    T.barrier_arrive(o_free)
                    for i, j in T.Parallel(ROWS, DIM):
                        if i < USED:
                            out[block, i, j] = result[i, j]
            else:
                T.set_max_nreg(40, 0)
                if tx < 288:
                    for block in T.serial(blocks):
                        first = block * BLOCK
                        stage = block & 1
                        T.barrier_wait(free[stage], ((block >> 1) & 1) ^ 1)
                        if block == 0:
                            T.tma_copy(q[0:USED, :], Q_shared[0:USED, :], barrier=full[stage])
                        T.tma_copy(k[first : first + BLOCK, :], K_shared[stage, :, :], barrier=full[stage])
                        T.tma_copy(v[first : first + BLOCK, :], V_shared[stage, :, :], barrier=full[stage])
                        T.barrier_arrive(full[stage])
                elif tx < 320:
                    for block in T.serial(blocks + 1):
                        before = block - 1
                        if block < blocks:
                            T.barrier_wait(full[block & 1], (block >> 1) & 1)
                            T.barrier_wait(s_free, (block & 1) ^ 1)
                            T.tcgen05_gemm(
                                Q_shared, K_shared[block & 1, :, :], S, transpose_B=True, clear_accum=True, mbar=None
                            )
                            T.tcgen05_mma_arrive(s_full)
                        if block > 0:
                            T.barrier_wait(o_free, (before & 1) ^ 1)
                            T.barrier_wait(p_full, before & 1)
                            T.tcgen05_gemm(P, V_shared[before & 1, :, :], PV, clear_accum=True, mbar=None)
                            T.tcgen05_mma_arrive(free[before & 1])
                            T.tcgen05_mma_arrive(p_free)
                            T.tcgen05_mma_arrive(o_full)
            T.sync_threads()

    return main
