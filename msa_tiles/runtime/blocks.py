"""What a thread block of a kernel takes, by the kernel's table or its row, before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping

from msa_tiles.runtime.registry import Cell, Target
from msa_tiles.spec.expression import Expression
from msa_tiles.spec.work import describe
from msa_tiles.tables import Table, table_of


def promises(cell: Cell, variant: Mapping[str, int]) -> tuple[Table | None, tuple[int | float, ...]]:
    """Threads, bytes of shared memory and registers that the kernel's table, or its row, says a block takes."""
    table_of_variant = table_of(cell.file.read_text(encoding="utf-8"))
    if table_of_variant is not None:
        table = table_of_variant(**variant)
        return table, (table.threads, table.shared_memory, table.registers)
    names: dict[str, int | float] = {**cell.entry["tile"], **variant}
    names["threads"] = threads = Expression(str(cell.entry["threads"]))(names)
    shared = Expression(str(cell.entry["shared_memory"]))(names)
    return None, (threads, shared, Expression(str(cell.entry["registers"] or 0))(names))


def excess(cell: Cell, variant: Mapping[str, int], target: Target) -> str | None:
    """Why a block of a kernel that was made for another target is too large for this one, as a sentence, or None."""
    _, (threads, shared, registers) = promises(cell, variant)
    for what, amount, limit in (
        ("threads", threads, target.threads_per_block),
        ("bytes of shared memory", shared, target.shared_memory_per_block),
        ("registers", registers, target.registers_per_sm),
    ):
        if amount > limit:
            at = f"at {describe(variant)}" if variant else "in all"
            return f"{amount} {what} {at} exceed the {limit} that a block can have on {target.name}"
    return None
