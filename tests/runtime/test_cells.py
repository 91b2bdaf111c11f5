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
    """All points that this run selected, compiled at once on all cores."""
    if toolchain.find_nvcc() is None:
        pytest.skip("needs nvcc: install the CUDA toolkit or the extra `cuda`")
    selected = {
        str(item.callspec.params["job"])
        for item in request.session.items
        if item.originalname == test_a_cell_compiles_and_passes_its_audit.__name__  # type: ignore[attr-defined]
    }
    jobs = [job for job in JOBS if str(job) in selected]
    found = build(jobs, default_registry().targets, workers=os.cpu_count() or 1)
    return {str(outcome.job): outcome for outcome in found}


def test_there_are_cells() -> None:
    assert JOBS


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_cell_compiles_and_passes_its_audit(job: Job, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[str(job)].complaints == ()
