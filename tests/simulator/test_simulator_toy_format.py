"""A format of one's own in TileLang, without touching a skeleton: int8 with a scale, generated and simulated."""

from __future__ import annotations

from pathlib import Path

import pytest
import simulated_calls
import torch
from few_specs import copy_specs
from simulated_calls import Call

from msa_tiles import codegen
from msa_tiles.dsl.tilelang import operands
from msa_tiles.runtime.registry import Cell, Registry

OPERAND = '''"""Keys or values of int8 with float32 scales, which the producer makes bfloat16."""

import tilelang.language as T

from msa_tiles.dsl.table import declares
from msa_tiles.dsl.tilelang.keys import block_keys
from msa_tiles.dsl.tilelang.operands import e4m3
from msa_tiles.dsl.tilelang.operands.e4m3 import Stored, start, weigh

TENSORS = ("", "_scale")
STARTS = True


@declares
def multiplied(name, token_scales):
    return "bfloat16"


@declares
def parts(name, head_dim, block_size, stages, **more):
    # Bytes are bytes: the ring has the size that it has for e4m3.
    found = e4m3.parts(name, head_dim, block_size, stages, **more)
    tiles = name + "_tiles"
    return found._replace(
        buffers=tuple(each._replace(element="bfloat16") if each.name == tiles else each for each in found.buffers)
    )


class Operand(e4m3.Operand):
    def __init__(self, *where, **more):
        super().__init__(*where, **more)
        self.element = "bfloat16"

    def tensor(self, heads):
        return T.StridedTensor(
            *block_keys(heads, self.head_dim, self.block_size, self.pages_per_block, self.name), "int8"
        )


def allocate(operand, table, stages):
    held = e4m3.allocate(operand, table, stages)
    return held._replace(raw=T.alloc_shared([stages, operand.block_size, operand.head_dim], "int8"))


@T.macro
def fill(operand, stored, page_table, row, head, held, full, place, stage, phase, thread):
    T.barrier_wait(held.landed[stage], phase)
    for j, c in T.Parallel(operand.block_size, operand.head_dim):
        held.tiles[0, j, c] = T.cast(T.cast(held.raw[stage, j, c], "float32"), "bfloat16")
    if operand.token_scales:
        own = thread % operand.block_size
        held.scales[0, own] = held.coming[0] if len(held.coming.shape) == 1 else held.coming[stage, own]
    T.fence_proxy_async()
'''
FORMAT = """  bytes:
    summary: int8 with float32 scales
    group: int8
    element: int8
    bits: 8
    storage: int8
    scale: {dtype: float32, per: [tensor, head, token_head]}
precisions:
  q16kvi8: {query: bf16, key_value: bytes, multiply: bfloat16, output: bfloat16}
"""


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path} does not hold {old!r} once"
    path.write_text(text.replace(old, new))


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """What is generated from specs that know the format, and from an operand that lies beside them."""
    specs = copy_specs(tmp_path / "specs", ["sparse_decode"])
    replaced(specs / "precisions.yaml", "precisions:\n", FORMAT)
    operator = specs / "operators/sparse_decode.yaml"
    replaced(operator, "  q16kv8: {out", "  q16kvi8: {out: 0.03, lse: 0.005}\n  q16kv8: {out")
    text = operator.read_text()
    row = text.index("precisions: [q16kv8]", text.index("dsl: tilelang"))
    operator.write_text(text[:row] + text[row:].replace("[q16kv8]", "[q16kv8, q16kvi8]", 1))
    (specs / "operands/tilelang").mkdir(parents=True)
    (specs / "operands/tilelang/bytes.py").write_text(OPERAND)
    monkeypatch.setattr(operands, "__path__", list(operands.__path__))
    codegen.generate(specs, tmp_path / "generated", codegen.Selection(ops=["sparse_decode"], dsls=["tilelang"]))
    return Registry.read(tmp_path / "generated")


def cell_of(registry: Registry) -> Cell:
    [cell] = (cell for cell in registry.cells if cell.id == "sparse_decode.tilelang.sm90.q16kvi8")
    return cell


def test_it_is_generated_from_the_same_skeleton(registry: Registry) -> None:
    text = cell_of(registry).file.read_text()
    assert "from msa_tiles.dsl.tilelang.operands import bytes as key_value\n" in text


def test_it_agrees_with_the_reference(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_calls, "default_registry", lambda: registry)
    monkeypatch.setattr(simulated_calls, "FP8", torch.int8)
    call = Call([(2, 90), (1, 150)])
    sizes = {"head_dim": 64, "block_size": 64, "group": 8, "topk": 3, "heads": 2}
    simulated_calls.sparse_decode(call, precision="q16kvi8", token_scales=0, **sizes)
