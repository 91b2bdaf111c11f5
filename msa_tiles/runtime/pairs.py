"""The precisions of a call that has an indexer and attention: `q8k8+q16kv8`, the one's and the other's."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from msa_tiles.runtime.parts import WHOLES, parts_of
from msa_tiles.runtime.registry import Cell, Registry

BF16 = "bf16"  # of what a precision says nothing of
KEYS = {"index_key": "index keys", "key_value": "keys and values"}  # by role, in the order of a pair


@dataclass(frozen=True)
class Pair:
    """What the indexer's tensors and what attention's are stored in, by the names of precisions."""

    indexer: str
    attention: str

    def __str__(self) -> str:
        return self.indexer if self.indexer == self.attention else f"{self.indexer}+{self.attention}"

    def in_words(self) -> str:
        """The same, which says what either is of."""
        halves = zip((self.indexer, self.attention), KEYS.values(), strict=True)
        return " and ".join(f"{half} ({kind})" for half, kind in halves)

    def of(self, reads: Collection[str]) -> str | None:
        """That of a kernel that reads tensors of these roles; None where it reads neither kind of keys."""
        if "index_key" in reads:
            return str(self) if "key_value" in reads else self.indexer
        return self.attention if "key_value" in reads else None


def pair_of(option: str, name: str, registry: Registry) -> Pair:
    """What a name means: a pair, or a precision or group, which leaves the keys in BF16 that it says nothing of.

    A group stands for the first of its precisions that says something of these keys.

    Raises ValueError for a name that means nothing, or is at the wrong place of a pair.
    """
    first, plus, second = name.partition("+")
    halves = (first, second) if plus else (first, first)
    found = _meant(halves, registry)
    if plus and None in found:
        wanted = f"{option} {name}: a pair is the precision of index keys + that of keys and values"
        if None not in _meant((second, first), registry):
            raise ValueError(f"{wanted}; did you mean {second}+{first}?")
        half, role = next((half, role) for half, role, it in zip(halves, KEYS, found, strict=True) if it is None)
        known = ", ".join(each.name for each in registry.precisions.values() if role in each.formats)
        raise ValueError(f"{wanted}, and {half} says nothing of {KEYS[role]}; known: {known}")
    return Pair(*(half or BF16 for half in found))


def asked_of(option: str, op: str, name: str, registry: Registry, *, refused: bool = False) -> dict[str, str]:
    """The operators whose kernels a call may launch in a precision, a group or a pair, and the precision or group of
    each: one that has kernels stands alone. With `refused` also where it has none of that precision.

    Raises ValueError for a precision that the operator has no kernels of, and says which ones there are.
    """
    none = f"{option} {name}: {op} has no kernels of it"
    reads = {part: {role for cell in registry.of(part) for role in cell.reads} for part in parts_of(op)}
    if own := registry.of(op):
        kinds = [kind for role, kind in KEYS.items() if role in reads[op]]
        if "+" in name and len(kinds) == 1:
            half = pair_of(option, name, registry).of(reads[op])
            raise ValueError(f"{none}: it reads {kinds[0]} alone, wanted {option} {half}")
        if reads[op] and not (refused and name in registry.precisions) and not serving_cells(op, name, registry):
            raise ValueError(f"{none}, only of {precisions_of(own)}")
        return {op: name}
    pair = pair_of(option, name, registry)
    asked = {part: pair.of(reads[part]) or cells[0].precision for part in reads if (cells := registry.of(part))}
    served = {part: precision for part, precision in asked.items() if serving_cells(part, precision, registry)}
    needed = [part for part in WHOLES[op] if part in asked]
    for part in needed:
        if part not in served:
            why = f"{none}, because {part} has none of {asked[part]}, only of {precisions_of(registry.of(part))}"
            others = " and ".join(each for each in needed if each in served)
            raise ValueError(f"{why}; {others} may be called by themselves" if others else why)
    return served


def forms_in(name: str, registry: Registry) -> dict[str, str]:
    """The forms of kernels in a name or a pair: precisions that no call has, with those that calls have instead."""
    called = {half: registry.called(half) for half in name.split("+")}
    return {half: other for half, other in called.items() if other != half}


def called_as(name: str, registry: Registry) -> str:
    """A name or a pair as calls have it, without forms of kernels."""
    return "+".join(registry.called(half) for half in name.split("+"))


def form_text(form: str, called: str) -> str:
    """Says what a form is."""
    return f"{form} is a form of kernels of {called}, which no call chooses by name"


def serving_cells(op: str, name: str, registry: Registry) -> list[Cell]:
    """An operator's kernels that serve calls of a precision or group."""
    serving = registry.serving(op, name)
    return alike(registry.of(op), serving, registry) or list(registry.select(op, precision=serving))


def model_of(op: str, name: str, registry: Registry) -> Cell:
    """The kernel that gives a call of an operator the compile-time dims that nobody names."""
    return next(iter(serving_cells(op, name, registry)), registry.of(op)[0])


def alike(cells: Iterable[Cell], precision: str, registry: Registry) -> list[Cell]:
    """The cells that take tensors as a precision stores them."""
    stored, known = registry.precisions.get(precision), registry.precisions
    return [cell for cell in cells if stored is not None and stored.agrees(known[cell.precision], cell.reads)]


def precisions_of(cells: Iterable[Cell]) -> str:
    """The precisions that they are of, as a list in words."""
    return ", ".join(dict.fromkeys(cell.precision for cell in cells))


def _meant(halves: Collection[str], registry: Registry) -> list[str | None]:
    """The precisions that the halves of a pair mean; None for one that says nothing of its keys."""
    every = list(registry.precisions.values())
    named = ([each for each in every if half == each.name] or [e for e in every if half == e.group] for half in halves)
    return [next((p.name for p in found if role in p.formats), None) for found, role in zip(named, KEYS, strict=True)]
