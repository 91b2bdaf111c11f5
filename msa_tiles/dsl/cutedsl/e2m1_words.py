"""Words of e2m1 as a whole: codes i and i + 4 as two 16-bit numbers, i from 0 to 3, by few logical instructions.

Those, and shifts to the right, take two clocks of a scheduler each, where products of 16-bit numbers take one. What a
code is in 16 bits: see msa_tiles.dsl.cutedsl.e2m1.
"""

import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.cutedsl.e2m1 import CODE_BF16, CODE_F16, SIGNS, shifted

BYTES = 0x01010101
BYTE_SIGNS = BYTES * 0x80 - (1 << 32)
UPPER = 0x00FF00FF ^ -1  # bytes of halves


def pairs_f16(word):
    """As float16, of which a code fills the upper byte: four codes get there at a time."""
    even, odd = upper_bytes(word, 0), upper_bytes(word, 1)
    low = [Int32(cute.arch.prmt(found, Int32(0), Int32(0x2404))) for found in (even, odd)]
    return [*low, even & UPPER, odd & UPPER]


def upper_bytes(word, odd):
    """Codes 0, 2, 4 and 6 of a word, or those behind them, each the upper byte of a float16."""
    lowest = CODE_F16 - 8
    return shifted(word, 4 - 4 * odd) & BYTE_SIGNS | shifted(word, lowest - 4 * odd) & BYTES * (7 << lowest)


def pairs_bf16(word):
    """As bfloat16: a product makes two copies of a code, one with the sign in its place, one with the other bits."""
    found = []
    for bytes_ in (word, word >> 8):
        for number in range(2):
            codes = bytes_ & 0xF000F << 4 * number
            copies = codes * ((1 << 12 - 4 * number) + (1 << CODE_BF16 - 4 * number))
            found.append(copies & ((0x70007 << CODE_BF16) + SIGNS))
    return found


def e8m0_pair(first, second):
    """The powers of two of two e8m0 codes as bfloat16; NaN for 255."""
    codes = first + second * (1 << 16)
    # As of one code (e8m0_bits): 0 where a code is 0 or 255, so that no bit is carried to the ninth of its half.
    inner = (codes + 0x10001 & 0xFE00FE) + 0xFF00FF
    return codes * (1 << 7) + ((inner ^ -1) >> 2 & 0x400040)
