"""The tensors here are small: a thread pool costs more than it gives, and on a busy machine very much more."""

import torch

torch.set_num_threads(1)
