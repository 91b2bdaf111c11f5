"""What a command cannot do is noticed before the work: places that cannot be written, sizes that run away."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from msa_tiles import cli, files
from msa_tiles.demo import text as demo_text
from msa_tiles.runtime import facts, toolchain
from msa_tiles.runtime import registry as registry_module
from msa_tiles.runtime.facts import DeviceFacts
from msa_tiles.runtime.registry import Registry, default_registry

# Every option that names a place to write, and whether that is a directory.
PLACES = {
    "demo": (["demo"], "--out", True),
    "demo --train": (["demo", "--train"], "--out", True),
    "generate": (["generate"], "--out", True),
    "build": (["build"], "--cache", True),
    "pack": (["pack", "--target", "sm90"], "--out", True),
    "pack, a wheel": (["pack", "--target", "sm90"], "--out", False),
    "pack, its cache": (["pack", "--target", "sm90", "--out", "new"], "--cache", True),
    "bench": (["bench"], "--out", False),
    "bench of old rows": (["bench", "--from", "rows.jsonl"], "--charts", True),
}


class BegunError(Exception):
    """Work has begun."""


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def begin(*arguments: object, **options: object) -> None:
        raise BegunError

    for what in (
        *("codegen.produce", "codegen.generate", "runtime.build.build", "pack.make.make", "pack.wheel.build"),
        *("demo.kernels.differences", "demo.device.choose", "demo.train.choose_place"),
        *("bench.session.run", "bench.rows.read", "bench.charts.draw"),
    ):
        monkeypatch.setattr(f"msa_tiles.{what}", begin)
    monkeypatch.setattr("msa_tiles.bench.charts.available", lambda: True)
    monkeypatch.chdir(tmp_path)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"msa-tiles {arguments[0]}: ")
    return line


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("depth", ["file", "file/below", "file/below/it"])
def test_a_place_that_cannot_be_written(
    name: str, depth: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, option, directory = PLACES[name]
    (tmp_path / "file").write_text("kept")
    place = tmp_path / depth
    if not directory:
        place = place / "inside.whl"  # a file may be written over
    line = complaint(capsys, *command, option, str(place))
    assert option in line and str(tmp_path / "file") in line
    assert (tmp_path / "file").read_text() == "kept" and sorted(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize("name", [name for name, (_, _, directory) in PLACES.items() if not directory])
def test_a_directory_is_no_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, option, _ = PLACES[name]
    (tmp_path / "here.whl").mkdir()
    assert f"{option} {tmp_path / 'here.whl'} is a directory, wanted a file" in complaint(
        capsys, *command, option, str(tmp_path / "here.whl")
    )


@pytest.mark.parametrize("name", ["demo", "generate", "pack", "bench of old rows"])
def test_a_place_that_can_be_written_lets_the_work_begin(name: str, tmp_path: Path) -> None:
    command, option, _ = PLACES[name]
    with pytest.raises(BegunError):
        cli.main([*command, option, str(tmp_path / "new" / "place")])
    assert not (tmp_path / "new").exists()


def test_rights_are_tried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only file system lets root believe that it may write."""

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)
    with pytest.raises(ValueError, match=r"--out \S*new cannot be made in \S* \(Read-only file system\); name another"):
        files.refuse_unwritable("--out", tmp_path / "new", directory=True)


def test_rows_go_to_a_file_that_can_be_written_without_being_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(toolchain, "missing", lambda dsl: None)
    monkeypatch.setattr(facts, "device_facts", lambda *_: DeviceFacts("NVIDIA H200", "sm90", 132, (9, 0)))
    (tmp_path / "msa_bench").write_text("")
    assert "--out msa_bench/nvidia-h200.jsonl cannot be made" in complaint(capsys, "bench", "combine")


@pytest.mark.parametrize("command", ["verify", "tune"])
def test_evidence_that_cannot_be_kept(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / {"verify": "verified.json", "tune": "tuned.json"}[command]
    shutil.copyfile(default_registry().directory / "index.json", tmp_path / "index.json")
    record.mkdir()
    monkeypatch.setattr(registry_module, "default_registry", lambda: Registry.read(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert str(record) in complaint(capsys, command)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["demo", "--tokens", "2000000"], "wanted at most 65,536 on a CPU"),
        (["demo", "--tokens", "70000"], "--tokens: 70,000 of pydoc_data.topics"),
        (["demo", "--tokens", "-5"], "--tokens: -5, wanted at least 2048"),
        (["demo", "--train", "--steps", "1000000000"], "--steps: 1,000,000,000, wanted at most 10,000"),
        (["build", "--jobs", "100000"], "--jobs is 100000, wanted at most "),
        (["pack", "--target", "sm90", "--out", "new", "--jobs", "100000"], "--jobs is 100000, wanted at most "),
        (["verify", "--jobs", "100000"], "--jobs is 100000, wanted at most "),
        (["verify", "--jobs", "-1"], "--jobs is -1, wanted at least 1"),
        (["tune", "--seconds", "1e9"], "--seconds is 1e+09, wanted more than 0 and at most 600"),
        (["bench", "--seconds", "nan"], "--seconds is nan, wanted more than 0 and at most 600"),
        (["bench", "--seconds", "inf"], "--seconds is inf, wanted more than 0 and at most 600"),
    ],
)
@pytest.mark.drawn(5)
def test_a_size_that_runs_away(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sentence in complaint(capsys, *arguments)


def test_a_gpu_that_cannot_run_the_demo_does_not_leave_its_text_to_the_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from msa_tiles.demo import device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("msa_tiles.demo.kernels.differences", lambda *_: (1, []))
    monkeypatch.setattr(device, "choose", lambda precision: device.CPU)
    assert "wanted at most 65,536 on a CPU" in complaint(capsys, "demo", "--tokens", "70000")


def test_a_short_text_of_many_tokens_asked_for_is_no_runaway(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("one two three " * 2000)
    loaded = demo_text.load(tmp_path / "own.txt", 2_000_000)
    demo_text.refuse_runaway(loaded, gpu=False)


@pytest.mark.parametrize(("content", "holds"), [("one", "1 token;"), ("one two", "2 tokens;"), ("", "0 tokens;")])
def test_one_token_is_one_token(content: str, holds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.txt").write_text(content)
    assert f"holds {holds}" in complaint(capsys, "demo", "--text", str(tmp_path / "own.txt"))


RECORDS = {
    "index.json": (["support"], ["explain", "combine", "--device", "sm90"], ["build"], ["verify"], ["tune"]),
    "verified.json": (["support"], ["support", "--json"]),
    "compiled.json": (["support"], ["support", "--json"]),
    "tuned.json": (["explain", "combine", "--device", "sm90"],),
}


@pytest.mark.parametrize(
    ("record", "command"),
    [(name, command) for name, commands in RECORDS.items() for command in commands],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
@pytest.mark.drawn(5)
def test_a_torn_record_is_named(
    record: str,
    command: list[str],
    kept: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in RECORDS:
        shutil.copyfile(default_registry().directory / name, tmp_path / name)
    whole = (tmp_path / record).read_text()
    (tmp_path / record).write_text(whole[: int(len(whole) * kept)])
    monkeypatch.setattr(registry_module, "default_registry", lambda: Registry.read(tmp_path))
    line = complaint(capsys, *command)
    assert str(tmp_path / record) in line and "msa-tiles " in line.split(": ", 1)[1]  # the file and the remedy
    # Nor does JSON of another kind pass.
    for other in ("[]", "3", json.dumps({"a": 1}), "[" * 100_000):
        (tmp_path / record).write_text(other)
        assert str(tmp_path / record) in complaint(capsys, *command)


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.split(",")[0] + line.partition(" s")[2] for line in capsys.readouterr().err.splitlines()]


def test_progress_says_at_once_what_is_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from msa_tiles import console

    monkeypatch.setattr(console, "_SECONDS_BETWEEN_LINES", 0.0)

    def outcomes() -> Iterator[str]:
        assert lines_of(capsys) == ["compiling: 0/3; one"]
        yield "two"
        assert lines_of(capsys) == ["compiling: 1/3; one"]
        yield "one"
        assert lines_of(capsys) == ["compiling: 2/3; three"]
        yield "three"
        assert lines_of(capsys) == ["compiling: 3/3"]

    assert list(console.arrivals(outcomes(), ["one", "two", "three"], "compiling", str)) == ["two", "one", "three"]
    assert lines_of(capsys) == []


def test_progress_of_work_counts_what_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from msa_tiles import console

    monkeypatch.setattr(console, "_SECONDS_BETWEEN_LINES", 0.0)
    seen = []
    for item in console.progress(["one", "two"], "operators", str.upper):
        seen.append((item, lines_of(capsys)))
    assert seen == [("one", ["operators: 0/2; ONE"]), ("two", ["operators: 1/2; TWO"])]
    assert lines_of(capsys) == ["operators: 2/2"]


@pytest.mark.parametrize("between", [0.0, 1e9])
@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_no_line_of_progress_is_written_twice(
    between: float, terminal: bool, number: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a log; on a terminal what was drawn is drawn over, and one line is left."""
    from msa_tiles import console

    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    names = [str(index) for index in range(number)]

    def arriving() -> Iterator[str]:
        yield from names
        if fails:
            raise ValueError

    def work(_: str) -> None:
        if fails:
            raise ValueError

    monkeypatch.setattr(console, "_SECONDS_BETWEEN_LINES", between)
    for counted, each in (
        (lambda: console.progress(names, "steps", str), work),
        (lambda: console.arrivals(arriving(), names, "steps", str), str),
    ):
        monkeypatch.setattr(sys, "stderr", stream := Stream())
        with contextlib.suppress(ValueError):
            for item in counted():
                each(item)
        *lines, rest = re.sub(r", [\d.]+ s", "", stream.getvalue()).split("\n")
        written = [line.rpartition("\r")[2] for line in lines]
        assert not rest
        assert written[-1].startswith(f"steps: {0 if fails and each is work else number}/{number}")
        assert len(written) == 1 if terminal else len(written) == len(set(written)), written


@pytest.mark.parametrize("command", ["verify", "tune", "bench"])
@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("gpu", "--device gpu names no GPU of this machine, and kernels "),
        ("cpu", "--device cpu names no GPU of this machine, and kernels "),
        ("b100", "name cuda or cuda:N (a GPU of compute capability 10.0 is served by sm100)"),
        ("rtx5090", "name cuda or cuda:N (no target serves a GPU of compute capability 12.0, "),
        ("cuda:7", "--device cuda:7 is not here: there are 2 GPUs"),
    ],
)
@pytest.mark.drawn(6)
def test_a_device_that_is_not_here(
    command: str, device: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert sentence in complaint(capsys, command, "--device", device)
