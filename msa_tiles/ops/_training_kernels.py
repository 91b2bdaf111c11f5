"""What `_dispatch.training_kernels` names: how the kernels of training are launched on CUDA."""

from msa_tiles.ops._backward_kernels import sparse_attention_backward
from msa_tiles.ops._kl_kernels import index_kl

__all__ = ["index_kl", "sparse_attention_backward"]
