"""What a row and its precision say of a kernel and its text does not follow: nothing of that is passed over."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msa_tiles.codegen.plan import KernelPlan
from msa_tiles.sources import OPERANDS, PACKAGE, operand_file, operands_in, source_at
from msa_tiles.spec import Precision
from msa_tiles.syntax import SourceError
from msa_tiles.tables import constants_of, place_of

MULTIPLIED = "multiplied"  # the function of an operand that says in which element it hands out values


class Noted:
    """A precision that remembers what is asked of it."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.asked.add(name)
        return getattr(self._precision, name)

    @property
    def tells_multiply(self) -> bool:
        """Whether somebody asked in which element it multiplies."""
        return not self.asked.isdisjoint(("multiply", "decoded"))


def unfollowed(
    plan: KernelPlan, precision: Precision, asked: bool, text: str, file: str, package: Path = PACKAGE
) -> Iterator[str]:
    """Sentences about operands that a row names and a kernel does not import, or that are for other tensors than calls
    pass, and about a precision that multiplies otherwise than the kernel, whose skeleton `asked` how it does or not.
    """
    imported = operands_in(text)
    for role in plan.named:
        if role not in imported:
            what = f"{file} imports {', '.join(imported)} alone" if imported else f"{file} imports no operand"
            yield f"operands.{role} is read by nothing: {what}"
    for role, module in imported.items():
        if role in precision.roles and (why := _of_another_format(plan, role, module, precision, package)):
            yield why
    if plan.compute != precision.multiply:
        return  # the row says what is computed
    told = {role: _multiplied(plan, role, module, package) for role, module in imported.items()}
    multiplies = f"{precision.name} multiplies {precision.multiply} ({precision.multiply_where})"
    for role, elements in told.items():
        if elements and not any(_bits(each) == _bits(precision.multiply) for each in elements):
            yield (
                f"{multiplies}, and the operand {plan.operands[role]} of {role} hands out {' or '.join(elements)}: "
                f"name one that hands out {precision.multiply} (operands: {{{role}: …}}), or another precision"
            )
    # An operand that the row names, and that says nothing, may hand out anything; what is not decoded is as it is.
    if precision.decoded and not asked and not any(told.values()) and not set(plan.named) & imported.keys():
        yield (
            f"{multiplies}, and {file} does not ask how: a line of it takes the element (`# <- precision.multiply`), "
            "or an operand that it imports says it"
        )


def _of_another_format(plan: KernelPlan, role: str, module: str, precision: Precision, package: Path) -> str | None:
    """Why an operand is not for the tensors that a call passes in a role's format, as a sentence; None where it is."""
    stored, package_of = precision.roles[role], f"msa_tiles.dsl.{plan.dsl}{OPERANDS}"
    path = operand_file(module, package_of, package)
    takes = None if path is None else constants_of(path, package).get("TENSORS")
    scale = stored.scale
    passed = ("", *["_scale"] * (scale is not None), *["_global_scale"] * bool(scale and scale.global_dtype))
    if not isinstance(takes, tuple) or takes == passed:  # or says it in a way that is not read here
        return None
    # Modules of one kind have the formats behind a common word: append_plain, append_e4m3.
    alike = "_".join((*module.split("_")[:-1], stored.operand))
    known = alike != module and operand_file(alike, package_of, package) is not None
    return (
        f"the operand {module} of {role} takes {_told(takes)}, and calls of {plan.precision} pass {_told(passed)} "
        f"({stored.name})"
        + (f": write adjust: {{{plan.precision}: {{operands: {{{role}: {alike}}}}}}}" if known else "")
    )


def _told(endings: tuple[str, ...]) -> str:
    """The tensors of an operand in words, by the endings of their names."""
    names = [ending.removeprefix("_").replace("_", " ") + "s" if ending else "values" for ending in endings]
    return ", ".join(names) + " alone" * (len(names) == 1)


def _multiplied(plan: KernelPlan, role: str, module: str, package: Path) -> tuple[str, ...]:
    """The elements in which an operand hands out keys, of all variants; none where it does not say."""
    path = operand_file(module, f"msa_tiles.dsl.{plan.dsl}{OPERANDS}", package)
    function = None if path is None else constants_of(path, package).get(MULTIPLIED)
    if not inspect.isfunction(function):
        return ()
    names = inspect.signature(function).parameters
    found: dict[str, None] = {}
    for point in plan.points():
        # The first of them, where it takes more than compile-time dims, is the name of keys or of values.
        given = {name: point.get(name, "k") for name in names}
        assert path is not None, "it has the function"
        try:
            element = function(**given)
        except Exception as error:
            at, line = place_of(error, source_at(path))
            raise SourceError(at or path, line, f"{MULTIPLIED} fails: {type(error).__name__}: {error}") from error
        if not isinstance(element, str):
            raise SourceError(path, 1, f"{MULTIPLIED} returns {element!r}, wanted the name of an element, as text")
        found[element] = None
    return tuple(found)


def _bits(element: str) -> int:
    """Those of an element, by its name: float16 and bfloat16 are multiplied alike."""
    digits = re.search(r"\d+", element)
    return int(digits.group()) if digits else 0
