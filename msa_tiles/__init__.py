"""MiniMax Sparse Attention kernels, generated from YAML specs."""

__version__ = "0.1.0"
