"""Words of e2m1 in registers: eight codes of a word become four words of two 16-bit numbers, exactly.

A code is its sign and three bits that stand in a float16, or a bfloat16, where exponent and mantissa meet: as such they
are the number times a power of two, subnormal ones included, which a product with the scale of the group takes away
again. Nibbles i and i + 4 of a word go to the two halves of word i, since they are as far apart as these.
"""

import cutlass.cute as cute
from cutlass import Int32

SIGNS = (1 << 15) - (1 << 31)  # of both halves
NIBBLES = 0x0F0F0F0F
CODE_F16, CODE_BF16 = 9, 6  # the lowest bit of the three
POWER_F16, POWER_BF16 = 14, 126  # of two, that the number lacks there


def halves(word, number, lowest):
    """Codes `number` and `number` + 4 of a word as two 16-bit numbers, their three bits from `lowest` on."""
    code = 0x70007 << lowest
    return shifted(word, 12 - 4 * number) & SIGNS | shifted(word, lowest - 4 * number) & code


def shifted(word, places):
    return word << places if places >= 0 else word >> -places


def apart(word):
    """The codes of a word in their order, two a word: in the lowest bits of its halves."""
    even, odd = word & NIBBLES, word >> 4 & NIBBLES
    # Byte i of both, each behind its highest bit eight times, which is 0: a number above 7 says so.
    return [Int32(cute.arch.prmt(even, odd, Int32(0xC480 + 0x1111 * i))) for i in range(4)]


def as_bf16(codes):
    """Two codes in the lowest bits of halves as bfloat16: one product makes two copies, of which one has the sign."""
    return codes * ((1 << 12) + (1 << CODE_BF16)) & (0x1C001C0 | SIGNS)


def as_f16(codes):
    """The same as float16, where the copies would meet: the sign moves by itself."""
    return (codes & 0x80008) * ((1 << 12) - (1 << CODE_F16)) + codes * (1 << CODE_F16)


def times_f16(first, second):
    """Two products of float16, subnormal numbers included."""
    return product("f16x2", first, second)


def times_bf16(first, second):
    """Two products of bfloat16, subnormal numbers included."""
    return product("bf16x2", first, second)


def product(kind, first, second):
    return cute.arch.inline_ptx(
        # A constant is no operand of this instruction.
        f"{{ .reg .b32 factor; mov.b32 factor, {{$r1}}; mul.rn.{kind} {{$w0}}, {{$r0}}, factor; }}",
        write_only_types=[Int32],
        read_only_args=[first, second],
    )


def both(word, half):
    """The lower (0) or upper half of a word, twice."""
    return Int32(cute.arch.prmt(word, word, Int32(0x3232 if half else 0x1010)))


def e8m0_bits(code):
    """The power of two of an e8m0 code as a bfloat16 in the lower half; NaN for 255."""
    # 2**-127 is subnormal: half of the smallest normal number. The same bit makes NaN of infinity.
    return code << 7 | (((code + 1) & 255) < 2) * Int32(64)
