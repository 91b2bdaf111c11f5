"""Whether a thread block of a kernel fits a target, before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msa_tiles import trees
from msa_tiles.runtime.audit import _promises  # a public name would make records of audits stale
from msa_tiles.runtime.registry import Cell, Target
from msa_tiles.spec import Expression
from msa_tiles.spec.work import describe


def excess(cell: Cell, variant: Mapping[str, int], target: Target) -> str | None:
    """Why a block of a kernel that was made for other limits is too large for a target, as a sentence, or None."""
    return _excess(_Block(cell.file, cell.digest, tuple(variant.items()), cell), target)


@dataclass(frozen=True)
class _Block:
    """What is asked about, as a key: reading a kernel's table takes milliseconds, and dispatch asks every cell."""

    file: Path
    digest: str
    variant: tuple[tuple[str, int], ...]
    cell: Cell = field(compare=False)


@trees.cached(maxsize=4096)
def _excess(block: _Block, target: Target) -> str | None:
    variant = dict(block.variant)
    block.cell.text()  # says what is wrong where there is none
    table, (threads, shared, registers) = _promises(block.cell, variant)
    if table is not None:
        columns: int | float = table.tensor_memory
    else:
        formula = Expression(str(block.cell.entry["tensor_memory"] or 0))
        columns = formula({**block.cell.entry["tile"], **variant})
    for what, amount, limit in (
        ("threads", threads, target.threads_per_block),
        ("bytes of shared memory", shared, target.shared_memory_per_block),
        ("registers", registers, target.registers_per_sm),
        ("columns of tensor memory", columns, target.tensor_memory_columns),
    ):
        if amount > limit:
            at = f"at {describe(variant)}" if variant else "in all"
            return f"{amount} {what} {at} exceed the {limit} that a block can have on {target.name}"
    return None
