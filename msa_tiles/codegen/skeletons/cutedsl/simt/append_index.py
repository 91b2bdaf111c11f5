"""Write each token's index key into its slot of a paged cache, in place.

Grid: a CTA for every ROWS keys; head_dim // 8 neighbouring threads have a key and eight columns each, which they read
16 bytes at a time. All warps alike; nothing is shared between threads but, where keys get a scale of their own, the
largest magnitude of one.

A token whose slot is negative, or not in the cache, is neither read nor written. Offsets have 64 bits.
"""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream

from msa_tiles.dsl.cutedsl.append import load_row, row_arguments, slot_of
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.operands import append_plain as index_key  # <- operands.index_key
from msa_tiles.dsl.cutedsl.vector import VECTOR
from msa_tiles.dsl.table import WARP, Role, Table, declares

ELEMENT = "bfloat16"  # <- precision.output
ROWS = 16  # <- tile.rows


def append_index(
    head_dim: int,
    float32_rows: int,
    token_scales: int,  # % if "token_scales" in plan.variants
):
    """Build the kernel for one index dim.

    idx_k [total_q, 1, head_dim], float32 with float32_rows, and slots int32 [total_q, words] (of one word, or of two
    with the lower one first: page * page size + place) -> cache [pages, 1, page size, head_dim].
    # % if "token_scales" in plan.variants
    cache_scale is [1], what keys are divided by with use_scale, or with token_scales [pages, 1, page size], written.
    # % elif precision.scale
    The cache holds two values in a byte. Bytes of cache_scale [pages, 1, page size / n, n, groups] are written, one for
    every group of a key; the global scale, of formats that have one, is [1].
    # % endif

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = AppendIndex(
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


class AppendIndex:
    """
    # <- cta
    """

    def __init__(self, head_dim, float32_rows, **scales):
        self.cta = cta(head_dim, float32_rows, **scales)
        self.head_dim = head_dim
        self.element = ELEMENTS["float32" if float32_rows else ELEMENT]
        self.cache = index_key.Cache(head_dim, **scales)
        self.lanes = head_dim // VECTOR  # threads of a row

    def arguments(self):
        """Stand-ins for cute.compile: keys, slots, the cache, scalars and the stream."""
        rows, heads = row_arguments(self.element, self.head_dim, 1)
        cache = self.cache.arguments(cute.sym_int(), heads, cute.sym_int())
        scalars = ()  # % if "token_scales" not in plan.variants
        scalars = (Int32(0),)  # % if "token_scales" in plan.variants
        return (*rows, *cache, *scalars, make_fake_stream(use_tvm_ffi_env_stream=True))

    @cute.jit
    def __call__(
        self,
        idx_k: cute.Tensor,
        slots: cute.Tensor,
        cache: cute.Tensor,  # <- tensors of operands.index_key
        use_scale: Int32,  # % if "token_scales" in plan.variants
        stream,
    ):
        """Launch, as early as the kernel before allows. Keys begin at multiples of 16 bytes."""
        stored = self.cache.stored(
            cache,  # <- tensors of operands.index_key
        )
        use_scale = Int32(0)  # % if "token_scales" not in plan.variants
        self.kernel(idx_k, slots, stored, use_scale).launch(
            grid=(cute.ceil_div(idx_k.shape[0] * idx_k.shape[1], ROWS), 1, 1),
            block=(self.cta.threads, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, idx_k: cute.Tensor, slots: cute.Tensor, stored: tuple, use_scale: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        heads, page_size = Int32(idx_k.shape[1]), Int32(stored.values.shape[2])
        row, lane = block * ROWS + thread // self.lanes, thread % self.lanes
        token, head = row // heads, row % heads
        # What the kernel before wrote is there from here on; the one behind may come up and wait in turn.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        slot = slot_of(slots, token, stored.values.shape[0] * page_size)
        keys = cute.make_rmem_tensor(VECTOR, self.element)
        keys.fill(0.0)
        if slot >= 0:
            load_row(idx_k[token, head, None], lane, keys)
        # Every lane takes part in the shuffles.
        scale = self.cache.scale_of(keys, stored, head, use_scale)
        if slot >= 0:
            self.cache.write(keys, scale, stored, slot // page_size, head, slot % page_size, lane)
