"""The arithmetic of the index_kl kernel: the teacher's probabilities, the student's, and what they differ by."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from msa_tiles.dsl.cutedsl.kl.layout import Layout, Shared
from msa_tiles.dsl.cutedsl.kl.tile import Tile
from msa_tiles.dsl.cutedsl.scores import pick_float
from msa_tiles.dsl.cutedsl.topk import pick
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.words import last_column_of


class Grading(Layout):
    """Probabilities from score tiles, in registers."""

    @cute.jit
    def teacher_columns(self, tile: Tile, t: cutlass.Constexpr, lse: cute.Tensor):
        """The exponentials of tile t of a chunk, and their sums over the heads -> its columns of the teacher."""
        S = tile.S[t % 2]
        place = tile.lane % 4
        eights = self.rows_per_query // 8
        sums = [[], []]
        for r in cutlass.range_constexpr(self.queries):
            shifts = lse[None, place, t * self.queries + r].load()
            for half in cutlass.range_constexpr(2):
                terms = []
                for c in cutlass.range_constexpr(2 * eights):
                    score = S[(c % 2, half, r * eights + c // 2), 0, 0]
                    terms.append(cute.math.exp2(score * tile.scale_log2 + shifts[c], fastmath=True))
                sums[half].append(added(terms))
        for half in cutlass.range_constexpr(2):
            own = halved(halved(sums[half], place >= 2, 2), place % 2 != 0, 1)
            for c in cutlass.range_constexpr(len(own)):
                if cutlass.const_expr(self.queries == 8):
                    tile.teacher[(c, half, t), 0, 0] = own[c]
                else:
                    tile.teacher[(t % 2, half, t // 2), 0, 0] = own[c]

    @cute.jit
    def score_gradients(self, shared: Shared, tile: Tile, buffer: Int32):
        """dS of a chunk from scores and teacher, and what it adds to the loss of the lane's two keys."""
        dS = cute.make_tensor(tile.dS.iterator, tile.scores.layout)
        first_row = tile.consumer * ROWS + tile.row
        for j in cutlass.range_constexpr(self.chunk_edges // 8):
            for c in cutlass.range_constexpr(2):
                column = 8 * j + 2 * (tile.lane % 4) + c
                edge = shared.edges[buffer, column]
                shift = shared.index_lse[buffer, column]
                weight = shared.weights[buffer, column]
                # The last key of the block that the query sees.
                limit = pick(edge < 0, -1, last_column_of(edge))
                for half in cutlass.range_constexpr(2):
                    seen = first_row + 8 * half <= limit
                    probability = pick_float(seen, tile.teacher[(c, half, j), 0, 0], Float32(0.0))
                    score = tile.scores[(c, half, j), 0, 0] * tile.index_scale_log2 - shift
                    guess = pick_float(seen, cute.math.exp2(score, fastmath=True), Float32(0.0))
                    dS[(c, half, j), 0, 0] = (weight * (guess - probability)).to(self.element)
                    # A term of 0 * log(0 / Q) is 0, whatever Q is.
                    term = weight * probability * (cute.math.log2(probability, fastmath=True) - score)
                    tile.row_loss[half] = tile.row_loss[half] + pick_float(probability != 0.0, term, Float32(0.0))


def added(terms):
    """The sum of a power of two of numbers."""
    while len(terms) > 1:
        terms = [low + high for low, high in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def halved(values, upper, distance):
    """The sums over this lane and the one at a distance, of the upper half of the values for `upper` lanes, or else of
    the lower one."""
    half = len(values) // 2
    sent = [pick_float(upper, low, high) for low, high in zip(values[:half], values[half:], strict=True)]
    kept = [pick_float(upper, high, low) for low, high in zip(values[:half], values[half:], strict=True)]
    return [own + cute.arch.shuffle_sync_bfly(other, distance) for own, other in zip(kept, sent, strict=True)]
