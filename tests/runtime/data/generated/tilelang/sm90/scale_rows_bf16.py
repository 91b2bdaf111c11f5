"""Multiply every row of a matrix by a number: the least kernel that has a variant, a capacity and a scalar."""

import tilelang.language as T


def scale_rows(width: int, capacity: int):
    """Kernel over x, y float32 [rows, width]: y = x * factor, in tiles of `capacity` rows."""
    rows = T.dynamic("rows")

    @T.prim_func
    def scale_rows_kernel(
        x: T.Tensor((rows, width), "float32"), y: T.Tensor((rows, width), "float32"), factor: T.float32
    ):
        with T.Kernel(T.ceildiv(rows, capacity), threads=64) as tile:
            x_shared = T.alloc_shared((capacity, width), "float32")
            for r, i in T.Parallel(capacity, width):
                x_shared[r, i] = x[T.min(tile * capacity + r, rows - 1), i]
            for r, i in T.Parallel(capacity, width):
                if tile * capacity + r < rows:
                    y[tile * capacity + r, i] = x_shared[r, i] * factor

    return scale_rows_kernel
