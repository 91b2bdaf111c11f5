"""A dense oracle of its own: numpy, float64, one query at a time, straight from the contracts.

It shares nothing with msa_tiles.reference and knows no storage: it sees the keys of each request as one array.
"""

from __future__ import annotations

import numpy as np
from reference.batches import Batch


def sees(batch: Batch, row: int, causal: bool = True) -> np.ndarray:
    """Which keys of its request a query row may see: bool [len_k]."""
    request, position = batch.rows()[row]
    if request < 0:
        return np.zeros(0, dtype=bool)
    key_positions = batch.offsets[request] + np.arange(batch.lengths_k[request])
    if not causal:
        return np.ones_like(key_positions, dtype=bool)
    return (key_positions <= position) & (position >= 0)


def block_of(batch: Batch, request: int, block_size: int) -> np.ndarray:
    """The block number of each key of a request."""
    return (batch.offsets[request] + np.arange(batch.lengths_k[request])) // block_size


def index_score(
    batch: Batch, idx_q: np.ndarray, keys: list[np.ndarray], width: int, block_size: int, causal: bool = True
):
    """[Hi, T, width] float64."""
    total_q, heads, _ = idx_q.shape
    score = np.full((heads, total_q, width), -np.inf)
    for row, (request, _) in enumerate(batch.rows()):
        if request < 0:
            continue
        blocks, visible = block_of(batch, request, block_size), sees(batch, row, causal)
        for head in range(heads):
            for block, product, seen in zip(blocks, keys[request] @ idx_q[row, head], visible, strict=True):
                if seen and block < width and product > score[head, row, block]:
                    score[head, row, block] = product
    return score


def valid_blocks(batch: Batch, block_size: int) -> list[int]:
    """How many blocks lie at or before each row's position, within its request."""
    counts = []
    for request, position in batch.rows():
        last = -1
        if request >= 0:
            last = min(position, batch.offsets[request] + batch.lengths_k[request] - 1)
        counts.append(last // block_size + 1 if last >= 0 else 0)
    return counts


def topk_row(scores: np.ndarray, valid: int, topk: int, init_blocks: int, local_blocks: int, order: str) -> list[int]:
    """One row by repeated search: scores [heads of the group, blocks] -> topk ids, -1 behind."""
    free = list(range(valid))
    init = [block for block in free if block < init_blocks][:topk]
    local = [block for block in free if block >= valid - local_blocks and block not in init][: topk - len(init)]
    free = [block for block in free if block not in init and block not in local]
    ranked: list[int] = []
    # Forced blocks that did not fit have filled all slots, so the search below then does nothing.
    while free and len(init) + len(local) + len(ranked) < topk:
        best = free[0]
        for block in free[1:]:
            if _beats(scores[:, block], scores[:, best]):
                best = block
        ranked.append(best)
        free.remove(best)
    if order == "ascending":
        chosen = sorted(init + local + ranked)
    else:
        chosen = init + local + ranked if order == "score" else init + ranked + local
    return chosen + [-1] * (topk - len(chosen))


def _beats(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether a block's scores over the heads of a group rank strictly above another's."""
    one, other = one[~np.isnan(one)], other[~np.isnan(other)]
    if one.size == 0 or other.size == 0:
        return one.size > other.size and other.size == 0
    return bool(one.max() > other.max())


def topk_select(
    score: np.ndarray, valid: list[int], topk: int, kv_heads: int, init_blocks: int, local_blocks: int, order: str
) -> np.ndarray:
    """[Hi, T, NB] -> int32 [Hkv, T, topk]."""
    heads, total_q, width = score.shape
    group = heads // kv_heads
    ids = np.full((kv_heads, total_q, topk), -1, dtype=np.int32)
    for head in range(kv_heads):
        for row in range(total_q):
            scores = score[head * group : (head + 1) * group, row]
            ids[head, row] = topk_row(scores, min(valid[row], width), topk, init_blocks, local_blocks, order)
    return ids


def attention(
    batch: Batch,
    q: np.ndarray,
    keys: list[np.ndarray],
    values: list[np.ndarray],
    ids: np.ndarray,
    block_size: int,
    scale: float,
) -> tuple[np.ndarray, np.ndarray]:
    """out [T, Hq, D] and lse [T, Hq], float64, by a softmax over the list of chosen and visible keys."""
    total_q, q_heads, _ = q.shape
    group = q_heads // ids.shape[0]
    out, lse = np.zeros_like(q), np.full((total_q, q_heads), -np.inf)
    for row, (request, _) in enumerate(batch.rows()):
        if request < 0:
            continue
        blocks, visible = block_of(batch, request, block_size), sees(batch, row)
        for head in range(q_heads):
            kv_head = head // group
            chosen = [j for j in range(len(blocks)) if visible[j] and blocks[j] in ids[kv_head, row]]
            if not chosen:
                continue
            logits = keys[request][chosen, kv_head] @ q[row, head] * scale
            weights = np.exp(logits - logits.max())
            out[row, head] = weights @ values[request][chosen, kv_head] / weights.sum()
            lse[row, head] = logits.max() + np.log(weights.sum())
    return out, lse
