"""How operators run on CUDA: a validated call's facts, places and workspaces, and the kernels in their order.

Nothing here synchronises. Tensors that come in are validated, and none of them is empty.
"""
