"""Which cases a command means, and doing them one after the other."""

from __future__ import annotations

import pytest
import torch
from stand_ins import FakeClock, bench, contender

from msa_tiles.bench import session
from msa_tiles.bench.harness import Benchmark
from msa_tiles.bench.operators import BENCHMARKS
from msa_tiles.bench.session import DeviceLost, Job, Settings
from msa_tiles.runtime.facts import DeviceFacts
from msa_tiles.runtime.registry import default_registry
from msa_tiles.spec.work import Work

H100 = DeviceFacts("NVIDIA H100 80GB HBM3", "sm90", 132, (9, 0))
CPU = torch.device("cpu")


def test_everything_is_planned_where_nothing_is_named():
    jobs = session.plan([], [], [])
    assert {job.benchmark.op for job in jobs} == set(BENCHMARKS)
    assert len({(job.benchmark.op, job.label, job.precision) for job in jobs}) == len(jobs)
    assert [str(job) for job in session.plan(["combine"], [], [])] == [
        "combine prefill_4k bf16",
        "combine prefill_32k bf16",
    ]


def test_operators_without_a_case_are_left_out():
    jobs = session.plan(["sparse_attention", "select_blocks"], ["prefill_32k_s", "chunk8k_1m_u"], ["bf16"])
    assert [str(job) for job in jobs] == [
        "select_blocks chunk8k_1m_u bf16",
        "sparse_attention prefill_32k_s bf16",
        "sparse_attention chunk8k_1m_u bf16",
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            (["attention"], [], []),
            "benchmark OP attention is unknown; did you mean msa_attention. Known: index",
        ),
        (
            (["combine"], ["prefill_32k_u"], []),
            "--cases prefill_32k_u is unknown; did you mean prefill_32k. Known: prefill_4k, ",
        ),
        ((["combine"], [], ["fp8"]), "--precision: precision fp8 is unknown; known: bf16"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        session.plan(*arguments)


def job(*made, op: str = "select_blocks", prepare=None, parts=("select_blocks",), precision: str = "bf16") -> Job:
    """A job that hands out these benches, one for each time it is run."""
    benches = iter(made)
    benchmark = Benchmark(
        op,
        ("prefill_32k_u",),
        lambda label: label,
        prepare or (lambda case, device, precision: next(benches)),
        lambda label, precision: [Work(989.4e9, 0, "bfloat16"), Work(0, 3.352e9, "bfloat16")],
        parts,
    )
    return Job(benchmark, "prefill_32k_u", precision)


def run(*jobs: Job, dsls=("tilelang",), peers=None):
    said: list[str] = []
    settings = Settings(dsls, peers, 0.01)
    registry = default_registry()
    outcomes = session.run(jobs, settings, CPU, H100, registry, said.append, clock=FakeClock(), l2_bytes=1)
    return outcomes, said


def test_rows_are_out_before_memory_is_given_back(monkeypatch):
    order: list[str] = []
    monkeypatch.setattr(session.harness, "release", lambda: order.append("release"))
    outcomes, _ = run(job(bench(mine={"tilelang": 2.0})), job(bench(mine={"tilelang": 2.0})))
    for done in outcomes:
        assert done.rows
        order.append("rows")
    # A case gives memory back while it runs, too; its inputs go once its rows are out.
    assert order.count("rows") == 2
    assert order[order.index("rows") + 1] == order[-1] == "release"


def test_rows_carry_the_machine_the_run_and_the_floor():
    outcomes, said = run(
        job(bench(contender("vllm", 6.0), mine={"tilelang": 2.0, "cutedsl": 3.0})), dsls=("tilelang", "cutedsl")
    )
    [done] = outcomes
    first, second = done.rows
    assert (first["card"], first["torch"]) == (H100.name, torch.__version__)
    assert {"driver", "cuda", "date", "run", "seconds", "order"} <= first.keys()
    assert first["run"] == second["run"] and first["run"].startswith(first["date"])
    assert first["floor_ms"] == 2.0, "a millisecond of arithmetic, then one of memory"
    assert said[0] == "select_blocks prefill_32k_u bf16"
    assert said[-2:] == [
        "  = tilelang  2.0000 ms (floor 2.0000 ms); 3.00x vllm",
        "  = cutedsl   3.0000 ms (floor 2.0000 ms); 2.00x vllm",
    ]
    assert not done.failures and not done.skipped


def test_peers_are_chosen():
    outcomes, _ = run(job(bench(contender("vllm", 6.0), contender("fa4", 5.0))), peers=("fa4",))
    [done] = outcomes
    assert done.rows[0]["baselines"] == {"fa4": 5.0}
    assert done.rows[0]["skipped"] == {"vllm": "left out by --peers"}


def test_without_a_kernel_nothing_is_prepared():
    prepared = []
    outcomes, said = run(job(prepare=prepared.append, parts=("sparse_attention", "combine"), precision="q8k8"))
    [done] = outcomes
    assert not done.rows and not prepared and not done.failures
    assert done.skipped == "no tilelang kernel of sparse_attention for sm90, q8k8"
    assert f"  skipped: {done.skipped}" in said


def test_inputs_that_do_not_fit_are_no_failure():
    def prepare(case, device, precision):
        raise torch.OutOfMemoryError("CUDA out of memory")

    outcomes, _ = run(job(prepare=prepare), job(bench()))
    full, done = outcomes
    assert full.skipped == "its inputs do not fit this card's memory" and not full.failures
    assert done.rows, "the next one has its turn"


def test_a_failure_leaves_the_others_their_turn():
    def prepare(case, device, precision):
        raise RuntimeError("no such thing\nat all")

    wrong = bench(check=lambda inputs, result: "scores are off")
    outcomes, _ = run(job(prepare=prepare), job(wrong), job(bench()))
    broken, false, done = outcomes
    assert broken.failures == ("select_blocks prefill_32k_u bf16: RuntimeError: no such thing",)
    assert list(false.failures) == ["select_blocks prefill_32k_u bf16, tilelang: scores are off"]
    assert not broken.rows and not false.rows and done.rows


def test_a_lost_device_ends_the_run(monkeypatch):
    def lost(device):
        raise DeviceLost("the device stopped answering")

    def release():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(session, "_still_answers", lost)
    monkeypatch.setattr(session.harness, "release", release)
    outcomes, _ = run(job(bench(check=lambda inputs, result: "wrong")), job(bench()))
    assert next(outcomes).failures
    with pytest.raises(DeviceLost):
        next(outcomes)
