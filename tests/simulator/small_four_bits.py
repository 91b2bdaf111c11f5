"""The smallest kernel of an operand of 4 bits: one block from bytes to a tile, and that to global memory."""

from typing import Any

import tilelang.language as T

from msa_tiles.dsl.table import TILELANG, Role, Table, buffer
from msa_tiles.dsl.tilelang import packed
from msa_tiles.dsl.tilelang.packed import PRODUCERS, Stored
from msa_tiles.dsl.tilelang.shared import make_buffer

BLOCK = 128


def decoded(operand: Any, parts: Any, rows: int) -> Any:
    """k [rows, 1, head_dim / 2] and its scales, of a block of BLOCK rows -> out [BLOCK, head_dim] bfloat16."""
    dim = operand.head_dim
    found = parts("k", dim, BLOCK, 1, producer="producer", readers=(), own=False)
    tiles = buffer("tiles", "bfloat16", align=1024, places=1, block_size=BLOCK, head_dim=dim)
    table = Table((Role("producer", 4, ""),), found.pipelines, (*found.buffers, tiles), static=TILELANG)

    @T.prim_func
    def main(k: operand.tensor(1), k_scale: operand.scale(1), out: T.Tensor((BLOCK, dim), "bfloat16")):
        with T.Kernel(1, threads=table.threads):
            held = packed.allocate(operand, table, make_buffer(table, "tiles"))
            stored = Stored(k, k_scale)
            tx = T.get_thread_binding()
            packed.start(operand, stored, None, 0, 0, held, 0, rows, tx)
            packed.fill(operand, stored, None, 0, 0, held, None, 0, 0, 0, tx)
            T.sync_threads(1, PRODUCERS)
            for j, c in T.Parallel(BLOCK, dim):
                out[j, c] = held.tiles[0, j, c]

    return main
