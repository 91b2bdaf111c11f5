"""The same bits again and again while another process uses the GPU, so that thread blocks stop and go on anywhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from msa_tiles import ops, paths, spec
from msa_tiles.runtime import toolchain
from msa_tiles.runtime.registry import default_registry
from msa_tiles.verify import compare
from msa_tiles.verify.cases import Case, Disagreement, cases
from msa_tiles.verify.inputs import Source, poison_free_memory
from msa_tiles.verify.operators import CHECKS, SparseDecode

pytestmark = pytest.mark.gpu

REPEATS = 100
RIVALS = 3
RIVAL = """
import torch
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
torch.mm(a, a)
torch.cuda.synchronize()
print("ready", flush=True)
while True:
    for _ in range(20):
        torch.mm(a, a)
    torch.cuda.synchronize()
"""
SPECS = spec.load(paths.specs_dir())


def _drawn() -> list[Case]:
    """Requests of several lengths at every point of attention and decode."""
    found = []
    for op in ("sparse_decode", "sparse_attention", "decode_score"):
        for cell in default_registry().select(op=op, target="sm90"):
            if toolchain.missing(cell.dsl) is None:
                found += [case for case in cases(cell, SPECS) if case.workload.label == "ragged"]
    return found


@pytest.fixture(scope="module")
def rivals() -> Iterator[None]:
    processes = [
        subprocess.Popen([sys.executable, "-c", RIVAL], stdout=subprocess.PIPE, text=True) for _ in range(RIVALS)
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("rivals")
@pytest.mark.parametrize("case", _drawn(), ids=lambda case: f"{case.cell.id}-{case.key}".replace(" ", "-"))
def test_runs_are_equal_beside_another_process(case: Case) -> None:
    device = torch.device("cuda")
    seed = int(torch.randint(1 << 31, ()))
    check = CHECKS[case.cell.op](case, Source(device, seed, case.workload.values), False, case.cell.dsl)
    scratch = _scratch(check) if case.cell.op == "sparse_decode" else torch.empty(0, device=device)
    poison_free_memory(device)
    first, kept = _run(check, scratch)
    check.compare(tuple(first))
    for repeat in range(1, REPEATS):
        again, partial = _run(check, scratch)
        wrong = []
        for name, now, then in [
            *((f"output {number}", *pair) for number, pair in enumerate(zip(again, first, strict=True))),
            ("the workspace", partial, kept),
        ]:
            try:
                compare.same_bits(name, now, then)
            except Disagreement as error:
                wrong.append(f"{error}: {_values(now, then)}")
        # Outputs that differ above a workspace that does not are the merge's.
        assert not wrong, f"run {repeat}, seed {seed}: " + "; ".join(wrong)


def _scratch(check: SparseDecode) -> torch.Tensor:
    """The workspace of a decode call, which shows what was merged."""
    scored: dict[str, Any] = {}
    if check.scored:
        scored = {
            "idx_q": check.idx_q,
            "max_seqlen_k": check.own["max_seqlen_k"],
            "block_size": check.case.dims["block_size"],
        }
    size = ops.decode_workspace_bytes(check.q, check.ids.shape[-1], check.k.shape[1], **scored)
    return torch.empty(size, dtype=torch.uint8, device=check.q.device)


def _run(check: Any, scratch: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Outputs of a run and its workspace, which holds NaN before."""
    scratch.fill_(255)
    if scratch.numel():
        check.options["workspace"] = scratch
    outputs = [output.clone() for output in check.run(into_buffers=False)]
    check.options.pop("workspace", None)  # the reference knows none
    return outputs, scratch.clone()


def _values(now: torch.Tensor, then: torch.Tensor) -> str:
    """The first values that differ, NaN included."""
    different = now.view(-1).ne(then.view(-1)) & ~(now.isnan() & then.isnan()).view(-1)
    places = different.nonzero().view(-1)[:4]
    return ", ".join(f"{now.view(-1)[i].item()} instead of {then.view(-1)[i].item()} at {i}" for i in places.tolist())
