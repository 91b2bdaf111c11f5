"""Whether a thread block of a kernel fits a target, before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping

from msa_tiles.runtime.audit import _promises  # a public name would make records of audits stale
from msa_tiles.runtime.registry import Cell, Target
from msa_tiles.spec.work import describe


def excess(cell: Cell, variant: Mapping[str, int], target: Target) -> str | None:
    """Why a block of a kernel that was made for another target is too large for this one, as a sentence, or None."""
    _, (threads, shared, registers) = _promises(cell, variant)
    for what, amount, limit in (
        ("threads", threads, target.threads_per_block),
        ("bytes of shared memory", shared, target.shared_memory_per_block),
        ("registers", registers, target.registers_per_sm),
    ):
        if amount > limit:
            at = f"at {describe(variant)}" if variant else "in all"
            return f"{amount} {what} {at} exceed the {limit} that a block can have on {target.name}"
    return None
