"""A format of one's own, without touching a skeleton: int8 keys and values with a scale for each head or token.

The bytes travel as e4m3, since specs know no int8.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from few_specs import copy_specs

from msa_tiles import codegen
from msa_tiles.dsl.cutedsl import operands
from msa_tiles.runtime import audit, toolchain
from msa_tiles.runtime.cache import Cache
from msa_tiles.runtime.compiler import compile_variant
from msa_tiles.runtime.registry import Registry
from msa_tiles.spec import load

OPERAND = '''"""Keys or values of int8 with float32 scales."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.cutedsl.operands import e4m3
from msa_tiles.dsl.table import declares

TENSORS = ("", "_scale")
Stored, Held = e4m3.Stored, e4m3.Held


@declares
def parts(name, head_dim, block_size, stages, **more):
    """As e4m3's: a byte is a byte."""
    return e4m3.parts(name, head_dim, block_size, stages, **more)


@declares
def multiplied(name, token_scales):
    return "bfloat16"


class Left(e4m3.Left):
    def __init__(self, *where, **more):
        super().__init__(*where, **more)
        self.element = cutlass.BFloat16

    def decode(self, word):
        return cute.arch.inline_ptx(
            "{ .reg .b32 a, b, c, d; .reg .f32 e, f, g, h; bfe.s32 a, {$r0}, 0, 8; bfe.s32 b, {$r0}, 8, 8; "
            "bfe.s32 c, {$r0}, 16, 8; bfe.s32 d, {$r0}, 24, 8; cvt.rn.f32.s32 e, a; cvt.rn.f32.s32 f, b; "
            "cvt.rn.f32.s32 g, c; cvt.rn.f32.s32 h, d; cvt.rn.bf16x2.f32 {$w0}, f, e; cvt.rn.bf16x2.f32 {$w1}, h, g; }",
            write_only_types=[Int32, Int32],
            read_only_args=[word],
        )
'''
FORMAT = """  int8:
    summary: int8 with float32 scales
    group: fp8
    element: float8_e4m3fn
    bits: 8
    storage: float8_e4m3fn
    scale: {dtype: float32, per: [head, token_head]}
precisions:
  q16kvi8: {query: bf16, key_value: int8, multiply: bfloat16, output: bfloat16}
"""
CELL = "sparse_decode.cutedsl.sm90.q16kvi8"


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
    replaced(operator, "precisions: [bf16, q16kv8, q16kv4", "precisions: [bf16, q16kv8, q16kvi8, q16kv4")
    (specs / "operands/cutedsl").mkdir(parents=True)
    (specs / "operands/cutedsl/int8.py").write_text(OPERAND)
    monkeypatch.setattr(operands, "__path__", list(operands.__path__))
    codegen.generate(specs, tmp_path / "generated")
    assert codegen.drift(codegen.produce(load(specs), tree=specs), tmp_path / "generated") == []
    # Whoever reads what was generated needs the specs no more.
    shutil.rmtree(specs)
    monkeypatch.setattr(operands, "__path__", list(operands.__path__)[:1])
    return Registry.read(tmp_path / "generated")


def test_it_is_generated(registry: Registry) -> None:
    [cell] = (cell for cell in registry.cells if cell.id == CELL)
    text = cell.file.read_text()
    assert "\nfrom msa_tiles.dsl.cutedsl.operands import int8 as key_value\n" in text
    assert "        k_scale: cute.Tensor,\n        v: cute.Tensor,\n        v_scale: cute.Tensor,\n" in text
    [e4m3] = (cell for cell in registry.cells if cell.id == "sparse_decode.cutedsl.sm90.q16kv8")
    assert cell.digest != e4m3.digest


def test_an_operand_that_there_is_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = copy_specs(tmp_path / "specs", ["sparse_decode"])
    (specs / "operands/cutedsl").mkdir(parents=True)
    (specs / "operands/cutedsl/e4m3.py").write_text(OPERAND)
    monkeypatch.setattr(operands, "__path__", list(operands.__path__))
    with pytest.raises(ValueError, match=r"e4m3.py has the name of an operand of cutedsl that there is already"):
        codegen.generate(specs, tmp_path / "generated")


@pytest.mark.slow
def test_it_compiles(registry: Registry, tmp_path: Path) -> None:
    try:
        toolchain.require_compiler("cutedsl")
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))
    [cell] = (cell for cell in registry.cells if cell.id == CELL)
    target = registry.targets["sm90"]
    entry = compile_variant(cell, cell.ci[0], target.arch, Cache(tmp_path / "cache"))
    assert audit.complaints(cell, cell.ci[0], target, entry) == []
