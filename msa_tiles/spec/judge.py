"""Judges rows: what they name that there is not, and what does not go together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msa_tiles.names import meant
from msa_tiles.spec.mistakes import Location, SpecError
from msa_tiles.spec.model import KernelRow, Operator, Precision, Target
from msa_tiles.spec.reach import group_told, unreached

Refusals = list[tuple[str, str]]  # keys of a row, and sentences
_CALLED = {"mma": "mma", "copy": "copy engine"}  # what a target has, by the key of rows that names it


@dataclasses.dataclass(frozen=True)
class Mistaken:
    """What files declare that have mistakes: it is known by its name, and nothing else of it."""

    targets: frozenset[str] = frozenset()
    precisions: frozenset[str] | None = frozenset()  # None: their names cannot be read
    rows: Mapping[str, Sequence[KernelRow]] = dataclasses.field(default_factory=dict)  # by operator
    heirs: Mapping[str, Location] = dataclasses.field(default_factory=dict)  # the operators' files


def unfit(
    row: KernelRow, operator: Operator, targets: Mapping[str, Target], precisions: Mapping[str, Precision]
) -> tuple[str, str] | None:
    """Why a row cannot be of its target and its precision, as a key of it and a sentence, or None."""
    found = Judge(targets, precisions, Mistaken(), operator.where, operator).refusals(row)
    return found[0] if found else None


@dataclasses.dataclass
class Judge:
    """Tells what rows name that there is not, or that does not go together: all that does not follow from another."""

    targets: Mapping[str, Target]
    precisions: Mapping[str, Precision]
    mistaken: Mistaken
    heir: Location
    operator: Operator | None = None  # None: it has mistakes of its own, and only what rows name is looked at
    found: list[tuple[KernelRow, str, str]] = dataclasses.field(default_factory=list)
    nowhere: list[KernelRow] = dataclasses.field(default_factory=list)  # rows that no target can run

    def refuses(self, row: KernelRow) -> bool:
        """Whether a row has mistakes, which `told` tells."""
        if row.target:
            refusals = self.refusals(row)
        else:
            targets = [self.refusals(dataclasses.replace(row, target=name)) for name in self.targets]
            refusals = self.telling(row, targets) if all(targets) else []
        self.found += [(row, *each) for each in refusals]
        return bool(refusals) or self._is_lost(row)

    def _is_lost(self, row: KernelRow) -> bool:
        """Whether there can be no plan of a row because of a mistake that is told elsewhere."""
        target, precision = self.targets.get(row.target), self.precisions.get(row.precision)
        if target is None or precision is None or row.mma not in target.mma or self.operator is None:
            return True
        computes = row.computes_in(precision) in target.mma[row.mma].elements
        return not computes or precision.name not in self.operator.tolerance

    def told(self) -> Iterator[SpecError]:
        """The mistakes of all rows that it has judged."""
        for row, key, sentence in self.found:
            yield SpecError(row.key_lines[key], sentence).of(self.heir)
        # What no target at all has is a mistake also where a row's target is none.
        names = {(row.key_lines[key], name) for row, key, _ in self.found for name in _named(row, key)
                 if row.target in self.targets}  # fmt: skip
        for row in (row for row, key, _ in self.found if key == "target" and not self.mistaken.targets):
            for key, known in self._everywhere().items():
                for name in _named(row, key):
                    if name not in known and (row.key_lines[key], name) not in names:
                        sentence = f"no target has the {_CALLED[key]} {name!r}; known: {', '.join(known)}"
                        yield SpecError(row.key_lines[key], sentence + meant(name, known)).of(self.heir)

    def _everywhere(self) -> dict[str, dict[str, None]]:
        """What there is on some target, by the key of rows that names it."""
        every = self.targets.values()
        return {key: {name: None for target in every for name in getattr(target, key)} for key in _CALLED}

    def telling(self, row: KernelRow, refusals: Sequence[Refusals]) -> Refusals:
        """Of the reasons why no target can run a row those that tell: what is wrong on all that have its MMA family.

        Where no target has it, that is wrong, and what else is wrong on all.
        """
        if self.mistaken.targets:  # one of them might run it
            return [each for each in self._precision(row) if row.precision]
        having = [each for each in refusals if all(key != "mma" for key, _ in each)] or list(refusals)
        if not having:
            return self._precision(row)
        common = [key for key in dict(having[0]) if all(key in dict(each) for each in having)]
        told = {}
        for key in common or [having[0][0][0]]:
            sentences = dict.fromkeys(why for each in having for other, why in each if other == key)
            told[key] = "; ".join(sentences)
        if "mma" in told:
            told["mma"] = self._no_mma(row, self.targets.values())
        return list(told.items())

    def _no_mma(self, row: KernelRow, targets: Iterable[Target]) -> str:
        has = (f"{target.name} has {', '.join(target.mma)}" for target in targets)
        return f"unknown mma {row.mma!r}; {'; '.join(has)}"

    def _precision(self, row: KernelRow) -> Refusals:
        names = self.mistaken.precisions
        if not row.precision or row.precision in self.precisions or names is None or row.precision in names:
            return []
        told = group_told(row.precision, self.operator, self.precisions.values())
        known = told or f"; known: {', '.join((*self.precisions, *names))}"
        return [("precision", f"unknown precision {row.precision!r}{known}")]

    def refusals(self, row: KernelRow) -> Refusals:
        """Why a row cannot be of its target and its precision, as keys of it and sentences."""
        found: Refusals = []
        if row.target not in self.targets and row.target not in self.mistaken.targets:
            known = ", ".join((*self.targets, *sorted(self.mistaken.targets)))
            found.append(("target", f"unknown target {row.target!r}; known: {known}"))
        found += self._precision(row)
        target, precision = self.targets.get(row.target), self.precisions.get(row.precision)
        if target is not None:
            if row.mma and row.mma not in target.mma:
                found.append(("mma", self._no_mma(row, [target])))
            for engine in row.copy:
                if engine not in target.copy:
                    has = f"it has {', '.join(target.copy)}"
                    found.append(("copy", f"{target.name} has no copy engine {engine!r}; {has}"))
        if self.operator is None:
            return found
        found += self._of_the_operator(row, self.operator, precision)
        if target is not None and precision is not None and row.mma in target.mma:
            kind, compute = target.mma[row.mma], row.computes_in(precision)
            # That no target multiplies a precision's element is said of the precision.
            if compute not in kind.elements and (row.compute or self._is_multiplied(compute)):
                key = "compute" if row.compute else "precision"
                has = f"it multiplies {', '.join(kind.elements)}"
                found.append((key, f"{target.name} {kind.name} cannot compute {compute!r}; {has}"))
        return found

    def _of_the_operator(self, row: KernelRow, operator: Operator, precision: Precision | None) -> Refusals:
        found = [
            ("operands", f"{operator.name} reads no {role}") for role in row.operands if role not in operator.roles
        ]
        if precision is None:
            return found
        roles = [role for role in operator.roles if role != "output" and role not in precision.roles]
        found += [("precision", f"{precision.name} has no {role}, which {operator.name} reads") for role in roles]
        if not roles and (why := unreached(operator, precision, self.precisions.values())):
            return [*found, ("precision", why)]
        # A tolerance of a precision that is none may have been meant for this one.
        if not roles and precision.name not in operator.tolerance and self._names_precisions(operator.tolerance):
            found.append(("precision", f"{operator.name} states no tolerance for {precision.name}"))
        return found

    def _names_precisions(self, names: Iterable[str]) -> bool:
        others = self.mistaken.precisions
        return others is None or all(name in self.precisions or name in others for name in names)

    def _is_multiplied(self, element: str) -> bool:
        every = (kind.elements for target in self.targets.values() for kind in target.mma.values())
        return bool(self.mistaken.targets) or any(element in elements for elements in every)


def _named(row: KernelRow, key: str) -> tuple[str, ...]:
    """What a row names under one of the keys that are about its target."""
    return row.copy if key == "copy" else (row.mma,) if key == "mma" and row.mma else ()
