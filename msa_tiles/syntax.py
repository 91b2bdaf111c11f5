"""Python text as a syntax tree, in any thread."""

from __future__ import annotations

import ast
from typing import Any

_ATTEMPTS = 100  # one in some forty is disturbed where eight threads do nothing but parse


def tree_of(source: str) -> ast.Module:
    """The tree of a module. Raises what `ast.parse` raises."""
    return _parsed(source, "exec")


def expression_of(source: str) -> ast.expr:
    """The tree of an expression. Raises what `ast.parse` raises."""
    return _parsed(source, "eval").body


def _parsed(source: str, mode: str) -> Any:
    """`ast.parse`, once more where another thread's parsing disturbed it.

    In Python 3.11.0 to 3.11.7 all threads count the depth of their trees in one place (CPython issue 106905). A garbage
    collection that runs Python code lets another thread in, and `ast.parse` raises SystemError where it finds a depth
    that is not its own. A lock would not do: other packages parse as well.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return ast.parse(source, mode=mode)
        except SystemError:
            continue
    return ast.parse(source, mode=mode)
