"""How tensors lie in global memory: strides of 64 bits, and the strides that TMA is told."""

import tilelang.language as T

TMA_BYTES = 16  # TMA wants addresses and strides to be multiples of it, and no stride of 0


def strides(names):
    """Symbolic strides, in elements. An undeclared type would be int32, and the host code cuts a stride to its type."""
    return T.dynamic(names, "int64")


def described(tensor):
    """A view of a tensor for TMA: the stride of a dimension of size 1 means nothing, may be anything, and is replaced.

    The tensor's last stride is 1. The view is of the same memory; nothing of it reaches the device code.
    """
    unit = T.int64(TMA_BYTES * 8 // T.dtype(tensor.dtype).bits)
    steps = zip(tensor.shape[:-1], tensor.strides[:-1], strict=True)
    replaced = [T.if_then_else(extent == 1, unit, stride) for extent, stride in steps]
    return T.StridedTensor(tuple(tensor.shape), (*replaced, 1), tensor.dtype, data=tensor.data)
