"""What is told of a tree of one's own: what it takes away from what lies beneath, and specs that cannot be read."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from test_trees import OPERATOR, TARGET, write

import msa_tiles
from msa_tiles import cli, ops, readable, trees
from msa_tiles.launch import lookup

CELL = "sparse_decode.cutedsl.sm90.bf16"
ONLY = OPERATOR.replace("    features: [paged, q_positions, expanded]\n", "    only: {head_dim: [128]}\n")
HEIR = "target: sm90tiny\ninherits: sm90small\nsummary: one that inherits from that of another tree\n"
DECODE = ("--op", "sparse_decode", "--target", "sm90")


@pytest.mark.parametrize(
    "text, lost",
    [
        (ONLY, "paged, q_positions, expanded; head_dim 64"),
        (OPERATOR.replace("paged, ", ""), "paged"),
        (OPERATOR, None),
    ],
)
def test_what_the_row_beneath_served_and_that_of_the_tree_does_not_is_told(
    text: str, lost: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "specs/operators/sparse_decode.yaml", text)
    assert cli.main(["generate", "--tree", str(tmp_path), *DECODE]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "no longer" in line]
    assert told == ([f"{CELL}: served by the one beneath and no longer: {lost}"] if lost else [])
    assert cli.main(["generate", "--tree", str(tmp_path), "--op", "combine"]) in (0, 2)
    assert "no longer" not in capsys.readouterr().err, "cells that are not selected stay as they were"


def test_specs_that_cannot_be_read_are_told_once_and_break_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path.resolve()
    spec = write(directory / "specs/targets/sm90small.yaml", TARGET)
    assert cli.main(["generate", "--tree", str(directory), "--op", "combine"]) == 0
    spec.write_text(TARGET + "  : [\n")
    capsys.readouterr()
    told = f"the specs of {directory} cannot be read, and its kernels are as they were until `msa-tiles generate "
    partial = torch.empty(2, 64, 16, 128, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(2, 64, 16, device="meta")
    with caplog.at_level(logging.WARNING), trees.use(directory):
        for _ in range(2):
            assert msa_tiles.explain(ops.combine, partial, lse, device="sm90").served
            assert lookup.broken_rules("combine", num_splits=2) == ()
        assert msa_tiles.explain(ops.combine, partial, lse, device="sm90small").kernels[0].expectation is None
    assert [told in each.getMessage() for each in caplog.records].count(True) == 1
    assert "sm90small.yaml:5" in caplog.text
    for command in ("support --op combine", "explain combine --device sm90", "support --target H100"):
        assert cli.main([*command.split(), "--tree", str(directory)]) == 0, command
        assert capsys.readouterr().err.count(told) == 1, command
    assert cli.main(["generate", "--tree", str(directory), "--target", "H100"]) == 2
    told_by_generate = capsys.readouterr().err
    assert told not in told_by_generate and "sm90small.yaml:5: not valid YAML" in told_by_generate


def test_a_tree_that_a_target_inherits_from_and_that_is_missing_is_told_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lower, upper = tmp_path.resolve() / "lower", tmp_path.resolve() / "upper"
    write(lower / "specs/targets/sm90small.yaml", TARGET)
    write(upper / "specs/targets/sm90tiny.yaml", HEIR)
    both = ["--tree", str(lower), "--tree", str(upper)]
    assert cli.main(["generate", "--tree", str(lower), "--op", "combine"]) == 0
    assert "left out" not in capsys.readouterr().err
    assert cli.main(["generate", *both, "--op", "combine"]) == 0
    capsys.readouterr()
    told = "there is no 'sm90small' to inherit from; there is sm100, sm103, sm90; name the tree that has it with"
    for command, status in (("explain combine --device sm90tiny", 0), ("support --op combine", 0), ("generate", 2)):
        assert cli.main([*command.split(), "--tree", str(upper)]) == status
        assert capsys.readouterr().err.count(f"{told} another --tree before this one") == 1, command
        if command != "generate":
            assert cli.main([*command.split(), *both]) == 0
            assert told not in capsys.readouterr().err
    with trees.use(upper):
        found, mistaken = readable.readable()
        assert set(mistaken) == {trees.Tree(upper)} and "sm90small" not in found.targets


def test_cells_of_a_target_of_another_tree_are_left_out_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lower, upper = tmp_path.resolve() / "lower", tmp_path.resolve() / "upper"
    write(lower / "specs/targets/sm90small.yaml", TARGET)
    write(upper / "specs/targets/sm90tiny.yaml", HEIR)
    both = ["--tree", str(lower), "--tree", str(upper), "--op", "sparse_attention,combine"]
    assert cli.main(["generate", *both[:2], *both[4:]]) == 0
    assert cli.main(["generate", *both]) == 0
    assert "left out" not in capsys.readouterr().err
    shutil.rmtree(upper / "generated")
    write(upper / "specs/operators/sparse_attention.yaml", "op: sparse_attention\ninherits: sparse_attention\n")
    assert cli.main(["generate", *both]) == 0
    assert "left out sparse_attention." in capsys.readouterr().err, "of an operator that the tree speaks of"
