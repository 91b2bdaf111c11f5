"""Sizes that 16 or 32 bits do not hold: 70,000 requests, and tensors whose elements lie more than 2**31 apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.verify.inputs import POISON_INT, poison

pytestmark = pytest.mark.gpu
BACKENDS = pytest.mark.parametrize("backend", ["tilelang", "cutedsl"])

DEVICE = "cuda"
GIB = 1 << 30
REQUESTS = 70_000  # more than an axis of a grid holds, but the first
FAR = 1 << 31
HEADS, GROUP, DIM, BLOCK, TOPK = 2, 16, 128, 128, 4


def needs(gibibytes: int) -> None:
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < gibibytes * GIB:
        pytest.skip(f"needs {gibibytes} GiB of free GPU memory")


def random(seed: int = 0) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Normal numbers, and whole ones in [low, high): functions of a shape."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=DEVICE)

    return normal, whole


def starts(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


@BACKENDS
def test_more_requests_than_an_axis_of_a_grid_holds(backend: str) -> None:
    """A query and up to two pages each; some requests are compared with the reference, as a batch of their own."""
    normal, whole = random()
    cache, index_cache = normal(64, HEADS, BLOCK, 2 * DIM), whole(-2, 3, 64, BLOCK, DIM).bfloat16()
    k, v = cache.split(DIM, -1)
    q, idx_q = normal(REQUESTS, HEADS * GROUP, DIM), whole(-2, 3, REQUESTS, HEADS, DIM).bfloat16()
    table, lengths = whole(0, 64, REQUESTS, 2).int(), whole(0, 2 * BLOCK + 1, REQUESTS).int()
    some = torch.cat([torch.arange(REQUESTS - 8, REQUESTS, device=DEVICE), whole(0, REQUESTS, 40)])

    def where(rows: Tensor) -> dict[str, Any]:
        each = torch.ones(len(rows), dtype=torch.int64, device=DEVICE)
        return {"cu_seqlens_q": starts(each), "page_table": table[rows], "seqused_k": lengths[rows]}

    options = {"max_seqlen_q": 1, "max_seqlen_k": 2 * BLOCK, "backend": backend}
    every = {**where(torch.arange(REQUESTS, device=DEVICE)), **options}
    wanted_score = reference.index_score(idx_q[some].float(), index_cache.float(), num_blocks=2, **where(some))
    wanted_ids = reference.topk_select(wanted_score, TOPK, num_kv_heads=HEADS, **where(some))
    attended = q[some].float(), k.float(), v.float(), wanted_ids
    wanted, wanted_lse = reference.sparse_attention(*attended, **where(some))

    def check(name: str, got: Tensor, want: Tensor, atol: float = 0.0) -> None:
        torch.testing.assert_close(got.float(), want.float(), atol=atol, rtol=atol, msg=lambda text: f"{name}: {text}")

    for op in ("index_score", "decode_score"):
        score = getattr(ops, op)(idx_q, index_cache, **every)
        check(op, score[:, some], wanted_score)
    for op in ("topk_select", "decode_topk"):
        ids = getattr(ops, op)(score, TOPK, num_kv_heads=HEADS, **every)
        check(op, ids[:, some], wanted_ids)
    ids = ops.select_blocks(idx_q, index_cache, TOPK, num_kv_heads=HEADS, **every)
    check("select_blocks", ids[:, some], wanted_ids)
    for op in ("sparse_attention", "sparse_decode"):
        out, lse = getattr(ops, op)(q, k, v, ids, return_lse=True, **every)
        check(op, out[some], wanted, 0.02)
        check(f"{op}: lse", lse[some], wanted_lse, 0.005)
    out = ops.msa_decode(q, k, v, idx_q, index_cache, TOPK, **every)
    check("msa_decode", out[some], wanted, 0.02)


@BACKENDS
@pytest.mark.slow
def test_scores_of_heads_that_lie_far_apart(backend: str) -> None:
    """262,144 queries on 1,048,576 keys: 2**31 scores a head."""
    needs(30)
    queries, keys = 1 << 18, 1 << 20
    _, whole = random(1)
    idx_q, idx_k = whole(-2, 3, queries, HEADS, DIM).bfloat16(), whole(-2, 3, keys, DIM).bfloat16()
    score = torch.full((HEADS, queries, keys // BLOCK), math.nan, device=DEVICE)
    assert score.stride(0) == FAR
    ops.index_score(idx_q, idx_k, out=score, backend=backend)
    where = {"cu_seqlens_q": starts(torch.tensor([queries], device=DEVICE)),
             "cu_seqlens_k": starts(torch.tensor([keys], device=DEVICE))}  # fmt: skip
    ids = ops.topk_select(score, 16, **where, backend=backend)
    for token in (0, 1, queries // 2 + 3, queries - 2, queries - 1):
        last = keys - queries + token
        row = torch.nn.functional.pad(
            idx_q[token].float() @ idx_k[: last + 1].float().T, (0, keys - last - 1), value=-math.inf
        )
        wanted = row.unflatten(1, (-1, BLOCK)).amax(-1)
        assert torch.equal(score[:, token], wanted), token
        chosen = reference.topk_select(wanted[:, None], 16, num_valid_blocks=last // BLOCK + 1)
        assert torch.equal(ids[:, token], chosen[:, 0]), token
    assert not bool(score[:, ::997].isnan().any())


def far(tensor: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The same values where the first and the last along a dimension lie `FAR` elements apart; and all of that memory.

    What lies between is poisoned.
    """
    others = [size for other, size in enumerate(tensor.shape) if other != dim]
    steps = list(torch.empty(others, device="meta").stride())
    step = -(-FAR // (tensor.shape[dim] - 1) // 64) * 64
    steps.insert(dim, step)
    memory = torch.full(
        ((tensor.shape[dim] - 1) * step + math.prod(others),), poison(tensor.dtype), dtype=tensor.dtype, device=DEVICE
    )
    return memory.as_strided(tensor.shape, steps).copy_(tensor), memory


@dataclass
class Call:
    """An operator, the tensors that may lie anywhere, and where its outputs may be written."""

    op: str
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    outputs: tuple[str, ...] = ()

    def run(self, backend: str, **changed: Tensor) -> tuple[Tensor, ...]:
        result = getattr(ops, self.op)(**{**self.tensors, **self.options, **changed}, backend=backend)
        return result if isinstance(result, tuple) else (result,)


def calls() -> list[Call]:
    """Flat and paged calls on two or three requests."""
    normal, whole = random(2)
    counts = torch.tensor([5, 0, 40], device=DEVICE), torch.tensor([200, 70, 700], device=DEVICE)
    flat = {"cu_seqlens_q": starts(counts[0]), "cu_seqlens_k": starts(counts[1])}
    table = torch.full((3, 6), -1, dtype=torch.int32, device=DEVICE)
    for request, pages in enumerate((2, 1, 6)):
        table[request, :pages] = torch.arange(4 * request, 4 * request + pages)
    paged = {"cu_seqlens_q": flat["cu_seqlens_q"], "seqused_k": counts[1].int()}
    q, idx_q = normal(45, HEADS * GROUP, DIM), whole(-2, 3, 45, HEADS, DIM).bfloat16()
    k, v, idx_k = normal(970, HEADS, DIM), normal(970, HEADS, DIM), whole(-2, 3, 970, DIM).bfloat16()
    pools = {"k": normal(16, HEADS, BLOCK, DIM), "v": normal(16, HEADS, BLOCK, DIM)}
    index_pool = whole(-2, 3, 16, BLOCK, DIM).bfloat16()
    score = reference.index_score(idx_q.float(), idx_k.float(), **flat)
    ids = reference.topk_select(score, TOPK, num_kv_heads=HEADS, **flat)
    out, lse = reference.sparse_attention(q.float(), k.float(), v.float(), ids, **flat)
    bounds = {"max_seqlen_q": 40, "max_seqlen_k": 700}
    main = {"q": q, "k": k, "v": v}
    found = [
        Call("combine", {"partial_out": normal(3, 45, 8, DIM), "partial_lse": normal(3, 45, 8).float()}, {},
             ("out", "lse")),
        Call("sparse_attention_backward",
             {"dout": normal(*q.shape), **main, "out": out.bfloat16(), "lse": lse, "block_indices": ids}, flat),
        Call("index_kl", {"q": q, "k": k, "lse": lse, "idx_q": idx_q, "idx_k": idx_k, "block_indices": ids}, flat),
    ]  # fmt: skip
    for where, keys, index_keys in (({**flat, **bounds}, {"k": k, "v": v}, idx_k), (paged | bounds, pools, index_pool)):
        tables = {} if where.keys() >= flat.keys() else {"page_table": table}
        indexer = {"idx_q": idx_q, "idx_k": index_keys, **tables}
        found += [Call(op, indexer, where, ("out",)) for op in ("index_score", "decode_score")]
        found.append(Call("select_blocks", indexer, {**where, "topk": TOPK}, ("out",)))
        for op in ("sparse_attention", "sparse_decode"):
            attended = {"q": q, **keys, "block_indices": ids, **tables}
            found.append(Call(op, attended, {**where, "return_lse": True}, ("out", "lse")))
        step = {"q": q, **keys, **indexer}
        found.append(Call("msa_decode", step, {**where, "topk": TOPK, "return_lse": True}, ("out", "lse")))
    for op in ("topk_select", "decode_topk"):
        found.append(Call(op, {"score": score}, {**flat, **bounds, "topk": TOPK}, ("out",)))
    return found


NUMBER = 17  # of them


@BACKENDS
@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUMBER))
def test_elements_more_than_32_bits_apart(backend: str, number: int) -> None:
    """Every dimension of every tensor in turn: the answer is the same, bit for bit, and written where it belongs."""
    needs(40)
    made = calls()
    assert len(made) == NUMBER
    call = made[number]
    wanted = call.run(backend)
    for name, tensor in call.tensors.items():
        for dim in range(tensor.dim() - 1):
            moved, memory = far(tensor, dim)
            for got, want in zip(call.run(backend, **{name: moved}), wanted, strict=True):
                assert torch.equal(got, want), f"{call.op}: {name} along dimension {dim}"
            del moved, memory
    for place, name in enumerate(call.outputs):
        want = wanted[place]
        for dim in range(want.dim() - 1):
            moved, memory = far(torch.full_like(want, poison(want.dtype)), dim)
            call.run(backend, **{name: moved})
            assert torch.equal(moved, want), f"{call.op}: {name} along dimension {dim}"
            written = ~memory.isnan() if memory.is_floating_point() else memory != POISON_INT
            assert int(written.sum()) == want.numel(), f"{call.op}: {name} along dimension {dim}, elsewhere"
            del moved, memory, written
