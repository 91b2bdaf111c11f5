"""Ctrl-C ends a command at once, with one line, whatever is compiling."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from msa_tiles import cli, interrupts
from msa_tiles.runtime import toolchain

AT_ONCE = 15.0  # seconds, on a machine that does other things too; a kernel of attention takes longer than that
COMMANDS = {
    "build": ["build", "--op", "sparse_attention", "--dsl", "tilelang"],
    "build in two processes": ["build", "--op", "sparse_attention", "--dsl", "tilelang", "--jobs", "2"],
    "pack": ["pack", "--target", "sm90", "--dsl", "tilelang", "--out", "pack"],
}


def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """A command that hears of Ctrl-C, also where these tests run in the background of a shell, which has it ignored."""

    def hear() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=hear, **options)


def busy(group: int) -> list[int]:
    """The processes whose parent is `group`, or whose parent's parent is."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    return [pid for pid, parent in parents.items() if group in (parent, parents.get(parent))]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_compiles(name: str, tmp_path: Path) -> None:
    try:
        toolchain.require_compiler("tilelang")
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))
    environment = {**os.environ, "MSA_TILES_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "msa_tiles", *COMMANDS[name]]
    started = start(command, cwd=tmp_path, env=environment)
    limit = time.monotonic() + 120
    # A stage directory is there as soon as the first kernel is being compiled.
    while not list((tmp_path / "cache").rglob("*stag*")):
        assert time.monotonic() < limit, "nothing is compiled"
        assert started.poll() is None, "it ended by itself"
        time.sleep(0.1)
    workers = busy(started.pid)
    assert workers, "nothing compiles in a process of its own"
    before = time.monotonic()
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert time.monotonic() - before < AT_ONCE
    assert started.returncode == 130
    assert said.splitlines()[-1] == "msa-tiles: interrupted"
    assert "Traceback" not in said
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()], "a compiler is still at work"


def test_a_command_that_computes(tmp_path: Path) -> None:
    code = (
        "import sys; from msa_tiles import cli, codegen\n"
        "def wait(*arguments, **options):\n"
        "    print('waiting', flush=True)\n"
        "    import time; time.sleep(60)\n"
        "codegen.produce = wait\n"
        "sys.exit(cli.main(['generate', '--check']))\n"
    )
    started = start([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert started.stdout is not None and started.stdout.readline() == "waiting\n"
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert (started.returncode, said.splitlines()[-1]) == (130, "msa-tiles: interrupted")
    assert "Traceback" not in said


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.__name__.rpartition(".")[2])
def test_every_command_ends_with_one_line(
    command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    name = command.__name__.rpartition(".")[2]
    assert cli.main([name, *{"explain": ["combine"], "pack": ["--out", "nowhere"]}.get(name, [])]) == 130
    assert capsys.readouterr() == ("", "msa-tiles: interrupted\n")


class Finalised:
    """What is interrupted as it goes, some times."""

    left = 0

    def __del__(self) -> None:
        if Finalised.left > 0:
            Finalised.left -= 1
            raise KeyboardInterrupt


def test_an_interrupt_in_a_finaliser_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """Python prints and forgets it; here it comes again, also where that is lost as well."""
    Finalised.left = 3
    hook, handler = sys.unraisablehook, signal.getsignal(signal.SIGALRM)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupts.insistent():
        while time.monotonic() - begun < 10:
            Finalised()
            time.sleep(0.001)
    assert Finalised.left == 0 and time.monotonic() - begun < 5
    assert (sys.unraisablehook, signal.getsignal(signal.SIGALRM)) == (hook, handler)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert "ignored" not in capsys.readouterr().err


def test_other_threads_have_no_signals_to_lose() -> None:
    found: list[bool] = []

    def work() -> None:
        with interrupts.insistent():
            found.append(sys.unraisablehook is hook)

    hook = sys.unraisablehook
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True]
