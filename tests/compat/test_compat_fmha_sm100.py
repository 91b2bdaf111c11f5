"""Functions of MiniMax's ``fmha_sm100`` by name: layouts, the inverted selection, attention and decode."""

from __future__ import annotations

import inspect
import itertools

import pytest
import rounding
import torch
from compat import packed_batches
from compat.packed_batches import BLOCK, DIM, HEADS, KV_HEADS, LENGTHS_K, LENGTHS_Q, FourBits, Packed
from torch import Tensor

from msa_tiles import quant
from msa_tiles.compat import fmha_sm100

SCALE = DIM**-0.5
FP8 = torch.float8_e4m3fn
ROWS = sum(-(-length // BLOCK) for length in LENGTHS_K)


def check(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], v: Tensor) -> None:
    out, lse = found
    largest = float(wanted[1].nan_to_num(neginf=0.0).abs().max())
    rounding.close(out, wanted[0], terms=rounding.softmax_terms(384, DIM, largest), size=float(v.float().abs().max()))
    rounding.close(lse, wanted[1], terms=rounding.softmax_terms(384, DIM, largest), size=1.0 + largest)


def inverted(batch: Packed, ids: Tensor) -> list[list[list[int]]]:
    """For every head, for the first block of every request, then the second ones …: its queries."""
    rows = [
        (request, block) for block in range(3) for request, length in enumerate(LENGTHS_K) if block * BLOCK < length
    ]
    limits, found = batch.limits(True), []
    firsts = batch.cu_q.tolist()
    for head in ids.tolist():
        rows_of = {each: [] for each in rows}
        for row, (request, _) in enumerate(limits):
            for block in head[row]:
                if (request, block) in rows_of:
                    rows_of[request, block].append(row - firsts[request])
        found.append(list(rows_of.values()))
    return found


@pytest.mark.parametrize("sized", [False, True])
def test_an_inverted_selection(sized: bool) -> None:
    """Rows go round the requests; ids that a request does not have are left out."""
    batch = Packed(f"csr {sized}")
    ids = batch.ids(3)
    ids[0, 0], ids[1, 4] = torch.tensor([1, -1, 77], dtype=torch.int32), torch.tensor([-5, 2, 0], dtype=torch.int32)
    wanted = inverted(batch, ids)
    further = {"total_rows": ROWS, "max_seqlen_k": max(LENGTHS_K), "max_seqlen_q": 40} if sized else {}
    pointers, queries = fmha_sm100.build_k2q_csr(ids, batch.cu_q, batch.cu_k, BLOCK, total_k=sum(LENGTHS_K), **further)
    assert queries.shape == (KV_HEADS, batch.total_q * 3) and pointers.dtype == queries.dtype == torch.int32
    assert pointers.shape[1] - 1 == ROWS if sized else pointers.shape[1] - 1 >= ROWS
    for head in range(KV_HEADS):
        bounds = pointers[head].tolist()
        rows = [queries[head, begin:end].tolist() for begin, end in itertools.pairwise(bounds)]
        assert rows[:ROWS] == wanted[head] and not any(rows[ROWS:])
        assert bool((queries[head, bounds[-1] :] == -1).all())
    builder = fmha_sm100.SparseK2qCsrBuilderSm100()
    again = builder(ids, batch.cu_q, batch.cu_k, total_k=sum(LENGTHS_K), return_schedule=True, **further)
    assert again[2] is None and torch.equal(again[0], pointers) and torch.equal(again[1], queries)


@pytest.mark.parametrize("paged", [False, True], ids=["flat", "paged"])
@pytest.mark.parametrize("causal", [None, True])
def test_attention(paged: bool, causal: bool | None) -> None:
    """Not causal by default; the temperature divides."""
    batch = Packed(f"atten {paged} {causal}")
    q, k, v, ids = batch.queries(), batch.keys(), batch.keys(), batch.ids(3)
    pointers, queries = fmha_sm100.build_k2q_csr(ids, batch.cu_q, batch.cu_k, BLOCK, total_k=sum(LENGTHS_K))
    where = {"cu_seqlens_q": batch.cu_q, "cu_seqlens_k": batch.cu_k}
    where |= {"max_seqlen_q": max(LENGTHS_Q), "max_seqlen_k": max(LENGTHS_K)}
    keys, values = k, v
    if paged:
        keys, values = batch.pages(k, 2 * DIM), batch.pages(v, 2 * DIM)
        where["page_table"] = batch.page_table
    if causal is not None:
        where |= {"causal": causal, "seqused_k": batch.used if paged else None}
    limits = batch.limits(bool(causal))
    call = fmha_sm100.sparse_atten_func
    out, lse, warm = call(
        q, keys, values, pointers, queries, 3, return_softmax_lse=True, return_temperature_lse=True,
        lse_temperature_scale=2.0, softmax_scale=0.4, **where,
    )  # fmt: skip
    check((out, lse), packed_batches.attention(batch, q, k, v, ids, limits, 0.4), v)
    check((out, warm), (out.double(), packed_batches.attention(batch, q, k, v, ids, limits, 0.2)[1]), v)
    assert torch.equal(call(q, keys, values, pointers, queries, 3, softmax_scale=0.4, **where), out)


def test_nvfp4_pages() -> None:
    batch, dim = Packed("nvfp4"), 32
    stored = FourBits.draw(batch, dim, 0.25, 1.0)
    q, ids = batch.queries(dim=dim), batch.ids(3)
    csr = fmha_sm100.build_k2q_csr(ids, batch.cu_q, batch.cu_k, BLOCK, total_k=sum(LENGTHS_K))
    where = {"cu_seqlens_q": batch.cu_q, "cu_seqlens_k": batch.cu_k, "max_seqlen_q": 40, "max_seqlen_k": 300}
    tensors = stored.k, stored.v, stored.k_scale.view(torch.uint8), stored.v_scale.view(torch.uint8)
    found = fmha_sm100.sparse_atten_nvfp4_kv_func(
        q, *tensors, torch.tensor([0.25]), None, *csr, 3, page_table=batch.page_table, seqused_k=batch.used,
        return_softmax_lse=True, softmax_scale=SCALE, **where,
    )  # fmt: skip
    values = stored.k_values, stored.v_values
    check(found, packed_batches.attention(batch, q, *values, ids, batch.limits(False), SCALE), stored.v_values)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_four_bits(kind: str, causal: bool) -> None:
    """Queries and paged keys of 4 bits, two query heads for each of two heads of keys; pages in a list."""
    batch, dim = Packed(f"fp4 {kind} {causal}"), 64
    quantise = {"nvfp4": quant.quantize_nvfp4, "mxfp4": quant.quantize_mxfp4}[kind]
    one = {} if kind == "mxfp4" else {"global_scale": 1.0}
    q = quantise(batch.queries(dim=dim), **one)
    keys = quantise(batch.pages(batch.keys(dim=dim), dim), **one)
    counts = [-(-length // BLOCK) for length in LENGTHS_K]
    listed = torch.cat([batch.page_table[request, :count] for request, count in enumerate(counts)])
    offsets = [130, 0, -3, 2, 100] if causal else None
    found = fmha_sm100.fp4_indexer_block_scores(
        q.data, keys.data, q.scale.view(torch.uint8), keys.scale, batch.cu_q, batch.cu_k,
        packed_batches.starts(tuple(counts)), max_seqlen_q=40, max_seqlen_k=300, kv_indices=listed, fp4_format=kind,
        causal=causal, qo_offset=None if offsets is None else torch.tensor(offsets, dtype=torch.int32),
        scale_layout="public",
    )  # fmt: skip
    values = q.dequantize(), batch.unpaged(keys.dequantize())
    wanted = packed_batches.scores(batch, *values, batch.limits(causal, offsets), 3)
    size = dim * float(values[0].abs().max() * values[1].abs().max())
    rounding.close(found, wanted, terms=dim, size=size)


def test_nobody_selects_anything() -> None:
    batch = Packed("nothing")
    q, k = batch.queries(), batch.keys()
    ids = torch.full((KV_HEADS, batch.total_q, 2), -1, dtype=torch.int32)
    csr = fmha_sm100.build_k2q_csr(ids, batch.cu_q, batch.cu_k, BLOCK, total_k=sum(LENGTHS_K))
    assert not bool(csr[0].any()) and bool((csr[1] == -1).all())
    where = {"cu_seqlens_q": batch.cu_q, "cu_seqlens_k": batch.cu_k, "max_seqlen_q": 40, "max_seqlen_k": 300}
    out, lse = fmha_sm100.sparse_atten_func(q, k, k, *csr, 2, return_softmax_lse=True, **where)
    assert not bool(out.any()) and bool((lse == -torch.inf).all())


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
@pytest.mark.parametrize("queries", [1, 3, 40])
def test_decode(dtype: torch.dtype, queries: int) -> None:
    """By the function and by the wrapper, into the caller's buffers."""
    lengths_k = (300, 50, 290, 129)
    batch = Packed(f"decode {dtype} {queries}", (queries,) * 4, lengths_k, 0)
    q, k, v = (each.to(dtype) for each in (batch.queries(), batch.keys(), batch.keys()))
    keys, values, ids = batch.pages(k, 2 * DIM), batch.pages(v, 2 * DIM), batch.ids(2)
    where = {"page_table": batch.page_table, "seqused_k": batch.used, "seqlen_q": queries, "max_seqlen_k": 300}
    found = fmha_sm100.sparse_decode_atten_func(q, keys, values, ids, return_softmax_lse=True, **where)
    exact = [each.float() for each in (q, k, v)]
    check(found, packed_batches.attention(batch, *exact, ids, batch.limits(True), SCALE), exact[2])
    wrapper = fmha_sm100.SparseDecodePagedAttentionWrapper()
    with pytest.raises(RuntimeError, match="before plan"):
        wrapper.run(q, keys, values)
    assert wrapper.plan(q2k_indices=ids, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, **where) is wrapper
    out, lse = torch.empty_like(found[0]), torch.empty_like(found[1])
    again = wrapper.run(q, keys, values, return_softmax_lse=True, out=out, lse=lse)
    assert again[0] is out and again[1] is lse
    assert torch.equal(out, found[0]) and torch.equal(lse, found[1])
    assert torch.equal(wrapper.run(q, keys, values), found[0])


@pytest.mark.parametrize("layout", ["HKT", "THK"])
def test_selection(layout: str) -> None:
    """In both layouts of scores; entries of a table in place of ids."""
    batch, heads, tiles, total = Packed(f"topk {layout}"), 2, 9, 12
    score = torch.randn(heads, tiles, total, generator=batch.generator)
    counts = torch.randint(0, tiles + 1, (total,), generator=batch.generator)  # int64 too
    given = score if layout == "HKT" else score.permute(2, 0, 1).contiguous()
    output = torch.full((total, heads, 4), 9, dtype=torch.int32)
    found = fmha_sm100.sparse_topk_select(
        given, 4, counts, output, force_begin_blocks=1, force_end_blocks=1, max_score_layout=layout
    )
    assert found is output
    for row in range(total):
        valid = int(counts[row])
        for head in range(heads):
            forced = {0, valid - 1} if valid else set()
            rest = sorted(set(range(valid)) - forced, key=lambda block: -float(score[head, block, row]))
            chosen = sorted([*forced, *rest[: 4 - len(forced)]])
            assert found[row, head].tolist() == chosen + [-1] * (4 - len(chosen))
    table = torch.randint(100, 200, (total, heads, tiles), generator=batch.generator, dtype=torch.int32)
    entries = fmha_sm100.sparse_topk_select(
        given, 4, counts, force_begin_blocks=1, force_end_blocks=1, max_score_layout=layout.lower(), block_table=table
    )
    for row, head, slot in torch.cartesian_prod(*map(torch.arange, entries.shape)).tolist():
        block = int(found[row, head, slot])
        assert int(entries[row, head, slot]) == (-1 if block < 0 else int(table[row, head, block]))


def test_signatures_begin_as_those_of_the_original() -> None:
    names = {
        "sparse_atten_func": "q k v k2q_row_ptr k2q_q_indices topK cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
        "blk_kv causal softmax_scale lse_temperature_scale return_temperature_lse partial_dtype return_softmax_lse "
        "page_table seqused_k schedule usable_SM_count qk_dtype pv_dtype",
        "sparse_decode_atten_func": "q k v q2k_indices page_table seqused_k seqlen_q max_seqlen_k blk_kv causal "
        "softmax_scale return_softmax_lse schedule O_partial LSE_partial",
        "build_k2q_csr": "q2k_indices cu_seqlens_q cu_seqlens_k kv_block_size total_k max_seqlen_k max_seqlen_q "
        "total_rows qhead_per_kv return_schedule",
        "sparse_topk_select": "max_score topk num_valid_pages output force_begin_blocks force_end_blocks "
        "max_score_layout block_table seq_lens block_size decode_query_len",
    }
    for name, parameters in names.items():
        assert [*inspect.signature(getattr(fmha_sm100, name)).parameters] == parameters.split()


def test_what_is_not_served_is_a_sentence() -> None:
    batch = Packed("errors")
    q, k, ids = batch.queries(), batch.keys(), batch.ids(2)
    csr = fmha_sm100.build_k2q_csr(ids, batch.cu_q, batch.cu_k, BLOCK, total_k=sum(LENGTHS_K))
    where = {"cu_seqlens_q": batch.cu_q, "cu_seqlens_k": batch.cu_k, "max_seqlen_q": 40, "max_seqlen_k": 300}
    step = {"page_table": batch.page_table, "seqused_k": batch.used, "seqlen_q": 1, "max_seqlen_k": 300}
    attend, build = fmha_sm100.sparse_atten_func, fmha_sm100.build_k2q_csr
    decode, select = fmha_sm100.sparse_decode_atten_func, fmha_sm100.sparse_topk_select
    score = torch.zeros(1, 4, 2)
    fp4, starts = fmha_sm100.fp4_indexer_block_scores, (batch.cu_q, batch.cu_k, batch.cu_k)
    byte, keys = (torch.zeros(shape, dtype=torch.uint8) for shape in ((46, 2, 8), (3, 2, BLOCK, 8)))
    pages = {"max_seqlen_q": 40, "max_seqlen_k": 300, "kv_indices": batch.used, "fp4_format": "nvfp4"}
    public = pages | {"scale_layout": "public"}
    other = public | {"fp4_format": "fp4"}
    for error, message, call in (
        (ValueError, "k: got shape", lambda: attend(q, k.byte(), k.byte(), *csr, 2, **where)),
        (ValueError, "return_softmax_lse", lambda: attend(q, k, k, *csr, 2, return_temperature_lse=True, **where)),
        (
            ValueError,
            "lse_temperature_scale: got 0",
            lambda: attend(q, k, k, *csr, 2, lse_temperature_scale=0.0, **where),
        ),
        (NotImplementedError, "q2k_indices: got None", lambda: decode(q[:5], k, k, **step)),
        (ValueError, "q: got 4 rows", lambda: decode(q[:4], k, k, ids[:, :4], **step)),
        (
            ValueError,
            "total_k: got None; wanted the number of keys .*: cu_seqlens_k is not read to the host",
            lambda: build(ids, batch.cu_q, batch.cu_k, BLOCK),
        ),
        (ValueError, "q2k_indices: got", lambda: build(ids[0], batch.cu_q, batch.cu_k, BLOCK, total_k=9)),
        (ValueError, "kv_block_size: got 0", lambda: build(ids, batch.cu_q, batch.cu_k, 0, total_k=9)),
        (ValueError, "cu_seqlens_q: got shape", lambda: build(ids, batch.cu_q, batch.cu_k[1:], BLOCK, total_k=9)),
        (ValueError, "max_score_layout: got 'KHT'", lambda: select(score, 2, max_score_layout="KHT")),
        (ValueError, "block_table: got", lambda: select(score, 2, block_table=torch.zeros(2, 1, 3, dtype=torch.int32))),
        (NotImplementedError, "page_table apart", lambda: select(score, 2, block_table=ids[0])),
        (NotImplementedError, "wanted 'public'", lambda: fp4(byte, keys, byte, keys, *starts, **pages)),
        (
            ValueError,
            "fp4_format: got 'fp4'",
            lambda: fp4(byte, keys, byte, keys, *starts, **other),
        ),
        (ValueError, "k_fp4: got shape", lambda: fp4(byte, keys[:, :, :64], byte, keys, *starts, **public)),
        (ValueError, "q_scale: got", lambda: fp4(byte, keys, byte[..., :2], keys, *starts, **public)),
        (ValueError, "qo_offset: got", lambda: fp4(byte, keys, byte, keys, *starts, **public, qo_offset=ids)),
    ):
        with pytest.raises(error, match=message):
            call()
