"""Stand-ins for the arguments of a kernel that is compiled."""

import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor


def stand_in(element, *shape, align=None, last=1):
    """A tensor of this shape: 64-bit strides, since it may be large whatever the lengths, but for `last`."""
    strides = (*(cute.sym_int64() for _ in shape[1:]), last)
    return make_fake_tensor(element, shape, strides, assumed_align=align)
