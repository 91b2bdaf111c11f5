"""`dequantize_kv` against torch: elements as float32, times their scales, rounded to bfloat16.

Caches are pages of one request in random order; scales of e4m3 are given for heads. Of pages torch gathers those that
the table names first.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msa_tiles import ops, quant
from msa_tiles.bench import cases, precisions
from msa_tiles.bench.harness import Bench, Contender
from msa_tiles.bench.inputs import Stored, in_format, normal, pages_of, wide
from msa_tiles.bench.operators._own import of_spec
from msa_tiles.bench.timing import Call


@dataclass(frozen=True)
class Caches:
    """k and v [pages, heads, page, D], a table of all pages, int32 [1, pages], and how many keys there are."""

    k: Stored
    v: Stored
    page_table: Tensor
    seqused_k: Tensor
    scales: dict[str, Tensor]

    def where(self) -> dict[str, Any]:
        """The arguments of the operator besides k and v."""
        return {"page_table": self.page_table, "seqused_k": self.seqused_k, **self.scales}


def caches(case: cases.Case, form: str, device: torch.device, seed: int) -> Caches:
    page, heads, dim = case["page_size"], case["num_kv_heads"], case["head_dim"]
    pages = -(-case.num_k // page)
    k, v = (in_format(normal(2 * seed + part, device, pages, heads, page, dim), form) for part in range(2))
    generator = torch.Generator(device).manual_seed(seed)
    table = torch.randperm(pages, generator=generator, device=device).to(torch.int32)[None]
    scales = {}
    if isinstance(k, Tensor):
        scales = {name: torch.full((heads,), 0.7, device=device) for name in ("k_scale", "v_scale")}
    return Caches(k, v, table, torch.full((1,), case.num_k, dtype=torch.int32, device=device), scales)


def by_torch(inputs: Caches) -> tuple[Tensor, Tensor]:
    """Rows of pages, dequantised."""
    found = []
    for stored, name in ((inputs.k, "k_scale"), (inputs.v, "v_scale")):
        if isinstance(stored, Tensor):
            chosen = stored.view(torch.uint8)[inputs.page_table[0]].view(stored.dtype)
            values = quant.dequantize(chosen, inputs.scales[name], torch.bfloat16)
        else:
            values = wide(pages_of(stored, inputs.page_table[0]))
        found.append(values.transpose(1, 2).flatten(0, 1))
    return found[0], found[1]


def check(inputs: Caches, outputs: tuple[Tensor, Tensor]) -> str | None:
    """Every row, bit for bit."""
    used = int(inputs.seqused_k)
    for got, wanted in zip(outputs, by_torch(inputs), strict=True):
        if not torch.equal(got[:used], wanted[:used]):
            return f"{int((got[:used] != wanted[:used]).sum())} values of {wanted[:used].numel()} are others"
    return None


def prepare(case: cases.Case, device: torch.device, precision: str) -> Bench:
    form = precisions.stored(precision, "key_value")
    values = 2 * case["num_kv_heads"] * case["head_dim"] * -(-case.num_k // case["page_size"]) * case["page_size"]

    def ours(dsl: str, inputs: Caches) -> Call:
        out = ops.dequantize_kv(inputs.k, inputs.v, **inputs.where(), backend=dsl)
        into = dict(zip(("k_out", "v_out"), out, strict=True))
        return lambda: ops.dequantize_kv(inputs.k, inputs.v, **inputs.where(), **into, backend=dsl)

    return Bench(
        case=case,
        make=functools.partial(caches, case, form.name, device),
        bytes_per_set=int(values * form.bits_with_scales / 8),
        ours=ours,
        check=check,
        peers=[Contender("torch", lambda inputs: lambda: by_torch(inputs), check)],
    )


BENCHMARK = of_spec("dequantize_kv", prepare, precisions.ATTENTION[1:])
