"""The launches of training calls on CUDA, by operator."""

from msa_tiles.ops._kl_kernels import index_kl

__all__ = ["index_kl"]
