"""`msa-tiles explain` of the shipped kernels: calls of several kernels, devices without a target, every refusal."""

from __future__ import annotations

import pytest

from msa_tiles import cli
from msa_tiles.runtime.parts import PARTS
from msa_tiles.runtime.registry import default_registry


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = cli.main(["explain", *arguments])
    out, error = capsys.readouterr()
    return status, out + error


@pytest.mark.parametrize("op", [op for op in PARTS if not default_registry().of(op)])
def test_a_call_of_several_kernels_shows_each(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = explain(capsys, op, "--device", "sm90", "--variant", "block_size=64", "head_dim=64")
    assert status == 0
    for part in PARTS[op]:
        section = text[text.index(f"\n{part} on ") :].split("\n\n")[0]
        assert f"\nRuns {part}." in section
        if "block_size" in default_registry().of(part)[0].variants:
            assert "block_size=64" in section.splitlines()[1]


def test_parts_that_read_nothing_quantised_run_in_their_own_precision(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = explain(capsys, "msa_decode", "--device", "sm90", "--precision", "q16kv8")
    assert status == 0
    assert "\nsparse_decode on NVIDIA H100 80GB HBM3 (sm90): q16kv8" in text
    assert "\ncombine on NVIDIA H100 80GB HBM3 (sm90): bf16" in text


def test_a_call_that_nobody_serves_in_one_part_fails(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = explain(capsys, "msa_decode", "--device", "sm90", "--variant", "group=3")
    assert status == 1
    assert text.count("No kernel serves this call.") == 1


def test_dense_attention_has_no_kernel_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(capsys, "dense_attention") == (
        0,
        "dense_attention runs FlashAttention-4 where it is installed and takes the call, else torch's attention.\n",
    )


def test_a_target_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = explain(capsys, "combine", "--device", "sm89")
    assert status == 2
    assert "no spec has a target sm89; a tree of your own can have one, see --tree; targets: sm100, sm103, sm90" in text


def test_every_refusal_of_a_kernel_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--device", "sm90", "--variant", "head_dim=96", "group=3", "--feature", "strided_unaligned")
    status, text = explain(capsys, "sparse_decode", *arguments)
    line = next(line for line in text.splitlines() if "sparse_decode.tilelang.sm90.bf16" in line)
    assert status == 1
    for sentence in (
        "head_dim is 96, wanted one of 64, 128",
        "group is 3, wanted one of",
        "not serve strided_unaligned",
    ):
        assert sentence in line
