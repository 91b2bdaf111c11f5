"""vLLM's MiniMax-M3 models, with our operators beneath: what the plugin registers in their place.

They are vLLM's classes. Importing this module has their layers choose our implementations; in a vLLM that is not the
one that we know they keep vLLM's, and the log says so.
"""

import logging

from vllm.models.minimax_m3 import (
    MiniMaxM3MTP,
    MiniMaxM3SparseForCausalLM,
    MiniMaxM3SparseForConditionalGeneration,
)

__all__ = ["MiniMaxM3MTP", "MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"]

try:
    from msa_tiles.compat.vllm import layers

    layers.install()
except Exception:
    logging.getLogger("vllm.msa_tiles").warning(
        "msa_tiles leaves MiniMax M3 to vLLM: it knows vLLM 0.33, and this one is another", exc_info=True
    )
