"""YAML read as located nodes: every value knows its file and line, and every mistake is reported there."""

from __future__ import annotations

import difflib
import functools
import keyword
import math
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from msa_tiles.spec.mistakes import Location, Mistakes, SpecError

Scalar = str | int | float | bool | None
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # composes nodes; nothing is ever constructed of a tag
_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
# More than any spec has; what is read is what somebody wrote, not what breaks a reader.
MOST_CHARACTERS, DEEPEST = 1 << 20, 24
LARGEST = 1 << 62  # of integers
_LONGEST_NAME = 64
# Of characters that no text of a spec holds: they end a line, or are seen as something else.
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


@dataclass(frozen=True)
class Node:
    """One YAML value. `where` is the line of its key, or its own line when it has none; the root has no name."""

    yaml: yaml.Node
    where: Location
    name: str

    @property
    def title(self) -> str:
        return self.name or "the file"

    def error(self, sentence: str) -> SpecError:
        return SpecError(self.where, sentence)

    def fields(self, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Node]:
        """The values of a mapping with a fixed set of keys. Raises SpecError for all keys that are wrong."""
        with Mistakes() as mistakes:
            return self.known(required := tuple(required), (*required, *optional), mistakes)

    def known(self, required: Iterable[str], known: Sequence[str], mistakes: Mistakes) -> dict[str, Node]:
        """Those values whose keys are known; the others, and required ones that are missing, are mistakes."""
        found = self.entries()
        for key, node in found.items():
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
                mistakes.add(node.error(f"unknown key {key!r} in {self.title}; {hint}"))
        for key in required:
            if key not in found:
                mistakes.add(self.error(f"{self.title} lacks the key {key!r}"))
        return {key: node for key, node in found.items() if key in known}

    def entries(self) -> dict[str, Node]:
        """The values of a mapping whose keys are free names."""
        if not isinstance(self.yaml, yaml.MappingNode):
            raise self.error(f"{self.title} must be a mapping, not {self._kind()}")
        self._refuse_tags()
        found: dict[str, Node] = {}
        with Mistakes() as mistakes:
            for key_node, value_node in self.yaml.value:
                where = Location(self.where.file, key_node.start_mark.line + 1)
                key = mistakes.read(Node(key_node, where, f"a key of {self.title}").string)
                if key is not None and key in found:
                    first = found[key].where.line
                    mistakes.add(
                        SpecError(where, f"duplicate key {key!r} in {self.title}; it is first on line {first}")
                    )
                elif key is not None:
                    found[key] = Node(value_node, where, f"{self.name}.{key}" if self.name else key)
        return found

    def named(self) -> dict[str, Node]:
        """The values of a mapping whose keys become names in code, files or cells."""
        found = self.entries()
        with Mistakes() as mistakes:
            for name, node in found.items():
                mistakes.read(node.check_name, name)
        return found

    def items(self) -> list[Node]:
        """The values of a list."""
        if not isinstance(self.yaml, yaml.SequenceNode):
            raise self.error(f"{self.name} must be a list, not {self._kind()}")
        self._refuse_tags()
        return [
            Node(item, Location(self.where.file, item.start_mark.line + 1), f"{self.name}[{position}]")
            for position, item in enumerate(self.yaml.value)
        ]

    def is_list(self) -> bool:
        return isinstance(self.yaml, yaml.SequenceNode)

    def is_mapping(self) -> bool:
        return isinstance(self.yaml, yaml.MappingNode)

    def scalar(self) -> Scalar:
        if not isinstance(self.yaml, yaml.ScalarNode):
            raise self.error(f"{self.name} must be a single value, not {self._kind()}")
        return _construct(self.yaml.tag, self.yaml.value, self)

    def string(self, choices: Iterable[str] | None = None) -> str:
        value = self.scalar()
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"{self.name} must be text, not {value!r}")
        if unseen := unseen_in(value):
            raise self.error(f"{self.name} holds {unseen[1]}, which text of a spec may not")
        if choices is not None and value not in (known := tuple(choices)):
            raise self.error(f"{self.name} is {value!r}; it must be one of {', '.join(known)}")
        return value

    def identifier(self) -> str:
        """Text that becomes a name in code, files or cells."""
        value = self.string()
        self.check_name(value)
        return value

    def check_name(self, name: str) -> None:
        """Refuse what is no plain name: ASCII letters, digits and underscores, a letter first, no word of Python."""
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or keyword.iskeyword(name) or len(name) > _LONGEST_NAME:
            raise self.error(
                f"{self.name}: {name!r} is no name; wanted a letter, then letters, digits and _, {_LONGEST_NAME} at "
                "most, and no word of Python"
            )

    def integer(self, minimum: int | None = None) -> int:
        value = self.scalar()
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(f"{self.name} must be an integer, not {value!r}")
        if abs(value) > LARGEST:
            raise self.error(f"{self.name} is {value:.3g}; it must be at most 2**62")
        if minimum is not None and value < minimum:
            raise self.error(f"{self.name} is {value}; it must be at least {minimum}")
        return value

    def number(self, minimum: float | None = None) -> float:
        value = self.scalar()
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(f"{self.name} must be a number, not {value!r}")
        if not math.isfinite(value) or abs(value) > LARGEST:
            raise self.error(f"{self.name} is {value:.3g}; it must be finite, and at most 2**62")
        if minimum is not None and not value >= minimum:
            raise self.error(f"{self.name} is {value}; it must be at least {minimum}")
        return value

    def boolean(self) -> bool:
        value = self.scalar()
        if not isinstance(value, bool):
            raise self.error(f"{self.name} must be true or false, not {value!r}")
        return value

    def strings(self, choices: Iterable[str] | None = None) -> tuple[str, ...]:
        """A list of distinct texts."""
        with Mistakes() as mistakes:
            values = mistakes.each(lambda item: item.string(choices), self.items())
        return self._distinct(values)

    def integers(self, minimum: int | None = None) -> tuple[int, ...]:
        """A list of distinct integers."""
        with Mistakes() as mistakes:
            values = mistakes.each(lambda item: item.integer(minimum), self.items())
        return self._distinct(values)

    def _distinct(self, values: Sequence) -> tuple:
        for position, value in enumerate(values):
            if value in values[:position]:
                raise self.items()[position].error(f"{self.name} lists {value!r} twice")
        return tuple(values)

    def _refuse_tags(self) -> None:
        if self.yaml.tag not in _PLAIN_TAGS:
            raise self.error(f"{self.title} has the tag {self.yaml.tag!r}; specs have none")

    def _kind(self) -> str:
        if isinstance(self.yaml, yaml.MappingNode):
            return "a mapping"
        return "a list" if self.is_list() else "a single value"


class Fields:
    """The values of a mapping with fixed keys, as far as they are there and right: `keys = Fields(mistakes, node, …)`.

    A key that is missing, unknown or mistaken is told by `mistakes`, and reads as `default`.
    """

    def __init__(self, mistakes: Mistakes, node: Node, required: Iterable[str], optional: Iterable[str] = ()) -> None:
        self.mistakes = mistakes
        self.nodes = mistakes.read(node.known, required := tuple(required), (*required, *optional), mistakes) or {}

    def __contains__(self, key: str) -> bool:
        return key in self.nodes

    def get(self, key: str, reader: Callable[[Node], Any], default: Any = None) -> Any:
        """What the reader makes of the value of a key."""
        if key not in self.nodes:
            return default
        found = self.mistakes.read(lambda: (reader(self.nodes[key]),))
        return default if found is None else found[0]


def read(path: Path) -> Node:
    """Compose one YAML file. The root node carries the file's first line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(Location(shown(path), int(not path.is_dir())), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError(Location(shown(path), 1), "is not UTF-8 text") from error
    return parse(text, shown(path))


@functools.lru_cache(maxsize=256)
def parse(text: str, file: str) -> Node:
    """Compose YAML text; `file` is what error messages call it."""
    if len(text) > MOST_CHARACTERS:
        raise SpecError(Location(file, 1), f"the file has {len(text)} characters, wanted at most {MOST_CHARACTERS}")
    if unseen := unseen_in(text, besides="\t\n"):
        line = text.count("\n", 0, unseen[0]) + 1
        raise SpecError(Location(file, line), f"the line holds {unseen[1]}, which specs may not")
    try:
        _check_shape(text, file)
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise SpecError(Location(file, mark.line + 1 if mark else 1), f"not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise SpecError(Location(file, 1), f"not valid YAML: {error}") from error
    if root is None:
        raise SpecError(Location(file, 1), "the file is empty")
    return Node(root, Location(file, 1), "")


def _check_shape(text: str, file: str) -> None:
    """Refuse what could make a reader run in circles or out of memory, before anything is composed."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        where = Location(file, event.start_mark.line + 1 if event.start_mark else 1)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise SpecError(where, "specs have no anchors (&) and no aliases (*)")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise SpecError(where, f"lists and mappings lie more than {DEEPEST} deep in each other")


def unseen_in(text: str, besides: str = "") -> tuple[int, str] | None:
    """Place and name of the first character of a text that is not seen, or ends a line; None where there is none."""
    if (text.translate(dict.fromkeys(map(ord, besides))) if besides else text).isprintable():
        return None
    for place, character in enumerate(text):
        if not character.isprintable() and character not in besides and unicodedata.category(character) in _UNSEEN:
            return place, f"the character U+{ord(character):04X}"
    return None


def shown(path: Path) -> str:
    """The path as messages name it: relative to the working directory when it lies below."""
    try:
        absolute = path.resolve()
    except (OSError, RuntimeError):  # links in a circle
        absolute = path.absolute()
    return os.path.relpath(absolute) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def _construct(tag: str, value: str, node: Node) -> Scalar:
    kind = tag.removeprefix("tag:yaml.org,2002:")
    if kind == "str":
        return value
    if kind == "null":
        return None
    if kind == "bool":
        return value.lower() in ("true", "yes", "on")
    try:
        if kind == "int":
            return int(value.replace("_", ""), 10)
        if kind == "float":
            return float(value.replace("_", ""))
    except ValueError:
        pass
    raise node.error(f"{node.name} is written as {value!r}; write a plain decimal number or text")
