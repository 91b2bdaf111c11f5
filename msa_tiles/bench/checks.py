"""Comparisons with the reference, on sampled rows; each returns None or a sentence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.bench.cases import Case
from msa_tiles.bench.inputs import Attention, Indexer, is_e4m3, sample_rows, wide

ROWS = 48
ATTENTION_ROWS = 16
DENSE_ROWS = 12
ATTENTION_LIMIT = 2e-2
SCORE_LIMIT = 1e-5
"""Largest error relative to the largest value: bfloat16 outputs, and float32 sums of bfloat16 products."""
GRADIENT_COSINE = 0.9999
"""Least cosine of gradients in bfloat16 with those in float32."""
FP8_SCORE_LIMIT = 2e-3
"""The same of sums of e4m3 products, which tensor cores cut 13 bits below the largest: four times what that does."""


def reference_scores(case: Case, inputs: Indexer, rows: Tensor) -> Tensor:
    """float32 `[Hi, N, blocks]`; -inf where a row sees nothing of a block."""
    positions = (rows + case.first_position).int()
    return reference.index_score(
        inputs.idx_q[rows], wide(inputs.idx_k), block_size=case["block_size"], q_positions=positions
    )


def scores(case: Case, inputs: Indexer, found: Tensor) -> str | None:
    """`found [Hi, T, >= blocks]` on the blocks that a row sees; peers leave the others unwritten."""
    rows = sample_rows(case.num_q, ROWS, inputs.idx_q.device)
    wanted = reference_scores(case, inputs, rows)
    got = found[:, rows, : wanted.shape[-1]]
    seen = wanted.isfinite()
    limit = score_limit(inputs) * wanted[seen].abs().max().item()
    error = (got - wanted)[seen].abs().max().item()
    return None if error <= limit else f"scores are off by {error:.3g}, at most {limit:.3g} is accepted"


def score_limit(inputs: Indexer) -> float:
    """Largest error of a score relative to the largest score."""
    return FP8_SCORE_LIMIT if is_e4m3(inputs.idx_k) else SCORE_LIMIT


def ids_by_score(
    case: Case, scores_of_rows: Tensor, rows: Tensor, ids: Tensor, local_blocks: int, limit: float = SCORE_LIMIT
) -> str | None:
    """Are `ids [Hkv, T, k]` a best selection by `scores_of_rows [Hkv, N, blocks]`, the last blocks forced?

    Scores closer than their own rounding error may be ranked either way; the order of ids in a row is free.
    """
    got = ids[:, rows].long()
    num_blocks = scores_of_rows.shape[-1]
    visible = (rows + case.first_position) // case["block_size"] + 1
    wanted_count = visible.clamp_max(got.shape[-1])[None, :].expand(got.shape[:2])
    valid = got >= 0
    if not torch.equal(valid.sum(-1), wanted_count):
        return "some rows do not hold min(k, visible blocks) ids"
    if bool((got >= visible[None, :, None]).any()):
        return "some ids lie behind the query"
    hits = torch.zeros(*got.shape[:2], num_blocks + 1, dtype=torch.int32, device=got.device)
    hits.scatter_add_(2, torch.where(valid, got, num_blocks), torch.ones_like(got, dtype=torch.int32))
    hits = hits[..., :num_blocks]
    if bool((hits > 1).any()):
        return "some rows hold an id twice"
    blocks = torch.arange(num_blocks, device=got.device)
    forced = (blocks < visible[:, None]) & (blocks >= visible[:, None] - local_blocks)
    if bool((forced & (hits == 0)).any()):
        return "some rows lack their own block"
    free = scores_of_rows.masked_fill(forced, float("-inf"))
    worst_in = free.masked_fill(hits == 0, float("inf")).masked_fill(forced, float("inf")).amin(-1)
    best_out = free.masked_fill(hits > 0, float("-inf")).amax(-1)
    slack = 2 * limit * scores_of_rows[scores_of_rows.isfinite()].abs().max()
    return None if bool((worst_in >= best_out - slack).all()) else "some blocks left out score higher than chosen ones"


def selected(case: Case, inputs: Indexer, ids: Tensor) -> str | None:
    """`ids [Hkv, T, k]` chosen from indexer inputs, with one local block."""
    rows = sample_rows(case.num_q, ROWS, ids.device)
    scores_of_rows = reference_scores(case, inputs, rows)
    return ids_by_score(case, scores_of_rows, rows, ids, local_blocks=1, limit=score_limit(inputs))


def attended(case: Case, inputs: Attention, out: Tensor) -> str | None:
    """`out [T, Hq, D]` of attention over the selected blocks."""
    rows = sample_rows(case.num_q, ATTENTION_ROWS, out.device)
    wanted, _ = reference.sparse_attention(
        inputs.q[rows].float(),
        wide(inputs.k),
        wide(inputs.v),
        inputs.block_indices[:, rows],
        **_where(case, rows),
    )
    return close(out[rows], wanted)


def _where(case: Case, rows: Tensor) -> dict[str, Any]:
    """What the reference wants to know of a call on `rows` of the case's queries and all of its keys."""
    return {"block_size": case["block_size"], "q_positions": (rows + case.first_position).int()}


def gradient_rows(case: Case, block_indices: Tensor) -> tuple[Tensor, slice]:
    """Queries to take gradients of, ascending, and the keys of a block that no other query selects, in no head."""
    block = 3 * (case.num_k // case["block_size"]) // 4
    asking = (block_indices == block).any(-1).any(0).nonzero()[:, 0]
    rows = torch.unique(torch.cat([asking, sample_rows(case.num_q, ATTENTION_ROWS, block_indices.device)]))
    return rows, slice(block * case["block_size"], (block + 1) * case["block_size"])


def attention_gradients(
    case: Case, inputs: Attention, dout: Tensor, out: Tensor, found: tuple[Tensor, ...]
) -> str | None:
    """`found`: dq of sampled rows, dk and dv of one block, against the reference in float32."""
    rows, keys = gradient_rows(case, inputs.block_indices)
    where = _where(case, rows)
    q, k, v = inputs.q[rows].float(), wide(inputs.k).float(), wide(inputs.v).float()
    ids = inputs.block_indices[:, rows]
    lse = reference.sparse_attention(q, k, v, ids, **where)[1]
    wanted = reference.sparse_attention_backward(dout[rows].float(), q, k, v, out[rows].float(), lse, ids, **where)
    got = found[0][rows], found[1][keys], found[2][keys]
    return _gradients(("dq", "dk", "dv"), got, (wanted[0], wanted[1][keys], wanted[2][keys]))


def index_gradients(case: Case, index: Indexer, main: Attention, found: tuple[Tensor, ...]) -> str | None:
    """`found`: the loss, which must be finite, and T * Hi times its gradients: rows and a block as above."""
    if not bool(found[0].isfinite()):
        return f"the loss is {found[0].item()}"
    rows, keys = gradient_rows(case, main.block_indices)
    where = _where(case, rows)
    q, k = main.q[rows].float(), wide(main.k).float()
    ids = main.block_indices[:, rows]
    lse = reference.sparse_attention(q, k, k, ids, **where)[1]
    _, d_idx_q, d_idx_k = reference.index_kl(
        q, k, lse, index.idx_q[rows].float(), wide(index.idx_k).float(), ids, **where
    )
    if d_idx_q is None or d_idx_k is None:
        raise RuntimeError("the reference gave no gradients")
    share = len(rows) * index.idx_q.shape[1]
    wanted = d_idx_q * share, d_idx_k[keys] * share
    return _gradients(("d_idx_q", "d_idx_k"), (found[1][rows], found[2][keys]), wanted)


def mostly_trained(case: Case, topk: int, inputs: Any, found: tuple[Tensor, Tensor]) -> str | None:
    """`found`: output and dq `[T, Hq, D]` of a peer that selects by itself.

    A peer that rounds its scores ranks blocks that nearly tie otherwise, in one group of heads or another: of sampled
    rows and KV heads three of four must be right.
    """
    index, main, dout = inputs.index, inputs.main, inputs.dout
    rows = sample_rows(case.num_q, ROWS, main.q.device)
    where = _where(case, rows)
    q, k, v = main.q[rows].float(), wide(main.k).float(), wide(main.v).float()
    ids = reference.select_blocks(index.idx_q[rows].float(), wide(index.idx_k).float(), topk, local_blocks=1, **where)
    out, lse = reference.sparse_attention(q, k, v, ids, **where)
    dq, _, _ = reference.sparse_attention_backward(dout[rows].float(), q, k, v, out, lse, ids, **where)
    for name, got, want in zip(("outputs", "dq"), found, (out, dq), strict=True):
        wrong, whole = (
            part.unflatten(1, (case["num_kv_heads"], -1)).flatten(2).norm(dim=2)
            for part in (got[rows].float() - want, want)
        )
        right = (wrong <= ATTENTION_LIMIT * whole.clamp_min(1e-6)).float().mean().item()
        if right < 0.75:
            return f"{name}: only {right:.0%} of the rows and KV heads are right"
    return None


def _gradients(names: tuple[str, ...], found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> str | None:
    for name, got, want in zip(names, found, wanted, strict=True):
        angle = torch.nn.functional.cosine_similarity(got.float().flatten(), want.flatten(), dim=0).item()
        scale = got.float().norm().item() / want.norm().item()
        # Written so that NaN is wrong.
        if not (angle >= GRADIENT_COSINE and abs(scale - 1) <= ATTENTION_LIMIT):
            return (
                f"{name}: cosine {angle:.6f} with the reference (at least {GRADIENT_COSINE}), {scale:.4f} times as long"
            )
    return None


def dense(case: Case, inputs: Attention, out: Tensor) -> str | None:
    """`out [T, Hq, D]` of causal attention over all keys."""
    rows = sample_rows(case.num_q, DENSE_ROWS, out.device)
    group = case["num_q_heads"] // case["num_kv_heads"]
    wanted = torch.empty(len(rows), *out.shape[1:], device=out.device)
    k, v = wide(inputs.k), wide(inputs.v)
    for i, row in enumerate(rows.tolist()):
        end = case.first_position + row + 1
        for h in range(case["num_kv_heads"]):
            heads = slice(h * group, (h + 1) * group)
            logits = inputs.q[row, heads].float() @ k[:end, h].float().T * out.shape[-1] ** -0.5
            wanted[i, heads] = logits.softmax(-1) @ v[:end, h].float()
    return close(out[rows], wanted)


def close(got: Tensor, wanted: Tensor) -> str | None:
    """`got` against float32 `wanted`, both `[N, H, D]`."""
    # Each row by its own largest value: rows that see few keys have far larger outputs than the others.
    scale = wanted.abs().amax(dim=(1, 2), keepdim=True)
    error = ((got.float() - wanted).abs() / scale).max().item()
    return None if error <= ATTENTION_LIMIT else f"outputs are off by {error:.3g} of a row's largest value"
