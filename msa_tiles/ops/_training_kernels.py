"""What `_dispatch.training_kernels` names: how the kernels of training are launched on CUDA."""

from msa_tiles.ops._backward_kernels import sparse_attention_backward

__all__ = ["sparse_attention_backward"]
