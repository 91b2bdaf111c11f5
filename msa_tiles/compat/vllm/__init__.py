"""vLLM 0.33's MiniMax-M3 operators over `msa_tiles.ops`: the same names, signatures and results in place.

`msa_tiles.compat.vllm.model` is what the plugin serves to vLLM, `layers` what it changes in it; they need vLLM, the
functions here do not.
"""

from msa_tiles.compat.vllm.operators import (
    minimax_m3_index_decode,
    minimax_m3_index_decode_score,
    minimax_m3_index_score,
    minimax_m3_index_topk,
    minimax_m3_sparse_attn,
    minimax_m3_sparse_attn_decode,
)

__all__ = [
    "minimax_m3_index_decode",
    "minimax_m3_index_decode_score",
    "minimax_m3_index_score",
    "minimax_m3_index_topk",
    "minimax_m3_sparse_attn",
    "minimax_m3_sparse_attn_decode",
]
