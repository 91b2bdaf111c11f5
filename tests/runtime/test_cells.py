"""Every generated cell compiles for its target, without that GPU, and its machine code keeps what its plan promised.

Of cells whose evidence is on record (`generated/compiled.json`) only a drawn tenth of the points is compiled here; the
seed is in pytest's header, and MSA_TILES_SEED repeats it.
"""

from __future__ import annotations

import os

import pytest

from msa_tiles.runtime import toolchain
from msa_tiles.runtime.build import Job, Outcome, build
from msa_tiles.runtime.evidence import due, read_compiled
from msa_tiles.runtime.registry import default_registry

REGISTRY = default_registry()
JOBS = due(REGISTRY.cells, REGISTRY.targets, read_compiled(REGISTRY.directory), int(os.environ["MSA_TILES_SEED"]))


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """All points that this run selected and that can be compiled here, compiled at once on all cores."""
    selected = {
        str(item.callspec.params["job"])
        for item in request.session.items
        if item.originalname == test_a_cell_compiles_and_passes_its_audit.__name__  # type: ignore[attr-defined]
    }
    jobs = [job for job in JOBS if str(job) in selected and why_not(job.cell.dsl) is None]
    found = build(jobs, default_registry().targets, workers=os.cpu_count() or 1)
    return {str(outcome.job): outcome for outcome in found}


def why_not(dsl: str) -> str | None:
    """Why kernels of a DSL cannot be compiled here."""
    try:
        toolchain.require_compiler(dsl)
    except toolchain.ToolchainError as error:
        return str(error)
    return None


def test_there_are_cells() -> None:
    assert REGISTRY.cells


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_cell_compiles_and_passes_its_audit(job: Job, outcomes: dict[str, Outcome]) -> None:
    if reason := why_not(job.cell.dsl):
        pytest.skip(reason)
    assert outcomes[str(job)].complaints == ()
