"""MiniMax Sparse Attention kernels, generated from YAML specs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msa_tiles.runtime.packs import Pack

__version__ = "0.1.0"


def use_pack(path: str | os.PathLike[str]) -> Pack:
    """Look for kernels in the pack of a directory first: see `msa_tiles.runtime.use_pack`."""
    from msa_tiles import runtime  # which imports torch

    return runtime.use_pack(path)
