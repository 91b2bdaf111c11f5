"""Which precision a call is, and which cells are candidates of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from msa_tiles.launch import lookup
from msa_tiles.runtime.dispatch import decide, preferring
from msa_tiles.runtime.facts import CallFacts, target_facts
from msa_tiles.runtime.registry import Precision, Registry, default_registry
from msa_tiles.spec.precisions import named

BF16, E4M3 = "bfloat16", "float8_e4m3fn"


@pytest.mark.parametrize(
    ("storages", "precision"),
    [
        ({"query": BF16, "key_value": BF16}, "bf16"),
        ({"query": BF16, "index_key": BF16}, "bf16"),
        ({"query": BF16, "key_value": BF16, "index_key": BF16}, "bf16"),
        ({"query": BF16, "key_value": E4M3}, "q16kv8"),
        ({"query": E4M3, "index_key": E4M3}, "q8k8"),
        ({"output": BF16}, "bf16"),
        ({"query": "float32", "key_value": "float32"}, "float32"),
        ({"query": BF16, "index_key": E4M3}, "query bfloat16, index_key float8_e4m3fn"),
        ({"query": BF16, "key_value": "uint8"}, "query bfloat16, key_value uint8"),
    ],
)
def test_the_precision_of_tensors(storages: dict[str, str], precision: str) -> None:
    assert default_registry().precision_of(storages) == precision
    assert (
        lookup.precision(**{role: torch.empty(0, dtype=getattr(torch, s)) for role, s in storages.items()}) == precision
    )


def with_native_cells() -> Registry:
    """The registry with a twin of every BF16 cell of sparse_attention that differs in how it multiplies alone."""
    registry = default_registry()
    stored = registry.precisions["bf16"]
    twins = [
        dataclasses.replace(cell, id=f"{cell.id}m8", precision="bf16m8")
        for cell in registry.of("sparse_attention")
        if cell.precision == "bf16"
    ]
    precisions = {**registry.precisions, "bf16m8": Precision("bf16m8", stored.group, stored.formats)}
    return dataclasses.replace(registry, cells=(*registry.cells, *twins), precisions=precisions)


def test_cells_of_the_same_storage_are_rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    """However they multiply; what was measured picks."""
    registry = with_native_cells()
    cell, twin = (registry.select("sparse_attention", "tilelang", "sm90", name)[0] for name in ("bf16", "bf16m8"))
    call = CallFacts("sparse_attention", torch.device("cuda"), "bf16", cell.ci[0])
    monkeypatch.setattr("msa_tiles.runtime.toolchain.missing", lambda dsl: None)
    monkeypatch.setattr("msa_tiles.runtime.evidence.has_run", lambda cell, registry: True)
    for slower, faster in ((cell, twin), (twin, cell)):
        figure = FIGURE | {"ms": {slower.id: 2.0, faster.id: 1.0}}
        monkeypatch.setattr("msa_tiles.runtime.tuned.figures_of", lambda directory, figure=figure: (made(figure),))
        decision = decide(call, target_facts(registry.targets["sm90"]), registry, "tilelang")
        assert decision.chosen is not None and decision.chosen.cell == faster
        assert decision.figure is not None
        with preferring(slower):
            decision = decide(call, target_facts(registry.targets["sm90"]), registry, "tilelang")
        assert decision.chosen is not None and decision.chosen.cell == slower, "for whoever measures"


FIGURE = {
    "op": "sparse_attention",
    "target": "sm90",
    "precision": "bf16",
    "workload": "w",
    "queries": 1,
    "card": "a card",
    "date": "2026-01-01",
    "digests": {},
}


def made(figure: dict) -> object:
    from msa_tiles.runtime.tuned import Figure

    return Figure(**figure)


@pytest.mark.parametrize("precision", ["bf16", "q16kv8", "q8k8"])
def test_an_operator_that_reads_no_keys_serves_every_precision(precision: str) -> None:
    registry = default_registry()
    for op in ("build_schedule", "combine"):
        call = CallFacts(op, torch.device("cuda"), precision, registry.of(op)[0].ci[0])
        decision = decide(call, target_facts(registry.targets["sm90"]), registry)
        assert not any("it takes" in (candidate.refusal or "") for candidate in decision.candidates)


def test_a_group_selects_all_of_its_precisions() -> None:
    registry = default_registry()
    assert {cell.precision for cell in registry.select(precision="fp8")} <= {"q16kv8", "q8k8"}
    assert registry.select("select_blocks", precision="fp8") == registry.select("select_blocks", precision="q8k8") != ()
    groups = {name: precision.group for name, precision in registry.precisions.items()}
    known = [entry["group"] for entry in registry.formats.values()]
    assert known == ["bf16", "fp8", "nvfp4", "fp4"]
    assert named(["fp8", "bf16"], groups, known) == ["q16kv8", "q8k8", "bf16"]
    assert named(["nvfp4"], groups, known) == ["q16kv4", "q16k4", "q8k4", "q16k4m8"]
    with pytest.raises(ValueError, match="precision fp9 is unknown; did you mean fp8"):
        named(["fp9"], groups, known)
