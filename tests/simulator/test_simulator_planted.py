"""Faults planted in the text of generated kernels. Each has a call that is right without it and wrong with it."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import simulated_calls
from simulated_calls import Call
from test_simulator_kernels import CASES, MODULES, TIED

from msa_tiles.dsl.tilelang import threshold
from msa_tiles.runtime.registry import default_registry
from msa_tiles.simulator import BarrierError, RaceError, UninitialisedError
from msa_tiles.verify.cases import Disagreement


@dataclass
class Fault:
    """Text of the operator's kernel that matches `pattern` becomes `replacement`, one place at a time."""

    op: str
    pattern: str
    replacement: str
    case: str = ""  # in CASES, or else
    call: tuple[dict[str, Any], dict[str, Any]] | None = None
    wanted: type[Exception] | tuple[type[Exception], ...] = (Disagreement, AssertionError)
    target: str = "sm90"

    def run(self) -> None:
        call, arguments = self.call or CASES[self.op][self.case]
        (module,) = [module for module in MODULES if hasattr(module, self.op)]
        getattr(module, self.op)(Call(**call, target=self.target), **arguments)


def shared_barrier(op: str, first: int, arguments: dict[str, Any], **call_options: Any) -> Fault:
    """Both consumers meet at the first one's barrier. In the model a consumer's warps come together."""
    call = {"sequences": [(40, 90)], **call_options}, {"group": 8, "topk": 2, **arguments}
    return Fault(op, rf"sync_threads\({first} \+ w", f"sync_threads({first}", call=call, wanted=BarrierError)


def unawaited(op: str, pattern: str, replacement: str, **arguments: Any) -> Fault:
    """What the kernel before writes is read before pdl_sync."""
    return Fault(op, pattern, replacement, call=({"sequences": [(2, 300)]}, arguments), wanted=RaceError)


def third_head(op: str, pattern: str, target: str = "sm90") -> Fault:
    """`head * group` behind `pattern` is right for the first two heads."""
    return Fault(op, rf"({pattern})head \* group", r"\1T.min(head, 1) * group", "three heads", target=target)


SIZES = {"head_dim": 64, "block_size": 64}
LARGE = {"head_dim": 128, "block_size": 128}  # with two consumers everywhere
SYNC = r"T\.pdl_sync\(\)"
FAULTS = {
    "sparse_attention: one barrier for both": shared_barrier("sparse_attention", 8, SIZES, spoilt=("v", math.nan)),
    "sparse_attention_backward: one barrier for both": shared_barrier("sparse_attention_backward", 2, LARGE),
    "index_kl: one barrier for both": shared_barrier("index_kl", 8, {**LARGE, "index_dim": 64}),
    "decode_score: no wait": unawaited("decode_score", SYNC, "pass", **SIZES),
    "decode_topk: no wait": unawaited("decode_topk", SYNC, "pass", max_blocks=1024, k=5, blocks=9),
    "combine: no wait": unawaited("combine", SYNC, "pass", head_dim=64, splits=3, heads=5),
    "sparse_decode: no wait": unawaited(
        "sparse_decode", SYNC + r"(\n +T\.pdl_trigger\(\)\n +limit = )", r"pass\1", **SIZES, group=8, topk=3
    ),
    "sparse_decode: no wait for scores": unawaited(
        "sparse_decode", SYNC + r"(\n +T\.pdl_trigger\(\)\n +sums = )", r"pass\1",
        **SIZES, group=8, topk=3, scored_blocks=1024,
    ),
    "sparse_decode: lse of the third head": third_head("sparse_decode", r"partial_lse\[split, token, "),
    "sparse_decode: out of the third head": third_head("sparse_decode", r"partial_out\[split, token, "),
    "shared_attention: lse of the third head": third_head("shared_attention", r"lse\[token \+ .*"),
    "index_kl: lse of the third head": third_head("index_kl", r"\n +lse\[.*"),
    "sparse_attention_backward: rows of the third head": Fault(
        "sparse_attention_backward", r"head \* group \+ lane", "T.min(head, 1) * group + lane", "three heads"
    ),
    "sparse_decode: one key hidden": Fault(
        "sparse_decode", r"> limit \+ 1:(\n +for r, j)", r"> limit + 2:\1", "one key hidden"
    ),
    "build_schedule: one key hidden": Fault(
        "build_schedule", r"visible < block_size - 1:", "visible < block_size - 2:", "one key hidden"
    ),
    "split_selection: one key hidden": Fault(
        "split_selection", r"- row < block_size - 1:", "- row < block_size - 2:", "one key hidden"
    ),
    "sparse_decode: one row missing": Fault(
        "sparse_decode", r"seen = limit \+ 1 -", "seen = limit + 2 -", "one row missing"
    ),
}  # fmt: skip
CLEARED = r"(clear_rows\(V_shared\.tiles, 0, valid_rows_of\(extent\))", r"\1 + 1"
SHORT = r"(valid_rows_of\(extent\) < block_size):", r"\1 - 1:"
SLOTS = r"(slot_of\((?:edge|\w+\[[^\]]*\])\))", r"(\1 & 31)"
for op, target, change in (
    ("sparse_attention", "sm90", CLEARED),
    ("sparse_attention", "sm100", SHORT),
    ("sparse_attention_backward", "sm90", SHORT),
):
    FAULTS[f"{op} {target}: one row missing"] = Fault(op, *change, "one row missing", target=target)
    if op == "sparse_attention":
        FAULTS[f"{op} {target}: lse of the third head"] = third_head(op, r"partial_lse\[.*", target)
for op, target in (
    ("sparse_attention", "sm90"),
    ("sparse_attention", "sm100"),
    ("sparse_attention_backward", "sm90"),
    ("index_lse", "sm90"),
    ("index_kl", "sm90"),
):
    FAULTS[f"{op} {target}: slots up to 31"] = Fault(op, *SLOTS, "slots beyond 31", target=target)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.drawn(1)
@pytest.mark.planted
def test_a_planted_fault_shows(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fault = FAULTS[name]
    fault.run()
    (cell,) = default_registry().select(fault.op, "tilelang", fault.target, "bf16")
    text, real = cell.file.read_text(), simulated_calls.kernel
    places = list(re.finditer(fault.pattern, text))
    assert places, f"{fault.pattern} is not in {cell.file}"
    for number, place in enumerate(places):
        file = tmp_path / f"{number}_{cell.file.name}"
        file.write_text(text[: place.start()] + place.expand(fault.replacement) + text[place.end() :])
        function = dataclasses.replace(cell, file=file).function

        def kernel(op: str, *named: str, function: Any = function, **variant: int) -> Any:
            return function(**variant) if op == fault.op else real(op, *named, **variant)

        monkeypatch.setattr(simulated_calls, "kernel", kernel)
        with pytest.raises(fault.wanted):
            fault.run()


@pytest.mark.parametrize("op", ["decode_topk", "sparse_decode"])
@pytest.mark.drawn(1)
def test_ids_want_all_their_bits(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(op, "", "", TIED)
    fault.run()
    monkeypatch.setattr(threshold, "ID_BITS", 13)
    monkeypatch.setattr(simulated_calls, "_kernels", {})
    with pytest.raises((Disagreement, UninitialisedError)):
        fault.run()
