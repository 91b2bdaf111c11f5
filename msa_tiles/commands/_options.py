"""Options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from msa_tiles import console

if TYPE_CHECKING:
    from msa_tiles.runtime.registry import Cell

FILTERS = ("op", "dsl", "target", "precision")


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Options that narrow a command down to some cells."""
    for name in FILTERS:
        what = "precision or group of precisions, such as fp8" if name == "precision" else name
        parser.add_argument(f"--{name}", metavar=name.upper(), help=f"only cells of this {what}")


def add_variant(parser: argparse.ArgumentParser, help: str) -> None:
    """Option that names compile-time dims: pairs of name and value in `variant`."""
    parser.add_argument(
        "--variant", nargs="+", action="extend", default=[], type=named_value, metavar="NAME=N", help=help
    )


def filters_of(args: argparse.Namespace) -> dict[str, str | None]:
    """What was given for them, as keywords of `Registry.select`."""
    return {name: getattr(args, name) for name in FILTERS}


def filter_text(filters: Mapping[str, str | None]) -> str:
    """The filters as they were typed, for a message."""
    return " ".join(f"--{name} {value}" for name, value in filters.items() if value is not None)


def without_missing(cells: Iterable[Cell]) -> list[Cell]:
    """The cells whose DSL is installed; says why those of another are left out."""
    from msa_tiles.runtime import toolchain

    cells = list(cells)
    reasons = {dsl: toolchain.missing(dsl) for dsl in sorted({cell.dsl for cell in cells})}
    for dsl, reason in reasons.items():
        if reason is not None:
            console.complain(f"the cells of {dsl} are left out: {reason}")
    return [cell for cell in cells if reasons[cell.dsl] is None]


def named_value(text: str) -> tuple[str, int]:
    """Parse `name=number` for argparse."""
    name, equals, value = text.partition("=")
    if not (name and equals and value.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NUMBER, for example head_dim=128")
    return name, int(value)
