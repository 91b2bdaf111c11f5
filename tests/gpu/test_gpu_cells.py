"""Every cell on every case of the verification grid: fresh inputs, poisoned outputs, three equal runs."""

from __future__ import annotations

import random

import pytest
import torch

from msa_tiles import paths, spec
from msa_tiles.runtime import toolchain
from msa_tiles.runtime.registry import default_registry
from msa_tiles.verify import runner
from msa_tiles.verify.cases import Case, cases

pytestmark = [pytest.mark.gpu, pytest.mark.matrix]

SPECS = spec.load(paths.specs_dir())
CELLS = [cell for cell in default_registry().select(target="sm90") if toolchain.missing(cell.dsl) is None]
GRID = [case for cell in CELLS for case in cases(cell, SPECS)]


@pytest.mark.parametrize("case", GRID, ids=lambda case: f"{case.cell.id}-{case.key}".replace(" ", "-"))
def test_cell_agrees_with_the_reference(case: Case) -> None:
    seed = random.randrange(1 << 31)
    runner.run_case(case, torch.device("cuda"), seed, case.cell.dsl)
