"""Rows of results that nobody measured: every case of every operator, at round shares of its floor."""

from __future__ import annotations

import functools
from typing import Any

from msa_tiles.bench import cases
from msa_tiles.bench.operators import BENCHMARKS
from msa_tiles.runtime.registry import default_registry

H100 = "NVIDIA H100 80GB HBM3"
DAY = "2026-01-31"


def row(op: str, case: str, dsl: str = "tilelang", precision: str = "bf16", **changes: Any) -> dict[str, Any]:
    """Twice the floor for TileLang, 1.6 times for CuTe DSL; vLLM takes five times the floor, dense attention thirty."""
    floor = cases.floor_ms(BENCHMARKS[op].work(case, precision), H100)
    registry = default_registry()
    cells = [registry.select(part, dsl, "sm90", precision) for part in BENCHMARKS[op].parts]
    dense = {"prefill": "fa4", "msa_decode": "dense_bytes"}.get(op)
    return {
        "op": op,
        "case": case,
        "precision": precision,
        "dsl": dsl,
        "ms": floor * (2.0 if dsl == "tilelang" else 1.6),
        "floor_ms": floor,
        "baselines": {"vllm": floor * 5} | ({dense: floor * 30} if dense else {}),
        "digest": "+".join((cell or registry.cells)[0].digest for cell in cells),
        "card": H100,
        "date": DAY,
    } | changes


def everything() -> list[dict[str, Any]]:
    """Rows that the caller may change."""
    return [each | {"baselines": dict(each["baselines"])} for each in _everything()]


@functools.cache
def _everything() -> list[dict[str, Any]]:
    return [
        row(op, case, dsl, precision)
        for op, benchmark in BENCHMARKS.items()
        for precision in benchmark.precisions
        for case in benchmark.labels
        for dsl in ("tilelang", "cutedsl")
    ]
