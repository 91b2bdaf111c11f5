"""Words of e2m1 in registers: eight codes of a uint32 become four words of two bfloat16, exactly.

Codes i and i + 4 of a word go to the halves of word i, since they are as far apart as these. As msa_tiles.dsl.four_bits
says, they lack a power of two, which a product with the scale of the group takes away.
"""

import tilelang.language as T

from msa_tiles.dsl.four_bits import CODE_BF16, SIGNS

HALF = 16  # bits


def halves(word, number):
    """Codes `number` and `number` + 4 of a word, which lack their power of two.

    One product sends the sign and the other three bits to their places; what else it writes lies between these.
    """
    # Codes 2 and 3 are codes 0 and 1 of what is left of the word without those.
    part = word >> T.uint32(HALF // 2) if number > 1 else word
    low = 4 * (number % 2)
    moves = (1 << 12 - low) + (1 << CODE_BF16 - low)
    return ((part & T.uint32(0xF000F << low)) * T.uint32(moves)) & T.uint32(SIGNS | 0x70007 << CODE_BF16)


def times(first, second):
    """Two products of bfloat16 in a word, rounded to nearest even, subnormal numbers included."""
    pair = T.mul2(T.reinterpret(first, "bfloat16x2"), T.reinterpret(second, "bfloat16x2"))
    return T.reinterpret(pair, "uint32")


def lower_halves(first, second):
    """The lower halves of two words, in one."""
    return (first & T.uint32(0xFFFF)) | (second << T.uint32(HALF))


def upper_halves(first, second):
    return (first >> T.uint32(HALF)) | (second & T.uint32(0xFFFF0000))
