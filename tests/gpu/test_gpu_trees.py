"""A kernel of a tree of one's own on a GPU: generated, verified, called, and gone with the tree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import msa_tiles
from msa_tiles import cli, ops
from msa_tiles.runtime import dispatch, toolchain

pytestmark = pytest.mark.gpu
CELL = "sparse_decode.cutedsl.sm90.bf16"
OPERATOR = """op: sparse_decode
inherits: sparse_decode
kernels:
  - dsl: cutedsl
    targets: [sm90]
    precisions: [bf16]
    mma: wgmma
    copy: [tma_load]
    tile: {stages: 3}
    expect: [SYNCS]
    features: [paged, q_positions, expanded]
"""


def used() -> set[tuple[str, Path | None]]:
    return {(kernel.cell.id, kernel.cell.tree) for kernel in dispatch._kernels.values()}


def test_a_variant_of_one_s_own_is_verified_and_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := toolchain.missing("cutedsl"):
        pytest.skip(reason)
    tree = tmp_path.resolve()
    (tree / "specs/operators").mkdir(parents=True)
    (tree / "specs/operators/sparse_decode.yaml").write_text(OPERATOR)
    only = ["--op", "sparse_decode", "--dsl", "cutedsl", "--precision", "bf16", "--tree", str(tree)]
    assert cli.main(["generate", "--tree", str(tree)]) == 0
    assert cli.main(["verify", "--smallest", *only]) == 0
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(2, 64, 128, dtype=torch.bfloat16, device="cuda", generator=generator)
    k, v = torch.randn(2, 1024, 4, 128, dtype=torch.bfloat16, device="cuda", generator=generator)
    ids = torch.stack([torch.randperm(7, device="cuda", generator=generator)[:4] for _ in range(8)])
    ids = ids.to(torch.int32).view(4, 2, 4)
    monkeypatch.setattr(dispatch, "_kernels", {})
    plain = ops.sparse_decode(q, k, v, ids, backend="cutedsl")
    assert (CELL, None) in used()
    with msa_tiles.use_tree(tree):
        own = ops.sparse_decode(q, k, v, ids, backend="cutedsl")
        assert (CELL, tree) in used()
    reference = ops.sparse_decode(q, k, v, ids, backend="reference")
    for out in (plain, own):
        torch.testing.assert_close(out.float(), reference.float(), atol=0.03, rtol=0)
    dispatch._kernels.clear()
    assert torch.equal(ops.sparse_decode(q, k, v, ids, backend="cutedsl"), plain)
    assert used() and all(tree is None for _, tree in used())
    index = json.loads((tree / "generated/index.json").read_text())
    assert [cell["id"] for cell in index["cells"]] == [CELL]
