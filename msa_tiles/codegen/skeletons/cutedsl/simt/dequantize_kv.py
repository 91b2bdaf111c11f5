"""Write quantised keys and values, of pages or flat, as flat ones of 16 bits, times their scales.

Grid: a CTA for every ROWS * STEPS tokens of a request's table and head; head_dim // 8 neighbouring threads have a row
of k and the one of v, eight columns of each, and STEPS rows that lie ROWS tokens apart. All of them are read before one
is written, 16 bytes at a time; as many columns are read at once. All warps alike; nothing is shared between threads.

Of pages, those of a request come in the order of its row of page_table, as many rows as the table has room for; what
lies behind seqused_k is not written, and tokens of a page that the cache does not have are 0. Offsets have 64 bits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.operands import dequantize_e4m3 as key_value  # <- operands.key_value
from msa_tiles.dsl.cutedsl.vector import BYTES, VECTOR
from msa_tiles.dsl.table import WARP, Role, Table, declares

ELEMENT = "bfloat16"  # <- precision.output
ROWS = 16  # <- tile.rows
STEPS = 4  # <- tile.steps
PAIRS = VECTOR // 2  # words


def dequantize_kv(
    head_dim: int,
    paged: int,
    token_scales: int,  # % if "token_scales" in plan.variants
):
    """Build the kernel for one head dim.

    k, v [pages, heads, page size, head_dim], page_table int32 [requests, columns] and seqused_k int32 [requests] ->
    k_out, v_out [requests * columns * page size, heads, head_dim]. Without `paged` there are one request and one page,
    [total_k] long: of page_table [1, 1] and seqused_k [1] nothing is read.
    # % if "token_scales" in plan.variants
    k_scale and v_scale are [heads], or with token_scales [pages, heads, page size].
    # % else
    k and v hold two values in a byte. Bytes of k_scale and v_scale [pages, heads, page size / n, n, groups], n 1 or 4,
    are one for every group of a row; global scales, of formats that have them, are [heads].
    # % endif

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = DequantizeKv(
        head_dim,
        paged,
        token_scales=token_scales,  # % if "token_scales" in plan.variants
    )
    return kernel, kernel.arguments()


@declares
def cta(head_dim, paged, **scales):
    """What a thread block is made of."""
    rows = Role("all", ROWS * head_dim // (VECTOR * WARP), "head_dim // 8 neighbouring threads a row")
    return Table((rows,), ())


class DequantizeKv:
    """
    # <- cta
    """

    def __init__(self, head_dim, paged, **scales):
        self.cta = cta(head_dim, paged, **scales)
        self.head_dim = head_dim
        self.paged = paged
        self.element = ELEMENTS[ELEMENT]
        self.cache = key_value.Cache(head_dim, **scales)
        self.lanes = head_dim // VECTOR  # threads of a row

    def arguments(self):
        """Stand-ins for cute.compile: keys and values, table and lengths, what is written, and the stream."""
        pages, heads, page = cute.sym_int(), cute.sym_int(), cute.sym_int()
        requests, columns, rows = cute.sym_int(), cute.sym_int(), cute.sym_int()
        caches = (*self.cache.arguments(pages, heads, page), *self.cache.arguments(pages, heads, page))
        table = stand_in(Int32, requests, columns)
        lengths = make_fake_tensor(Int32, (requests,), (1,))
        out = tuple(stand_in(self.element, rows, heads, self.head_dim, align=BYTES) for _ in range(2))
        return (*caches, table, lengths, *out, make_fake_stream(use_tvm_ffi_env_stream=True))

    @cute.jit
    def __call__(
        self,
        k: cute.Tensor,  # <- tensors of operands.key_value
        v: cute.Tensor,  # <- tensors of operands.key_value
        page_table: cute.Tensor,
        seqused_k: cute.Tensor,
        k_out: cute.Tensor,
        v_out: cute.Tensor,
        stream,
    ):
        """Launch, as early as the kernel before allows. Rows begin at multiples of 16 bytes."""
        k_stored = self.cache.stored(
            k,  # <- tensors of operands.key_value
        )
        v_stored = self.cache.stored(
            v,  # <- tensors of operands.key_value
        )
        parts = cute.ceil_div(page_table.shape[1] * k.shape[2], ROWS * STEPS)
        self.kernel(k_stored, v_stored, page_table, seqused_k, k_out, v_out).launch(
            grid=(page_table.shape[0] * parts * k.shape[1], 1, 1),
            block=(self.cta.threads, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        k_stored: tuple,
        v_stored: tuple,
        page_table: cute.Tensor,
        seqused_k: cute.Tensor,
        k_out: cute.Tensor,
        v_out: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        heads, page_size = Int32(k_stored.values.shape[1]), Int32(k_stored.values.shape[2])
        head, part = block % heads, block // heads
        row, lane = thread // self.lanes, thread % self.lanes
        # What the kernel before wrote is there from here on; the one behind may come up and wait in turn.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        request, length, begin = Int32(0), page_size, Int32(0)
        if cutlass.const_expr(self.paged):
            span = page_size * Int32(page_table.shape[1])
            parts = cute.ceil_div(span, ROWS * STEPS)
            request, part = part // parts, part % parts
            length, begin = cutlass.min(seqused_k[request], span), request * span
        first = part * (ROWS * STEPS)
        if first < length:
            k_outer = self.cache.outer_of(k_stored, head)
            v_outer = self.cache.outer_of(v_stored, head)
            keys, values, kept = [], [], []
            for step in cutlass.range_constexpr(STEPS):
                # Rows behind the last one read that, and are not written.
                token = cutlass.min(first + step * ROWS + row, length - 1)
                page, place, mask = Int32(0), token, Int32(-1)
                if cutlass.const_expr(self.paged):
                    entry, pages = page_table[request, token // page_size], Int32(k_stored.values.shape[0])
                    page = cutlass.max(cutlass.min(entry, pages - 1), Int32(0))
                    place, mask = token % page_size, -Int32(entry == page)
                keys.append(self.cache.read(k_stored, page, head, place, lane))
                values.append(self.cache.read(v_stored, page, head, place, lane))
                kept.append(mask)
            for step in cutlass.range_constexpr(STEPS):
                token = first + step * ROWS + row
                if token < length:
                    self.write(keys[step], k_outer, kept[step], k_out[begin + token, head, None], lane)
                    self.write(values[step], v_outer, kept[step], v_out[begin + token, head, None], lane)

    def write(self, read, outer, mask, row, lane):
        """The VECTOR columns of a lane, 0 where the mask is."""
        words = cute.make_rmem_tensor(PAIRS, Int32)
        pairs = self.cache.decode(*read, outer)
        for i in range(PAIRS):
            words[i] = pairs[i] & mask
        start = row.iterator + lane * VECTOR
        target = cute.make_ptr(Int32, start.toint(), start.memspace, assumed_align=BYTES)
        cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(PAIRS)))
