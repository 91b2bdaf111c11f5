"""The tensors here are small: a thread pool costs more than it gives, and on a busy machine very much more."""

import torch
from ops.decode_stand_ins import decode_kernels  # noqa: F401

torch.set_num_threads(1)
