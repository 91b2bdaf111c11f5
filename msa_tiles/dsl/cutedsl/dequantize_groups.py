"""Caches of 4 bits, as rows are read out of them: a lane has eight codes in a word, and the scale of their group."""

from cutlass import Float32, Int32

from msa_tiles.dsl.cutedsl.append_groups import WORD_BYTES, Groups
from msa_tiles.dsl.cutedsl.decoding import words_at
from msa_tiles.dsl.cutedsl.vector import VECTOR


class ReadGroups(Groups):
    """The `Cache` of a format; see msa_tiles.dsl.cutedsl.operands. A format adds `numbers`, and to `outer_of`."""

    def read(self, stored, page, head, place, lane):
        """The word of a lane's VECTOR columns, and the code of their scale."""
        start = stored.values[page, head, place, None].iterator + lane * WORD_BYTES
        # Spans are of one token or of four.
        span = Int32(stored.scales.shape[3])
        shift, inside = span >> 1, place & (span - 1)
        code = Int32(stored.scales[page, head, place >> shift, inside, lane // (self.group // VECTOR)])
        return words_at(start, 1), code

    def outer_of(self, stored, head):
        """What all rows of a head are multiplied with, where the format has that."""
        return Float32(1.0)

    def decode(self, words, scale, outer):
        """Four words of two bfloat16, in the order of columns."""
        return [Int32(pair) for pair in self.numbers(words[0], scale, outer)]
