"""The kernels that a run of cases launches, so that they are compiled, or packed, before it."""

from __future__ import annotations

from collections.abc import Iterable

from msa_tiles.runtime import evidence, packs
from msa_tiles.runtime.build import Job
from msa_tiles.runtime.parts import COPIER, parts_of, variants_at
from msa_tiles.runtime.registry import Cell, Registry
from msa_tiles.spec import Specs
from msa_tiles.verify.cases import Case, cases


def to_compile(grid: Iterable[tuple[Cell, list[Case]]], registry: Registry) -> list[Job]:
    """The kernels that these cases launch, but for those that run from a pack."""
    return [job for job in launched(grid, registry) if packs.find(job.cell, job.variant) is None]


def launched(grid: Iterable[tuple[Cell, list[Case]]], registry: Registry) -> list[Job]:
    """The kernels that these cases launch: their own, and those of other operators that their calls launch besides.

    What is forgotten here is compiled when a case comes to it.
    """
    jobs: dict[str, Job] = {}
    for cell, found in grid:
        points = list({tuple(case.point.items()): case.point for case in found}.values())
        wanted = [Job(cell, dict(point)) for point in points]
        # Cases of quantised keys read them as they are stored.
        for op in (part for part in parts_of(cell.op)[1:] if part != COPIER):
            others = registry.select(op, target=cell.target)
            # Of another DSL where the cell's own has none.
            for other in [other for other in others if other.dsl == cell.dsl] or others:
                if registry.precisions[cell.precision].agrees(registry.precisions[other.precision], other.reads):
                    wanted += [Job(other, variant) for point in points for variant in variants_at(other, point)]
        jobs |= {str(job): job for job in wanted}
    return list(jobs.values())


def unverified(registry: Registry, specs: Specs, target: str, dsls: Iterable[str]) -> list[Job]:
    """The kernels that verifying all stale cells of a target and these DSLs launches.

    Raises ValueError where no cell is stale.
    """
    verified = evidence.verified_of(registry)
    cells = [cell for cell in registry.select(target=target) if cell.dsl in dsls]
    due = [(cell, cases(cell, specs)) for cell in cells if not evidence.is_verified(cell, verified)]
    if not due:
        raise ValueError(f"all {len(cells)} kernels for {target} are verified as they are now")
    return sorted(launched(due, registry), key=str)
