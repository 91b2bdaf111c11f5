"""Write each token's keys and values into its slot of paged caches, in place.

Grid: a CTA for every ROWS rows of a token and head; head_dim // 8 neighbouring threads have a row of k and the one of v
and eight columns of each. Rows are read 16 bytes at a time, both before either is written. All warps alike; nothing is
shared between threads but, where rows get a scale of their own, the largest magnitude of one.

A token whose slot is negative, or not in the caches, is neither read nor written. Offsets have 64 bits.
"""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream

from msa_tiles.dsl.cutedsl.append import load_row, row_arguments, slot_of
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.operands import append_plain as key_value  # <- operands.key_value
from msa_tiles.dsl.cutedsl.vector import VECTOR
from msa_tiles.dsl.table import WARP, Role, Table, declares

ELEMENT = "bfloat16"  # <- precision.output
ROWS = 16  # <- tile.rows


def append_kv(
    head_dim: int,
    float32_rows: int,
    token_scales: int,  # % if "token_scales" in plan.variants
):
    """Build the kernel for one head dim.

    k, v [total_q, heads, head_dim], float32 with float32_rows, and slots int32 [total_q, words] (of one word, or of two
    with the lower one first: page * page size + place) -> k_cache, v_cache [pages, heads, page size, head_dim].
    # % if "token_scales" in plan.variants
    k_scale and v_scale are [heads], what rows are divided by, or with token_scales [pages, heads, page size], written.
    # % elif precision.scale
    Caches hold two values in a byte. Bytes of k_scale and v_scale [pages, heads, page size / n, n, groups] are written,
    one for every group of a row; global scales, of formats that have them, are [heads].
    # % endif

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = AppendKv(
        head_dim,
        float32_rows,
        token_scales=token_scales,  # % if "token_scales" in plan.variants
    )
    return kernel, kernel.arguments()


@declares
def cta(head_dim, float32_rows, **scales):
    """What a thread block is made of."""
    rows = Role("all", ROWS * head_dim // (VECTOR * WARP), "head_dim // 8 neighbouring threads a row")
    return Table((rows,), ())


class AppendKv:
    """
    # <- cta
    """

    def __init__(self, head_dim, float32_rows, **scales):
        self.cta = cta(head_dim, float32_rows, **scales)
        self.head_dim = head_dim
        self.element = ELEMENTS["float32" if float32_rows else ELEMENT]
        self.cache = key_value.Cache(head_dim, **scales)
        self.lanes = head_dim // VECTOR  # threads of a row

    def arguments(self):
        """Stand-ins for cute.compile: rows, slots and caches, and the stream."""
        rows, heads = row_arguments(self.element, self.head_dim, 2)
        pages, page = cute.sym_int(), cute.sym_int()
        caches = (*self.cache.arguments(pages, heads, page), *self.cache.arguments(pages, heads, page))
        return (*rows, *caches, make_fake_stream(use_tvm_ffi_env_stream=True))

    @cute.jit
    def __call__(
        self,
        k: cute.Tensor,
        v: cute.Tensor,
        slots: cute.Tensor,
        k_cache: cute.Tensor,  # <- tensors of operands.key_value
        v_cache: cute.Tensor,  # <- tensors of operands.key_value
        stream,
    ):
        """Launch, as early as the kernel before allows. Rows begin at multiples of 16 bytes."""
        k_stored = self.cache.stored(
            k_cache,  # <- tensors of operands.key_value
        )
        v_stored = self.cache.stored(
            v_cache,  # <- tensors of operands.key_value
        )
        self.kernel(k, v, slots, k_stored, v_stored).launch(
            grid=(cute.ceil_div(k.shape[0] * k.shape[1], ROWS), 1, 1),
            block=(self.cta.threads, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, k: cute.Tensor, v: cute.Tensor, slots: cute.Tensor, k_stored: tuple, v_stored: tuple):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        heads, page_size = Int32(k.shape[1]), Int32(k_stored.values.shape[2])
        row, lane = block * ROWS + thread // self.lanes, thread % self.lanes
        token, head = row // heads, row % heads
        # What the kernel before wrote is there from here on; the one behind may come up and wait in turn.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        slot = slot_of(slots, token, k_stored.values.shape[0] * page_size)
        keys = cute.make_rmem_tensor(VECTOR, self.element)
        values = cute.make_rmem_tensor(VECTOR, self.element)
        keys.fill(0.0)
        values.fill(0.0)
        if slot >= 0:
            load_row(k[token, head, None], lane, keys)
            load_row(v[token, head, None], lane, values)
        # Every lane takes part in the shuffles.
        k_scale = self.cache.scale_of(keys, k_stored, head, Int32(1))
        v_scale = self.cache.scale_of(values, v_stored, head, Int32(1))
        if slot >= 0:
            page, place = slot // page_size, slot % page_size
            self.cache.write(keys, k_scale, k_stored, page, head, place, lane)
            self.cache.write(values, v_scale, v_stored, page, head, place, lane)
