"""Index keys of e4m3 with float32 scales, which are multiplied as they are stored and scaled behind the product."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.operands import index_plain
from msa_tiles.dsl.cutedsl.operands.index_plain import Held, Stored
from msa_tiles.dsl.cutedsl.row_scales import copy_scales
from msa_tiles.dsl.table import Parts, buffer, declares, threads

TENSORS = ("", "_scale")


@declares
def multiplied():
    """The element of the product that index keys are part of."""
    return "float8_e4m3fn"


@declares
def parts(name, head_dim, block_size, stages, *, producer, freed, key_scales, element="float8_e4m3fn"):
    """One pipeline, which TMA fills, and beside it the producer's lanes where every key has a scale."""
    bare = index_plain.parts(name, head_dim, block_size, stages, producer=producer, freed=freed, element=element)
    if not key_scales:
        return bare
    [pipeline] = bare.pipelines
    scales = buffer(f"{name}_scales", "float32", align=128, block_size=block_size, stages=stages)
    return Parts((pipeline._replace(full=(*pipeline.full, threads(producer))),), (*bare.buffers, scales))


class Scales(NamedTuple):
    """The scales of queries [total_q, num_index_heads], and whether they, and one of all keys, are to be used."""

    q_scale: Any
    use_q_scale: Any
    use_k_scale: Any


class IndexKeys(index_plain.IndexKeys):
    """The same with a scale for every key (key_scales = 1), or one that all keys share (key_scales = 0)."""

    element = cutlass.Float8E4M3FN
    scaled = True

    def __init__(self, name, table, head_dim, block_size, pages_per_block, key_scales):
        super().__init__(name, table, head_dim, block_size, pages_per_block)
        self.key_scales = key_scales

    def arguments(self):
        """Stand-ins: the keys, and k_scale with their rows, or a vector whose first element counts for all keys."""
        page = (self.box_rows,) if self.pages_per_block and self.key_scales else ()
        return *super().arguments(), stand_in(Float32, cute.sym_int(), *page, last=cute.sym_int64())

    @cute.jit
    def load_scales(self, stored: Stored, held: Held, stage: Int32, row: Int32, pages):
        if cutlass.const_expr(self.key_scales):
            copy_scales(stored.scales, row, pages, held.scales[None, stage], self.box_rows)
            cute.arch.cp_async_mbarrier_arrive_noinc(held.full + stage)

    def factors(self, held, stage):
        return held.scales[None, stage] if self.key_scales else None

    @cute.jit
    def row_factor(self, stored: Stored, scales: Scales, token: Int32, head: Int32):
        factor = Float32(1.0)
        if scales.use_q_scale != 0:
            factor = Float32(scales.q_scale[token, head])
        if cutlass.const_expr(not self.key_scales):
            if scales.use_k_scale != 0:
                factor = factor * stored.scales[0]
        return factor
