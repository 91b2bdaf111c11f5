"""`topk_select` against torch.topk and vLLM's top-k kernel, on the same scores."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from msa_tiles import ops
from msa_tiles.bench import cases, checks, flashinfer_peer, peers
from msa_tiles.bench.harness import Bench, Contender
from msa_tiles.bench.inputs import normal, sample_rows
from msa_tiles.bench.operators._own import of_spec
from msa_tiles.bench.timing import Call

OP = "topk_select"
_CHUNK = 8192


def causal_scores(case: cases.Case, heads: int, device: torch.device, seed: int) -> Tensor:
    """Normal scores `[H, T, blocks]`, -inf behind each query's own block, as `index_score` leaves them."""
    num_blocks = -(-case.num_k // case["block_size"])
    scores = normal(seed, device, heads, case.num_q, num_blocks, dtype=torch.float32)
    blocks = torch.arange(num_blocks, device=device)
    for start in range(0, case.num_q, _CHUNK):
        end = min(start + _CHUNK, case.num_q)
        own = torch.arange(start, end, device=device) + case.first_position
        scores[:, start:end].masked_fill_(blocks > (own // case["block_size"])[:, None], float("-inf"))
    return scores


def check(case: cases.Case, local_blocks: int, scores: Tensor, ids: Tensor) -> str | None:
    """`ids [H, T, k]` against the scores they were chosen from."""
    rows = sample_rows(case.num_q, checks.ROWS, scores.device)
    return checks.ids_by_score(case, scores[:, rows], rows, ids, local_blocks)


def torch_topk(case: cases.Case, topk: int) -> Contender:
    """torch.topk over all columns. It forces no local block and names hidden ones, which the check drops."""
    width = min(topk, -(-case.num_k // case["block_size"]))

    def check_visible(scores: Tensor, found: tuple[Tensor, Tensor]) -> str | None:
        values, ids = found
        padded = torch.full((*ids.shape[:2], topk), -1, dtype=torch.int64, device=ids.device)
        padded[..., :width] = torch.where(values.isfinite(), ids, -1)
        return check(case, 0, scores, padded)

    return Contender("torch", lambda scores: lambda: torch.topk(scores, width, dim=-1), check_visible)


def prepare(case: cases.Case, device: torch.device, precision: str) -> Bench:
    heads, topk = case["num_index_heads"], case["topk"]
    num_valid = (torch.arange(case.num_q, device=device) + case.first_position) // case["block_size"] + 1
    num_valid = num_valid.int()

    def ours(dsl: str, scores: Tensor) -> Call:
        return lambda: ops.topk_select(
            scores,
            topk,
            num_kv_heads=case["num_kv_heads"],
            num_valid_blocks=num_valid,
            block_size=case["block_size"],
            backend=dsl,
        )

    return Bench(
        case=case,
        make=functools.partial(causal_scores, case, heads, device),
        bytes_per_set=4 * heads * case.num_q * -(-case.num_k // case["block_size"]),
        ours=ours,
        check=functools.partial(check, case, 1),
        peers=[
            torch_topk(case, topk),
            peers.vllm_topk(case, topk, functools.partial(check, case, 1)),
            flashinfer_peer.topk_select(case, functools.partial(check, case, 1)),
        ],
    )


BENCHMARK = of_spec(OP, prepare)
