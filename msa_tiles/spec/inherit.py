"""`inherits: NAME`: what a file does not say itself, the file of that name says for it.

A key that the heir has replaces the whole key of its parent, but for an operator's `kernels`, whose rows are joined,
and its `tolerance`, whose precisions are: the parent's rows need theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msa_tiles.spec.mistakes import Mistakes
from msa_tiles.spec.source import Node

KEY = "inherits"
JOINED = "tolerance"


@dataclass(frozen=True)
class Heir(Node):
    """A file's mapping with what it inherits. Every value knows its own file and line."""

    parent: Node

    def entries(self) -> dict[str, Node]:
        inherited = {key: node for key, node in self.parent.entries().items() if key != KEY}
        own = super().entries()
        if JOINED in own and JOINED in inherited:
            given = own[JOINED]
            own[JOINED] = Heir(given.yaml, given.where, given.name, inherited[JOINED])
        return inherited | own


@dataclass(frozen=True)
class Single(Node):
    """A file's mapping that inherits nothing, and the files that it could inherit from: it may have forgotten to."""

    others: Mapping[str, Node] = field(compare=False)  # what is read of two that differ here is the same, if anything

    def known(self, required: Iterable[str], known: Sequence[str], mistakes: Mistakes) -> dict[str, Node]:
        own, required = self.entries(), tuple(required)
        missing = [key for key in required if key not in own]
        names = [name for name, other in self.others.items() if other.is_mapping() and {*missing} <= {*other.entries()}]
        if missing and names:
            keys = "the key" if len(missing) == 1 else "the keys"
            mistakes.add(
                self.error(
                    f"{self.title} lacks {keys} {', '.join(map(repr, missing))}; with `{KEY}: {names[0]}` it has from "
                    f"there what it does not say itself" + f" (or from {', '.join(names[1:])})" * (len(names) > 1)
                )
            )
            required = tuple(key for key in required if key in own)
        return super().known(required, known, mistakes)


def resolved(layers: Iterable[Iterable[Node]], any_name: bool = False) -> dict[str, Node]:
    """The files of several directories by their names, the highest directory's last, with what they inherit.

    A file inherits from another of its directory or of those beneath, or from the one of its own name beneath; with
    `any_name` those may have any.

    Raises SpecError where there is no such file, or where files inherit from each other.
    """
    found: dict[str, Node] = {}
    for layer in layers:
        own = {Path(root.where.file).stem: root for root in layer}
        beneath = dict(found)
        for name, root in own.items():
            others = {name: beneath[name]} if name in beneath else {**beneath, **own} if any_name else {}
            others = {other: node for other, node in others.items() if node is not root}
            heir = _heir(name, own, beneath, ())
            found[name] = Single(root.yaml, root.where, root.name, others) if heir is root and others else heir
    return found


def _heir(name: str, own: Mapping[str, Node], beneath: Mapping[str, Node], heirs: tuple[str, ...]) -> Node:
    root = own[name]
    key = root.entries().get(KEY)
    if key is None:
        return root
    parent = key.identifier()
    if parent in own and parent != name:
        if parent in heirs:
            raise key.error(f"{', '.join((*heirs, name))} inherit from each other")
        return Heir(root.yaml, root.where, root.name, _heir(parent, own, beneath, (*heirs, name)))
    if parent not in beneath:
        known = ", ".join(sorted({*own, *beneath} - {name})) or "none"
        remedy = "; name the tree that has it with another --tree before this one" if beneath else ""
        wrong = f"{name!r} inherits from itself" if parent == name else f"there is no {parent!r} to inherit from"
        raise key.error(f"{wrong}; there is {known}{remedy}")
    return Heir(root.yaml, root.where, root.name, beneath[parent])


def lineage(root: Node) -> Iterator[Node]:
    """A file's own mapping and those that it inherits from, the furthest first, each without what it inherits."""
    if isinstance(root, Heir):
        yield from lineage(root.parent)
    yield Node(root.yaml, root.where, root.name)
