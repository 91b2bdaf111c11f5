"""FlashInfer's ``msa_*`` by name: layouts, defaults and buffers, against a dense oracle."""

from __future__ import annotations

import inspect

import pytest
import rounding
import torch
from compat import packed_batches
from compat.packed_batches import BLOCK, DIM, HEADS, KV_HEADS, LENGTHS_K, LENGTHS_Q, FourBits, Packed
from torch import Tensor

from msa_tiles import quant
from msa_tiles.compat import flashinfer, four_bits

FP8 = torch.float8_e4m3fn
SCALE = DIM**-0.5
# Parameters and defaults of flashinfer-python 0.7.4, which has * before those that are named alone.
SIGNATURES = {
    "msa_proxy_score": "q k cu_seqlens_q cu_seqlens_k=None * page_table=None seqused_k=None causal=True "
    "max_seqlen_q=None max_k_tiles=None output=None reduce_heads=False q_offset=None use_fp32_acc=True",
    "msa_proxy_score_fp4": "q_fp4 k_fp4 q_scale k_scale q_global_scale k_global_scale cu_seqlens_q cu_seqlens_k=None * "
    "page_table=None seqused_k=None causal=True max_seqlen_q=None max_k_tiles=None output=None reduce_heads=False "
    "q_offset=None",
    "msa_topk_select": "max_score topk num_valid_pages=None output=None force_begin_blocks=0 force_end_blocks=0",
    "msa_sparse_attention": "q k v q2k_indices cu_seqlens_q cu_seqlens_k=None causal=False softmax_scale=None "
    "page_table=None seqused_k=None return_softmax_lse=False k_scale=None v_scale=None k_global_scale=None "
    "v_global_scale=None q_offset=None return_temperature_lse=False lse_temperature_scale=1.0 workspace=None out=None",
    "msa_sparse_decode_attention": "q k v q2k_indices * page_table=None seqused_k=None cu_seqlens_k=None seqlen_q=1 "
    "causal=True softmax_scale=None return_softmax_lse=False k_scale=None v_scale=None k_global_scale=None "
    "v_global_scale=None q_offset=None partial_dtype=None force_fused=None workspace=None out=None",
}


def spelled(function: object) -> str:
    words: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        words.append(parameter.name + default)
    return " ".join(words)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flashinfer(name: str) -> None:
    assert spelled(getattr(flashinfer, name)) == SIGNATURES[name]


def stored(batch: Packed, paged: bool, *flat: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Keys and values as a call has them, and the arguments that say where; pages are halves of wider ones."""
    if not paged:
        return list(flat), {"cu_seqlens_k": batch.cu_k}
    return [batch.pages(each, 2 * DIM) for each in flat], {"page_table": batch.page_table, "seqused_k": batch.used}


@pytest.mark.parametrize("paged", [False, True], ids=["flat", "paged"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("few", [False, True])
def test_scores(paged: bool, causal: bool, few: bool) -> None:
    """Whole numbers, so exactly; a column more than there are blocks, and one fewer."""
    batch = Packed(f"scores {paged} {causal} {few}")
    q, k = batch.queries(whole=True), batch.keys(whole=True)
    [keys], where = stored(batch, paged, k)
    bound = {"max_seqlen_q": max(LENGTHS_Q) if not few else 32}
    found = flashinfer.msa_proxy_score(q, keys, batch.cu_q, causal=causal, **where, **bound)
    wanted = packed_batches.scores(batch, q, k, batch.limits(causal), 3)
    assert found.shape == (HEADS, 3, batch.total_q) and torch.equal(found.double(), wanted)
    for tiles in (4, 2):
        output = torch.full((HEADS, tiles, batch.total_q), torch.nan)
        again = flashinfer.msa_proxy_score(q, keys, batch.cu_q, causal=causal, output=output, **where)
        assert again is output
        assert torch.equal(output.double(), packed_batches.scores(batch, q, k, batch.limits(causal), tiles))
    one = flashinfer.msa_proxy_score(q, keys, batch.cu_q, causal=causal, reduce_heads=True, max_k_tiles=3, **where)
    assert torch.equal(one.double(), wanted.amax(0, keepdim=True))


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_scores_at_an_offset(kind: str) -> None:
    """Queries that begin elsewhere than before the end, some of them before the first key."""
    batch = Packed(f"offset {kind}")
    q, k = batch.queries(whole=True), batch.keys(whole=True)
    offsets = [7] * 5 if kind == "number" else [130, 0, -3, 2, 100]
    given = 7 if kind == "number" else torch.tensor(offsets, dtype=torch.int32)
    found = flashinfer.msa_proxy_score(q, k, batch.cu_q, batch.cu_k, q_offset=given)
    assert torch.equal(found.double(), packed_batches.scores(batch, q, k, batch.limits(True, offsets), 3))


def test_scores_of_e4m3() -> None:
    batch = Packed("e4m3 scores")
    q, k = batch.queries(whole=True), batch.keys(whole=True)
    found = flashinfer.msa_proxy_score(q.to(FP8), k.to(FP8), batch.cu_q, batch.cu_k, use_fp32_acc=False)
    assert torch.equal(found.double(), packed_batches.scores(batch, q, k, batch.limits(True), 3))


def tiled(scale: Tensor) -> Tensor:
    """Scales [..., G] of rows in tiles of 128 rows by 4 groups: bytes [n]; what fills up tiles is a NaN."""
    rows = scale.view(torch.uint8).flatten(0, -2)
    across = -(-rows.shape[1] // 4)
    found = torch.full((-(-len(rows) // 128) * across * 512,), 0x7F, dtype=torch.uint8)
    for row, groups in enumerate(rows.tolist()):
        for group, byte in enumerate(groups):
            tile = row // 128 * across + group // 4
            found[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4] = byte
    return found


@pytest.mark.parametrize("paged", [False, True], ids=["flat", "paged"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dim", [64, 128])
def test_scores_of_nvfp4(paged: bool, causal: bool, dim: int) -> None:
    """Scales in tiles of all rows, those of heads between each other; global ones that are numbers. By decode, too."""
    batch = Packed(f"fp4 {paged} {causal} {dim}")
    q, k = (quant.quantize_nvfp4(each, 1.0) for each in (batch.queries(dim=dim), batch.keys(dim=dim)))
    keys, scale, where = k.data, k.scale, {"cu_seqlens_k": batch.cu_k}
    if paged:
        where = {"page_table": batch.page_table, "seqused_k": batch.used}
        made = quant.quantize_nvfp4(batch.pages(batch.keys(dim=dim), dim), 1.0)
        keys, scale = made.data, made.scale
        k_values = batch.unpaged(made.dequantize())
    else:
        k_values = k.dequantize()
    limits = batch.limits(causal)
    wanted = packed_batches.scores(batch, 0.5 * q.dequantize(), 3.0 * k_values, limits, 3)
    size = dim * 1.5 * float(q.dequantize().abs().max() * k_values.abs().max())
    given = (q.data, keys, tiled(q.scale), tiled(scale), 0.5, 3.0, batch.cu_q)
    call = flashinfer.msa_proxy_score_fp4
    for bound in ({}, {"max_seqlen_q": 32}):
        rounding.close(call(*given, causal=causal, **where, **bound), wanted, terms=dim, size=size)
    output = torch.full((1, 4, batch.total_q), torch.nan)
    assert call(*given, causal=causal, output=output, reduce_heads=True, **where) is output
    wanted = packed_batches.scores(batch, 0.5 * q.dequantize(), 3.0 * k_values, limits, 4).amax(0, keepdim=True)
    rounding.close(output, wanted, terms=dim, size=size)


def test_scores_of_nvfp4_copy_no_pool() -> None:
    """Scales are put in order for the pages of the batch; those of other pages, and their keys, stay where they are."""
    batch, dim = Packed("fp4 pool"), 64
    q = quant.quantize_nvfp4(batch.queries(dim=dim), 1.0)
    pages = quant.quantize_nvfp4(batch.pages(batch.keys(dim=dim), dim), 1.0)
    table = batch.page_table
    table[3] = -1  # of the request without keys
    scale = tiled(pages.scale)
    at_odds = torch.cat([scale.new_zeros(1), scale])[1:]  # begins between two words
    calls = [
        flashinfer.msa_proxy_score_fp4(
            q.data, pages.data, tiled(q.scale), each, 1.0, 1.0, batch.cu_q, page_table=table, seqused_k=batch.used
        )
        for each in (scale, at_odds)
    ]
    assert torch.equal(*calls)
    ordered = four_bits.by_rows_of_pages("k_scale", pages.data, scale, torch.tensor([[1, -1]]))
    for page in (0, 1):
        assert torch.equal(ordered[page].view(torch.uint8), pages.scale[page].view(torch.uint8))


def ranked(score: list[float], valid: int, topk: int, begin: int, end: int) -> list[int]:
    """The ids of one row, by sorting; the lower id wins among equals."""
    forced = [*range(min(begin, valid)), *range(max(valid - end, min(begin, valid)), valid)][:topk]
    rest = sorted((block for block in range(valid) if block not in forced), key=lambda block: -score[block])
    chosen = sorted(forced + rest[: topk - len(forced)])
    return chosen + [-1] * (topk - len(chosen))


@pytest.mark.parametrize("valid", ["all", "number", "each"])
@pytest.mark.parametrize("forced", [(0, 0), (1, 2)])
def test_selection(valid: str, forced: tuple[int, int]) -> None:
    """Few different scores, so that many are equal; counts beyond the blocks that there are."""
    batch, tiles, topk = Packed(f"selection {valid} {forced}"), 11, 4
    score = torch.randint(0, 4, (3, tiles, 20), generator=batch.generator).float()
    counts = torch.randint(0, tiles + 3, (20,), generator=batch.generator, dtype=torch.int32)
    given = {"all": None, "number": 7, "each": counts}[valid]
    each = {"all": [tiles] * 20, "number": [7] * 20, "each": counts.clamp(max=tiles).tolist()}[valid]
    wanted = [
        [ranked(score[head, :, row].tolist(), each[row], topk, *forced) for head in range(3)] for row in range(20)
    ]
    begin, end = forced
    found = flashinfer.msa_topk_select(score, topk, given, None, begin, end)
    assert found.is_contiguous() and found.tolist() == wanted
    output = torch.full((20, 3, topk), 99, dtype=torch.int32)
    lying = score.transpose(1, 2).contiguous().transpose(1, 2)  # as msa_proxy_score hands it out
    assert flashinfer.msa_topk_select(lying, topk, given, output, begin, end) is output
    assert output.tolist() == wanted


def check(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], v: Tensor) -> None:
    """out and lse within what rounding may do to sums over 384 keys."""
    out, lse = found
    terms = rounding.softmax_terms(384, DIM, float(wanted[1].nan_to_num(neginf=0.0).abs().max()))
    rounding.close(out, wanted[0], terms=terms, size=float(v.float().abs().max()), dtype=out.dtype)
    rounding.close(lse, wanted[1], terms=terms, size=1.0 + float(wanted[1].nan_to_num(neginf=0.0).abs().max()))


@pytest.mark.parametrize("paged", [False, True], ids=["flat", "paged"])
@pytest.mark.parametrize("causal", [None, True])
def test_attention(paged: bool, causal: bool | None) -> None:
    """Without ``causal`` a query sees all keys of its blocks."""
    batch = Packed(f"attention {paged} {causal}")
    q, k, v, ids = batch.queries(), batch.keys(), batch.keys(), batch.ids(2)
    (keys, values), where = stored(batch, paged, k, v)
    if causal is not None:
        where["causal"] = causal
    out = torch.full_like(q, torch.nan)
    found = flashinfer.msa_sparse_attention(q, keys, values, ids, batch.cu_q, out=out, return_softmax_lse=True, **where)
    assert found[0] is out
    check(found, packed_batches.attention(batch, q, k, v, ids, batch.limits(bool(causal)), SCALE), v)


def test_attention_with_scales_offsets_and_a_temperature() -> None:
    batch = Packed("scales")
    q, k, v, ids = batch.queries(), batch.keys(), batch.keys(), batch.ids(2)
    offsets = [130, 0, -3, 2, 100]
    out, lse, warm = flashinfer.msa_sparse_attention(
        q,
        k,
        v,
        ids,
        batch.cu_q,
        batch.cu_k,
        causal=True,
        softmax_scale=0.2,
        k_global_scale=1.5,
        v_global_scale=-2.0,
        q_offset=torch.tensor(offsets, dtype=torch.int32),
        return_temperature_lse=True,
        lse_temperature_scale=0.5,
    )
    limits = batch.limits(True, offsets)
    check((out, lse), packed_batches.attention(batch, q, 1.5 * k, -2.0 * v, ids, limits, 0.2), 2 * v)
    check((out, warm), (out.double(), packed_batches.attention(batch, q, 1.5 * k, v, ids, limits, 0.1)[1]), 2 * v)


@pytest.mark.parametrize("queries", [torch.bfloat16, FP8])
@pytest.mark.parametrize("function", ["prefill", "decode"])
def test_e4m3_caches(queries: torch.dtype, function: str) -> None:
    """Elements stand for themselves, times one number for all."""
    batch = Packed(f"e4m3 {queries} {function}", lengths_q=(2,) * 5, behind=0)
    q, k, v = (each.to(dtype) for each, dtype in zip(
        (batch.queries(), batch.keys(), batch.keys()), (queries, FP8, FP8), strict=True
    ))  # fmt: skip
    ids = batch.ids(2)
    keys, values = batch.pages(k, 2 * DIM), batch.pages(v, 2 * DIM)
    options = {"page_table": batch.page_table, "seqused_k": batch.used, "return_softmax_lse": True, "causal": True}
    options |= {"k_global_scale": 0.5, "v_global_scale": 4.0, "out": torch.empty(q.shape, dtype=torch.bfloat16)}
    if function == "prefill":
        found = flashinfer.msa_sparse_attention(q, keys, values, ids, batch.cu_q, **options)
    else:
        found = flashinfer.msa_sparse_decode_attention(q, keys, values, ids, seqlen_q=2, **options)
    exact = [each.float() for each in (q, k, v)]
    wanted = packed_batches.attention(batch, exact[0], 0.5 * exact[1], 4 * exact[2], ids, batch.limits(True), SCALE)
    assert found[0] is options["out"]
    check(found, wanted, 4 * exact[2])


@pytest.mark.parametrize("scales", [torch.uint8, FP8])
def test_nvfp4_pages(scales: torch.dtype) -> None:
    """Planar pages with scales as bytes or as numbers: prefill, decode, and decode that was prepared."""
    batch, dim = Packed(f"nvfp4 {scales}", lengths_q=(2,) * 5, behind=0), 32
    stored = FourBits.draw(batch, dim, 0.25, 0.5)
    q, ids = batch.queries(dim=dim), batch.ids(2)
    wanted = packed_batches.attention(batch, q, stored.k_values, stored.v_values, ids, batch.limits(True), dim**-0.5)
    options = {"page_table": batch.page_table, "seqused_k": batch.used, "k_global_scale": 0.25, "v_global_scale": 0.5}
    options |= {"k_scale": stored.k_scale.view(scales), "v_scale": stored.v_scale.view(scales)}
    caches = stored.k, stored.v
    found = flashinfer.msa_sparse_attention(
        q, *caches, ids, batch.cu_q, causal=True, return_softmax_lse=True, **options
    )
    check(found, wanted, stored.v_values)
    found = flashinfer.msa_sparse_decode_attention(q, *caches, ids, seqlen_q=2, return_softmax_lse=True, **options)
    check(found, wanted, stored.v_values)
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan)
    run = flashinfer.prepare_msa_nvfp4_sparse_decode(q, *caches, ids, seqlen_q=2, out=out, lse=lse, **options)
    assert bool(out.isnan().all())  # nothing runs before it is called
    assert run() is out and torch.equal(out, found[0]) and torch.equal(lse, found[1])
    fresh = flashinfer.prepare_msa_nvfp4_sparse_decode(q, *caches, ids, seqlen_q=2, **options)
    assert fresh() is fresh() and torch.equal(fresh(), out)


@pytest.mark.parametrize("paged", [False, True], ids=["flat", "paged"])
@pytest.mark.parametrize("queries", [1, 40])
def test_decode(paged: bool, queries: int) -> None:
    """One query for each request, more than the decode kernels take, and not causal."""
    lengths_k = (300, 50, 290, 129) if queries > 1 else (300, 50, 290, 0, 129)
    batch = Packed(f"decode {paged} {queries}", (queries,) * len(lengths_k), lengths_k, 0)
    q, k, v, ids = batch.queries(), batch.keys(), batch.keys(), batch.ids(2)
    (keys, values), where = stored(batch, paged, k, v)
    call = flashinfer.msa_sparse_decode_attention
    found = call(q, keys, values, ids, seqlen_q=queries, return_softmax_lse=True, force_fused=True, **where)
    check(found, packed_batches.attention(batch, q, k, v, ids, batch.limits(True), SCALE), v)
    out = call(q, keys, values, ids, seqlen_q=queries, causal=False, softmax_scale=0.4, **where)
    wanted = packed_batches.attention(batch, q, k, v, ids, batch.limits(False), 0.4)
    rounding.close(out, wanted[0], terms=rounding.softmax_terms(384, DIM, 20.0), size=float(v.abs().max()))


def test_a_whole_step() -> None:
    """Scores, selection and attention, each handing the next what it made: as dense attention over what was chosen."""
    batch = Packed("step")
    q, k, v = batch.queries(), batch.keys(), batch.keys()
    idx_q, idx_k = batch.queries(KV_HEADS, whole=True), batch.keys(1, whole=True)
    limits = batch.limits(True)
    score = flashinfer.msa_proxy_score(idx_q, idx_k, batch.cu_q, batch.cu_k)
    valid = torch.tensor([last // BLOCK + 1 for _, last in limits], dtype=torch.int32)
    ids = flashinfer.msa_topk_select(score, 2, valid, force_end_blocks=1)
    exact = packed_batches.scores(batch, idx_q, idx_k, limits, 3)
    for row, (_, last) in enumerate(limits):
        for head in range(KV_HEADS):
            assert ids[row, head].tolist() == ranked(exact[head, :, row].tolist(), last // BLOCK + 1, 2, 0, 1)
    selected = ids.transpose(0, 1).contiguous()
    out, lse = flashinfer.msa_sparse_attention(
        q, k, v, selected, batch.cu_q, batch.cu_k, causal=True, return_softmax_lse=True
    )
    check((out, lse), packed_batches.attention(batch, q, k, v, selected, limits, SCALE), v)


def test_what_is_not_served_is_a_sentence() -> None:
    batch = Packed("errors")
    q, k, ids = batch.queries(), batch.keys(), batch.ids(2)
    attend, decode = flashinfer.msa_sparse_attention, flashinfer.msa_sparse_decode_attention
    places = (batch.cu_q, batch.cu_k)
    byte = torch.zeros(2, KV_HEADS, BLOCK, 8, dtype=torch.uint8)
    scale = torch.zeros(2, KV_HEADS, BLOCK, 1, dtype=torch.uint8)
    far = torch.zeros(2, KV_HEADS, BLOCK, 3, dtype=torch.uint8)[..., :1]
    fp4, four = flashinfer.msa_proxy_score_fp4, torch.zeros(sum(LENGTHS_K), 1, 32, dtype=torch.uint8)
    tiles, wide = torch.zeros(7 * 512, dtype=torch.uint8), torch.zeros(7 * 1024, dtype=torch.uint8)[::2]
    four_tiles = (four, four, tiles, tiles)
    for error, message, call in (
        (ValueError, "v: got dtype torch.float32 beside", lambda: attend(q, k.to(torch.uint8), k, ids, *places)),
        (ValueError, "k: got shape", lambda: attend(q, k.byte(), k.byte(), ids, *places, k_scale=scale)),
        (ValueError, "tiles of 128x4", lambda: attend(q, byte, byte, ids, *places, k_scale=scale.flatten())),
        (ValueError, "k_scale: got None", lambda: attend(q, byte, byte, ids, *places)),
        (ValueError, "v_scale: got strides", lambda: attend(q, byte, byte, ids, *places, k_scale=scale, v_scale=far)),
        (ValueError, "k_scale: got a tensor", lambda: attend(q, k, k, ids, *places, k_scale=torch.ones(1))),
        (ValueError, "workspace", lambda: attend(q, k, k, ids, *places, workspace=object())),
        (TypeError, "float16", lambda: attend(q.half(), k.half(), k.half(), ids, *places)),
        (ValueError, "cu_seqlens_k: got None", lambda: attend(q, k, k, ids, batch.cu_q)),
        (ValueError, "seqused_k: got None", lambda: attend(q, k, k, ids, batch.cu_q, page_table=batch.page_table)),
        (ValueError, "seqlen_q: got 5", lambda: decode(q, k, k, ids, cu_seqlens_k=batch.cu_k, seqlen_q=5)),
        (TypeError, "k: got dtype", lambda: flashinfer.msa_proxy_score(q, k.to(FP8), *places)),
        (ValueError, "q: got 3 heads", lambda: flashinfer.msa_proxy_score(q[:, :3], k, *places)),
        (ValueError, "output: got", lambda: flashinfer.msa_topk_select(torch.zeros(1, 2, 3), 2, output=ids)),
        (ValueError, "q_scale: got", lambda: fp4(four, four, byte, tiles, 1.0, 1.0, *places)),
        (ValueError, "k_scale: got strided", lambda: fp4(four, four, tiles, wide, 1.0, 1.0, *places)),
        (ValueError, "q_scale: got scales of head dim 8", lambda: fp4(*[four[..., :4]] * 4, 1.0, 1.0, *places)),
        (TypeError, "k_global_scale: got a tensor", lambda: fp4(*four_tiles, 1.0, torch.ones(1), *places)),
        (ValueError, "q_global_scale: got -1.0", lambda: fp4(*four_tiles, -1.0, 1.0, *places)),
        (ValueError, "k_global_scale: got inf", lambda: fp4(*four_tiles, 1.0, float("inf"), *places)),
        (TypeError, "k_fp4: got dtype", lambda: fp4(four, four.float(), tiles, tiles, 1.0, 1.0, *places)),
        (ValueError, "k_fp4: got shape", lambda: fp4(four, byte, tiles, tiles, 1.0, 1.0, *places)),
        (ValueError, "k_fp4: got shape", lambda: fp4(*four_tiles, 1.0, 1.0, batch.cu_q, page_table=batch.page_table)),
        (ValueError, "output: got", lambda: fp4(*four_tiles, 1.0, 1.0, *places, output=torch.zeros(1, 2, 3))),
        (AttributeError, "k_offset", lambda: flashinfer.msa_icp_merge_candidates),
        (AttributeError, "no attribute 'msa_nothing'", lambda: flashinfer.msa_nothing),
    ):
        with pytest.raises(error, match=message):
            call()
    assert flashinfer.SUPPORTS_PACKED_KV and flashinfer.supports_packed_kv("cpu")
