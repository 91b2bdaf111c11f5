"""NaN and infinities in keys and values: they reach the queries that see their position, and no other bit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_calls import Named
from torch import Tensor

from msa_tiles import ops, reference

pytestmark = pytest.mark.gpu

BLOCK, DIM, PAGES, PAGE, TOPK = 128, 128, 12, 64, 6
LENGTHS_K = [700, 130, 333, 640]
LENGTHS = {"sparse_attention": [600, 1, 200, 640], "sparse_decode": [4, 1, 32, 7]}
VALUES = [torch.nan, torch.inf, -torch.inf]
OF_DSL = [(named, op) for named in (Named("tilelang"), Named("cutedsl")) for op in LENGTHS if named.has(op)]
each_kernel = pytest.mark.parametrize(
    ("named", "op"), [pytest.param(*pair, id=f"{pair[1]}-{pair[0].backend}") for pair in OF_DSL]
)


class Hidden:
    """Four requests whose last positions some of their queries do not see, on flat keys or on pages."""

    def __init__(self, op: str, layout: str, group: int, positions: bool) -> None:
        generator = torch.Generator("cuda").manual_seed(int(torch.randint(1 << 31, ())))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda").bfloat16()

        def int32(values: list[int]) -> Tensor:
            return torch.tensor(values, device="cuda", dtype=torch.int32)

        lengths = LENGTHS[op]
        total, heads = sum(lengths), 4
        starts = int32([0, *lengths]).cumsum(0).int()
        self.requests = torch.arange(4, device="cuda").repeat_interleave(torch.tensor(lengths, device="cuda"))
        ends = int32(LENGTHS_K)[self.requests]
        self.positions = ends - starts[1:][self.requests] + torch.arange(total, device="cuda")
        self.where: dict[str, Any] = {"cu_seqlens_q": starts}
        if positions:
            # As the branches of a tree of drafts do: not in the order of the queries.
            self.positions = torch.randint(0, 1 << 20, (total,), generator=generator, device="cuda") % ends
            self.where["q_positions"] = self.positions.int()
        self.q = normal(total, heads * group, DIM)
        self.keys = torch.tensor([0, *LENGTHS_K], device="cuda").cumsum(0)
        self.table = None
        if layout == "paged":
            self.table = torch.randperm(4 * PAGES, generator=generator, device="cuda").int().view(4, PAGES)
            self.where |= {"page_table": self.table, "seqused_k": int32(LENGTHS_K)}
            self.k, self.v = normal(4 * PAGES, heads, PAGE, 2 * DIM).split(DIM, -1)
        else:
            self.where["cu_seqlens_k"] = self.keys.int()
            self.k, self.v = (normal(int(self.keys[-1]), heads, DIM) for _ in range(2))
        # Neighbours share most of what they select; every query reads the blocks at its request's end where it may.
        blocks = (self.positions // BLOCK + 1)[:, None]
        drawn = torch.rand(heads, -(-total // 8), 8, generator=generator, device="cuda").repeat_interleave(8, 1)
        drawn = drawn[:, :total] + 0.3 * torch.rand(heads, total, 8, generator=generator, device="cuda")
        column = torch.arange(8, device="cuda")
        drawn = torch.where(column >= blocks - 2, 9.0, drawn).masked_fill(column >= blocks, -1.0)
        order = drawn.topk(TOPK)
        self.ids = order.indices.int().masked_fill(order.values < 0, -1)

    def spoil(self, which: str, value: float) -> tuple[dict[str, Tensor], Tensor]:
        """Keys and values, one of them with `value` in places; and who sees such a place: bool [heads, queries]."""
        spoilt = {"k": self.k.clone(), "v": self.v.clone()}
        seen = torch.zeros(self.ids.shape[:2], dtype=torch.bool, device="cuda")
        for request, length in enumerate(LENGTHS_K):
            # The last position, one in the middle of those where queries stand, one behind the first of them.
            first = int(self.positions[self.requests == request].min())
            for number, place in enumerate((length - 1, (first + length) // 2, min(first + 1, length - 1))):
                columns = slice(7 + number, 9 + number) if which == "v" else slice(5 + number, 6 + number)
                self._row(spoilt[which], request, place)[:, columns] = value
                reads = (self.ids == place // BLOCK).any(-1) & (self.requests == request)
                seen |= reads & (self.positions >= place)
            if self.table is not None:
                # Behind the request, in its last page and in pages that nobody reads.
                behind = length % PAGE
                if behind:
                    spoilt[which][int(self.table[request, length // PAGE]), :, behind:] = value
                for page in self.table[request, -(-length // PAGE) :].tolist():
                    spoilt[which][page] = value
        return spoilt, seen

    def _row(self, keys: Tensor, request: int, place: int) -> Tensor:
        """[heads, dim] of a position."""
        if self.table is None:
            return keys[int(self.keys[request]) + place]
        return keys[int(self.table[request, place // PAGE]), :, place % PAGE]


@each_kernel
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize(
    ("layout", "group", "positions", "scheduled"),
    [("flat", 16, False, False), ("paged", 16, False, True), ("paged", 4, True, False), ("flat", 8, True, True)],
)
def test_what_is_not_finite_reaches_who_sees_it(
    named: Named, op: str, which: str, layout: str, group: int, positions: bool, scheduled: bool
) -> None:
    given = Hidden(op, layout, group, positions)
    where = dict(given.where)
    if scheduled and op == "sparse_attention":
        # With a schedule of its own a call goes block by block; without, query by query where neighbours share blocks.
        where["schedule"] = ops.build_schedule(given.ids, **where)

    def attend(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = getattr(named, op)(given.q, k, v, given.ids, return_lse=True, **where)
        return out.unflatten(1, (4, group)), lse.unflatten(1, (4, group))

    clean = attend(given.k, given.v)
    assert clean[0].isfinite().all()
    for value in VALUES:
        spoilt, seen = given.spoil(which, value)
        assert seen.any() and not seen.all()
        found = attend(**spoilt)
        for got, wanted in zip(found, clean, strict=True):
            hidden = ~seen.T
            torch.testing.assert_close(got[hidden], wanted[hidden], rtol=0, atol=0)
        right_out, right_lse = reference.sparse_attention(
            given.q.float(), spoilt["k"].float(), spoilt["v"].float(), given.ids, **given.where
        )
        right_out, right_lse = right_out.unflatten(1, (4, group)), right_lse.unflatten(1, (4, group))
        assert not right_out[seen.T].isfinite().all()
        # What is made of infinite values that are seen may be NaN.
        assert torch.equal(found[0].isfinite(), right_out.isfinite())
        assert torch.equal(found[1].isfinite(), right_lse.isfinite())
        finite = right_out.isfinite()
        torch.testing.assert_close(found[0][finite].float(), right_out[finite], atol=0.02, rtol=0.02)
        finite = right_lse.isfinite()
        torch.testing.assert_close(found[1][finite], right_lse[finite], atol=0.005, rtol=0.005)
