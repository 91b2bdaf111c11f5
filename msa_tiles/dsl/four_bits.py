"""What decoders of 4-bit values know about their formats. Plain Python, for kernels of any DSL and for tests.

A code of e2m1 is a sign and three bits. Where these stand in a bfloat16 at the place at which exponent and mantissa
meet, they are the number times a power of two, subnormal ones included.
"""

CODES = 2  # in a byte
SIGNS = 0x80008000  # of the two 16-bit numbers in a word
CODE_BF16 = 6  # the lowest bit of the three
POWER_BF16 = 126  # of two, that the number lacks there
NVFP4_GROUP, MXFP4_GROUP = 16, 32  # values that share a scale
# What an e4m3 scale may be multiplied with: 448 is below 2**9, bfloat16 ends at 2**128.
SCALE_POWER = 118
TOKENS = 4  # whose scales lie together in pages
