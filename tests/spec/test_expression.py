from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msa_tiles.spec import Expression, ExpressionError


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("2 * rows + 1", 17),
        ("rows // 3", 2),
        ("rows / 16", 0.5),
        ("-rows % 3", 1),
        ("ceildiv(rows + 1, 4)", 3),
        ("min(rows, 5, 6) + max(rows, 5)", 13),
        ("rows if rows > 4 else 0", 8),
        ("0 if rows > 4 else rows", 0),
        ("4 < rows <= 8", True),
        ("4 < rows < 8", False),
        ("rows == 8 and not rows != 8", True),
        ("rows == 9 or rows == 8", True),
        ("8 * (1 + 2)", 24),
    ],
)
def test_value(source: str, value: float) -> None:
    assert Expression(source)({"rows": 8}) == value


@pytest.mark.parametrize(
    "source",
    [
        "rows.real",
        "rows[0]",
        "__import__('os')",
        "'text'",
        "True",
        "rows ** 2",
        "rows << 2",
        "lambda: 1",
        "[1]",
        "pow(rows, 2)",
        "min(a=1)",
        "min(*rows)",
        "(rows := 3)",
        "1j",
    ],
)
def test_anything_but_arithmetic_is_refused(source: str) -> None:
    with pytest.raises(ExpressionError, match="may not use"):
        Expression(source)


@pytest.mark.parametrize("source", ["", "2 *", "rows; rows", "rows = 2", "a b"])
def test_broken_text_is_refused(source: str) -> None:
    with pytest.raises(ExpressionError, match="is not an expression"):
        Expression(source)


def test_a_function_is_no_number() -> None:
    with pytest.raises(ExpressionError, match="uses the function min as a number"):
        Expression("min + 1")


def test_missing_names_are_listed() -> None:
    with pytest.raises(ExpressionError, match="needs a value for columns, rows"):
        Expression("rows * columns * 2")({})


def test_division_by_zero_is_explained() -> None:
    with pytest.raises(ExpressionError, match="divides by zero"):
        Expression("4 // rows")({"rows": 0})


def test_names_leave_functions_out() -> None:
    assert Expression("max(rows, ceildiv(columns, 2))").names == {"rows", "columns"}


@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(1, 50))
def test_agrees_with_python(a: int, b: int, c: int) -> None:
    source = "(a + b) * c - a // c + b % c if a < b else ceildiv(a, c)"
    expected = (a + b) * c - a // c + b % c if a < b else -(-a // c)
    assert Expression(source)({"a": a, "b": b, "c": c}) == expected


@pytest.mark.parametrize("source", ["min()", "min(rows)", "max(1)", "ceildiv(1)", "ceildiv(1, 2, 3)"])
def test_functions_take_what_they_can_compute(source: str) -> None:
    with pytest.raises(ExpressionError, match=r"calls \w+ with \d arguments, wanted two"):
        Expression(source)


@pytest.mark.parametrize("source", ["1e308 * 10", "1e308 * 10 - 1e308 * 10", "9" * 400 + " / 3", "max(1e308 * 10, 1)"])
def test_what_no_number_holds_is_said(source: str) -> None:
    with pytest.raises(ExpressionError, match="is too large for a number"):
        Expression(source)({})


def test_whole_numbers() -> None:
    assert Expression("rows * 3 / 2").whole({"rows": 4}) == 6
    for rows in (3, -2):
        with pytest.raises(ExpressionError, match="wanted a whole number that is not negative"):
            Expression("rows * 3 / 2").whole({"rows": rows})
