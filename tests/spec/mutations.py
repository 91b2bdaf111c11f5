"""Every small change one can make to a YAML document: values changed, keys renamed, keys and list items removed.

Changes are made in the composed tree and taken back, so a file is parsed once and every line number stays as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

Trail = tuple[str | int, ...]
_INT = "tag:yaml.org,2002:int"


@dataclass(frozen=True)
class Mutation:
    trail: Trail
    what: str
    line: int
    node: Any
    changed: dict[str, Any]  # attributes of `node` while the mutation is applied

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.trail))} (line {self.line}): {self.what}"

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        kept = {name: getattr(self.node, name) for name in self.changed}
        for name, value in self.changed.items():
            setattr(self.node, name, value)
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(self.node, name, value)


def mutations(root: yaml.Node, alternatives: dict[Trail, set[str]]) -> Iterator[Mutation]:
    """All mutations of a document. `alternatives` holds, by kind of place, the texts that stand there in any spec."""
    for trail, node in nodes(root):
        line = node.start_mark.line + 1
        if isinstance(node, yaml.ScalarNode):
            for tag, value in _other_values(node, alternatives.get(kind_of_place(trail), set())):
                yield Mutation(trail, f"{node.value!r} becomes {value!r}", line, node, {"tag": tag, "value": value})
            continue
        items = node.value
        for position, item in enumerate(items):
            rest = items[:position] + items[position + 1 :]
            if isinstance(node, yaml.MappingNode):
                key = item[0]
                at, below = key.start_mark.line + 1, (*trail, key.value)
                yield Mutation(below, "key removed", line, node, {"value": rest})
                yield Mutation(below, "key renamed", at, key, {"value": key.value + "x"})
                yield Mutation(below, "key duplicated", at, node, {"value": [*items, item]})
            else:
                yield Mutation((*trail, position), "item removed", line, node, {"value": rest})


def nodes(node: yaml.Node, trail: Trail = ()) -> Iterator[tuple[Trail, yaml.Node]]:
    yield trail, node
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from nodes(value, (*trail, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            yield from nodes(item, (*trail, position))


def kind_of_place(trail: Trail) -> Trail:
    return tuple("*" if isinstance(part, int) else part for part in trail[-2:])


def texts_by_place(roots: Iterable[yaml.Node]) -> dict[Trail, set[str]]:
    found: dict[Trail, set[str]] = {}
    for root in roots:
        for trail, node in nodes(root):
            if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":str"):
                found.setdefault(kind_of_place(trail), set()).add(node.value)
    return found


def _other_values(node: yaml.ScalarNode, alternatives: set[str]) -> Iterator[tuple[str, str]]:
    """(tag, text) of values that differ from the present one: a neighbour, a legal rival, and one of another type."""
    match node.tag.rsplit(":", 1)[1]:
        case "int":
            yield node.tag, str(int(node.value) + 1)
        case "float":
            yield node.tag, str(float(node.value) + 1)
        case "bool":
            yield node.tag, "false" if node.value == "true" else "true"
        case "null":
            yield _INT, "7"
        case _:
            yield node.tag, node.value + "x"
            for rival in sorted(alternatives - {node.value})[:1]:
                yield node.tag, rival
            yield _INT, "7"
            return
    yield "tag:yaml.org,2002:str", "text"
