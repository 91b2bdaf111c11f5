"""Make packs: compiled kernels that run with torch, TVM-FFI and the CUDA driver alone. No GPU is needed.

`msa_tiles.runtime.packs` finds and runs what is made here.
"""
