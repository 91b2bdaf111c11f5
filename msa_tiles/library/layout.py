"""A call as torch.library sees it: the one place where its typed object becomes a list of arguments, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_type_hints

from torch import Tensor

Call = TypeVar("Call", bound=tuple)

_KINDS = {Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool", str: "str"}


class _Part(NamedTuple):
    """A field of a call: one argument, or the arguments of a NamedTuple that may be None."""

    layout: Layout[Any] | None
    optional: bool


class Layout(Generic[Call]):
    """The arguments of a NamedTuple, field by field; a field that is one itself stands as its own fields.

    Names are unique, however deep their fields stand: they are the names of the schema. A NamedTuple that may be None
    is None where all of its fields are.
    """

    def __init__(self, kind: type[Call]) -> None:
        self.kind = kind
        self.parts: list[_Part] = []
        self.fields: list[str] = []
        for name, hint in get_type_hints(kind).items():
            optional = NoneType in get_args(hint)
            (of, *others) = [choice for choice in get_args(hint) if choice is not NoneType] or [hint]
            if others:
                raise TypeError(f"{kind.__name__}.{name} is of several types: {hint}")
            layout = None if of in _KINDS else Layout(of)
            fields = [f"{_KINDS[of]} {name}"] if layout is None else layout.fields
            self.parts.append(_Part(layout, optional))
            self.fields += [_or_none(field) for field in fields] if optional else fields
        self.names = [field.split()[1] for field in self.fields]
        if len(set(self.names)) < len(self.names):
            raise TypeError(f"{kind.__name__} names an argument twice: {', '.join(self.names)}")

    @property
    def schema(self) -> str:
        return ", ".join(self.fields)

    def flatten(self, call: Call) -> list[Any]:
        values: list[Any] = []
        for (layout, _), value in zip(self.parts, call, strict=True):
            if layout is None:
                values.append(value)
            elif value is None:
                values += [None] * len(layout.fields)
            else:
                values += layout.flatten(value)
        return values

    def unflatten(self, values: Sequence[Any]) -> Call:
        return self.kind(*self._fields_of(values))

    def _fields_of(self, values: Sequence[Any]) -> Iterator[Any]:
        first = 0
        for layout, optional in self.parts:
            size = 1 if layout is None else len(layout.fields)
            own = values[first : first + size]
            first += size
            if layout is None:
                yield own[0]
            else:
                yield None if optional and all(value is None for value in own) else layout.unflatten(own)


def _or_none(field: str) -> str:
    kind, name = field.split()
    return f"{kind.removesuffix('?')}? {name}"
