"""Compiling ahead of time in worker processes, and the evidence that comes of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from msa_tiles.runtime import evidence
from msa_tiles.runtime.build import Job, audit_compiled, build, ci_jobs
from msa_tiles.runtime.cache import Cache
from msa_tiles.runtime.registry import Cell, Registry, Target


@pytest.mark.slow
def test_workers_compile_and_audit_every_ci_point(registry: Registry, tmp_path: Path, nvcc: Path) -> None:
    cache = Cache(tmp_path)
    jobs = ci_jobs(registry.cells)
    assert len(jobs) == 2
    outcomes = list(build(jobs, registry.targets, workers=2, cache=cache))
    assert {str(outcome.job) for outcome in outcomes} == {str(job) for job in jobs}
    assert [outcome.complaints for outcome in outcomes] == [(), ()]
    assert all(outcome.seconds > 0.1 for outcome in outcomes)
    again = list(build(jobs, registry.targets, workers=2, cache=cache))
    assert all(outcome.good and outcome.seconds < 0.1 for outcome in again)


@pytest.mark.slow
def test_a_failure_in_a_worker_is_an_outcome(registry: Registry, cell: Cell, tmp_path: Path, nvcc: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def scale_rows(width, capacity):\n    raise IndexError('no such row')\n")
    jobs = [Job(dataclasses.replace(cell, file=broken), variant) for variant in cell.ci]
    outcomes = list(build(jobs, registry.targets, workers=2, cache=Cache(tmp_path / "cache")))
    assert all(not outcome.good for outcome in outcomes)
    assert {str(outcome.job) for outcome in outcomes} == {str(job) for job in jobs}
    # Whoever shows an outcome names its job.
    assert {outcome.complaints[0] for outcome in outcomes} == {
        f"not compiled: IndexError: no such row ({broken}:2)",
    }


def test_compiled_means_every_ci_point_with_a_passing_audit(
    cell: Cell, target: Target, entry: object, cache: Cache, tmp_path: Path
) -> None:
    first_only = dataclasses.replace(cell, entry={**cell.entry, "ci": cell.entry["ci"][:1]})
    assert evidence.is_compiled(first_only, target, cache)
    assert not evidence.is_compiled(first_only, target, Cache(tmp_path))
    stricter = dataclasses.replace(first_only, entry={**first_only.entry, "expect": ["HGMMA"]})
    assert not evidence.is_compiled(stricter, target, cache)
    assert audit_compiled(Job(cell, {"width": 64, "capacity": 8}), target, Cache(tmp_path)) == ("not compiled",)
    nothing = dataclasses.replace(cell, entry={**cell.entry, "ci": []})
    assert not evidence.is_compiled(nothing, target, cache)


def test_what_is_on_record_goes_with_digest_plan_and_limits(cell: Cell, target: Target, tmp_path: Path) -> None:
    assert evidence.read_compiled(tmp_path) == {}
    entry = {"digest": cell.digest, "audit": evidence.audit_digest(cell, target)}
    evidence.record_compiled(tmp_path, {cell.id: entry, "another": {"digest": "b"}})
    compiled = evidence.read_compiled(tmp_path)
    assert evidence.is_recorded(cell, target, compiled)
    for changed in (
        dataclasses.replace(cell, digest="f" * 16),
        dataclasses.replace(cell, entry={**cell.entry, "expect": ["HGMMA"]}),
        dataclasses.replace(cell, entry={**cell.entry, "ci": cell.entry["ci"][:1]}),
    ):
        assert not evidence.is_recorded(changed, target, compiled)
    assert not evidence.is_recorded(cell, dataclasses.replace(target, registers_per_thread=168), compiled)
    evidence.record_compiled(tmp_path, {cell.id: None})
    assert list(evidence.read_compiled(tmp_path)) == ["another"], "what failed loses its entry"


def test_a_tenth_of_what_is_on_record_is_compiled_again(cell: Cell, target: Target) -> None:
    points = [{"width": 64, "capacity": 4}] * 400
    many = dataclasses.replace(cell, entry={**cell.entry, "ci": points})
    targets = {target.name: target}
    assert len(evidence.due([many], targets, {}, seed=1)) == 400, "all, when nothing is"
    compiled = {many.id: {"digest": many.digest, "audit": evidence.audit_digest(many, target)}}
    counts = [len(evidence.due([many], targets, compiled, seed)) for seed in range(20)]
    assert 10 < min(counts) < max(counts) < 80
    assert counts == [len(evidence.due([many], targets, compiled, seed)) for seed in range(20)]


def test_verified_goes_with_the_digest(cell: Cell, tmp_path: Path) -> None:
    assert evidence.read_verified(tmp_path) == {}
    (tmp_path / "verified.json").write_text(f'{{"{cell.id}": {{"digest": "{cell.digest}", "card": "NVIDIA H100"}}}}')
    verified = evidence.read_verified(tmp_path)
    assert evidence.is_verified(cell, verified)
    assert not evidence.is_verified(dataclasses.replace(cell, digest="f" * 16), verified)
    (tmp_path / "verified.json").write_text("[]")
    with pytest.raises(ValueError, match="is not what `msa-tiles verify` writes"):
        evidence.read_verified(tmp_path)


def test_simulated_goes_with_the_digest(cell: Cell, tmp_path: Path) -> None:
    assert not evidence.is_simulated(cell, tmp_path)
    evidence.mark_simulated(cell, tmp_path)
    assert evidence.is_simulated(cell, tmp_path)
    assert not evidence.is_simulated(dataclasses.replace(cell, digest="f" * 16), tmp_path)


def test_status_is_the_strongest_flag() -> None:
    assert evidence.status({"generated": True, "compiled": False, "verified": False}) == "generated"
    assert evidence.status({"generated": True, "compiled": True, "simulated": True, "verified": False}) == "simulated"
    assert evidence.status({"generated": True, "compiled": True, "simulated": False, "verified": True}) == "verified"
    assert evidence.status({"generated": False, "compiled": False, "verified": False}) == "missing"
