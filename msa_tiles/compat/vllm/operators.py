"""vLLM's MiniMax-M3 operators by their names.

They write where vLLM's write, and what vLLM leaves as it was (scores of blocks that a query does not see, rows behind
the last request, outputs of requests that pad a batch) is defined here: -inf, ids -1, and 0. Ids come in vLLM's order:
init blocks, local blocks, then by descending score; equal scores in ascending order of ids, where vLLM's order varies.
NaN ranks last. Nothing synchronises, and what is allocated under graph capture belongs to the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from msa_tiles import ops
from msa_tiles.call import validate
from msa_tiles.compat import arguments, kept, packed, servers
from msa_tiles.compat.vllm import caches
from msa_tiles.compat.vllm.caches import PAGE

INIT_SCORE, LOCAL_SCORE = 1e30, 1e29
SCORE_COLUMNS = 16
"""Score matrices have a multiple of this many columns."""
# What an error of our operators calls a parameter, and vLLM calls it.
_OWN = {
    "block_indices": "topk_idx",
    "idx_k": "index_kv_cache",
    "max_seqlen_k": "max_seq_len",
    "max_seqlen_q": "max_query_len",
    "page_table": "block_table",
    "q_positions": "prefix_lens",
    "seqused_k": "seq_lens",
    "softmax_scale": "sm_scale",
}
_OWN_DECODE = {**_OWN, "max_seqlen_q": "decode_query_len"}
_ATTENDED = {"k": "kv_cache", "v": "kv_cache", "out": "output"}


@arguments.told(**_OWN)
@torch.no_grad()
def minimax_m3_index_score(
    idx_q: Tensor,
    index_kv_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    prefix_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    num_kv_heads: int,
) -> Tensor:
    """Scores of every block that a query of a prefill sees: float32 [Hkv, T, blocks of max_seq_len, up to 16s].

    ``idx_q`` [T, Hkv, D]; ``index_kv_cache`` [pages, 128, D], BF16 or e4m3 (without scales: the elements themselves);
    ``block_table`` int32 [B, pages of a request]; ``cu_seqlens_q`` int32 [B + 1]; ``seq_lens``, ``prefix_lens`` int32
    [B]: all keys of a request, and those before its first query. ``max_seq_len`` is an upper bound.

    Raises ValueError or TypeError for arguments that no kernel takes, index queries of another dtype than the keys
    among them; e4m3 queries of BF16 keys are widened.
    """
    _check_heads(idx_q, num_kv_heads)
    _check_int32(block_table=block_table, seq_lens=seq_lens, prefix_lens=prefix_lens)
    keys = caches.index_keys(index_kv_cache)
    score = _new_scores(idx_q, max_seq_len)
    requests = _num_requests(cu_seqlens_q, prefix_lens)
    return ops.index_score(
        _as_keys(idx_q, keys),
        keys,
        cu_seqlens_q=cu_seqlens_q,
        page_table=block_table[:requests],
        seqused_k=seq_lens[:requests],
        max_seqlen_q=max_query_len,
        max_seqlen_k=_bound(max_seq_len, block_table),
        q_positions=servers.positions(cu_seqlens_q, prefix_lens, idx_q.shape[0]),
        block_size=PAGE,
        out=score,
    )


@arguments.told(**_OWN)
@torch.no_grad()
def minimax_m3_index_topk(
    score: Tensor,
    cu_seqlens_q: Tensor,
    prefix_lens: Tensor,
    max_query_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: Tensor | None = None,
) -> Tensor:
    """The best blocks of every query of a prefill: int32 [Hkv, T, topk], -1 behind the last.

    ``score`` is the answer of `minimax_m3_index_score`. ``out`` [Hkv, at least T, topk], of any strides, gets the ids
    in its first T rows, and these are returned.
    """
    _check_int32(prefix_lens=prefix_lens)
    requests = _num_requests(cu_seqlens_q, prefix_lens)
    validate.tensor("score", score, "[Hkv, T, blocks]")
    # As many keys as stand in front of the request's last query, it included: position and causal rule follow.
    lengths = prefix_lens[:requests] + (cu_seqlens_q[1:] - cu_seqlens_q[:-1])
    return ops.topk_select(
        score,
        topk,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=lengths,
        max_seqlen_q=max_query_len,
        block_size=PAGE,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        order="score",
        out=_rows(out, score.shape[1]),
    )


@arguments.told(**_OWN_DECODE)
@torch.no_grad()
def minimax_m3_index_decode_score(
    idx_q: Tensor,
    index_kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    init_blocks: int,
    local_blocks: int,
    num_kv_heads: int,
    decode_query_len: int,
    max_decode_query_len: int,
    score_out: Tensor | None = None,
) -> Tensor:
    """Scores of every block that a query of a decode step sees: float32 [Hkv, T, at least the blocks of max_seq_len].

    ``idx_q`` [B * decode_query_len, Hkv, D], request by request, whose last query sits at the request's last key;
    ``seq_lens`` int32 [B], 0 for requests that pad the batch; ``block_table``, ``index_kv_cache`` as in
    `minimax_m3_index_score`. Init blocks score 1e30, local ones 1e29. ``score_out`` [Hkv, at least T, at least the
    blocks], of any strides, gets the scores, and is returned.
    """
    score = _decode_scores(
        idx_q, index_kv_cache, block_table, seq_lens, max_seq_len, num_kv_heads, decode_query_len,
        max_decode_query_len, score_out,
    )  # fmt: skip
    _force(score, seq_lens, decode_query_len, init_blocks, local_blocks)
    return _published(score, score_out)


@arguments.told(**_OWN_DECODE)
@torch.no_grad()
def minimax_m3_index_decode(
    idx_q: Tensor,
    index_kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    num_kv_heads: int,
    decode_query_len: int,
    max_decode_query_len: int,
    out: Tensor | None = None,
    score_out: Tensor | None = None,
) -> Tensor:
    """The best blocks of every query of a decode step: int32 [Hkv, T, topk], -1 behind the last.

    Arguments as in `minimax_m3_index_decode_score`; ``out`` [Hkv, at least T, topk], of any strides, gets the ids in
    its first T rows, and these are returned. ``score_out`` gets what that function would write there.
    """
    score = _decode_scores(
        idx_q, index_kv_cache, block_table, seq_lens, max_seq_len, num_kv_heads, decode_query_len,
        max_decode_query_len, score_out,
    )  # fmt: skip
    if score_out is not None:
        _force(score, seq_lens, decode_query_len, init_blocks, local_blocks)
        _published(score, score_out)
    requests = seq_lens.shape[0]
    return ops.decode_topk(
        score,
        topk,
        cu_seqlens_q=kept.multiples(decode_query_len, requests + 1, idx_q.device),
        seqused_k=seq_lens,
        max_seqlen_q=decode_query_len,
        block_size=PAGE,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        order="score",
        out=_rows(out, idx_q.shape[0]),
    )


@arguments.told(**_OWN, **_ATTENDED)
@torch.no_grad()
def minimax_m3_sparse_attn(
    q: Tensor,
    kv_cache: Tensor,
    topk_idx: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    prefix_lens: Tensor,
    max_query_len: int,
    num_kv_heads: int,
    sm_scale: float,
    output: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Attention of a prefill over the blocks ``topk_idx`` [Hkv, T, topk], of any strides, into ``output`` [T, Hq, D].

    ``q`` [T, Hq, D]; ``kv_cache`` [pages, Hkv, 128, 2 * D], K beside V, BF16 or e4m3 (uint8 is taken for e4m3); the
    rest as in `minimax_m3_index_score`. ``k_scale`` and ``v_scale``, float32, are one number each or [Hkv, tokens of
    the pool], both or none, and not looked at unless the cache is e4m3.
    """
    _check_int32(block_table=block_table, seq_lens=seq_lens, prefix_lens=prefix_lens)
    validate.tensor("q", q, "[T, Hq, D]")
    validate.tensor("output", output, "[T, Hq, D]")
    k, v = caches.keys_and_values(kv_cache, num_kv_heads, q.shape[-1])
    k, v, k_scale, v_scale = caches.scales(k, v, k_scale, v_scale)
    requests = _num_requests(cu_seqlens_q, prefix_lens)
    ops.sparse_attention(
        q,
        k,
        v,
        topk_idx,
        cu_seqlens_q=cu_seqlens_q,
        page_table=block_table[:requests],
        seqused_k=seq_lens[:requests],
        max_seqlen_q=max_query_len,
        q_positions=servers.positions(cu_seqlens_q, prefix_lens, q.shape[0]),
        block_size=PAGE,
        softmax_scale=sm_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        out=output,
    )


@arguments.told(**_OWN_DECODE, **_ATTENDED)
@torch.no_grad()
def minimax_m3_sparse_attn_decode(
    q: Tensor,
    kv_cache: Tensor,
    topk_idx: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    num_kv_heads: int,
    sm_scale: float,
    output: Tensor,
    decode_query_len: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Attention of a decode step over the blocks ``topk_idx`` [Hkv, T, topk], into ``output`` [T, Hq, D].

    ``q`` [B * decode_query_len, Hq, D] and ``seq_lens`` as in `minimax_m3_index_decode_score`, the rest as in
    `minimax_m3_sparse_attn`.
    """
    _check_int32(block_table=block_table, seq_lens=seq_lens)
    _check_queries("q", q, seq_lens, decode_query_len)
    validate.tensor("output", output, "[T, Hq, D]")
    k, v = caches.keys_and_values(kv_cache, num_kv_heads, q.shape[-1])
    k, v, k_scale, v_scale = caches.scales(k, v, k_scale, v_scale)
    requests = seq_lens.shape[0]
    ops.sparse_decode(
        q,
        k,
        v,
        topk_idx,
        cu_seqlens_q=kept.multiples(decode_query_len, requests + 1, q.device),
        page_table=block_table[:requests],
        seqused_k=seq_lens,
        max_seqlen_q=decode_query_len,
        block_size=PAGE,
        softmax_scale=sm_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        out=output,
    )


@arguments.told(out="score_out")
def _decode_scores(
    idx_q: Tensor,
    index_kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    num_kv_heads: int,
    decode_query_len: int,
    max_decode_query_len: int,
    score_out: Tensor | None,
) -> Tensor:
    """The scores themselves, in ``score_out`` where its rows can be written to, else in a tensor of its own."""
    _check_heads(idx_q, num_kv_heads)
    _check_int32(block_table=block_table, seq_lens=seq_lens)
    _check_queries("idx_q", idx_q, seq_lens, decode_query_len)
    if decode_query_len > max_decode_query_len:
        came = f"{decode_query_len} beside max_decode_query_len = {max_decode_query_len}"
        raise ValueError(f"decode_query_len: got {came}; wanted at most that")
    if score_out is not None:
        validate.tensor("score_out", score_out, "[Hkv, T, blocks]")
    keys = caches.index_keys(index_kv_cache)
    requests, total_q = seq_lens.shape[0], idx_q.shape[0]
    if score_out is None:
        score = _new_scores(idx_q, max_seq_len)
    elif score_out.stride(-1) == 1:
        score = score_out[:, :total_q, : -(-max_seq_len // PAGE)]
    else:
        score = _new_scores(idx_q, max_seq_len)[..., : -(-max_seq_len // PAGE)]
    return ops.decode_score(
        _as_keys(idx_q, keys),
        keys,
        cu_seqlens_q=kept.multiples(decode_query_len, requests + 1, idx_q.device),
        page_table=block_table[:requests],
        seqused_k=seq_lens,
        max_seqlen_q=decode_query_len,
        max_seqlen_k=_bound(max_seq_len, block_table),
        block_size=PAGE,
        out=score,
    )


def _force(score: Tensor, seq_lens: Tensor, decode_query_len: int, init_blocks: int, local_blocks: int) -> None:
    """Write the scores of the blocks that every query selects; a block that is both is a local one."""
    if init_blocks <= 0 and local_blocks <= 0:
        return
    places = torch.arange(1 - decode_query_len, 1, dtype=torch.int32, device=seq_lens.device)
    seen = (seq_lens[:, None] + places).clamp_min_(0).flatten()
    blocks = ((seen + (PAGE - 1)) >> (PAGE.bit_length() - 1))[:, None]
    column = torch.arange(score.shape[2], dtype=torch.int32, device=score.device)
    visible = column < blocks
    score.masked_fill_(visible & (column < init_blocks), INIT_SCORE)
    score.masked_fill_(visible & (column >= blocks - local_blocks), LOCAL_SCORE)


def _published(score: Tensor, score_out: Tensor | None) -> Tensor:
    if score_out is None:
        return score
    if score_out.stride(-1) != 1:
        score_out[:, : score.shape[1], : score.shape[2]].copy_(score)
    return score_out


def _new_scores(idx_q: Tensor, max_seq_len: int) -> Tensor:
    columns = -(-max_seq_len // (PAGE * SCORE_COLUMNS)) * SCORE_COLUMNS
    return idx_q.new_empty((idx_q.shape[1], idx_q.shape[0], columns), dtype=torch.float32)


def _bound(max_seq_len: int, block_table: Tensor) -> int:
    """The longest request: vLLM's bound may be of the model, and its table of the batch."""
    return min(max_seq_len, block_table.shape[1] * PAGE)


def _rows(out: Tensor | None, total_q: int) -> Tensor | None:
    return None if out is None else validate.tensor("out", out, "[Hkv, T, topk]")[:, :total_q]


def _as_keys(idx_q: Tensor, keys: Tensor) -> Tensor:
    """e4m3 queries of wider keys become these keys' kind, which is exact."""
    narrower = idx_q.dtype == torch.float8_e4m3fn and keys.dtype.itemsize > 1
    return idx_q.to(keys.dtype) if narrower else idx_q


def _check_heads(idx_q: Tensor, num_kv_heads: int) -> None:
    if idx_q.dim() != 3 or idx_q.shape[1] != num_kv_heads:
        raise ValueError(f"idx_q: got shape {list(idx_q.shape)}; wanted [T, num_kv_heads = {num_kv_heads}, head_dim]")


def _check_queries(name: str, queries: Tensor, seq_lens: Tensor, decode_query_len: int) -> None:
    validate.tensor(name, queries, "[T, heads, D]")
    if queries.shape[0] != seq_lens.shape[0] * decode_query_len:
        wanted = f"{decode_query_len} for each of {seq_lens.shape[0]} requests"
        raise ValueError(f"{name}: got {queries.shape[0]} queries; wanted {wanted}")


def _check_int32(**arrays: Tensor) -> None:
    """Operators of ours would blame arguments by other names."""
    for name, value in arrays.items():
        validate.tensor(name, value, "[B, pages]" if name == "block_table" else "[B]")
        if value.dtype != torch.int32:
            raise TypeError(f"{name}: got dtype {value.dtype}; wanted torch.int32")


def _num_requests(cu_seqlens_q: Tensor, prefix_lens: Tensor) -> int:
    """B of a prefill, whose ``prefix_lens`` may have more."""
    requests = packed.num_requests(cu_seqlens_q)
    if prefix_lens.shape[0] < requests:
        validate.refuse("prefix_lens", f"shape {validate.shape_text(prefix_lens.shape)}", f"[B] = [{requests}]")
    return requests
