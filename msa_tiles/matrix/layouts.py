"""How the keys of a cell's calls may lie, and which layouts of their scales its kernels refuse.

Nothing of that is typed here: compile-time dims say how keys lie, and `msa_tiles.explain` what is refused, of a call on
tensors without values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from msa_tiles import ops, trees
from msa_tiles.explaining import explain
from msa_tiles.explaining.examples import call_of
from msa_tiles.quant import GROUPS, QuantizedTensor, layouts
from msa_tiles.runtime import toolchain
from msa_tiles.runtime.pairs import pair_of
from msa_tiles.runtime.registry import Cell, Registry, default_registry
from msa_tiles.verify.cases import Case

FLAT, OF_BLOCKS, SMALLER, CACHE, WITHOUT = "flat", "pages of a block", "smaller pages", "pages", "-"
PARTS = {"shared_attention": "sparse_attention"}  # operators that others launch -> those
# Whose scales are told, the first one of these that a call has: K of attention has linear ones beside any of V.
TOLD = ("v_cache", "cache", "v", "idx_k")
FEW = 8  # queries
PAGES = ("pages_per_block", "paged")  # compile-time dims that say how keys lie


class Layout(NamedTuple):
    """How keys lie, and the scales of their groups where they have some; why the cell refuses that, if it does."""

    keys: str
    scales: str = ""
    refusal: str = ""

    def __str__(self) -> str:
        return f"{self.keys}, {self.scales} scales" if self.scales else self.keys


def of_point(cell: Cell, point: Mapping[str, int]) -> str:
    """How keys lie for a cell at a compile-time point."""
    if "append" in cell.op:
        return CACHE
    if "paged" in point:
        return CACHE if point["paged"] else FLAT
    pages = point.get("pages_per_block")
    if pages is not None:
        return FLAT if pages == 0 else OF_BLOCKS if pages == 1 else SMALLER
    return WITHOUT if {"key_value", "index_key"}.isdisjoint(cell.reads) else FLAT


def of_case(case: Case) -> str:
    """How keys lie in a case of the grid."""
    return of_point(case.cell, case.point)


def samples(found: Iterable[Case]) -> list[Case]:
    """One case in each layout of keys: the first of drawn values whose queries are enough that torch's errors say
    something, else the first with queries and keys.
    """
    firsts: dict[str, Case] = {}
    telling: dict[str, Case] = {}
    for case in found:
        queries = sum(queries for queries, keys in case.workload.sequences if keys)
        if queries:
            firsts.setdefault(of_case(case), case)
        if queries > FEW and case.workload.values != "integer":
            telling.setdefault(of_case(case), case)
    return list((firsts | telling).values())


def of_cell(cell: Cell, registry: Registry, scales: bool = True) -> tuple[Layout, ...]:
    """Every layout of a cell; with `scales` in each layout of groups' scales, and what is refused."""
    dims = {name: values[0] for name, values in cell.variants.items()}
    how = next((name for name in PAGES if name in dims), None)
    points = [dims] if how is None else [dims | {how: value} for value in sorted(cell.variants[how])]
    keys: dict[str, dict[str, int]] = {}
    for point in points:
        keys.setdefault(of_point(cell, point), point)
    if not scales or GROUPS.keys().isdisjoint(registry.precisions[cell.precision].formats.values()):
        return tuple(map(Layout, keys))
    return tuple(
        Layout(name, order, _refusal(cell.id, tuple(point.items()), order))
        for name, point in keys.items()
        for order in layouts.LAYOUTS
    )


@trees.cached(maxsize=1024)
def _refusal(name: str, dims: tuple[tuple[str, int], ...], scales: str) -> str:
    """Why a call of the cell of that name with such scales is refused; empty where its kernel would run."""
    registry = default_registry()
    cell = next(cell for cell in registry.cells if cell.id == name)
    op = PARTS.get(cell.op, cell.op)
    call = call_of(op, dict(dims), pair_of("precision", cell.precision, registry), 256, 1024, 2, registry)
    told = next(name for name in TOLD if name in call)
    try:
        call[told] = _with(call[told], scales)
        found = explain(getattr(ops, op), **call, backend=cell.dsl, device=cell.target)
    except (ValueError, TypeError) as error:
        return str(error)
    asked = {each.cell: each for kernel in found.kernels for each in kernel.asked}
    name = cell.id if cell.id in asked else name.replace(cell.op, op, 1)
    if name not in asked:
        return "no call asks for it"
    refusal, lacking = asked[name].refusal or "", toolchain.missing(cell.dsl)
    # What is on record holds where a DSL is not installed, too.
    return "" if lacking is not None and refusal.startswith(lacking) else refusal


def _with(value: QuantizedTensor, scales: str) -> QuantizedTensor:
    """The same without values, with scales of another layout."""
    *outer, rows, groups = value.scale.shape
    shape = (*outer, *layouts.shape_in(scales, rows, groups))
    made: Any = torch.empty(shape, dtype=value.scale.dtype, device="meta")
    return dataclasses.replace(value, scale=made, layout=scales)
