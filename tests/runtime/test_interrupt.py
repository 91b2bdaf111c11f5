"""Ctrl-C ends a command at once, with one line, whatever is compiling."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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


SLOW = """
import sys, time
class Slow:
    def find_spec(self, name, *_):
        if name == "msa_tiles.cli":
            print("importing", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
from msa_tiles.__main__ import main
sys.exit(main())
"""


def test_a_command_that_is_being_imported() -> None:
    started = start([sys.executable, "-c", SLOW], stdout=subprocess.PIPE)
    assert started.stdout is not None and started.stdout.readline() == "importing\n"
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert (started.returncode, said) == (130, "msa-tiles: interrupted\n")


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


@pytest.fixture
def hearing() -> Iterator[None]:
    """Ctrl-C is heard, also where these tests run in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hearing")
@pytest.mark.parametrize("error", [ImportError("cannot load module more than once per process"), OSError(2, "none")])
def test_what_fails_after_an_interrupt_is_interrupted(error: Exception) -> None:
    """As numpy fails, whose import takes the interrupt for its own failure."""
    with pytest.raises(KeyboardInterrupt), interrupts.insistent():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise error from None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(type(error)), interrupts.insistent():
        raise error


@pytest.mark.usefixtures("hearing")
def test_who_ignores_interrupts_goes_on_ignoring_them() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts.insistent():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


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
