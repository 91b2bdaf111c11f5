"""Errors of a drop-in in the words of its own signature.

A call that succeeds is not looked at. Of one that fails, the arguments are compared with the annotations, and what the
operators beneath say of theirs gets the names that the caller knows.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def _one_value(value: Any) -> bool:
    return math.prod(getattr(value, "shape", ())) == 1


# What an annotation may be made of, how an error calls it, and what fits.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("an integer", lambda value: hasattr(value, "__index__") and _one_value(value)),
    "float": ("a number", lambda value: hasattr(value, "__float__") and _one_value(value)),
    "str": ("a string", lambda value: isinstance(value, str)),
    "Tensor": ("a tensor", lambda value: isinstance(value, Tensor)),
    "None": ("None", lambda value: value is None),
}


def told(**theirs: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a drop-in; ``theirs`` are its names for parameters of `msa_tiles.ops`, by the names there.

    If the call raises, an argument that is not of its annotation is a ``TypeError`` that names it. Else a
    ``ValueError`` or ``TypeError`` about a parameter of an operator gets its name in the drop-in; anything else is
    raised as it is.
    """
    names = "|".join(theirs)
    mention = re.compile(rf"(?:^|(?<=\blike )|(?<=\bof ))(?:{names})\b") if theirs else None

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        kinds = {name: str(parameter.annotation).split(" | ") for name, parameter in parameters.items()}
        known = {name: each for name, each in kinds.items() if each != ["None"] and set(each) <= set(_KINDS)}

        @functools.wraps(function)
        def call(*given: P.args, **named: P.kwargs) -> R:
            try:
                return function(*given, **named)
            except Exception as error:
                for name, value in (dict(zip(kinds, given, strict=False)) | named).items():
                    if name in known and not any(_KINDS[kind][1](value) for kind in known[name]):
                        _refuse(name, value, known[name], error)
                if mention and isinstance(error, (ValueError, TypeError)) and error.args:
                    text = mention.sub(lambda found: theirs[found[0]], str(error.args[0]))
                    error.args = (text, *error.args[1:])
                raise

        return call

    return decorate


def _refuse(name: str, value: Any, kinds: list[str], error: Exception) -> NoReturn:
    *most, last = (_KINDS[kind][0] for kind in kinds)
    wanted = f"{', '.join(most)} or {last}" if most else last
    raise TypeError(f"{name}: got {type(value).__name__}; wanted {wanted}") from error
