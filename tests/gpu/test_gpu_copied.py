"""dequantize_kv, and prefill over quantised keys and values through a copy in bfloat16 beside that which reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_calls import Named
from torch import Tensor

from msa_tiles import ops, quant, reference
from msa_tiles.launch import attention
from msa_tiles.library.remember import forget_all
from msa_tiles.quant import FP8, GROUPS, QuantizedTensor
from msa_tiles.runtime import dispatch
from msa_tiles.verify.caches import bits
from msa_tiles.verify.dequantize import DequantizeKV
from msa_tiles.verify.inputs import Buffer, Source

pytestmark = pytest.mark.gpu

DSLS = [named for named in (Named("tilelang"), Named("cutedsl")) if named.has("dequantize_kv")]
each_dsl = pytest.mark.parametrize("named", DSLS, ids=lambda named: named.backend)
LENGTHS_Q, LENGTHS_K = [700, 0, 1, 900], [1000, 70, 333, 900]
HEADS, GROUP, DIM, BLOCK, TOPK = 4, 16, 128, 128, 6
KINDS = ("e4m3 of heads", "e4m3 of tokens", *GROUPS)


@each_dsl
@pytest.mark.parametrize("kind", ["", *GROUPS])
@pytest.mark.parametrize("paged", [0, 1])
@pytest.mark.parametrize("strided", [False, True])
def test_random_bits_are_dequantised_as_by_torch(named: Named, kind: str, paged: int, strided: bool) -> None:
    for head_dim, token_scales, page in ((128, 1, 64), (64, 0, 3)):
        dims = {
            "num_kv_heads": 3,
            "page_size": page,
            "head_dim": head_dim,
            "paged": paged,
            "token_scales": token_scales,
        }
        work = SimpleNamespace(sequences=[(1, 5000), (0, 0), (1, 777)] if paged else [(1, 5777)])
        case = SimpleNamespace(dims={**dims, "total_k": 5777}, dtype=lambda role: FP8, packed=kind, workload=work)
        source = Source(torch.device("cuda"), int(torch.randint(1 << 31, ())), "normal")
        check = DequantizeKV(case, source, strided, named.backend)  # type: ignore[arg-type]
        runs = [check.run(into_buffers) for into_buffers in (True, False, True)]
        for outputs in runs:
            check.compare(outputs)
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(outputs, runs[0], strict=True))


@each_dsl
def test_a_graph_serves_other_tables_and_lengths(named: Named) -> None:
    pool = torch.randint(0, 256, (40, 2, 64, 128), device="cuda").to(torch.uint8).view(FP8)
    scale = torch.rand(40, 2, 64, device="cuda")
    table, used = torch.zeros(3, 12, dtype=torch.int32, device="cuda"), torch.zeros(3, dtype=torch.int32, device="cuda")
    given: dict[str, Any] = {"page_table": table, "seqused_k": used, "k_scale": scale, "v_scale": scale}
    out = torch.empty(2, 3 * 12 * 64, 2, 128, dtype=torch.bfloat16, device="cuda")
    named.dequantize_kv(pool, pool, **given, k_out=out[0], v_out=out[1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        named.dequantize_kv(pool, pool, **given, k_out=out[0], v_out=out[1])
    for _ in range(3):
        table.copy_(torch.randperm(40, device="cuda")[:36].view(3, 12))
        table[1, 2], table[2, 0] = -1, 40
        used.copy_(torch.randint(0, 800, (3,), device="cuda"))
        out.fill_(torch.nan)
        graph.replay()
        wanted = torch.full_like(out, torch.nan)
        reference.dequantize_kv(pool, pool, wanted[0], wanted[1], **given)
        assert torch.equal(bits(out), bits(wanted))


@pytest.fixture
def copying() -> Iterator[Any]:
    """Whether calls attend to copies."""

    def choose(wanted: bool | None) -> None:
        attention.COPY = wanted
        forget_all()

    yield choose
    choose(None)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)


def quantised(kind: str, values: Tensor) -> QuantizedTensor:
    if kind == "nvfp4":
        return quant.quantize_nvfp4(values, (values.float().abs().amax() / 2688).clamp_min(1e-6))
    if kind == "mxfp4":
        return quant.quantize_mxfp4(values)
    return quant.quantize_fp8(values, "head" if kind.endswith("heads") else "token_head")


class Batch:
    """Requests with fresh queries, keys and ids; whatever no request uses is NaN."""

    def __init__(self, kind: str, page: int) -> None:
        generator = torch.Generator("cuda").manual_seed(int(torch.randint(1 << 31, ())))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

        total_q, total_k = sum(LENGTHS_Q), sum(LENGTHS_K)
        self.q = normal(total_q, HEADS * GROUP, DIM)
        self.k, self.v = (quantised(kind, normal(total_k, HEADS, DIM)) for _ in range(2))
        blocks = [-(-length // BLOCK) for length in LENGTHS_K]
        drawn = [
            torch.rand(HEADS, length, max(count, TOPK), generator=generator, device="cuda").topk(TOPK).indices
            for length, count in zip(LENGTHS_Q, blocks, strict=True)
        ]
        self.ids = torch.cat(drawn, 1).int()
        self.flat = {"cu_seqlens_q": starts(LENGTHS_Q), "cu_seqlens_k": starts(LENGTHS_K)}
        # As torch dequantises them, and rounded to bfloat16 as a copy is.
        self.exact = tuple(part.dequantize() for part in (self.k, self.v))
        self.rounded = tuple(part.dequantize(torch.bfloat16) for part in (self.k, self.v))
        self.where: dict[str, Any] = self.flat
        if page:
            columns = max(LENGTHS_K) // page + 2
            table = torch.randperm(4 * columns, generator=generator, device="cuda").view(4, columns)
            self.k, self.v = (_paged(part, table, page) for part in (self.k, self.v))
            needed = torch.arange(columns, device="cuda") * page < torch.tensor(LENGTHS_K, device="cuda")[:, None]
            used = torch.tensor(LENGTHS_K, dtype=torch.int32, device="cuda")
            self.where = {"cu_seqlens_q": starts(LENGTHS_Q), "seqused_k": used}
            self.where["page_table"] = torch.where(needed, table, -1).int()

    def attend(self, named: Named, **further: Any) -> tuple[Tensor, Tensor]:
        """Into poisoned buffers."""
        out = Buffer(self.q.shape, torch.bfloat16, self.q.device)
        lse = torch.full(self.q.shape[:2], torch.nan, device="cuda")
        named.sparse_attention(
            self.q, self.k, self.v, self.ids, **self.where, out=out.view, lse=lse, return_lse=True, **further
        )
        out.check_gaps("out")
        return out.view.clone(), lse


def _paged(flat: QuantizedTensor, table: Tensor, page: int) -> QuantizedTensor:
    def moved(part: Tensor) -> Tensor:
        plain = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
        fill = 0x7F if plain.dtype == torch.uint8 else torch.nan
        pool = torch.full((table.numel() + 1, page, *plain.shape[1:]), fill, dtype=plain.dtype, device="cuda")
        begin = 0
        for request, length in enumerate(LENGTHS_K):
            rows = torch.arange(length, device="cuda")
            pool[table[request, rows // page], rows % page] = plain[begin : begin + length]
            begin += length
        return pool.transpose(1, 2).view(part.dtype)

    scale = flat.scale if flat.scale.dim() < 2 else moved(flat.scale)
    return dataclasses.replace(flat, data=moved(flat.data), scale=scale)


@each_dsl
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [0, 128, 32])
def test_both_ways_are_right(named: Named, kind: str, page: int, copying: Any) -> None:
    x = Batch(kind, page)
    wanted, wanted_lse = reference.sparse_attention(x.q.float(), *x.exact, x.ids, **x.flat)
    beside, beside_lse = reference.sparse_attention(x.q.float(), *(part.float() for part in x.rounded), x.ids, **x.flat)
    for wanted_copy in (True, False):
        copying(wanted_copy)
        with dispatch.finding() as found:
            out, lse = x.attend(named)
        assert ("dequantize_kv" in {kernel.cell.op for kernel in found}) == wanted_copy
        # Kernels that read the storage may round keys that are times the scales of tokens, too.
        references = [(beside, beside_lse), *([] if wanted_copy else [(wanted, wanted_lse)])]
        assert min(float((out.float() - right).abs().max()) for right, _ in references) < 0.03
        assert torch.equal(lse.isinf(), wanted_lse.isinf())
        off = torch.stack([(lse - right).nan_to_num(0.0).abs() for _, right in references])
        assert float(off.amin(0).max()) < 0.005
        for _ in range(2):
            again = x.attend(named)
            assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    # What a copy changes is the rounding of keys and values.
    assert float((wanted - beside).abs().max()) < 0.03


@each_dsl
@pytest.mark.parametrize("kind", KINDS)
def test_flat_keys_give_the_bits_of_a_call_in_bfloat16(named: Named, kind: str, copying: Any) -> None:
    x = Batch(kind, 0)
    copying(True)
    out, lse = x.attend(named)
    x.k, x.v = x.rounded  # type: ignore[assignment]
    assert all(torch.equal(a, b) for a, b in zip((out, lse), x.attend(named), strict=True))


@each_dsl
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_made_without_synchronisation_and_in_graphs(named: Named, kind: str, copying: Any) -> None:
    x = Batch(kind, 64)
    copying(True)
    x.attend(named)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    out, lse = torch.empty_like(x.q), torch.empty(x.q.shape[:2], device="cuda")
    given = {**x.where, "out": out, "lse": lse, "return_lse": True}
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        named.sparse_attention(x.q, x.k, x.v, x.ids, **given)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        named.sparse_attention(x.q, x.k, x.v, x.ids, **given)
    for seed in range(3):
        x.q.normal_(generator=torch.Generator("cuda").manual_seed(seed))
        x.where["seqused_k"].sub_(7 * seed).clamp_min_(0)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        direct = x.attend(named)
        assert torch.equal(out, direct[0]) and torch.equal(lse, direct[1])


@each_dsl
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [0, 64])
def test_nan_that_nobody_sees_changes_no_bit(named: Named, kind: str, page: int, copying: Any) -> None:
    """The last key of the first request, which all its queries but the last are in front of."""
    x = Batch(kind, page)
    copying(True)
    out, lse = x.attend(named)
    place = LENGTHS_K[0] - 1
    for part in (x.k, x.v):
        held = part.scale if kind in GROUPS else part.data
        of = held.view(torch.uint8)
        row = of[int(x.where["page_table"][0, place // page]), :, place % page] if page else of[place]
        row.fill_(0xFF if kind == "mxfp4" else 0x7F)
    spoilt, spoilt_lse = x.attend(named)
    last = LENGTHS_Q[0] - 1
    seen = torch.zeros(len(x.q), dtype=torch.bool, device="cuda")
    seen[last] = True
    assert torch.equal(spoilt[~seen], out[~seen]) and torch.equal(spoilt_lse[~seen], lse[~seen])
    reads = (x.ids[:, last] == place // BLOCK).any(-1).repeat_interleave(GROUP)
    assert torch.equal(spoilt[last].isnan().any(-1), reads)


def test_a_call_that_is_large_enough_is_copied_by_itself(copying: Any) -> None:
    copying(None)
    q = torch.randn(2048, HEADS * GROUP, DIM, device="cuda").bfloat16()
    k, v = (quantised("nvfp4", torch.randn(2048, HEADS, DIM, device="cuda")) for _ in range(2))
    ids = torch.arange(16, device="cuda", dtype=torch.int32).expand(HEADS, 2048, 16).contiguous()
    size = 2 * k.data.shape[0] * HEADS * DIM * 2  # bytes of both copies
    fits, is_short = {"workspace": size}, {"workspace": size - 1}
    for further, wanted in (({}, True), ({"batch_invariant": True}, False), (fits, True), (is_short, False)):
        with dispatch.finding() as found:
            ops.sparse_attention(q, k, v, ids, **further)
        assert ("dequantize_kv" in {kernel.cell.op for kernel in found}) == wanted
