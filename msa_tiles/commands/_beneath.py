"""Which kernels a command takes of a tree that --tree names: its own, or with --beneath those beneath it, too."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msa_tiles import console, trees
from msa_tiles.commands._options import filter_text, filters_of
from msa_tiles.names import counted

if TYPE_CHECKING:
    from msa_tiles.runtime.build import Job
    from msa_tiles.runtime.registry import Cell


def add_beneath(parser: argparse.ArgumentParser) -> None:
    """Option of what takes the kernels of a tree that --tree names, see `own_kernels`."""
    parser.add_argument(
        "--beneath",
        action="store_true",
        help="with --tree, also the kernels that lie beneath the tree, the shipped ones among them (default: its own "
        "alone)",
    )


def own_kernels(args: argparse.Namespace, cells: tuple[Cell, ...]) -> tuple[Cell, ...]:
    """Of a tree that --tree names its own kernels alone, unless --beneath is given: those of beneath may take hours.

    Raises ValueError where none of these is its own, and for --beneath without a tree.
    """
    top = trees.top()
    if top is None or not args.tree:
        if args.beneath:
            raise ValueError("--beneath is given without --tree: then nothing that matches is left out")
        return cells
    if args.beneath:
        return cells
    found = tuple(cell for cell in cells if cell.tree == top.directory)
    if not found:
        matching = f" that match {filter_text(filters_of(args))}" if any(filters_of(args).values()) else ""
        raise ValueError(f"{top.directory} has no kernels of its own{matching}; --beneath takes those beneath it")
    if len(found) < len(cells):
        console.note(
            f"the {counted(len(found), 'kernel')} of {top.directory}, of {len(cells)} that match; "
            "--beneath takes those beneath it, too"
        )
    return found


def tell_beneath(jobs: Sequence[Job]) -> None:
    """Say how much of it is not of the tree on top, where there is one: compiling that may take hours."""
    top = trees.top()
    cells = {job.cell.id: job.cell for job in jobs}
    tops = [cell for cell in cells.values() if top is not None and cell.tree == top.directory]
    if top is None or len(tops) == len(cells):
        return
    variants = sum(job.cell.tree == top.directory for job in jobs)
    console.note(
        f"{counted(len(tops), 'kernel')} ({counted(variants, 'variant')}) of {top.directory} and "
        f"{counted(len(cells) - len(tops), 'kernel')} ({counted(len(jobs) - variants, 'variant')}) that lie beneath "
        "are compiled; --op and --target say which, and --tree without --beneath has its own compiled alone"
    )
