"""Caches of 4 bits, as rows are read out of them: a lane has eight codes in a word, and the scale of their group."""

import tilelang.language as T

from msa_tiles.dsl.tilelang.append_groups import CODES
from msa_tiles.dsl.tilelang.e2m1 import halves, lower_halves, upper_halves


@T.macro
def read(cache, stored, page, head, place, column, step, words, scales):
    """The word of a lane's eight columns, and the code of their scale, of a row of this number."""
    words[step] = T.ldg32(stored.values[page, head, place, T.truncdiv(column, CODES)])
    # Spans are of one token or of four.
    span = stored.scales.shape[3]
    group = T.truncdiv(column, cache.group)
    scales[step] = T.cast(stored.scales[page, head, place >> (span >> 1), place & (span - 1), group], "uint32")


def in_order(numbers):
    """Words of two numbers i and i + 4 -> words of two that follow each other."""
    return [side(numbers[i], numbers[i + 1]) for side in (lower_halves, upper_halves) for i in (0, 2)]


def codes_of(word):
    """The codes of a word, i and i + 4 in word i, which lack their power of two."""
    return [halves(word, number) for number in range(4)]
