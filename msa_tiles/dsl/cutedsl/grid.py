"""CTAs of every head along the first axis of a grid, since the other axes end at 65,535."""

import cutlass.cute as cute
from cutlass import Int32


def head_and_place(num_heads) -> tuple[Int32, Int32, Int32]:
    """This CTA's head, its place among the CTAs of that head, and how many these are. Heads are neighbours."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    heads = Int32(num_heads)
    return cta % heads, cta // heads, ctas // heads
