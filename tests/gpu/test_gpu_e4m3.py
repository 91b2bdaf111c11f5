"""Attention over e4m3 keys and values under BF16 queries, against the reference on what they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_calls import Named, reading
from torch import Tensor

from msa_tiles import paths, quant, reference, spec
from msa_tiles.runtime.registry import default_registry

pytestmark = pytest.mark.gpu

LENGTHS_K = [700, 130, 333, 640]
LENGTHS = {"sparse_attention": [600, 1, 200, 640], "sparse_decode": [4, 1, 32, 7]}
HEADS, TOPK = 4, 6
NAN = 0x7F
SPECS = spec.load(paths.specs_dir())
SERVED = [
    (named, op)
    for named in (Named("tilelang"), Named("cutedsl"))
    for op in LENGTHS
    if named.has(op) and default_registry().select(op=op, dsl=named.backend, precision="q16kv8")
]
each_kernel = pytest.mark.parametrize(
    ("named", "op"), [pytest.param(*pair, id=f"{pair[1]}-{pair[0].backend}") for pair in SERVED]
)


@pytest.fixture(autouse=True, params=[False, True], ids=["stored", "copied"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prefill both ways."""
    yield from reading(request.param, request.node.callspec.params.get("op", ""))


class Quantised:
    """Four requests with keys and values in e4m3, flat or in pages, and ids of blocks that neighbours share.

    With ``alike`` all keys of a head point the way of its queries: scores are large and near each other. Scales are
    powers of two then, with which bfloat16 has what codes stand for.
    """

    def __init__(
        self, op: str, layout: str, group: int, head_dim: int, block_size: int, per: str, alike: bool = False
    ) -> None:
        generator = torch.Generator("cuda").manual_seed(int(torch.randint(1 << 31, ())))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda")

        def int32(values: list[int]) -> Tensor:
            return torch.tensor(values, device="cuda", dtype=torch.int32)

        lengths = LENGTHS[op]
        total, blocks = sum(lengths), -(-max(LENGTHS_K) // block_size)
        starts = int32([0, *lengths]).cumsum(0).int()
        requests = torch.arange(4, device="cuda").repeat_interleave(torch.tensor(lengths, device="cuda"))
        positions = int32(LENGTHS_K)[requests] - starts[1:][requests] + torch.arange(total, device="cuda")
        self.where: dict[str, Any] = {"cu_seqlens_q": starts, "block_size": block_size}
        self.q = normal(total, HEADS * group, head_dim).bfloat16()
        if layout == "paged":
            page, width = block_size // 2, 2 * blocks
            table = torch.randperm(4 * width, generator=generator, device="cuda").int().view(4, width)
            self.where |= {"page_table": table, "seqused_k": int32(LENGTHS_K)}
            exact = [normal(4 * width, HEADS, page, head_dim) for _ in range(2)]
        else:
            self.where["cu_seqlens_k"] = int32([0, *LENGTHS_K]).cumsum(0).int()
            exact = [normal(sum(LENGTHS_K), HEADS, head_dim) for _ in range(2)]
        if alike:
            directions = normal(HEADS, head_dim).sign()
            self.q += directions.repeat_interleave(group, 0)
            each_head = (HEADS, 1, -1) if layout == "paged" else (HEADS, -1)
            exact[0] = 10 * directions.view(each_head) + 2 * exact[0]
            exact[1] *= 4
            powers = torch.tensor([1.0, 0.5, 2.0, 1.0], device="cuda").view(each_head)
            for tensor in exact:
                # The largest of every token and head is 448 times a power of two.
                tensor.clamp_(-14, 14)[..., 0].sign_().mul_(14)
                tensor *= powers
        else:
            for tensor in exact:
                # One head is a thousand times the others, or one token.
                if per == "head":
                    tensor[:, 1] *= 1000
                elif layout == "flat":
                    tensor[5] *= 1000
            exact[0] *= 0.03  # of scores as large as these the largest one alone would count
        self.k, self.v = (quant.quantize_fp8(tensor, per=per) for tensor in exact)
        visible = (positions // block_size + 1)[:, None]
        drawn = torch.rand(HEADS, -(-total // 8), blocks, generator=generator, device="cuda").repeat_interleave(8, 1)
        drawn = drawn[:, :total] + 0.3 * torch.rand(HEADS, total, blocks, generator=generator, device="cuda")
        column = torch.arange(blocks, device="cuda")
        drawn = torch.where(column >= visible - 1, 9.0, drawn).masked_fill(column >= visible, -1.0)
        order = drawn.topk(min(TOPK, blocks))
        self.ids = order.indices.int().masked_fill(order.values < 0, -1)
        self.requests, self.positions = requests, positions

    def attend(self, named: Named, op: str) -> tuple[Tensor, Tensor]:
        return getattr(named, op)(
            self.q, self.k.data, self.v.data, self.ids, k_scale=self.k.scale, v_scale=self.v.scale, return_lse=True,
            **self.where,
        )  # fmt: skip

    def wanted(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """The reference's answer on what codes and scales stand for, in this type."""
        k, v = (tensor.dequantize().to(dtype).float() for tensor in (self.k, self.v))
        return reference.sparse_attention(self.q.float(), k, v, self.ids, **self.where)


def errors(found: Tensor, right: Tensor, group: int) -> Tensor:
    """The largest of each head."""
    error = (found.float() - right).nan_to_num(0.0, 0.0, 0.0).abs()
    return error.unflatten(1, (HEADS, group)).transpose(0, 1).flatten(1).amax(1)


def check(given: Quantised, found: tuple[Tensor, Tensor], group: int) -> None:
    """What is not finite is so in the reference too; errors are at most twice those of keys and values in BF16, or what
    rounding of weights and results leaves beside a head's largest number."""
    for got, right, plain in zip(found, given.wanted(), given.wanted(torch.bfloat16), strict=True):
        assert torch.equal(got.isfinite(), right.isfinite())
        rounding = 0.01 * errors(torch.zeros_like(right), right, group)
        error, allowed = errors(got, right, group), 2 * errors(plain, right, group) + rounding
        assert (error <= allowed).all(), (error, allowed)


CASES = [
    ("flat", 16, 128, 128, "head"),
    ("paged", 16, 128, 128, "token_head"),
    ("flat", 4, 128, 128, "token_head"),
    ("paged", 8, 64, 128, "head"),
    ("flat", 1, 64, 64, "token_head"),
    ("paged", 2, 128, 64, "tensor"),
]


@each_kernel
@pytest.mark.parametrize(("layout", "group", "head_dim", "block_size", "per"), CASES)
def test_it_is_attention_over_what_the_codes_stand_for(
    named: Named, op: str, layout: str, group: int, head_dim: int, block_size: int, per: str
) -> None:
    given = Quantised(op, layout, group, head_dim, block_size, per)
    found = given.attend(named, op)
    check(given, found, group)
    assert all(map(torch.equal, found, given.attend(named, op)))


@each_kernel
@pytest.mark.parametrize(("layout", "group", "head_dim", "block_size", "per"), CASES)
def test_large_scores_under_scales_that_bfloat16_holds(
    named: Named, op: str, layout: str, group: int, head_dim: int, block_size: int, per: str
) -> None:
    """There torch in BF16 is right, and a score that is off by 0.1 shows: parts of a row that were computed apart meet
    with weights that are off by 10%."""
    given = Quantised(op, layout, group, head_dim, block_size, per, alike=True)
    for tensor in (given.k, given.v):
        assert (tensor.scale.frexp().mantissa == 0.5).all()
    out, lse = given.wanted()
    assert all(map(torch.equal, (out, lse), given.wanted(torch.bfloat16)))
    assert lse[lse.isfinite()].max() > 100
    found = given.attend(named, op)
    check(given, found, group)
    assert errors(found[1], lse, group).max() <= SPECS.operators[op].tolerance["q16kv8"]["lse"]


@each_kernel
@pytest.mark.parametrize(("layout", "group", "head_dim", "block_size", "per"), CASES[:2])
@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_reaches_who_sees_it_alone(
    named: Named, op: str, layout: str, group: int, head_dim: int, block_size: int, per: str, which: str
) -> None:
    given = Quantised(op, layout, group, head_dim, block_size, per)
    clean = given.attend(named, op)
    codes = (given.k if which == "k" else given.v).data.view(torch.uint8)
    seen = torch.zeros(given.ids.shape[:2], dtype=torch.bool, device="cuda")
    start = 0
    for request, length in enumerate(LENGTHS_K):
        first = int(given.positions[given.requests == request].min())
        for place in (length - 1, (first + length) // 2):
            if layout == "flat":
                codes[start + place, :, 3] = NAN
            else:
                table, page = given.where["page_table"], block_size // 2
                codes[int(table[request, place // page]), :, place % page, 3] = NAN
                if length % page:
                    codes[int(table[request, length // page]), :, length % page :] = NAN | 0x80
            reads = (given.ids == place // block_size).any(-1) & (given.requests == request)
            seen |= reads & (given.positions >= place)
        start += length
    found = given.attend(named, op)
    assert seen.any() and not seen.all()
    for got, was in zip(found, clean, strict=True):
        got, was = got.unflatten(1, (HEADS, group)), was.unflatten(1, (HEADS, group))
        torch.testing.assert_close(got[~seen.T], was[~seen.T], rtol=0, atol=0)
    check(given, found, group)


@each_kernel
def test_a_scale_of_zero_makes_zeros(named: Named, op: str) -> None:
    given = Quantised(op, "flat", 16, 128, 128, "head")
    given.k.scale[0] = given.v.scale[2] = 0.0
    check(given, given.attend(named, op), 16)
