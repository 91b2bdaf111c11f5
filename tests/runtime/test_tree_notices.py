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
from msa_tiles.runtime.registry import default_registry

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


def test_kernels_for_a_target_of_a_tree_that_is_not_named_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lower, upper = tmp_path.resolve() / "lower", tmp_path.resolve() / "upper"
    write(lower / "specs/targets/sm90small.yaml", "target: sm90small\ninherits: sm90\n")
    write(upper / "specs/operators/sparse_decode.yaml", OPERATOR.replace("[sm90]", "[sm90small]"))
    both = ["--tree", str(lower), "--tree", str(upper)]
    assert cli.main(["generate", "--tree", str(lower), "--op", "combine"]) == 0
    assert cli.main(["generate", *both]) == 0
    capsys.readouterr()
    assert cli.main(["explain", "sparse_decode", "--tree", str(upper), "--device", "sm90"]) == 2
    printed = capsys.readouterr().err
    assert (
        "index.json has kernels for sm90small, which neither it nor what lies beneath declares: name the tree"
        in printed
    )
    assert cli.main(["explain", "sparse_decode", *both, "--device", "sm90small", "--as-if-installed"]) == 0


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


SELECT = """op: select_blocks
inherits: select_blocks
kernels:
  - dsl: cutedsl
    targets: [sm90]
    precisions: [bf16]
    mma: wgmma
    copy: [tma_load]
    operands: {index_key: index_plain}
    tile: {stages: 3, consumers: 2, producer_registers: 40, consumer_registers: 232}
    expect: [SYNCS, USETMAXREG]
    features: [paged, q_positions, expanded]
"""


@pytest.mark.parametrize(
    "old, new, told",
    [
        (
            "    operands: {index_key: index_plain}\n",
            "",
            "the row names no operand for index_key, so that it is plain, that of the format, which does not fit "
            "cutedsl/wgmma/select_blocks.py; shipped rows of this skeleton have operands: index_key: index_plain",
        ),
        (
            "index_plain",
            "index_plian",
            "operands.index_key is index_plian, which is no module of msa_tiles.dsl.cutedsl.operands, nor a tree's "
            "operands/cutedsl/index_plian.py; did you mean 'index_plain'?",
        ),
        (
            "registers: 40",
            "registers: 41",
            "the producer asks for 41 registers a thread, wanted a multiple of 8 from 24 to 256, as setmaxnreg",
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_told_in_its_words(
    old: str, new: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "specs/operators/select_blocks.yaml", SELECT.replace(old, new))
    assert cli.main(["generate", "--tree", str(tmp_path), "--op", "select_blocks"]) == 2
    assert f"select_blocks.yaml:4: select_blocks.cutedsl.sm90.bf16: {told}" in capsys.readouterr().err


def test_an_operand_of_the_tree_is_near_a_misspelt_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "operands/cutedsl/my_own_keys.py", "TENSORS = ()\n")
    write(tmp_path / "specs/operators/select_blocks.yaml", SELECT.replace("index_plain", "my_own_kesy"))
    assert cli.main(["generate", "--tree", str(tmp_path), "--op", "select_blocks"]) == 2
    assert "operands/cutedsl/my_own_kesy.py; did you mean 'my_own_keys'?" in capsys.readouterr().err


def test_a_target_that_takes_the_gpus_of_another_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = "sm90small has the capability 9.0 of sm90: with this tree GPUs of that capability are sm90small"
    target = write(tmp_path / "specs/targets/sm90small.yaml", TARGET)
    assert cli.main(["generate", "--tree", str(tmp_path), "--op", "combine"]) == 0
    assert own in capsys.readouterr().err
    target.write_text(TARGET + "arch: sm_103a\ncapability: [10, 3]\n")
    cli.main(["generate", "--tree", str(tmp_path), "--op", "combine"])
    told = "sm90small has the capability 10.3 of sm103: with this tree GPUs of that capability are sm90small"
    assert told in capsys.readouterr().err
    target.write_text(TARGET + "arch: sm_103a\ncapability: [10, 4]\n".replace("103", "104"))
    write(tmp_path / "specs/targets/sm90twin.yaml", "target: sm90twin\ninherits: sm90small\n")
    cli.main(["generate", "--tree", str(tmp_path), "--op", "combine"])
    printed = capsys.readouterr().err
    assert (
        "sm90small has the capability 10.4 of sm90twin: with this tree GPUs of that capability are sm90small" in printed
    )
    assert printed.count("of that capability") == 1
    with msa_tiles.use_tree(tmp_path):
        assert next(iter(default_registry().targets)) == "sm90small"


def test_a_copy_engine_that_nothing_names_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engines = "copy: {cp_async: [LDGSTS], tma_laod: [UTMALDG], tma_store: [UTMASTG], bulk: [UBLKCP]}\n"
    write(tmp_path / "specs/targets/sm90small.yaml", TARGET + engines)
    cli.main(["generate", "--tree", str(tmp_path), "--op", "combine"])
    printed = capsys.readouterr().err
    assert "no row names the copy engine 'tma_laod' of sm90small; did you mean 'tma_load'?" in printed
    assert printed.count("no row names") == 1


INTEGERS = """formats:
  kvi8:
    summary: integers
    group: int8
    element: int8
    bits: 8
    storage: int8
    scale: {dtype: float32, per: [head, token_head]}
    operand: append_e4m3
precisions:
  q16kvi8: {query: bf16, key_value: kvi8, multiply: bfloat16, output: bfloat16}
"""
APPEND = """op: append_kv
inherits: append_kv
tolerance:
  q16kvi8: {k_cache: 0, v_cache: 0, k_scale: 0, v_scale: 0}
kernels:
  - dsl: cutedsl
    targets: [sm90]
    precisions: [q16kvi8]
    compute: float32
    mma: simt
    tile: {rows: 16}
    features: [expanded]
"""


def test_a_format_of_which_no_call_passes_tensors_is_told_by_explain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "specs/precisions.yaml", INTEGERS)
    write(tmp_path / "specs/operators/append_kv.yaml", APPEND)
    assert cli.main(["generate", "--tree", str(tmp_path), "--op", "append_kv"]) == 0
    told = "No call passes tensors of the format kvi8, of int8, so that none runs these kernels"
    for precision, said in (("q16kvi8", True), ("q16kv8", False)):
        asked = ["explain", "append_kv", "--tree", str(tmp_path), "--device", "sm90", "--precision", precision]
        assert cli.main(asked) == 0
        assert (told in capsys.readouterr().out) is said
