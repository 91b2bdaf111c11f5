"""Oracles in plain torch, on any device; also what a CPU tensor runs on.

The functions here work chunk by chunk, so that 16K tokens of the M3 shape fit a laptop. `reference.plain` holds the
same operators as whole matrices. float64 tensors are computed in float64, float32 and bfloat16 in float32. Arguments
are trusted: `msa_tiles.ops` validates them. They compute on one thread, whatever torch has: their steps are small, and
threads would wait for each other in every one (`reference.threads`).
"""

from msa_tiles.reference import plain
from msa_tiles.reference.alone import each_alone
from msa_tiles.reference.attention import combine, dense_attention, sparse_attention
from msa_tiles.reference.backward import dense_attention_backward, sparse_attention_backward
from msa_tiles.reference.caches import append_index, append_kv, append_rows, dequantize_kv
from msa_tiles.reference.gradient_parts import gradient_rows, merge_gradients
from msa_tiles.reference.hybrid import split_selection
from msa_tiles.reference.index_parts import index_gradients, index_lse
from msa_tiles.reference.indexer import index_score, select_blocks
from msa_tiles.reference.kl import index_kl
from msa_tiles.reference.norm_rope import norm_rope, norm_rope_append
from msa_tiles.reference.schedule import build_schedule
from msa_tiles.reference.selection import topk_select

__all__ = [
    "append_index",
    "append_kv",
    "append_rows",
    "build_schedule",
    "combine",
    "dense_attention",
    "dense_attention_backward",
    "dequantize_kv",
    "each_alone",
    "gradient_rows",
    "index_gradients",
    "index_kl",
    "index_lse",
    "index_score",
    "merge_gradients",
    "norm_rope",
    "norm_rope_append",
    "plain",
    "select_blocks",
    "sparse_attention",
    "sparse_attention_backward",
    "split_selection",
    "topk_select",
]
