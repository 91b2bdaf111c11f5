"""What targets have no kernels of, as commands show it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from msa_tiles import console
from msa_tiles.spec.model import Specs

if TYPE_CHECKING:
    from msa_tiles.codegen.lacks import Lack


def lacks_of(
    specs: Specs, targets: Iterable[str], present: Collection[str] | None, ops: Collection[str]
) -> dict[str, list[Lack]]:
    """What each of these targets lacks, those left out that no spec is of."""
    from msa_tiles.codegen.lacks import lacks

    return {name: lacks(specs, name, present, ops) for name in targets if name in specs.targets}


def show_lacks(specs: Specs, targets: Iterable[str], present: Collection[str] | None, ops: Collection[str]) -> None:
    """A table for each target that lacks operators: which, why, and what would have to be written."""
    for target, found in lacks_of(specs, targets, present, ops).items():
        if found:
            console.say(f"\n{target} has no kernels of")
            rows = [(each.operator, each.reason, each.remedy) for each in found]
            console.table([("operator", "because", "what would have to be written"), *rows])
