"""MiniMax Sparse Attention kernels, generated from YAML specs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msa_tiles.runtime.packs import Pack

__version__ = "0.1.0"


def use_pack(path: str | os.PathLike[str]) -> Pack:
    """Look for kernels in the pack of a directory first, before any other, from now on.

    Raises `msa_tiles.runtime.PackError`, a RuntimeError, when the pack is damaged, or made for another machine or
    another TVM-FFI.
    """
    # Here, because both import torch.
    from msa_tiles import runtime
    from msa_tiles.library import remember

    pack = runtime.use_pack(path)
    remember.forget_all()
    return pack
