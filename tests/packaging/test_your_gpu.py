"""The page "Your GPU in ten minutes": what it has one type prints what it shows."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pages
import pytest
import torch

from msa_tiles import cli, trees
from msa_tiles.runtime import packs, toolchain

PAGE = Path(__file__).resolve().parents[2] / "docs" / "your-gpu.md"
STEPS = list(pages.steps(PAGE))
# What compiles, and what shows that it did.
COMPILING = ("build", "pack", "support")


def test_the_page_is_read() -> None:
    commands = [step.command for step in STEPS if step.command]
    words = {word for command in commands for word in command.split()}
    assert {"generate", "build", "explain", "support", "verify", "pack", "sm103"} <= words
    assert sum(bool(step.file) for step in STEPS) == 4
    assert pages.same("a\n…\nb … d\n", "a\nx\ny\nb c d\n") and pages.same("a\n…\n", "a\n")
    assert not pages.same("a\n", "a\nb\n") and not pages.same("a …\n", "b c\n")


@pytest.mark.slow
def test_what_it_says_without_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(tmp_path, monkeypatch, capsys, compiling=False)


@pytest.mark.slow
def test_all_that_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        toolchain.require_compiler("cutedsl")
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))
    _run(tmp_path, monkeypatch, capsys, compiling=True)


def _run(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, compiling: bool) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("MSA_TILES_CACHE_DIR", str(home / "cache"))
    for step in STEPS:
        if step.file:
            (home / step.file).parent.mkdir(parents=True, exist_ok=True)
            (home / step.file).write_text(step.text)
            continue
        words = shlex.split(step.command)
        if words[0] == "mkdir":
            (home / words[1]).mkdir()
            continue
        variables = dict(word.split("=") for word in words[: words.index("msa-tiles")])
        command = words[words.index("msa-tiles") + 1 :]
        if not compiling and (command[0] in COMPILING or variables):
            continue
        if command[0] == "verify" and torch.cuda.is_available():
            continue  # the page is of a machine without a GPU
        with monkeypatch.context() as inner:
            for name, value in variables.items():
                inner.setenv(name, value)
            packs._listed.cache_clear()
            capsys.readouterr()
            status = cli.main(command)
        packs._listed.cache_clear()
        printed, complained = capsys.readouterr()
        assert trees.stack() == ()
        printed += "".join(line for line in complained.splitlines(keepends=True) if line.startswith("msa-tiles "))
        assert status == (2 if step.text.startswith("msa-tiles ") else 0), complained
        shown = printed.replace(os.path.realpath(home), pages.HOME)
        assert pages.same(step.text, shown), f"{step.command}\n{shown}\ninstead of\n{step.text}"
