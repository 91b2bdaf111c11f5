"""Kernels that are sound TileLang and beyond the simulator, or whose arguments the tests get wrong."""

import tilelang.language as T


def scaled():
    """out = x * factor, one element a thread."""
    n, stride = T.dynamic("n, stride")

    @T.prim_func
    def main(
        x: T.StridedTensor((n, 32), (stride, 1), "float32"),
        out: T.Tensor((n, 32), "float32"),
        factor: T.float32,
        count: T.int32,
    ):
        with T.Kernel(n, threads=32) as row:
            tx = T.get_thread_binding()
            if row < count:
                out[row, tx] = x[row, tx] * factor

    return main


def multiplied():
    """T.gemm leaves fences and waits to the compiler."""

    @T.prim_func
    def main(a: T.Tensor((64, 64), "bfloat16"), out: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            A = T.alloc_shared([64, 64], "bfloat16")
            C = T.alloc_fragment([64, 64], "float32")
            T.copy(a, A)
            T.gemm(A, A, C, transpose_B=True, clear_accum=True)
            T.copy(C, out)

    return main


def pipelined():
    """T.Pipelined leaves the stages to the compiler."""

    @T.prim_func
    def main(a: T.Tensor((4, 64, 64), "float32"), out: T.Tensor((4, 64, 64), "float32")):
        with T.Kernel(1, threads=128):
            A = T.alloc_shared([64, 64], "float32")
            for step in T.Pipelined(4, num_stages=2):
                T.copy(a[step, :, :], A)
                T.copy(A, out[step, :, :])

    return main


def accumulated():
    """A scan is not a tile operation of the simulator."""

    @T.prim_func
    def main(a: T.Tensor((64, 64), "float32"), out: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            C = T.alloc_fragment([64, 64], "float32")
            T.copy(a, C)
            T.cumsum(C, dim=1)
            T.copy(C, out)

    return main


def printed():
    """T.print has no meaning here."""

    @T.prim_func
    def main(out: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            T.print(tx)
            out[tx] = tx

    return main


def voted():
    """A vote that names some lanes only."""

    @T.prim_func
    def main(out: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            out[tx] = T.any_sync(tx == 3, mask=0xFF)

    return main


def hinted():
    """A loop with an annotation that may mean anything."""

    @T.prim_func
    def main(out: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.serial(32, annotations={"pragma_unknown": 1}):
                out[i] = i

    return main


def narrow():
    """An element type that is not simulated."""

    @T.prim_func
    def main(out: T.Tensor((32,), "float8_e5m2")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            out[tx] = T.cast(tx, "float8_e5m2")

    return main


def moved():
    """TMA from a tensor with a stride that it cannot have."""
    stride = T.dynamic("stride")

    @T.prim_func
    def main(x: T.StridedTensor((64, 64), (stride, 1), "bfloat16"), out: T.Tensor((64, 64), "bfloat16")):
        with T.Kernel(1, threads=128):
            A = T.alloc_shared([64, 64], "bfloat16")
            C = T.alloc_fragment([64, 64], "bfloat16")
            full = T.alloc_barrier(arrive_count=128)
            T.tma_copy(x, A, barrier=full)
            T.barrier_arrive(full)
            T.barrier_wait(full, 0)
            T.copy(A, C)
            T.copy(C, out)

    return main
