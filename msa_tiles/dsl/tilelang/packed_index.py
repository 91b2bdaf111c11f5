"""Index keys of 4 bits, decoded to bfloat16 by the producer, in tiles of the kernel.

They have no heads, and their scales are linear. Columns of tiles are in the order of decoding: see `column`.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from msa_tiles.dsl.four_bits import CODES
from msa_tiles.dsl.tilelang import packed
from msa_tiles.dsl.tilelang.keys import index_keys
from msa_tiles.dsl.tilelang.layout import described, strides
from msa_tiles.dsl.tilelang.packed import WORD
from msa_tiles.dsl.tilelang.stages import advance


class Operand(packed.Operand):
    """Blocks of keys. A format adds `group`, `scale_element`, `factor`, `number`, `whole`."""

    in_order = False

    def tensor(self, heads=None):
        """Bytes [total_k, head_dim / 2], or [pages, page, head_dim / 2] with pages_per_block > 0."""
        return T.StridedTensor(*index_keys(self.head_dim // CODES, self.block_size, self.pages_per_block), "uint8")

    def scale(self, heads=None):
        """[total_k, groups], or [pages, page, groups]."""
        rows, pages = T.dynamic("num_scale_rows, num_scale_pages")
        page_stride, row_stride = strides("scale_page, scale_row")
        if self.pages_per_block == 0:
            return T.StridedTensor((rows, self.groups), (row_stride, 1), self.scale_element)
        shape = (pages, self.block_size // self.pages_per_block, self.groups)
        return T.StridedTensor(shape, (page_stride, row_stride, 1), self.scale_element)

    def scale_at(self, stored, place, token, head, byte):
        return stored.scales[place, byte] if self.pages_per_block == 0 else stored.scales[place, token, byte]

    def box(self, stored, row, page, head):
        values = described(stored.values)
        if self.pages_per_block == 0:
            return values[row : row + self.block_size, :]
        return values[page, 0 : self.block_size // self.pages_per_block, :]


def column(number):
    """Where a tile has a column: as `e2m1.halves` brings the codes of a word, which spares to sort them.

    Queries that are laid down likewise have the same products with it.
    """
    return number // WORD * WORD + 2 * (number % 4) + number // 4 % 2


class Held(NamedTuple):
    """What msa_tiles.dsl.tilelang.packed has in shared memory; and of each thread of the producer where the next tile
    goes and where its bytes lie (a stage and a phase each), and how many blocks are on their way.
    """

    raw: Any
    scales: Any
    landed: Any
    tiles: Any
    at: Any
    come: Any
    begun: Any


def allocate(operand, table, tiles):
    own = (T.alloc_local([2], "int32"), T.alloc_local([2], "int32"), T.alloc_local([1], "int32"))
    return Held(*packed.allocate(operand, table, tiles), *own)


@T.macro
def begin(held):
    """The producer, before anything else."""
    held.begun[0] = 0
    for n in T.unroll(2):
        held.at[n] = 0
        held.come[n] = 0


@T.macro
def send(operand, stored, page_table, row, rows, held, full, free, thread):
    """Send for a block, of which `rows` rows or more are the request's; lay down another where the ring is full."""
    if held.begun[0] == held.raw.shape[0]:
        lay_down(operand, stored, held, full, free, thread)
        held.begun[0] = held.begun[0] - 1
    # All threads are done with the stage.
    T.sync_threads(7, 128)
    stage = T.truncmod(held.come[0] + held.begun[0], held.raw.shape[0])
    packed.start(operand, stored, page_table, row, 0, held, stage, rows, thread)
    held.begun[0] = held.begun[0] + 1


@T.macro
def lay_down(operand, stored, held, full, free, thread):
    """The next block's tile, once there is room."""
    at, come = held.at, held.come
    T.barrier_wait(free[at[0]], at[1] ^ 1)
    packed.fill(operand, stored, None, 0, 0, held, full, at[0], come[0], come[1], thread)
    T.barrier_arrive(full[at[0]])
    advance(at, held.tiles.shape[0])
    advance(come, held.raw.shape[0])


@T.macro
def finish(operand, stored, held, full, free, thread):
    """Lay down what is on its way."""
    for _ in T.serial(held.begun[0]):
        lay_down(operand, stored, held, full, free, thread)
