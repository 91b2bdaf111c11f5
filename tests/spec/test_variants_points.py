"""At which points continuous integration compiles a cell."""

from __future__ import annotations

from msa_tiles import paths
from msa_tiles.spec import load
from msa_tiles.spec.model import Variants


def test_values_need_fewer_points_than_pairs() -> None:
    ci = tuple({"a": a, "b": b} for a, b in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)))
    variants = Variants(exact=("a", "b"), capacity=(), scaled=(), ci=ci)
    assert variants.ci_points("pairs") == ci
    assert variants.ci_points("values") == (ci[0], ci[3], ci[4])


def test_every_value_of_a_row_is_compiled_somewhere() -> None:
    for operator in load(paths.specs_dir()).operators.values():
        for row in operator.kernels:
            points = operator.variants.only(row.only).ci_points(row.ci)
            assert points[0] == operator.m3
            for name in operator.variants.names:
                assert {point[name] for point in points} == set(row.only.get(name, operator.values(name))), (
                    operator.name, row.dsl, name,
                )  # fmt: skip
