"""Words between kernels and the claim of a task are written once: msa_tiles.dsl.words and the claims of each DSL."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from msa_tiles.codegen.emit import SKELETONS
from msa_tiles.dsl import words

FILES = sorted(SKELETONS.rglob("*.py"))
SHIFTS = {words.SLOT_SHIFT, words.QUERY_SHIFT}  # of an edge


def by_hand(code: str) -> Iterator[str]:
    """What a kernel writes that has its home elsewhere."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.BinOp(_, ast.LShift() | ast.RShift(), ast.Constant(int(bits))) if bits in SHIFTS:
                yield ast.unparse(node)
            case ast.BinOp(ast.Name("extent") | ast.Subscript(ast.Name("tasks")), ast.RShift() | ast.BitAnd()):
                yield ast.unparse(node)
            case ast.BinOp(_, ast.BitAnd(), ast.Constant(mask)) if mask == words.MOST_VISIBLE - 1:
                yield ast.unparse(node)
            case ast.Call(ast.Attribute(_, "atomic_add"), [first, *_]) if "claims" in ast.unparse(first):
                yield ast.unparse(node)


@pytest.mark.parametrize("file", FILES, ids=lambda file: "/".join(file.relative_to(SKELETONS).parts))
def test_no_skeleton_takes_words_apart_or_claims_a_task(file: Path) -> None:
    assert not list(by_hand(file.read_text())), "use msa_tiles.dsl.words, and claims of msa_tiles.dsl.<dsl>"


@pytest.mark.parametrize(
    "line",
    [
        "query = edge >> 13",
        "slot = (row_edge[i] >> 7) & 63",
        "edges[place] = (query << 13) | (slot << 7) | visible",
        "seen = edge_shared[stage, j] & 127",
        "rows = tasks[window_index, head, task, 3] >> 1",
        "if (extent & 1) != 0: pass",
        "claim = T.atomic_add(claims[window_index], 1, return_prev=True)",
        "claim = cute.arch.atomic_add(claims.iterator + window_index, Int32(1))",
    ],
)
def test_what_is_written_by_hand_is_found(line: str) -> None:
    assert list(by_hand(line))
