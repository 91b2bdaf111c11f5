"""The same bits again and again while another process uses the GPU, so that thread blocks stop and go on anywhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from msa_tiles import paths, spec
from msa_tiles.runtime import toolchain
from msa_tiles.runtime.registry import default_registry
from msa_tiles.verify import compare
from msa_tiles.verify.cases import Case, cases
from msa_tiles.verify.inputs import Source, poison_free_memory
from msa_tiles.verify.operators import CHECKS

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
    poison_free_memory(device)
    first = [output.clone() for output in check.run(into_buffers=False)]
    check.compare(tuple(first))
    for repeat in range(1, REPEATS):
        for number, (kept, again) in enumerate(zip(first, check.run(into_buffers=False), strict=True)):
            compare.same_bits(f"output {number}, run {repeat}, seed {seed}", again, kept)
