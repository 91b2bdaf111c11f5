"""Rows written into caches, against a loop over single elements that shares no code with the reference."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.quant import FP8, quantize_fp8
from msa_tiles.verify.caches import Caches, bits, wild_caches, wild_rows, wild_slots
from msa_tiles.verify.inputs import Source

SEED = int(os.environ["MSA_TILES_SEED"])
DIMS = {"num_pages": 3, "page_size": 5, "head_dim": 16}
# Every value of e4m3 that is no NaN, by its code.
VALUES = torch.arange(256, dtype=torch.uint8).view(FP8).float().tolist()


def nearest(value: float) -> int:
    """The code of the closest value of the same sign, the even one of two; by looking at all of them."""
    if math.isnan(value):
        return 0x7F
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    value = min(abs(value), 1e4)  # as far as differences are told apart
    return sign | min(range(127), key=lambda code: (abs(VALUES[code] - value), code & 1))


def single(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def write(rows: Tensor, cache: Tensor, slots: Tensor, scale: Tensor | None, scales: Tensor | None) -> None:
    """One element after the other."""
    pages, heads, page, _ = cache.shape
    for token, slot in enumerate(slots.tolist()):
        if not 0 <= slot < pages * page:
            continue
        for head in range(heads):
            row = rows[token, head]
            target = cache[slot // page, head, slot % page]
            if cache.dtype != FP8:
                target.copy_(row)
                continue
            values = row.float().tolist()
            one = 1.0
            if scales is not None:
                finite = [abs(x) for x in values if not math.isnan(x)]
                largest = min(max(finite, default=0.0), torch.finfo(torch.float32).max)
                one = single(largest / 448.0)
                one = one if one >= 2.0**-126 else 1.0
                scales[slot // page, head, slot % page] = one
            elif scale is not None:
                one = (scale if scale.dim() == 0 else scale[head]).item()
            codes = [nearest(single(x / one)) for x in values]
            target.copy_(torch.tensor(codes, dtype=torch.uint8).view(FP8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16 rows", "float32 rows"])
@pytest.mark.parametrize(
    ("stored", "kind"),
    [(torch.bfloat16, ""), (torch.float32, ""), (FP8, "none"), (FP8, "tensor"), (FP8, "head"), (FP8, "token")],
)
def test_rows_are_written_as_one_by_one(stored: torch.dtype, kind: str, dtype: torch.dtype) -> None:
    source = Source(torch.device("cpu"), SEED, "normal")
    made: Caches = wild_caches(source, 1, DIMS, 2, stored, True, kind == "token")
    rows, slots = wild_rows(source, (12, 2, 16), dtype), wild_slots(source, 12, 15, True)
    given = {"tensor": source.scales(()), "head": source.scales((2,))}.get(kind)
    found, wanted = made.copied(), made.copied()
    for write_into, into in ((reference.append_rows, found), (write, wanted)):
        write_into(rows, into.views[0], slots, given, into.scales[0] if into.scales else None)
    for got, expected in zip(found.codes(), wanted.codes(), strict=True):
        assert torch.equal(got, expected)
    assert (bits(made.pool) != bits(found.pool)).any()


def test_computed_scales_are_those_of_the_quantiser() -> None:
    rows = wild_rows(Source(torch.device("cpu"), SEED, "normal"), (40, 3, 16), torch.float32)
    cache, scales = torch.zeros(40, 3, 1, 16).to(FP8), torch.zeros(40, 3, 1)
    reference.append_rows(rows, cache, torch.arange(40), scales=scales)
    flat = quantize_fp8(rows.transpose(1, 2).reshape(40, -1, 3).transpose(1, 2).flatten(0, 1), per="token_head")
    assert torch.equal(scales.flatten(), flat.scale)
    assert torch.equal(bits(cache.flatten(0, 2)), bits(flat.data))


def test_a_row_too_small_for_a_scale_is_rounded_as_it_is() -> None:
    cache, scales = torch.ones(1, 1, 2, 16).to(FP8), torch.zeros(1, 1, 2)
    rows = torch.full((2, 1, 16), 1e-44)
    rows[1] = 3e-36
    reference.append_rows(rows, cache, torch.arange(2), scales=scales)
    assert scales.flatten().tolist() == [1.0, 1.0] and (cache.float() == 0).all()
