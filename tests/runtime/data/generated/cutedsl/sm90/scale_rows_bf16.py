"""Multiply every row of a matrix by a number: the least kernel that has a variant, a capacity and a scalar."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

THREADS = 64


def scale_rows(width: int, capacity: int):
    """Kernel over x, y float32 [rows, width]: y = x * factor, in tiles of `capacity` rows."""
    kernel = ScaleRows(width, capacity)
    rows = cute.sym_int()
    x, y = (make_fake_tensor(Float32, (rows, width), (width, 1)) for _ in range(2))
    return kernel, (x, y, Float32(1.0), make_fake_stream(use_tvm_ffi_env_stream=True))


class ScaleRows:
    def __init__(self, width, capacity):
        self.width, self.capacity = width, capacity

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, factor: Float32, stream):
        self.kernel(x, y, factor).launch(
            grid=(cute.ceil_div(x.shape[0], self.capacity), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, factor: Float32):
        thread, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        x_shared = SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((self.capacity, self.width), stride=(self.width, 1))
        )
        for r in cutlass.range_constexpr(self.capacity):
            for i in cutlass.range_constexpr(self.width // THREADS):
                row = cutlass.min(tile * self.capacity + r, x.shape[0] - 1)
                x_shared[r, i * THREADS + thread] = x[row, i * THREADS + thread]
        for r in cutlass.range_constexpr(self.capacity):
            if tile * self.capacity + r < x.shape[0]:
                for i in cutlass.range_constexpr(self.width // THREADS):
                    y[tile * self.capacity + r, i * THREADS + thread] = x_shared[r, i * THREADS + thread] * factor
