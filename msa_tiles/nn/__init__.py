"""Layers for models that are trained with MiniMax Sparse Attention.

Wrong arguments raise ``ValueError`` or ``TypeError`` that name them.
"""

from msa_tiles.nn.attention import AttentionOutput, MiniMaxSparseAttention
from msa_tiles.nn.parts import HeadNorm, rotate

__all__ = ["AttentionOutput", "HeadNorm", "MiniMaxSparseAttention", "rotate"]
