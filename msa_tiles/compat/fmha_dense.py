"""The dense pass of MiniMax's ``fmha_sm100`` over ours; `msa_tiles.compat.fmha_sm100` has it beside the rest."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msa_tiles import ops
from msa_tiles.call import validate
from msa_tiles.compat import arguments, flashinfer_scores, packed, positions

CHUNK = 64  # blocks that one call of the attention operators takes
TILES = 128  # of scores: their number is rounded up to a multiple of it


@dataclass(frozen=True)
class Plan:
    """What calls on the same lengths share. ``lengths`` int32 [B]; ``starts_*`` int32 [B + 1]; bounds on the host."""

    starts_q: Tensor
    starts_k: Tensor
    starts_pages: Tensor
    lengths: Tensor
    offset: int | Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    heads: int
    page_size: int
    tiles: int
    blocks: int
    causal: bool


@arguments.told()
def fmha_sm100_plan(
    qo_segment_lens: Tensor,
    kv_segment_lens: Tensor,
    num_qo_heads: int,
    num_kv_heads: int = -1,
    *,
    qo_offset: int | Tensor | None = None,
    split_prefill_decode: bool = True,
    num_kv_splits: int = -1,
    page_size: int = -1,
    output_maxscore: bool = False,
    kv_block_num: int = -1,
    usable_SM_count: int = -1,
    causal: bool = True,
    sparse_kernel_mode: str = "auto",
    use_fp8_kvcache: bool = False,
    device: torch.device | str | int | None = None,
    stream: int | None = None,
) -> tuple[bool, int, int, Plan, None]:
    """What `fmha_sm100` has to know of a batch: a tuple of five, as there, whose fourth is the plan.

    ``qo_segment_lens``, ``kv_segment_lens`` int32 or int64 [B], queries and keys of each request, on any device: they
    are read to the host. ``num_qo_heads`` query heads. ``qo_offset`` (an integer, or [B]) is where a request's first
    query sits, by default so that the last one sits on the last key; without ``causal`` a query sees all keys.
    ``page_size`` tokens of a page, below 1 for flat keys. With ``output_maxscore`` calls return scores, with a
    ``kv_block_num`` above 0 they attend to selected blocks. ``device`` is that of the calls' tensors: the current CUDA
    device by default, the CPU where there is none.

    ``num_kv_heads``, ``split_prefill_decode``, ``num_kv_splits``, ``usable_SM_count``, ``sparse_kernel_mode``,
    ``use_fp8_kvcache`` and ``stream`` are about the original's kernels and have no effect. Raises ``ValueError`` for
    what does not fit.
    """
    validate.tensor("qo_segment_lens", qo_segment_lens, "[B]")
    if qo_segment_lens.shape != kv_segment_lens.shape or not qo_segment_lens.numel():
        came = f"{list(kv_segment_lens.shape)} beside qo_segment_lens {list(qo_segment_lens.shape)}"
        raise ValueError(f"kv_segment_lens: got shape {came}; wanted [B] for both, of one request or more")
    if kv_block_num > 0 and output_maxscore:
        raise ValueError(
            "output_maxscore: got True beside kv_block_num; wanted one of them: scores are the dense pass's"
        )
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    elif isinstance(device, int):
        device = torch.device("cuda", device)
    else:
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"device: got {device!r}; wanted a device of torch, such as 'cuda:0'") from error
    queries, keys = qo_segment_lens.tolist(), kv_segment_lens.tolist()
    for name, lengths in (("qo_segment_lens", queries), ("kv_segment_lens", keys)):
        if min(lengths) < 0:
            raise ValueError(f"{name}: got {min(lengths)} among them; wanted no length below 0")
    if isinstance(qo_offset, Tensor):
        if qo_offset.dim():
            validate.shaped("qo_offset", qo_offset, [len(queries)], "[B]")
        qo_offset = qo_offset.to(device, torch.int32)
    elif qo_offset is not None:
        qo_offset = operator.index(qo_offset)
    tiles = -(-max(keys) // packed.BLOCK)
    plan = Plan(
        starts_q=_starts(queries, device),
        starts_k=_starts(keys, device),
        starts_pages=_starts([-(-length // page_size) if page_size > 0 else 0 for length in keys], device),
        lengths=torch.tensor(keys, dtype=torch.int32, device=device),
        offset=qo_offset,
        max_seqlen_q=max(queries),
        max_seqlen_k=max(keys),
        heads=operator.index(num_qo_heads),
        page_size=page_size,
        tiles=-(-tiles // TILES) * TILES if output_maxscore else -1,
        blocks=kv_block_num,
        causal=causal,
    )
    return False, 0, len(queries), plan, None


@arguments.told(
    idx_q="q", idx_k="k", block_indices="kv_block_indexes", cu_seqlens_k="plan_info", q_positions="q_offset_override",
    softmax_scale="sm_scale",
)  # fmt: skip
@torch.no_grad()
def fmha_sm100(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan_info: tuple[bool, int, int, Plan, None],
    kv_indices: Tensor | None = None,
    kv_block_indexes: Tensor | None = None,
    q_offset_override: int | Tensor | None = None,
    out: Tensor | None = None,
    max_score: Tensor | None = None,
    page_table: Tensor | None = None,
    *,
    sm_scale: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    o_scale: float | None = None,
    output_maxscore: bool = True,
    output_o: bool = True,
    check_input_valid: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Attention to all keys, the largest product of a query with a key of each block of 128, or both: (out, scores).

    ``q`` [T, Hq, D] bfloat16, float32, float64 or e4m3; ``k``, ``v`` of q's dtype or e4m3, flat [Tk, Hkv, D], or pages
    [pages, Hkv, P, D] with ``kv_indices``, int32, the pages of all requests one after another, or with ``page_table``
    int32 [B, pages]. ``plan_info`` is the answer of `fmha_sm100_plan`. ``q_offset_override`` stands in for its
    ``qo_offset``. With ``kv_block_indexes`` int32 [T, Hkv or Hq, k] (-1 for none) a query attends to these blocks of
    P keys alone, of Hq rows to those of each group's first head.

    out [T, Hq, D] is in q's dtype (bfloat16 for e4m3), softmax over products times ``sm_scale`` (``D ** -0.5``) times
    ``q_scale * k_scale``, and times ``v_scale``, numbers. Scores float32 [Hq, tiles, T] are those of the stored
    elements, unscaled, -inf for none; tiles are a multiple of 128. They come with a plan for them and
    ``output_maxscore``, else None; then ``output_o`` may leave ``out`` away. ``out`` and ``max_score`` may be the
    caller's. ``check_input_valid`` reads lengths, pages and ids to the host and refuses those that cannot be.

    Flat keys under queries that end with them run on `msa_tiles.ops.dense_attention`. Others run on
    `msa_tiles.ops.sparse_attention` or `sparse_decode` with 64 blocks at a time, and are merged in float32.

    Raises ``NotImplementedError`` for an ``o_scale``, ``ValueError`` or ``TypeError`` for what does not fit.
    """
    plan = _checked(q, k, plan_info, kv_indices, page_table, kv_block_indexes)
    if o_scale not in (None, 1.0):
        raise NotImplementedError(f"o_scale: got {o_scale}; wanted None or 1: out has 16 bits or more and no scale")
    scored = output_maxscore and plan.tiles >= 0
    where = _places(plan, q, k, kv_indices, page_table, q_offset_override)
    if check_input_valid:
        where["check"] = True
    if scored:
        placed = {name: value for name, value in where.items() if not name.startswith("max_seqlen")}
        found = flashinfer_scores.scores(q, list(k.unbind(1)), placed, plan.tiles, True, plan.max_seqlen_q)
        found = found.transpose(1, 2)
        if max_score is None:
            max_score = found
        else:
            flashinfer_scores.check_output(max_score, tuple(found.shape), torch.float32, "max_score")
            max_score.copy_(found)
    else:
        max_score = None
    if scored and not output_o:
        return None, max_score
    options: dict[str, Any] = {
        "softmax_scale": (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
        * (1.0 if q_scale is None else q_scale),
        "few": plan.max_seqlen_q <= packed.FEW_QUERIES,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    if kv_block_indexes is None:
        return _attend_to_all(q, k, v, plan, where, options, out), max_score
    ids = _of_kv_heads(kv_block_indexes, q.shape[1], k.shape[1])
    block_size = k.shape[2] if k.dim() == 4 else packed.BLOCK
    return packed.attend(q, k, v, ids, where, block_size=block_size, out=out, **options)[0], max_score


def _checked(
    q: Tensor,
    k: Tensor,
    plan_info: tuple[bool, int, int, Plan, None],
    kv_indices: Tensor | None,
    page_table: Tensor | None,
    kv_block_indexes: Tensor | None,
) -> Plan:
    packed.check_queries(q)
    if not (isinstance(plan_info, tuple) and len(plan_info) == 5 and isinstance(plan_info[3], Plan)):
        raise TypeError(f"plan_info: got a {type(plan_info).__name__}; wanted the answer of fmha_sm100_plan")
    plan = plan_info[3]
    if plan.starts_q.device != q.device:
        came = f"a plan for {plan.starts_q.device}"
        raise ValueError(f"plan_info: got {came}; wanted {q.device} like q: give fmha_sm100_plan its device")
    if plan.heads != q.shape[1]:
        raise ValueError(f"plan_info: got one for {plan.heads} query heads; wanted the {q.shape[1]} of q")
    paged = kv_indices is not None or page_table is not None
    if k.dim() != (4 if paged else 3):
        wanted = "[pages, Hkv, P, D] beside kv_indices or page_table" if paged else "[Tk, Hkv, D] without kv_indices"
        raise ValueError(f"k: got shape {list(k.shape)}; wanted {wanted}")
    if paged and k.shape[2] != plan.page_size:
        raise ValueError(f"plan_info: got pages of {plan.page_size} tokens; wanted the {k.shape[2]} of k")
    if plan.blocks > 0 and kv_block_indexes is None:
        raise ValueError("kv_block_indexes: got None with a plan of selected blocks; wanted int32 [T, Hkv, k]")
    return plan


def _places(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    kv_indices: Tensor | None,
    page_table: Tensor | None,
    offset: int | Tensor | None,
) -> dict[str, Any]:
    """The operators' keyword arguments; where every query sees all keys its position says so."""
    if page_table is None and kv_indices is not None:
        page_table = packed.table_of(kv_indices, plan.starts_pages, -(-plan.max_seqlen_k // k.shape[2]))
    used = None if page_table is None else plan.lengths
    if isinstance(offset, Tensor):
        offset = offset.to(torch.int32)
    offset = plan.offset if offset is None else offset
    where = packed.places(plan.starts_q, plan.starts_k, page_table, used, plan.causal, offset, q.shape[0])
    return where | {"max_seqlen_q": plan.max_seqlen_q, "max_seqlen_k": plan.max_seqlen_k}


def _of_kv_heads(ids: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Ids [T, Hkv or Hq, k] as int32 [Hkv, T, k]."""
    if ids.dim() != 3 or ids.shape[1] not in (kv_heads, heads):
        raise ValueError(f"kv_block_indexes: got shape {list(ids.shape)}; wanted [T, {kv_heads} or {heads}, k]")
    return ids[:, :: ids.shape[1] // kv_heads].to(torch.int32).transpose(0, 1)


def _attend_to_all(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, where: dict[str, Any], options: dict[str, Any], out: Tensor | None
) -> Tensor:
    if "page_table" not in where and "q_positions" not in where and q.dtype == k.dtype != packed.FP8:
        times = 1.0 if options["k_scale"] is None else options["k_scale"]
        found = ops.dense_attention(q, k, v, softmax_scale=options["softmax_scale"] * times, **where)
        assert isinstance(found, Tensor)
        if options["v_scale"] is not None:
            found.mul_(options["v_scale"])
        return found if out is None else _into(out, found)
    total: tuple[Tensor, Tensor] | None = None
    blocks = max(-(-plan.max_seqlen_k // packed.BLOCK), 1)
    rows = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    held = (plan.lengths + packed.BLOCK - 1)[positions.requests(plan.starts_q, q.shape[0])] // packed.BLOCK
    held = torch.where(rows < plan.starts_q[-1], held, 0)  # blocks of each query's request
    for first in range(0, blocks, CHUNK):
        some = torch.arange(first, min(first + CHUNK, blocks), dtype=torch.int32, device=q.device)
        ids = torch.where(some < held[:, None], some, -1).expand(k.shape[1], -1, -1).contiguous()
        part = packed.attend(q, k, v, ids, where, **options)
        total = part if total is None else _merged(total, part)
    assert total is not None
    found = total[0].to(torch.bfloat16 if q.dtype == packed.FP8 else q.dtype)
    return found if out is None else _into(out, found)


def _into(out: Tensor, found: Tensor) -> Tensor:
    flashinfer_scores.check_output(out, tuple(found.shape), found.dtype, "out")
    return out.copy_(found)


def _merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention to the keys of both: out [T, Hq, D] in float32 or wider, and its LSE [T, Hq]."""
    lse = torch.logaddexp(one[1], other[1])
    wide = torch.promote_types(one[0].dtype, torch.float32)
    parts = [
        out.to(wide) * torch.where(lse == -torch.inf, 0.0, torch.exp(part - lse))[..., None]
        for out, part in (one, other)
    ]
    return parts[0] + parts[1], lse


def _starts(lengths: list[int], device: torch.device | str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
