"""MiniMax Sparse Attention kernels, generated from YAML specs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from msa_tiles.explaining import Explanation
    from msa_tiles.runtime.packs import Pack
    from msa_tiles.trees import Use
else:

    def __getattr__(name: str) -> Any:
        if name != "Explanation":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from msa_tiles.explaining import Explanation  # which imports torch

        return Explanation


__version__ = "0.1.0"


def use_pack(path: str | os.PathLike[str]) -> Pack:
    """Look for kernels in the pack in the directory ``path`` first, before any other, from now on.

    Raises `msa_tiles.runtime.PackError`, a RuntimeError, when the pack is damaged, or made for another machine or
    another TVM-FFI.
    """
    # Here, because both import torch.
    from msa_tiles import runtime
    from msa_tiles.library import remember

    pack = runtime.use_pack(path)
    remember.forget_all()
    return pack


def use_tree(path: str | os.PathLike[str]) -> Use:
    """Use a tree of one's own: specs, skeletons, operands and kernels in ``path`` go before the shipped ones.

    It holds for the whole process, from now on, or until the end of a block: `with msa_tiles.use_tree(path): …`. Behind
    it everything is as before. CUDA graphs keep the kernels that they were captured with.

    Raises `msa_tiles.trees.TreeError`, a RuntimeError, where the directory is no tree or others may write to it.
    """
    from msa_tiles import trees

    return trees.use(path)


def explain(
    operator: Callable[..., Any], /, *arguments: Any, device: str | torch.device | None = None, **named: Any
) -> Explanation:
    """What ``operator(*arguments, **named)`` would do: `msa_tiles.explaining.explain`, which says more."""
    from msa_tiles import explaining

    return explaining.explain(operator, *arguments, device=device, **named)
