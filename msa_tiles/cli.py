"""The command `msa-tiles`."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from msa_tiles import __version__, console, interrupts, trees
from msa_tiles.commands import bench, build, demo, explain, generate, matrix, pack, support, tune, verify
from msa_tiles.commands._options import Once, add_tree, is_target, path, targets_of, tell_mistakes, tell_outdated
from msa_tiles.errors import ToolError
from msa_tiles.names import unknown

CLOSED_PIPE = 141  # what a shell says of a program that SIGPIPE ended
COMMANDS = (demo, generate, support, matrix, explain, build, pack, verify, tune, bench)
TWINS = {  # what one command calls so and another one so
    "--device": ("--target",),
    "--target": ("--device",),
    "--backend": ("--dsl",),
    "--dsl": ("--backend",),
}
SHOWING = ("support", "matrix", "explain")  # these say of each kernel whether it is out of date


class Parser(argparse.ArgumentParser):
    """A parser whose help and errors come through `console`, in whatever encoding a terminal has.

    Options that have one value take one, and paths that are not empty.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.register("action", None, Once)
        self.register("type", Path, path)

    def _print_message(self, message: str, file: Any = None) -> None:
        if message:
            console.write(file or sys.stderr, message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    0, 1 for a failed check, 2 for bad input or a missing tool, 130 after Ctrl-C, 141 when nobody reads what is written.
    """
    console.replace_closed()
    parser = Parser(
        prog="msa-tiles",
        description="MiniMax Sparse Attention kernels from YAML specs.",
        epilog="A kernel, or cell, is of an operator, a DSL (TileLang or CuTe DSL), a target (a family of GPUs) and a "
        "precision, as in sparse_attention.tilelang.sm90.q16kv8, and behind it the algorithm where that has a name, "
        "as in select_blocks.cutedsl.sm90.q8k8.two_tiles. `msa-tiles support` lists them all, and "
        "`msa-tiles COMMAND --help` tells the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for command in COMMANDS:
        command.add(subparsers)
    for each in subparsers.choices.values():
        add_tree(each)
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        os.getcwd()
    except OSError as error:
        console.complain(f"msa-tiles: the working directory cannot be read ({error.strerror}): change to one that can")
        return 2
    if given and not given[0].startswith("-") and given[0] not in subparsers.choices:
        console.complain(f"msa-tiles: {unknown('command', given[0], subparsers.choices)}")
        return 2
    if given and (misplaced := _misplaced(given, subparsers.choices)):
        console.complain(f"msa-tiles: {misplaced}")
        return 2
    args, extra = parser.parse_known_args(given)
    if extra:
        own = subparsers.choices[args.command].format_usage()
        parser.error(f"unrecognized arguments: {shlex.join(extra)}{_meant(extra, args.command, own)}")
    try:
        with contextlib.ExitStack() as used:
            used.enter_context(interrupts.insistent())
            for tree in args.tree:
                used.enter_context(trees.use(tree))
            if args.command != "generate":  # which raises them
                tell_mistakes()
            if any(not is_target(name) for name in getattr(args, "target", None) or ()):
                args.target = targets_of(args.target)
            if args.command == "generate":
                return args.func(args)
            tell_outdated()
            status = args.func(args)
            if args.command not in SHOWING:
                tell_outdated()  # what was said before the work is far above its result
            return status
    except KeyboardInterrupt:
        console.complain(interrupts.SENTENCE)
        return interrupts.INTERRUPTED
    except BrokenPipeError:
        console.close()
        return CLOSED_PIPE
    except (ToolError, ValueError) as error:
        # A compiler, a DSL or the cache; bad specs and bad calls. The message says which, and what to do.
        console.complain(f"msa-tiles {args.command}: {error}")
        return 2
    except OSError as error:  # a path that cannot be read or written, or a full disk behind stdout
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        where = error.filename
        if where is None:
            where = "writing failed"
            console.close()
        console.complain(f"msa-tiles {args.command}: {where}: {error.strerror}")
        return 2


def _meant(extra: Sequence[str], command: str, usage: str) -> str:
    """The end of the sentence about options that a command does not have: its own one for what others call so."""
    options = set(re.findall(r"--[a-z-]+", usage))
    named = [word.partition("=")[0] for word in extra]
    return "".join(
        f"; {command} has {own} in place of {name}"
        for name in dict.fromkeys(named)
        for own in TWINS.get(name, ())
        if own in options
    )


def _misplaced(given: Sequence[str], commands: Collection[str]) -> str:
    """The sentence about an option of commands that stands before the command; empty where none does."""
    option = given[0].partition("=")[0]
    if not option.startswith("-") or any(own.startswith(option) for own in ("-h", "--help", "--version")):
        return ""
    places = [place for place, word in enumerate(given) if word in commands]
    # What follows an option is its value, where another word can be the command.
    place = next((each for each in places if "=" in given[each - 1] or given[each - 1][0:1] != "-"), None)
    place = place if place is not None else next(iter(places), None)
    words = list(given) if place is None else [given[place], *given[:place], *given[place + 1 :]]
    command = "COMMAND " * (place is None) + shlex.join(words)
    return f"{option} stands before the command, and options come behind it: msa-tiles {command}"


if __name__ == "__main__":
    raise SystemExit(main())
