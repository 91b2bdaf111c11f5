"""Do the shipped kernels follow from the shipped specs, and which kernels run: shipped ones, or those of a tree?"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from msa_tiles import trees
from msa_tiles.names import counted
from msa_tiles.runtime.facts import device_facts
from msa_tiles.runtime.parts import jobs_for
from msa_tiles.runtime.registry import Cell, default_registry

OPERATORS = ("select_blocks", "sparse_attention")  # that the demo calls


def differences(shipped: Path, generate: Callable[[Path], object]) -> tuple[int, list[str]]:
    """Generate everything into a temporary folder with `generate(folder)` and compare it with `shipped`, byte by byte.

    Returns the number of kernel files generated, and a sentence for each file that differs, is missing or left over.
    """
    with tempfile.TemporaryDirectory(prefix="msa_tiles_demo_") as folder:
        fresh = Path(folder)
        generate(fresh)
        made = {file.relative_to(fresh): file.read_bytes() for file in _files(fresh)}
    there = {file.relative_to(shipped): file.read_bytes() for file in _files(shipped)} if shipped.is_dir() else {}
    sentences = []
    for name in sorted(made.keys() | there.keys()):
        if name not in there:
            sentences.append(f"{name} follows from the specs but is not shipped")
        elif name not in made:
            sentences.append(f"{name} is shipped but does not follow from the specs")
        elif made[name] != there[name]:
            sentences.append(f"{name} differs from what the specs generate")
    return sum(name.suffix == ".py" for name in made), sentences


def of_trees() -> Iterator[str]:
    """A sentence for each tree in use about its kernels, which go before the shipped ones."""
    cells = default_registry().cells
    for tree in trees.stack():
        own = [cell.id for cell in cells if cell.tree == tree.directory]
        names = f", which go before those beneath: {', '.join(own)}" if own else ""
        yield f"{counted(len(own), 'kernel')} of the tree {tree.directory}{names}"


def behind(device: torch.device, precision: str) -> str:
    """The sentence about the kernels that the demo's calls may run on a device, and where they come from."""
    target = None if device.type == "cpu" else device_facts(device, default_registry().targets.values()).target
    if target is None:
        return "the reference has run, and no kernel, neither a shipped one nor one of a tree"
    return f"these calls may run {', '.join(_candidates(target, precision)) or 'kernels of packs'}"


def _candidates(target: str, precision: str) -> list[str]:
    """The kernels that such calls as the demo's may run on a target and no pack has, each with what it comes from."""
    registry = default_registry()
    jobs = [job for op in OPERATORS for job in jobs_for(f"{op},precision={precision}", registry, target)]
    return [f"{cell.id} ({_from(cell)})" for cell in {job.cell.id: job.cell for job in jobs}.values()]


def _from(cell: Cell) -> str:
    return "shipped" if cell.tree is None else f"of the tree {cell.tree}"


def _files(root: Path) -> list[Path]:
    """What the generator writes: kernels and the index. Evidence (`verified.json`) comes from running."""
    files = [file for file in root.rglob("*.py") if "__pycache__" not in file.parts]
    return files + [file for file in [root / "index.json"] if file.is_file()]
