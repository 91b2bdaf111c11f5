"""A format of index keys of one's own in CuTe DSL, from an operand beside the specs: no skeleton is touched."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from few_specs import copy_specs

from msa_tiles import codegen
from msa_tiles.dsl.cutedsl import operands
from msa_tiles.runtime.build import Job, build
from msa_tiles.runtime.cache import Cache
from msa_tiles.runtime.registry import Registry
from msa_tiles.tables import table_of

OPERAND = '''"""Index keys of bfloat16 with float32 scales."""

import cutlass

from msa_tiles.dsl.cutedsl.operands import index_e4m3
from msa_tiles.dsl.cutedsl.operands.index_e4m3 import Scales
from msa_tiles.dsl.table import declares

TENSORS = ("", "_scale")


@declares
def multiplied():
    return "bfloat16"


@declares
def parts(name, head_dim, block_size, stages, *, producer, freed, key_scales):
    return index_e4m3.parts(
        name, head_dim, block_size, stages,
        producer=producer, freed=freed, key_scales=key_scales, element=multiplied(),
    )


class IndexKeys(index_e4m3.IndexKeys):
    element = cutlass.BFloat16
'''
FORMAT = """  scaled:
    summary: bfloat16 with float32 scales
    group: scaled
    element: bfloat16
    bits: 16
    storage: bfloat16
    scale: {dtype: float32, per: [tensor, head, token_head]}
precisions:
  s16: {query: scaled, index_key: scaled, multiply: bfloat16, output: bfloat16}
"""
OPERATORS = {"index_score": "  q8k8: {out", "decode_score": "  q8k8: {out"}


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path} does not hold {old!r} once"
    path.write_text(text.replace(old, new))


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """What is generated from specs that know the format, and from the operand that lies beside them."""
    specs = copy_specs(tmp_path / "specs", OPERATORS)
    replaced(specs / "precisions.yaml", "precisions:\n", FORMAT)
    for name, tolerance in OPERATORS.items():
        operator = specs / f"operators/{name}.yaml"
        replaced(operator, tolerance, f"  s16: {{out: 0.1}}\n{tolerance}")
        replaced(operator, "precisions: [bf16, q8k8]", "precisions: [bf16, q8k8, s16]")
        # As the row of e4m3 is adjusted, but for the operand.
        [adjusted] = re.findall(r"adjust: \{q8k8: (.*index_e4m3.*)\}\n", operator.read_text())
        own = adjusted.replace("index_e4m3", "index_scaled")
        replaced(operator, f"{{q8k8: {adjusted}}}", f"{{q8k8: {adjusted}, s16: {own}}}")
    (specs / "operands/cutedsl").mkdir(parents=True)
    (specs / "operands/cutedsl/index_scaled.py").write_text(OPERAND)
    monkeypatch.setattr(operands, "__path__", list(operands.__path__))
    codegen.generate(specs, tmp_path / "generated", codegen.Selection(ops=list(OPERATORS), dsls=["cutedsl"]))
    return Registry.read(tmp_path / "generated")


def test_its_table_is_that_of_e4m3_but_for_the_element(registry: Registry) -> None:
    for name in OPERATORS:
        tables = {}
        for precision in ("q8k8", "s16"):
            [cell] = (cell for cell in registry.cells if cell.id == f"{name}.cutedsl.sm90.{precision}")
            table_of_variant = table_of(cell.file.read_text())
            assert table_of_variant is not None
            tables[precision] = table_of_variant(**{**cell.ci[0], "key_scales": 1})
        own, keys = tables["s16"], tables["s16"].buffers["k_tiles"]
        assert keys.element == own.buffers["queries"].element == "bfloat16"
        assert keys.bytes == 2 * tables["q8k8"].buffers["k_tiles"].bytes
        assert own.barriers == tables["q8k8"].barriers


@pytest.mark.slow
def test_it_compiles_and_the_audit_holds(registry: Registry, tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    jobs = [Job(cell, cell.ci[0]) for cell in registry.cells if cell.id.endswith("cutedsl.sm90.s16")]
    assert len(jobs) == len(OPERATORS)
    for outcome in build(jobs, registry.targets, cache=Cache(tmp_path / "cache")):
        assert outcome.good, outcome.complaints
