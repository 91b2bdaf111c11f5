"""e4m3 in the ring of TileLang's shared_attention: faults of operand and kernel, and scales that are small or 0."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import simulated_calls
import simulated_hybrid
from simulated_calls import Call

from msa_tiles.dsl.tilelang.operands import e4m3, e4m3_in_ring
from msa_tiles.runtime.registry import default_registry
from msa_tiles.simulator import RaceError, SimulationError
from msa_tiles.verify.cases import Disagreement

IMPORT = "from msa_tiles.dsl.tilelang.operands import e4m3_in_ring as key_value"
TOKENS = {"head_dim": 64, "block_size": 64, "group": 8, "topk": 2, "heads": 2, "close": True, "token_scales": 1}
HEADS = {**TOKENS, "token_scales": 0}
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tokens": ({"sequences": [(40, 90)], "seed": 1}, TOKENS),
    "pages": ({"sequences": [(40, 90)], "seed": 1, "pages_per_block": 2}, TOKENS),
    "heads": ({"sequences": [(40, 90)], "seed": 1}, HEADS),
    "zeros": ({"sequences": [(40, 90)], "seed": 1, "zeros": True}, HEADS),
}
WRONG: tuple[type[Exception], ...] = (Disagreement, AssertionError)
# By name: the call that shows it, the text of operand or kernel that becomes another, and what the simulator says.
FAULTS: dict[str, tuple[str, str, str, tuple[type[Exception], ...]]] = {
    "a scale forgotten": ("tokens", ' "float32") * scale,', ' "float32"),', WRONG),
    "the scale of a row beside": ("tokens", "step * at_once + thread % WARP // lanes", "step * at_once", WRONG),
    "scales of the first warp's rows": ("tokens", "+ thread // WARP * at_once + number", "+ number", WRONG),
    "scales of the first page": ("pages", "first_page + own // page_size], head, own", "first_page], head, own", WRONG),
    "a page twice": ("pages", "T.min(first_page + p,", "T.min(first_page,", WRONG),
    "bytes not awaited": ("tokens", "T.barrier_wait(held.landed[stage], phase)", "pass", (SimulationError,)),
    "no fence behind the rows": ("tokens", "    T.fence_proxy_async()\n\n", "\n", (SimulationError,)),
    "bytes sent for while they are read": ("tokens", "T.sync_threads(7, 128)", "pass", (RaceError,)),
    "a head's scale of values forgotten": ("heads", "values.fold(O[i, j], stored_v, head)", "O[i, j]", WRONG),
    "a head's scale of keys forgotten": ("heads", "keys.fold(scale_log2, stored_k, head)", "scale_log2", WRONG),
}


def run(name: str) -> None:
    call, arguments = CALLS[name]
    simulated_hybrid.shared_attention_q16kv8(Call(**call), **arguments)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.drawn(1)
def test_the_calls_are_right_without_faults(name: str) -> None:
    run(name)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.drawn(1)
@pytest.mark.planted
def test_a_fault_is_caught(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, old, new, expected = FAULTS[fault]
    (cell,) = default_registry().select("shared_attention", "tilelang", precision="q16kv8")
    operand, kernel_text = Path(e4m3_in_ring.__file__).read_text(), cell.file.read_text()
    assert IMPORT in kernel_text and (old in operand) != (old in kernel_text)
    # A name of its own for each fault: modules stay imported.
    module = f"planted_{sorted(FAULTS).index(fault)}_operand"
    (tmp_path / f"{module}.py").write_text(operand.replace(old, new))
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / f"planted_{sorted(FAULTS).index(fault)}_shared_attention.py"
    file.write_text(kernel_text.replace(old, new).replace(IMPORT, f"import {module} as key_value"))
    function = dataclasses.replace(cell, file=file).function
    real = simulated_calls.kernel

    def kernel(op: str, *named: str, **variant: int) -> Any:
        return function(**variant) if op == "shared_attention" else real(op, *named, **variant)

    monkeypatch.setattr(simulated_calls, "kernel", kernel)
    with pytest.raises(expected):
        run(name)


def test_a_scale_of_0_wants_the_least_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e4m3, "LEAST_SCALE", 0.0)
    monkeypatch.setattr(simulated_calls, "_kernels", {})
    with pytest.raises(Disagreement, match="NaN"):
        run("zeros")
