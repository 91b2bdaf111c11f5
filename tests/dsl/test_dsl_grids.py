"""Grids of CuTe DSL kernels hold every call: an axis that ends at 65,535 counts only what a call has few of.

`test_dsl_layout` asks TileLang kernels the same.
"""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest

from msa_tiles.paths import specs_dir
from msa_tiles.runtime.registry import Cell, default_registry
from msa_tiles.spec import load

CELLS = default_registry().select(dsl="cutedsl")
HEADS = {"num_q_heads", "num_kv_heads", "num_index_heads"}
# Splits of a decode call; windows of one launch, which launch.kl bounds; `parts` has a compile-time limit of its own.
FEW = HEADS | {"heads", "splits", "windows", "parts"}
# What `__call__` names otherwise than the spec, or has beside it.
ALIASES = {"num_heads": "num_kv_heads"}
PARTIAL = {"partial_out": ("splits", "total_q", "num_q_heads", "head_dim")}


def grids(cell: Cell) -> list[ast.Tuple]:
    """The grid that a kernel's file launches, or else those of the helpers that it is made of."""
    pending, seen = [ast.parse(cell.file.read_text())], set[str]()
    while pending:
        tree = pending.pop(0)
        found: list[ast.expr] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "grid":
                found.append(node.value)
            elif isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                found += [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "grid"]
            name = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if name.startswith("msa_tiles.dsl.cutedsl.") and name not in seen:
                seen.add(name)
                pending.append(ast.parse(inspect.getsource(importlib.import_module(name))))
        if found:
            return [grid for grid in found if isinstance(grid, ast.Tuple)]
    return []


def counted(cell: Cell, size: ast.expr) -> set[str]:
    """The names of what an axis counts: dims of the operator's tensors, or the variables themselves."""
    operator = load(specs_dir()).operators[cell.op]
    tensors = {name: [str(dim.source) for dim in tensor.shape]
               for name, tensor in (*operator.inputs.items(), *operator.outputs.items())}  # fmt: skip
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
            assert isinstance(node.value.value, ast.Name)
            dim = {**PARTIAL, **tensors}[node.value.value.id][ast.literal_eval(node.slice)]
            names.add(ALIASES.get(dim, dim))
        elif isinstance(node, ast.Call):
            # A method of the kernel bounds what it answers; a function of cute is arithmetic.
            own = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self"
            for part in () if own else node.args:
                visit(part)
            if own:
                names.add(ast.unparse(node.func).removeprefix("self."))
        elif isinstance(node, ast.Name) and not node.id.isupper():
            names.add(node.id)
        else:
            for part in ast.iter_child_nodes(node):
                visit(part)

    visit(size)
    return names


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
@pytest.mark.drawn(6)
def test_what_may_be_long_lies_on_the_first_axis(cell: Cell) -> None:
    launched = grids(cell)
    assert launched
    for grid in launched:
        for size in grid.elts[1:]:
            assert counted(cell, size) <= FEW, ast.unparse(grid)


def test_an_axis_of_queries_is_noticed() -> None:
    (cell,) = default_registry().select("decode_topk", "cutedsl", "sm90")
    assert counted(cell, ast.parse("out.shape[1]", mode="eval").body) == {"total_q"}
    assert counted(cell, ast.parse("cute.ceil_div(out.shape[1], ROWS) + n", mode="eval").body) == {"total_q", "n"}
    assert counted(cell, ast.parse("self.parts(out, 3)", mode="eval").body) == {"parts"}
