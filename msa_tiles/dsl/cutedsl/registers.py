"""What keeps values out of registers while they are not needed."""

import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.table import WARP


def anew(value):
    """The same value, which the compiler does not know: what is made of it in a loop is not made before the loop."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def lane_anew(lane):
    """A lane likewise."""
    return anew(lane) & WARP - 1
