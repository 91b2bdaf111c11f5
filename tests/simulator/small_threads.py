"""Small kernels of threads that go their own ways; the tests run them and broken copies of them."""

# ruff: noqa: SIM108

import tilelang.language as T

THREADS = 128


def arithmetic():
    """Integer and float operations, one result a row."""
    n = T.dynamic("n")

    @T.prim_func
    def main(
        a: T.Tensor((n,), "int32"),
        b: T.Tensor((n,), "int32"),
        x: T.Tensor((n,), "float32"),
        whole: T.Tensor((12, n), "int32"),
        real: T.Tensor((8, n), "float32"),
        factor: T.float32,
        offset: T.int32,
    ):
        with T.Kernel(T.ceildiv(n, THREADS), threads=THREADS) as block:
            i = block * THREADS + T.get_thread_binding()
            if i < n:
                whole[0, i] = T.truncdiv(a[i], b[i])
                whole[1, i] = T.truncmod(a[i], b[i])
                whole[2, i] = a[i] // b[i]
                whole[3, i] = a[i] % b[i]
                whole[4, i] = T.max(a[i], b[i]) - T.min(a[i], offset)
                whole[5, i] = (a[i] & 0xFF) | (b[i] ^ 3)
                whole[6, i] = a[i] >> 2
                whole[7, i] = T.reinterpret(T.reinterpret(a[i], "uint32") << T.uint32(5), "int32")
                whole[8, i] = T.reinterpret(x[i], "int32")
                whole[9, i] = T.if_then_else(a[i] > 0 and b[i] > 0, 1, T.if_then_else(a[i] < 0 or b[i] < 0, 2, 3))
                whole[10, i] = T.cast(x[i], "int32")
                whole[11, i] = a[i] * 65537
                real[0, i] = T.exp2(x[i]) * factor
                real[1, i] = T.log2(T.abs(x[i]) + 1.0)
                real[2, i] = T.max(x[i], T.reinterpret(T.int32(0x7FC00000), "float32"))
                real[3, i] = T.cast(T.cast(x[i], "bfloat16"), "float32")
                real[4, i] = x[i] / T.cast(b[i], "float32")
                real[5, i] = T.sqrt(T.abs(x[i]))
                real[6, i] = T.if_then_else(x[i] > 0.0, T.infinity("float32"), -T.infinity("float32"))
                real[7, i] = T.min(x[i], factor)

    return main


def divergent():
    """Loops whose trip counts differ between threads, and between warps."""
    n = T.dynamic("n")

    @T.prim_func
    def main(counts: T.Tensor((n,), "int32"), steps: T.Tensor((n,), "int32"), sums: T.Tensor((n,), "int32")):
        with T.Kernel(T.ceildiv(n, THREADS), threads=THREADS) as block:
            value = T.alloc_var("int32")
            step = T.alloc_var("int32")
            seen = T.alloc_local([4], "int32")
            tx = T.get_thread_binding()
            i = block * THREADS + tx
            if i < n:
                value = counts[i]
                step = 0
                for j in T.unroll(4):
                    seen[j] = 0
                while value > 1:
                    if value % 2 == 0:
                        value = value // 2
                    else:
                        value = value * 3 + 1
                    seen[value % 4] = seen[value % 4] + 1
                    step = step + 1
                steps[i] = step
                value = 0
                for j in T.serial(counts[i]):
                    for h in T.serial(tx // 32 + 1):
                        value = value + j * h
                sums[i] = value + seen[0] * 1000

    return main


def reduction():
    """Row sums: lanes by shuffles, warps through shared memory."""
    rows = T.dynamic("rows")
    row_stride = T.dynamic("row_stride")

    @T.prim_func
    def main(x: T.StridedTensor((rows, THREADS), (row_stride, 1), "float32"), sums: T.Tensor((rows, 2), "float32")):
        with T.Kernel(rows, threads=THREADS) as row:
            partial = T.alloc_shared([4], "float32", scope="shared.dyn")
            mine = T.alloc_var("float32")
            other = T.alloc_var("float32")
            tx = T.get_thread_binding()
            mine = x[row, tx]
            for level in T.unroll(5):
                mine = mine + T.shfl_xor(mine, 1 << level)
            partial[tx // 32] = mine
            T.sync_threads()
            mine = 0.0
            for w in T.unroll(4):
                mine = mine + partial[w]
            other = x[row, tx]
            for level in T.unroll(5):
                other = other + T.shfl_down(other, 16 >> level)
            if tx == 0:
                sums[row, 0] = mine
                sums[row, 1] = other

    return main


def votes():
    """What the lanes of a warp tell each other: one row for each operation. Warp w asks whether x is above w."""

    @T.prim_func
    def main(x: T.Tensor((THREADS,), "int32"), out: T.Tensor((5, THREADS), "int32")):
        with T.Kernel(1, threads=THREADS):
            bits = T.alloc_var("uint32")
            tx = T.get_thread_binding()
            bits = T.cast(T.ballot(x[tx] > tx // 32), "uint32")
            out[0, tx] = T.reinterpret(bits, "int32")
            out[1, tx] = T.any_sync(x[tx] > tx // 32)
            out[2, tx] = T.warp_reduce_min(x[tx])
            out[3, tx] = T.popcount(x[tx])
            out[4, tx] = T.cast(T.popcount(bits), "int32")

    return main


def no_numbers():
    """The bits of differences, some of them NaN."""

    @T.prim_func
    def main(
        x: T.Tensor((THREADS,), "float32"), y: T.Tensor((THREADS,), "float32"), out: T.Tensor((THREADS,), "int32")
    ):
        with T.Kernel(1, threads=THREADS):
            tx = T.get_thread_binding()
            out[tx] = T.reinterpret(x[tx] - y[tx], "int32")

    return main


def turns():
    """The lanes of a warp pass values on through shared memory."""

    @T.prim_func
    def main(x: T.Tensor((2, THREADS), "int32"), out: T.Tensor((2, THREADS), "int32")):
        with T.Kernel(2, threads=THREADS) as row:
            line = T.alloc_shared([THREADS], "int32", scope="shared.dyn")
            carried = T.alloc_var("int32")
            tx = T.get_thread_binding()
            carried = x[row, tx]
            for _ in T.serial(3):
                line[tx] = carried
                T.sync_warp()
                carried = line[tx // 32 * 32 + (tx + 1) % 32]
                T.sync_warp()
            out[row, tx] = carried

    return main


def histogram():
    """Counts by atomics, and a ticket for everybody."""
    n, bins = T.dynamic("n, bins")

    @T.prim_func
    def main(x: T.Tensor((n,), "int32"), counts: T.Tensor((bins,), "int32"), tickets: T.Tensor((n,), "int32")):
        with T.Kernel(T.ceildiv(n, THREADS), threads=THREADS) as block:
            i = block * THREADS + T.get_thread_binding()
            if i < n:
                tickets[i] = T.atomic_add(counts[x[i]], 1, return_prev=True)

    return main


def pairs():
    """Warps that pair up in named barriers, as a flag in memory says; the others do not take part."""

    @T.prim_func
    def main(paired: T.Tensor((4,), "int32"), out: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=THREADS):
            box = T.alloc_shared([4], "int32", scope="shared.dyn")
            tx = T.get_thread_binding()
            warp = tx // 32
            box[warp] = warp + 1
            if paired[warp] != 0:
                T.sync_threads(3, 64)
                if tx % 32 == 0:
                    out[warp] = box[0] + box[2]
            else:
                if tx % 32 == 0:
                    out[warp] = box[warp]

    return main


def handover():
    """Two warps, each of which waits for the kernel before; the weights were there already."""

    @T.prim_func
    def main(x: T.Tensor((64,), "float32"), weights: T.Tensor((64,), "float32"), out: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            weight = T.alloc_var("float32")
            tx = T.get_thread_binding()
            weight = weights[tx]
            if tx < 32:
                T.pdl_sync()
                out[tx] = weight * x[tx]
            else:
                T.pdl_sync()
                out[tx] = weight + x[tx]

    return main


def wide():
    """128-bit copies of rows."""
    rows, row_stride, out_stride = T.dynamic("rows, row_stride, out_stride")

    @T.prim_func
    def main(
        x: T.StridedTensor((rows, 64), (row_stride, 1), "bfloat16"),
        out: T.StridedTensor((rows, 64), (out_stride, 1), "bfloat16"),
    ):
        with T.Kernel(rows, threads=32) as row:
            held = T.alloc_local([4], "uint32")
            tx = T.get_thread_binding()
            if tx < 8:
                held[0:4] = T.ldg128(x[row, tx * 8])
                T.stg128(out[row, tx * 8], held[0:4])

    return main


def far():
    """Copies rows that may lie more than 2**31 elements apart."""
    rows = T.dynamic("rows")
    stride, out_stride = T.dynamic("stride, out_stride", "int64")

    @T.prim_func
    def main(
        x: T.StridedTensor((rows, 64), (stride, 1), "int8"), out: T.StridedTensor((rows, 64), (out_stride, 1), "int8")
    ):
        with T.Kernel(rows, threads=64) as row:
            tx = T.get_thread_binding()
            out[row, tx] = x[row, tx]

    return main


def tiles():
    """Fragments: copies, reductions and a parallel loop over shared memory."""

    @T.prim_func
    def main(
        x: T.Tensor((64, 32), "float32"), rows: T.Tensor((3, 64), "float32"), turned: T.Tensor((32, 64), "float32")
    ):
        with T.Kernel(1, threads=THREADS):
            staged = T.alloc_shared([64, 32], "float32", scope="shared.dyn")
            tile = T.alloc_fragment([64, 32], "float32")
            most = T.alloc_fragment([64], "float32")
            least = T.alloc_fragment([64], "float32")
            total = T.alloc_fragment([64], "float32")
            T.copy(x, tile)
            T.reduce_max(tile, most, dim=1)
            T.reduce_min(tile, least, dim=1)
            T.reduce_sum(tile, total, dim=1)
            T.copy(most, rows[0, :])
            T.copy(least, rows[1, :])
            for i in T.Parallel(64):
                rows[2, i] = total[i]
            T.copy(tile, staged)
            T.sync_threads()
            for j, i in T.Parallel(32, 64):
                turned[j, i] = staged[i, j]

    return main
