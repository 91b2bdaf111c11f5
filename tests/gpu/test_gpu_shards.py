"""Shards of the keys (``k_offset``) on kernels, against the reference that knows them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from msa_tiles import ops

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BLOCK, DIM, TOPK, PAGE = 128, 128, 8, 32
LENGTHS_Q, FEW_Q = [129, 0, 5, 64], [1, 0, 5, 32]
LENGTHS_K = [129, 70, 900, 333]
OFFSETS = [0, 256, 1280, 128]
CLOSE = {"atol": 0.02, "rtol": 0.02}


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, device=DEVICE, dtype=torch.int32)


def starts(lengths: list[int]) -> Tensor:
    return int32(list(itertools.accumulate(lengths, initial=0)))


class Shards:
    """A shard of each of four requests, some rows behind them, and what to ask of every operator."""

    def __init__(self, seed: int, lengths_q: list[int], paged: bool = False, positions: bool = False) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE).to(torch.bfloat16)

        def whole(*shape: int) -> Tensor:
            return torch.randint(-2, 3, shape, generator=generator, device=DEVICE).to(torch.bfloat16)

        total_q, end = sum(lengths_q) + 3, max(map(sum, zip(LENGTHS_K, OFFSETS, strict=True)))
        self.where: dict[str, Any] = {
            "cu_seqlens_q": starts(lengths_q),
            "k_offset": int32(OFFSETS),
            "max_seqlen_k": end,
            "block_size": BLOCK,
        }
        rows = sum(LENGTHS_K)
        self.idx_q, self.q = whole(total_q, 4, DIM), normal(total_q, 64, DIM)
        if paged:
            width = -(-max(LENGTHS_K) // BLOCK) * BLOCK // PAGE
            numbers = torch.randperm(4 * width, generator=generator, device=DEVICE)
            self.where |= {"page_table": numbers.to(torch.int32).view(4, width), "seqused_k": int32(LENGTHS_K)}
            self.idx_k, cache = whole(4 * width, PAGE, DIM), normal(4 * width, 4, PAGE, 2 * DIM)
            self.k, self.v = cache.split(DIM, -1)
        else:
            self.where["cu_seqlens_k"] = starts(LENGTHS_K)
            self.idx_k, self.k, self.v = whole(rows, DIM), normal(rows, 4, DIM), normal(rows, 4, DIM)
        if positions:
            # In front of the shard, in it and behind it; below 0 too.
            spots = torch.randint(-200, end + 200, (total_q,), generator=generator, device=DEVICE)
            self.where["q_positions"] = spots.to(torch.int32)
        blocks = -(-end // BLOCK) + 3
        order = torch.rand(4, total_q, blocks, generator=generator, device=DEVICE).argsort(-1)[..., :TOPK]
        dropped = torch.rand(order.shape, generator=generator, device=DEVICE) < 0.1
        self.ids = order.masked_fill(dropped, -1).to(torch.int32)
        self.score = whole(4, total_q, -(-end // BLOCK)).float()

    def all(self, few: bool, backend: str = "auto") -> dict[str, Callable[[], Any]]:
        """The operators that are made for many queries, or those for few."""
        score, attend = ("decode_score", "sparse_decode") if few else ("index_score", "sparse_attention")
        where = {**self.where, "backend": backend}
        attention = (self.q, self.k, self.v, self.ids)
        calls = {
            score: lambda: getattr(ops, score)(self.idx_q, self.idx_k, **where),
            attend: lambda: getattr(ops, attend)(*attention, return_lse=True, **where),
            "topk_select": lambda: ops.topk_select(self.score, TOPK, init_blocks=1, **where),
            "select_blocks": lambda: ops.select_blocks(self.idx_q, self.idx_k, TOPK, **where),
        }
        return {name: call for name, call in calls.items() if hasattr(ops, name)}


def agree(found: Any, wanted: Any) -> None:
    """Ids and integer scores exactly, attention nearly."""
    if isinstance(found, tuple):
        torch.testing.assert_close(found[0].float(), wanted[0].float(), **CLOSE)
        torch.testing.assert_close(found[1], wanted[1], **CLOSE)
    else:
        torch.testing.assert_close(found, wanted, atol=0, rtol=0)


@pytest.fixture
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


FEW = pytest.mark.parametrize("few", [False, True], ids=["many queries", "few queries"])
PAGED = pytest.mark.parametrize("paged", [False, True], ids=["flat", "paged"])
POSITIONS = pytest.mark.parametrize("positions", [False, True], ids=["rule", "positions"])


@FEW
@PAGED
@POSITIONS
def test_kernels_agree_with_the_reference(few: bool, paged: bool, positions: bool) -> None:
    made = Shards(int(torch.randint(1 << 31, ())), FEW_Q if few else LENGTHS_Q, paged, positions)
    wanted = made.all(few, "reference")
    for name, call in made.all(few).items():
        agree(call(), wanted[name]())


@PAGED
@pytest.mark.parametrize("order", ["ascending", "score", "local_last"])
@pytest.mark.parametrize(("init", "local", "topk"), [(0, 1, 8), (3, 2, 8), (0, 0, 16), (12, 9, 16), (2, 4, 3)])
def test_selections_force_blocks_of_the_whole_request(
    paged: bool, order: str, init: int, local: int, topk: int
) -> None:
    for positions in (False, True):
        made = Shards(init + local, LENGTHS_Q, paged, positions)
        options = {**made.where, "init_blocks": init, "local_blocks": local, "order": order, "num_kv_heads": 2}
        wanted = ops.select_blocks(made.idx_q, made.idx_k, topk, backend="reference", **options)
        out = torch.full((len(made.idx_q), 2, topk), -7, dtype=torch.int32, device=DEVICE).transpose(0, 1)
        ops.select_blocks(made.idx_q, made.idx_k, topk, out=out, **options)
        agree(out, wanted)


def test_scores_in_every_layout() -> None:
    made = Shards(3, LENGTHS_Q, positions=True)
    for options in ({"causal": False}, {"layout": "token_major"}):
        wanted = ops.index_score(made.idx_q, made.idx_k, backend="reference", **options, **made.where)
        out = torch.full_like(wanted, torch.nan)
        ops.index_score(made.idx_q, made.idx_k, out=out, **options, **made.where)
        agree(out, wanted)


@PAGED
def test_a_schedule_of_shards_can_be_used_again(paged: bool) -> None:
    made = Shards(4, LENGTHS_Q, paged)
    schedule = ops.build_schedule(made.ids, **made.where)
    given = {"schedule": schedule, "return_lse": True, **made.where}
    first, again = (
        ops.sparse_attention(made.q, made.k, made.v, made.ids, check=check, **given) for check in (False, True)
    )
    torch.testing.assert_close(again, first, atol=0, rtol=0)
    # A call without one may take other kernels, which add in another order.
    torch.testing.assert_close(first, made.all(False)["sparse_attention"](), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("cuts", [[0, 3, 8], [0, 1, 2, 5, 8]], ids=str)
def test_shards_merge_to_the_whole(cuts: list[int]) -> None:
    """Context parallelism on one GPU: scores by max, one top-k, attention by LSE."""
    made = Shards(5, LENGTHS_Q)
    whole = {"cu_seqlens_q": made.where["cu_seqlens_q"], "cu_seqlens_k": starts(LENGTHS_K)}
    q, idx_q = made.q[:-3], made.idx_q[:-3]
    wanted_ids = ops.select_blocks(idx_q, made.idx_k, TOPK, **whole)
    wanted = ops.sparse_attention(q, made.k, made.v, wanted_ids, return_lse=True, **whole)
    spots = [k - n + i for n, k in zip(LENGTHS_Q, LENGTHS_K, strict=True) for i in range(n)]
    parts = []
    for begin, end in itertools.pairwise(cuts):
        rows, held, first = [], [], 0
        for length in LENGTHS_K:
            low, high = min(begin * BLOCK, length), min(end * BLOCK, length)
            rows += range(first + low, first + high)
            held.append(high - low)
            first += length
        shard = {
            "cu_seqlens_q": whole["cu_seqlens_q"],
            "cu_seqlens_k": starts(held),
            "k_offset": int32([begin * BLOCK] * 4),
            "q_positions": int32(spots),
            "max_seqlen_k": 8 * BLOCK,
        }
        parts.append((torch.tensor(rows, device=DEVICE, dtype=torch.int64), shard))
    scores = [ops.index_score(idx_q, made.idx_k[rows], **shard) for rows, shard in parts]
    ids = ops.topk_select(torch.stack(scores).amax(0), TOPK, **whole)
    agree(ids, wanted_ids)
    found = [ops.sparse_attention(q, made.k[r], made.v[r], ids, return_lse=True, **shard) for r, shard in parts]
    agree(ops.combine(torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])), wanted)


@FEW
@POSITIONS
def test_no_call_synchronises(few: bool, positions: bool, no_sync: None) -> None:
    torch.cuda.set_sync_debug_mode("default")
    made = Shards(6, FEW_Q if few else LENGTHS_Q, positions=positions)
    for call in made.all(few).values():
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for call in made.all(few).values():
        call()


@FEW
@PAGED
def test_a_replayed_graph_follows_the_shards(few: bool, paged: bool) -> None:
    lengths_q = FEW_Q if few else LENGTHS_Q
    static, other = (Shards(seed, lengths_q, paged, positions=True) for seed in (7, 8))
    other.where["k_offset"] = int32([128, 0, 640, 1408])
    other.where["max_seqlen_k"] = static.where["max_seqlen_k"]
    for call in static.all(few).values():
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = {name: call() for name, call in static.all(few).items()}
    for field in ("idx_q", "idx_k", "q", "k", "v", "ids", "score"):
        getattr(static, field).copy_(getattr(other, field))
    for name, value in other.where.items():
        if isinstance(value, Tensor):
            static.where[name].copy_(value)
    graph.replay()
    for name, call in other.all(few, "reference").items():
        agree(found[name], call())


@FEW
def test_a_shard_that_begins_inside_a_block_gives_no_numbers(few: bool) -> None:
    lengths_q = FEW_Q if few else LENGTHS_Q
    made = Shards(9, lengths_q)
    wanted = {name: call() for name, call in made.all(few).items() if name != "topk_select"}
    made.where["k_offset"] = int32([*OFFSETS[:2], OFFSETS[2] - 64, *OFFSETS[3:]])
    first = lengths_q[0] + lengths_q[1]
    broken = slice(first, first + lengths_q[2])
    for name, answer in wanted.items():
        found = made.all(few)[name]()
        for part, whole in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, answer)), strict=True):
            by_query = (lambda x: x) if isinstance(found, tuple) else (lambda x: x.transpose(0, 1))
            got, kept = by_query(part), by_query(whole)
            assert (got[broken] == -1).all() if name == "select_blocks" else got[broken].isnan().all()
            others = [slice(0, first), slice(broken.stop, None)]
            found_rest, wanted_rest = (torch.cat([x[rows] for rows in others]).float() for x in (got, kept))
            torch.testing.assert_close(
                found_rest, wanted_rest, **(CLOSE if "sparse" in name else {"atol": 0, "rtol": 0})
            )
    with pytest.raises(ValueError, match="k_offset: got 1216 for request 2; wanted multiples of block_size = 128"):
        ops.select_blocks(made.idx_q, made.idx_k, TOPK, check=True, **made.where)
