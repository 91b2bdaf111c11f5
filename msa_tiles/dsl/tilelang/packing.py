"""Two bfloat16 values in one 32-bit word, the lower address in the lower half."""

import tilelang.language as T


def low_half(word):
    """The bfloat16 in the lower half of a uint32, as float32."""
    return T.reinterpret(word << T.uint32(16), "float32")


def high_half(word):
    """The bfloat16 in the upper half of a uint32, as float32."""
    return T.reinterpret(word & T.uint32(0xFFFF0000), "float32")


def pack_halves(low, high):
    """Round two float32 values to bfloat16 (to nearest even) and pack them into a uint32."""
    low_bits = T.cast(T.reinterpret(T.cast(low, "bfloat16"), "uint16"), "uint32")
    high_bits = T.cast(T.reinterpret(T.cast(high, "bfloat16"), "uint16"), "uint32")
    return low_bits | (high_bits << T.uint32(16))
