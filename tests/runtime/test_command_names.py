"""Names on the command line: several, typed wrong, or such that nothing is left. Every command, every option."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from msa_tiles import cli
from msa_tiles.commands import _options, bench, build, explain, generate, pack, support, tune, verify
from msa_tiles.runtime.build import Outcome
from msa_tiles.runtime.registry import Registry, default_registry
from msa_tiles.spec import cards

FILTERED = ("generate", "support", "build", "verify", "tune")
# Options that take names, and a misspelt one with what was meant.
FILTERS = {
    "--op": ("sparse_atention", "sparse_attention"),
    "--dsl": ("cutdsl", "cutedsl"),
    "--target": ("sm91", "sm90"),
    "--precision": ("q16kv9", "q16kv8"),
}
TYPED = [
    *((command, option, *names) for command in FILTERED for option, names in FILTERS.items()),
    ("tune", "--workload", "prefill_32", "prefill_32k"),
    ("pack", "--target", "sm91", "sm90"),
    ("pack", "--dsl", "cutdsl", "cutedsl"),
    ("explain", "--precision", "q16kv9", "q16kv8"),
    ("explain", "--backend", "cutdsl", "cutedsl"),
    ("explain", "--feature", "page", "paged"),
    ("bench", "--cases", "prefill_32", "prefill_32k"),
    ("bench", "--precision", "q16kv9", "q16kv8"),
    ("bench", "--backend", "cutdsl", "cutedsl"),
    ("bench", "--peers", "vlm", "vllm"),
]
ONE = [("explain", "--precision"), ("explain", "--backend")]  # that take one name
NEEDED = {"pack": ["--target", "sm90", "--out", "nowhere"], "explain": ["sparse_attention"]}


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*arguments: object, **options: object) -> Iterator[Outcome]:
        raise AssertionError("work has begun")

    monkeypatch.setattr("msa_tiles.runtime.build.build", work)
    monkeypatch.setattr("msa_tiles.codegen.produce", work)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command says that must refuse: one line."""
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert not printed.out
    *before, line = printed.err.splitlines()
    assert all(note.startswith("rendering the kernels of ") for note in before)
    assert line.startswith(f"msa-tiles {arguments[0]}: ")
    return line


@pytest.mark.parametrize(("command", "option", "typed", "meant"), TYPED)
@pytest.mark.drawn(12)
def test_a_typo_is_refused_with_what_was_meant(
    command: str, option: str, typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = NEEDED.get(command, [])
    line = complaint(capsys, command, *needed, option, typed)
    assert option in line and f"{typed} is unknown; did you mean {meant}? Known: " in line
    # Among right ones too, wherever it stands.
    others = [] if option in needed or (command, option) in ONE else [option, meant]
    assert f"{typed} is unknown" in complaint(capsys, command, *needed, *others, option, f"{meant},{typed}")


def test_no_option_that_takes_names_is_left_out_above() -> None:
    """Whoever adds such an option adds a line to TYPED."""
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    for command in (bench, build, explain, generate, pack, support, tune, verify):
        command.add(subparsers)
    taking = {
        (name, option)
        for name, command in subparsers.choices.items()
        for action in command._actions
        for option in action.option_strings
        if action.type is _options.listed
    }
    assert taking <= {(command, option) for command, option, *_ in TYPED}


def test_operators_are_checked_like_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean sparse_attention?" in complaint(capsys, "explain", "sparse_atention")
    assert "did you mean sparse_attention?" in complaint(capsys, "bench", "sparse_atention")
    file = "perf/results/nvidia-h200.jsonl"
    assert "did you mean select_blocks?" in complaint(capsys, "bench", "--from", file, "select_block")


@pytest.mark.parametrize("command", [*FILTERED, "bench"])
@pytest.mark.parametrize("nothing", ["", ",", " , "])
def test_an_option_that_names_nothing_is_refused(
    command: str, nothing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--precision", nothing])
    assert end.value.code == 2
    assert "names nothing: leave the option out for everything" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [*([command] for command in FILTERED), ["support", "--json"], ["generate", "--check"]], ids=" ".join
)
@pytest.mark.drawn(2)
def test_names_that_leave_nothing_are_refused(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    line = complaint(capsys, *command, "--op", "combine", "--precision", "fp8")
    assert "matches --op combine --precision fp8" in line


def test_a_benchmark_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["--cases", "prefill_32k", "--precision", "q8k8"]  # the one of combine, the other of select_blocks
    assert "no case is of all that" in complaint(capsys, "bench", "combine", "select_blocks", *names)


def test_several_names_select_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    def chosen(*arguments: str) -> set[tuple[str, str]]:
        assert cli.main(["support", "--json", "--target", "sm90", "--dsl", "cutedsl", *arguments]) == 0
        return {(row["op"], row["precision"]) for row in json.loads(capsys.readouterr().out)}

    both = chosen("--op", "combine", "--op", "topk_select")
    assert {op for op, _ in both} == {"combine", "topk_select"}
    assert chosen("--op", "combine,topk_select") == chosen("--op", " topk_select , combine") == both
    assert {precision for _, precision in chosen("--precision", "bf16,fp8")} > {"bf16", "q8k8"}


def test_a_build_of_two_operators_builds_both(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def built(jobs: list, *arguments: object, **options: object) -> Iterator[Outcome]:
        asked.extend(job.cell.op for job in jobs)
        return (Outcome(job, None, 0.0, ()) for job in jobs)

    monkeypatch.setattr("msa_tiles.runtime.build.build", built)
    monkeypatch.setattr("msa_tiles.runtime.toolchain.missing", lambda dsl: None)
    for target in ("sm90", "H200"):
        asked.clear()
        assert cli.main(["build", "--op", "combine", "--op", "topk_select", "--target", target]) == 0
        assert set(asked) == {"combine", "topk_select"}


def test_an_operator_without_kernels_of_its_own_names_those_it_launches(capsys: pytest.CaptureFixture[str]) -> None:
    line = complaint(capsys, "build", "--op", "msa_decode")
    assert "--op decode_score,decode_topk,sparse_decode,combine" in line
    registry: Registry = default_registry()
    assert not registry.of("msa_decode")


@pytest.mark.parametrize(("given", "meant"), [("FP8", "fp8"), ("NVFP4", "nvfp4"), ("Q16KV8", "q16kv8")])
def test_capital_letters_are_told(given: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["support"], ["matrix"], ["bench"], ["explain", "sparse_attention"]):
        line = complaint(capsys, *command, "--precision", given)
        assert f"precision {given} is unknown; did you mean {meant}?" in line, command


def test_a_command_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["suport"]) == 2
    assert "msa-tiles: command suport is unknown; did you mean support?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shell", "status", "told"),
    [
        ("PYTHONIOENCODING=ascii {} support --help", 0, r"--op OP,\u2026"),
        ("{} support > /dev/full", 2, "msa-tiles support: writing failed: No space left on device"),
        ("{} support --op combine >&-", 0, ""),
        ("{} support --op combine 2>&-", 0, "combine"),
        ("{} support --op combin >&- <&-", 2, "did you mean combine?"),
    ],
    ids=["ascii", "full", "no stdout", "no stderr", "stderr alone"],
)
def test_a_terminal_of_few_letters_a_disk_without_room_and_streams_that_are_closed(
    shell: str, status: int, told: str
) -> None:
    command = shell.format(f"{sys.executable} -m msa_tiles")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert told in done.stdout + done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "of", "serving"),
    [
        *((name, "9.0", "sm90") for name in ("H20", "h800", "gh200", "H100 NVL 94GB!", "sm_90a", "compute_90", "9.0")),
        *((name, "10.0", "sm100") for name in ("b100", "GB200", "sm_100")),
        ("NVIDIA B300 SXM7", "10.3", "sm103"),
        *((name, "12.0", "") for name in ("rtx5090", "RTX 5090 Ti", "RTX PRO 6000", "sm120a")),
        *((name, "8.9", "") for name in ("l40s", "NVIDIA L4", "4090", "sm89")),
        *((name, "8.0", "") for name in ("a100", "80GB A100", "A800", "ampere")),
        *((name, "8.6", "") for name in ("A10G", "rtx 3090", "RTX A6000")),
        *((name, of, "") for name, of in (("gb10", "12.1"), ("T4", "7.5"), ("v100", "7.0"))),
    ],
)
def test_a_card_or_architecture_is_told_which_target_serves_it(name: str, of: str, serving: str) -> None:
    sentence = cards.unknown_target("--target", name, default_registry().targets)
    assert sentence.startswith(f"--target {name} is unknown; ")
    served = f"a GPU of compute capability {of} is served by {serving}: write --target {serving}."
    assert (served if serving else f"no target serves a GPU of compute capability {of}, ") in sentence
    assert sentence.endswith("Known: sm100 (10.0), sm103 (10.3), sm90 (9.0)")


@pytest.mark.parametrize("name", ["mi300", "gaudi3", "cuda", "gpu", "h1000", "b1"])
def test_other_names_are_no_nvidia_card(name: str) -> None:
    assert cards.told_of(name, default_registry().targets) == ""
    assert "did you mean" not in cards.unknown_target("--target", name, default_registry().targets)


@pytest.mark.parametrize(
    "command",
    [
        ["support", "--target"],
        ["matrix", "--target"],
        ["build", "--target"],
        ["build", "--for", "combine", "--target"],
        ["pack", "--out", "nowhere", "--target"],
        ["verify", "--target"],
        ["tune", "--target"],
        ["generate", "--check", "--target"],
        ["explain", "combine", "--device"],
    ],
    ids=" ".join,
)
def test_every_command_says_which_target_serves_a_card(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "GPU of compute capability 10.0 is served by sm100" in complaint(capsys, *command, "b100")
    assert "no target serves a GPU of compute capability 8.9" in complaint(capsys, *command, "l40s")


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (["support", "--device", "sm90"], "--device sm90; support has --target in place of --device\n"),
        (["matrix", "--device=sm90"], "--device=sm90; matrix has --target in place of --device\n"),
        (["explain", "combine", "--target", "sm90"], "; explain has --device in place of --target\n"),
        (["bench", "--dsl", "tilelang"], "; bench has --backend in place of --dsl\n"),
        (["tune", "--backend", "tilelang"], "; tune has --dsl in place of --backend\n"),
        (["bench", "--target", "sm90"], "; bench has --device in place of --target\n"),
        (["support", "--nothing"], "unrecognized arguments: --nothing\n"),
    ],
)
def test_an_option_of_another_command_is_told_what_it_is_called(
    command: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(command)
    assert left.value.code == 2
    assert capsys.readouterr().err.endswith(hint)


def parsers() -> dict[str, argparse.ArgumentParser]:
    subparsers = argparse.ArgumentParser().add_subparsers()
    for command in cli.COMMANDS:
        command.add(subparsers)
    return subparsers.choices


@pytest.mark.parametrize("name", parsers())
def test_help_says_what_every_option_takes(name: str) -> None:
    """What has a default tells it; what takes one name does not say that it may be repeated."""
    for action in parsers()[name]._actions:
        told = action.help or ""
        assert told and not told.endswith("."), action.option_strings
        if action.default not in (None, [], False, 0, argparse.SUPPRESS):
            shown = f"{action.default:g}" if isinstance(action.default, float) else str(action.default)
            computed = name == "verify" and action.dest == "jobs"
            assert "default" in told and (computed or shown in told), action.option_strings
        assert not any(word in told.split() for word in ("ops", "dsls", "cells", "cell")), action.option_strings
    assert "repeatable" not in " ".join(action.help or "" for action in parsers()["pack"]._actions)


def options_of(kind: object) -> list[tuple[str, str, object]]:
    """Command, option and type of the options that have one value, or with Path those that take one."""
    subparsers = cli.Parser().add_subparsers()
    for command in cli.COMMANDS:
        command.add(subparsers)
    for parser in subparsers.choices.values():
        _options.add_tree(parser)
    return [
        (name, action.option_strings[-1], action.choices or action.type)
        for name, parser in subparsers.choices.items()
        for action in parser._actions
        if action.option_strings and (type(action) is kind or action.type is kind)
    ]


@pytest.mark.parametrize(("command", "option", "type"), options_of(_options.Once))
def test_a_second_value_of_an_option_is_refused(
    command: str, option: str, type: object, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = list(type)[:2] if isinstance(type, Iterable) else ("1.5", "2.5") if type is float else ("1", "2")
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, option, one, option, one, option, two])
    assert stopped.value.code == 2
    assert f"argument {option}: it is {one} and then {two}, and takes one value" in capsys.readouterr().err


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(("command", "option", "_"), options_of(_options.EachOnce))
def test_a_second_value_of_a_dim_is_refused(
    command: str, option: str, _: object, separate: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, option, "group=8", "head_dim=64", *[option] * separate, "group=8", "head_dim=128"])
    assert f"argument {option}: head_dim is 64 and then 128, and takes one value" in capsys.readouterr().err


def test_a_second_value_in_a_call_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for name, one, two in (("head_dim", "64", "128"), ("precision", "bf16", "q16kv8")):
        line = complaint(capsys, "build", "--target", "sm90", "--for", f"combine,{name}={one},{name}={two}")
        assert line.endswith(f": {name} is {one} and then {two}, and takes one value")


@pytest.mark.parametrize(("command", "option", "_"), options_of(Path))
def test_an_empty_path_is_not_the_working_directory(
    command: str, option: str, _: object, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, option, ""])
    assert f"argument {option}: the path is empty; name one" in capsys.readouterr().err


def test_help_says_what_a_kernel_is_of(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "A kernel, or cell, is of an operator, a DSL" in text
    assert re.search(r"as in (\S+)\. ", text)[1] in {cell.id for cell in default_registry().cells}  # type: ignore[index]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["--tree", "mine", "support"], "support --tree mine"),
        (["--tree=mine", "support", "--op", "combine"], "support --tree=mine --op combine"),
        (["--tree", "demo", "explain", "combine"], "explain --tree demo combine"),
        (["--audit", "build"], "build --audit"),
        (["--op", "combine"], "COMMAND --op combine"),
    ],
)
def test_an_option_before_the_command_is_told_where_it_goes(
    given: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(given) == 2
    option = given[0].partition("=")[0]
    error = capsys.readouterr().err
    assert error == f"msa-tiles: {option} stands before the command, and options come behind it: msa-tiles {wanted}\n"


@pytest.mark.parametrize(
    ("op", "precision", "serving"),
    [
        ("index_score", "q8k4", "q16k4"),
        ("select_blocks", "q8kmx4", "q16kmx4"),
        ("combine", "fp8", "bf16"),
        ("index_kl", "q16kv8", ""),
    ],
)
@pytest.mark.parametrize("command", ["support", "build", "matrix"])
def test_a_precision_that_kernels_of_another_serve(
    command: str, op: str, precision: str, serving: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever looks for its kernels is told which those are."""
    assert cli.main([command, "--op", op, "--precision", precision]) == 2
    error = capsys.readouterr().err
    told = f"calls of {op} in {precision} run kernels of {serving}, --precision {serving}"
    assert f"no cell matches --op {op} --precision {precision}" in error
    assert told in error if serving else "run kernels of" not in error
