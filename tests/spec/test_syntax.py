"""Python's parser, where threads share it."""

from __future__ import annotations

import ast
import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from msa_tiles import syntax
from msa_tiles.syntax import expression_of, tree_of

SOURCE = "\n".join(f"def f{each}(a, b):\n    return [a + (b * {each}), {{a: b}}]" for each in range(40))


@pytest.fixture
def turns() -> Iterator[None]:
    """Threads take turns in the middle of trees: a collection that runs Python code lets others in."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()

    def collected(*_: object) -> None:
        for _ in range(50):
            pass

    gc.callbacks.append(collected)
    sys.setswitchinterval(1e-6)
    gc.set_threshold(50)
    yield
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)
    gc.callbacks.remove(collected)


@pytest.mark.usefixtures("turns")
def test_threads_that_parse_do_not_disturb_each_other() -> None:
    """In Python 3.11.7 and before, eight threads that call `ast.parse` make one call in some forty raise."""
    together = threading.Barrier(8)

    def parse(_: int) -> list[str]:
        together.wait(60)
        trees = [tree_of(SOURCE) for _ in range(20)]
        return [*map(ast.dump, trees[:1]), *(ast.dump(expression_of("a + (b, [c])")) for _ in range(20))]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(parse, range(8)))
    wanted = [ast.dump(ast.parse(SOURCE)), *[ast.dump(ast.parse("a + (b, [c])", mode="eval").body)] * 20]
    assert found == [wanted] * 8


def test_a_disturbed_attempt_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any Python; what is wrong with a text is said at once."""
    calls: list[str] = []

    def disturbed(source: str, mode: str) -> ast.AST:
        calls.append(source)
        if len(calls) < 4:
            raise SystemError("AST constructor recursion depth mismatch (before=51, after=40)")
        return ast.parse(source, mode=mode)

    monkeypatch.setattr(syntax, "ast", SimpleNamespace(parse=disturbed))  # pytest parses, too
    assert ast.unparse(tree_of("x = 1")) == "x = 1"
    assert calls == ["x = 1"] * 4
    with pytest.raises(SyntaxError):
        tree_of("x =")
    assert len(calls) == 5


def test_an_error_of_the_parser_itself_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: str, mode: str) -> ast.AST:
        raise SystemError(f"broken in {mode}: {source}")

    monkeypatch.setattr(syntax, "ast", SimpleNamespace(parse=broken))
    with pytest.raises(SystemError, match="broken in eval: 1"):
        expression_of("1")
