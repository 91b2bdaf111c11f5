"""Every generated cell compiles for its target, without that GPU, and its machine code keeps what its plan promised.

The kernels lie in the usual cache afterwards: this is the evidence for the flag `compiled` on this machine.
"""

from __future__ import annotations

import os

import pytest

from msa_tiles.runtime import toolchain
from msa_tiles.runtime.build import Job, Outcome, build, ci_jobs
from msa_tiles.runtime.registry import default_registry

JOBS = ci_jobs(default_registry().cells)


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
    assert JOBS


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_cell_compiles_and_passes_its_audit(job: Job, outcomes: dict[str, Outcome]) -> None:
    if reason := why_not(job.cell.dsl):
        pytest.skip(reason)
    assert outcomes[str(job)].complaints == ()
