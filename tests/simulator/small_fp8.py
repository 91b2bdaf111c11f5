"""Small kernels that multiply e4m3 tiles; the tests run them, and one that mixes types or majors."""

import tilelang.language as T

ROWS, COLUMNS, DEPTH = 64, 64, 128


def multiplied():
    """out = a b^T of one tile each."""
    return _product((ROWS, DEPTH), (COLUMNS, DEPTH), "float8_e4m3fn", True)


def multiplied_across():
    """out = a b: K runs down the columns of b."""
    return _product((ROWS, DEPTH), (DEPTH, COLUMNS), "float8_e4m3fn", False)


def multiplied_mixed():
    """a is bfloat16."""
    return _product((ROWS, DEPTH), (COLUMNS, DEPTH), "bfloat16", True)


def _product(a_shape, b_shape, a_element, transpose_b):
    @T.prim_func
    def main(
        a: T.Tensor(a_shape, a_element),
        b: T.Tensor(b_shape, "float8_e4m3fn"),
        out: T.Tensor((ROWS, COLUMNS), "float32"),
    ):
        with T.Kernel(1, threads=128):
            A_shared = T.alloc_shared(a_shape, a_element)
            B_shared = T.alloc_shared(b_shape, "float8_e4m3fn")
            C = T.alloc_fragment([ROWS, COLUMNS], "float32")
            full = T.alloc_barrier(arrive_count=128)
            T.tma_copy(a, A_shared, barrier=full)
            T.tma_copy(b, B_shared, barrier=full)
            T.barrier_arrive(full)
            T.barrier_wait(full, 0)
            T.wgmma_gemm(A_shared, B_shared, C, transpose_B=transpose_b, clear_accum=True)
            T.wait_wgmma(0)
            T.copy(C, out)

    return main
