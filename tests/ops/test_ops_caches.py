"""append_kv and append_index: layouts, formats, scales, errors, torch.library and the launch of their kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import msa_tiles
from msa_tiles import ops
from msa_tiles.launch import caches as launch
from msa_tiles.quant import (
    FP8,
    QuantizedTensor,
    dequantize,
    quantize_fp8,
    quantize_mxfp4,
    quantize_nvfp4,
    vllm_pages,
)

BF16 = torch.bfloat16
SLOTS = torch.tensor([7, 0, -1, 30, 31, 12])  # of 32; 30 and 31 stand at the end of the last page
KEPT = [0, 1, 3, 4, 5]


def rows(seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def read(cache: Tensor, slots: Tensor) -> Tensor:
    """[pages, Hkv, page, …] -> the rows of these slots."""
    page = cache.shape[2]
    return torch.stack([cache[slot // page, :, slot % page] for slot in slots.tolist()])


def hnd() -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 2, 8, 64).to(BF16), torch.zeros(4, 2, 8, 64).to(BF16)


def beside() -> tuple[Tensor, Tensor]:
    """K beside V in one cache, heads first."""
    k, v = torch.zeros(4, 2, 8, 128).to(BF16).split(64, -1)
    return k, v


def token_major() -> tuple[Tensor, Tensor]:
    """K beside V in one cache, tokens first."""
    k, v = torch.zeros(4, 8, 2, 128).to(BF16).transpose(1, 2).split(64, -1)
    return k, v


def layers() -> tuple[Tensor, Tensor]:
    """One layer of a pool that all share."""
    pool = torch.zeros(4, 3, 2, 2, 8, 64).to(BF16)
    return pool[:, 1, 0], pool[:, 1, 1]


@pytest.mark.parametrize("layout", [hnd, beside, token_major, layers])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_lie_where_attention_reads_them(layout: Any, dtype: torch.dtype) -> None:
    k_cache, v_cache = layout()
    k, v = rows(0), rows(1)
    assert ops.append_kv(k, v, k_cache, v_cache, SLOTS.to(dtype)) is None
    assert torch.equal(read(k_cache, SLOTS[KEPT]), k[KEPT]) and torch.equal(read(v_cache, SLOTS[KEPT]), v[KEPT])
    assert int((k_cache != 0).any(-1).sum()) == int((v_cache != 0).any(-1).sum()) == 2 * len(KEPT)


def test_a_pool_of_slots_is_pages_of_one() -> None:
    k_pool, v_pool = torch.zeros(32, 2, 64).to(BF16), torch.zeros(32, 2, 64).to(BF16)
    ops.append_kv(rows(0), rows(1), k_pool, v_pool, SLOTS)
    assert torch.equal(k_pool[SLOTS[KEPT]], rows(0)[KEPT]) and torch.equal(v_pool[SLOTS[KEPT]], rows(1)[KEPT])
    index = torch.zeros(32, 64).to(BF16)
    ops.append_index(rows(0)[:, 0], index, SLOTS)
    assert torch.equal(index[SLOTS[KEPT]], rows(0)[KEPT, 0])


def test_slots_that_no_cache_has_are_skipped() -> None:
    slots = torch.tensor([32, -(1 << 40), (1 << 32) + 3, -5, torch.iinfo(torch.int64).max, 3])
    cache = torch.zeros(4, 8, 64).to(BF16)
    ops.append_index(rows()[:, 0], cache, slots)
    assert torch.equal(cache[0, 3], rows()[5, 0]) and int((cache != 0).any(-1).sum()) == 1


def test_a_decode_step_reads_what_was_appended() -> None:
    """24 tokens of one request, written in three turns into shuffled pages, against flat keys."""
    tokens, table = 24, torch.tensor([[2, 0, 3]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    k, v, idx_k = (torch.randn(tokens, *shape, generator=generator).to(BF16) for shape in ((2, 64), (2, 64), (64,)))
    k_cache, v_cache = hnd()
    index_cache = torch.zeros(4, 8, 64).to(BF16)
    place = torch.arange(tokens)
    slots = table[0].long()[place // 8] * 8 + place % 8
    for turn in (slice(0, 11), slice(11, 23), slice(23, 24)):
        ops.append_kv(k[turn], v[turn], k_cache, v_cache, slots[turn])
        ops.append_index(idx_k[turn], index_cache, slots[turn])
    q, idx_q = torch.randn(1, 4, 64, generator=generator).to(BF16), torch.randn(1, 2, 64, generator=generator).to(BF16)
    starts, used = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    paged = {"cu_seqlens_q": starts, "page_table": table, "seqused_k": used, "block_size": 8}
    found = ops.msa_decode(q, k_cache, v_cache, idx_q, index_cache, 2, **paged)
    wanted = ops.msa_decode(q, k, v, idx_q, idx_k, 2, block_size=8)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_given_scales_divide(dtype: torch.dtype) -> None:
    k, v, scale = rows(0, dtype), rows(1, dtype), torch.tensor([0.01, 0.5])
    k_cache, v_cache = (torch.zeros(4, 2, 8, 64).to(FP8) for _ in range(2))
    ops.append_kv(k, v, k_cache, v_cache, SLOTS, k_scale=scale, v_scale=torch.tensor(0.25))
    wanted = (k.float() / scale[:, None]).clamp(-448, 448).to(FP8)
    assert torch.equal(read(k_cache, SLOTS[KEPT]).float(), wanted[KEPT].float())
    assert wanted.float().abs().max() < 448
    assert torch.equal(read(v_cache, SLOTS[KEPT]).float(), (v.float() / 0.25).to(FP8)[KEPT].float())


def test_what_e4m3_cannot_hold_is_its_largest() -> None:
    cache = torch.zeros(1, 2, 64).to(FP8)
    keys = torch.full((2, 64), 1e6)
    keys[1] = -torch.inf
    ops.append_index(keys, cache, torch.tensor([0, 1]))
    assert cache.float().flatten(0, 1).amax(-1).tolist() == [448.0, -448.0]
    ops.append_index(torch.full((1, 64), torch.nan), cache, torch.tensor([1]), scale=torch.tensor(2.0))
    assert cache.float()[0, 1].isnan().all()


def test_a_scale_of_zero_leaves_the_largest_numbers() -> None:
    """Given scales are on the device, where nobody looks whether they are above 0."""
    cache = torch.zeros(1, 1, 4, 4).to(FP8)
    row = torch.tensor([[[1.0, -1.0, 0.0, torch.nan]]])
    one = {"k_scale": torch.zeros(()), "v_scale": torch.ones(())}
    ops.append_kv(row, row, cache, cache.clone(), torch.tensor([1]), **one)
    wanted = torch.tensor([448.0, -448.0, torch.nan, torch.nan])
    torch.testing.assert_close(cache[0, 0, 1].float(), wanted, rtol=0, atol=0, equal_nan=True)


def test_float32_rows_are_rounded_once() -> None:
    """1 + 2**-4 + 2**-12 lies above the middle of two numbers of e4m3; bfloat16 would lay it on the middle first."""
    cache = torch.zeros(1, 1, 64).to(FP8)
    ops.append_index(torch.full((1, 64), 1 + 2.0**-4 + 2.0**-12), cache, torch.tensor([0]))
    assert (cache.float() == 1.125).all()


@pytest.mark.parametrize("pool", [False, True])
def test_computed_scales_stand_beside_their_rows(pool: bool) -> None:
    shape = (32, 2) if pool else (4, 2, 8)
    k_cache, v_cache = (torch.zeros(*shape, 64).to(FP8) for _ in range(2))
    # Token-major in memory, as the rows may be too.
    scales = [torch.full((*shape[::2], 2) if not pool else shape, torch.nan) for _ in range(2)]
    k_scale, v_scale = (each if pool else each.transpose(1, 2) for each in scales)
    k, v = rows(0) * torch.tensor([1e-3, 1e3], dtype=BF16)[:, None], rows(1)
    ops.append_kv(k, v, k_cache, v_cache, SLOTS, k_scale=k_scale, v_scale=v_scale)
    for given, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        kept = SLOTS[KEPT]
        got = cache[kept] if pool else read(cache, kept)
        got_scale = scale[kept] if pool else read(scale, kept)
        wanted = quantize_fp8(given.transpose(1, 2).contiguous().transpose(1, 2)[KEPT].flatten(0, 1), "token_head")
        assert torch.equal(got_scale.flatten(), wanted.scale) and torch.equal(
            got.flatten(0, 1).float(), wanted.data.float()
        )
        assert int(scale.isfinite().sum()) == 2 * len(KEPT)
        error = (dequantize(wanted.data, wanted.scale) - given[KEPT].flatten(0, 1).float()).abs()
        assert (error <= 2.0**-4 * given[KEPT].flatten(0, 1).float().abs() + wanted.scale[:, None] * 2.0**-10).all()


def test_caches_come_as_bytes_or_quantised() -> None:
    wanted = torch.zeros(4, 2, 8, 64).to(FP8)
    ops.append_kv(rows(), rows(), wanted, wanted.clone(), SLOTS, k_scale=torch.ones(()), v_scale=torch.ones(2))
    for kind in ("bytes", "quantised"):
        k, v = (torch.zeros(4, 2, 8, 64).to(FP8) for _ in range(2))
        if kind == "bytes":
            one = {"k_scale": torch.ones(()), "v_scale": torch.ones(2)}
            ops.append_kv(rows(), rows(), k.view(torch.uint8), v.view(torch.uint8), SLOTS, format="e4m3", **one)
        else:
            given = QuantizedTensor(k, torch.ones(())), QuantizedTensor(v, torch.ones(2))
            ops.append_kv(rows(), rows(), *given, SLOTS)
        assert torch.equal(k.float(), wanted.float()) and torch.equal(v.float(), wanted.float())


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_pages_of_four_bits_are_those_of_the_quantiser(dtype: torch.dtype) -> None:
    """Written row by row, in a shuffled order, against pages that are quantised as a whole: all bytes of the pool."""
    k, v = (torch.randn(2, 2, 8, 64, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(2))
    pages = [vllm_pages(torch.zeros(2, 4, 8, 36, dtype=torch.uint8), *map(torch.tensor, (0.01, 0.02))) for _ in "ab"]
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2))
    flat_k, flat_v = (each.transpose(1, 2).flatten(0, 1)[order] for each in (k, v))
    for turn in (slice(0, 5), slice(5, 16)):
        ops.append_kv(flat_k[turn], flat_v[turn], pages[0].k, pages[0].v, order[turn])
    for source, target in ((k, pages[1].k), (v, pages[1].v)):
        made = quantize_nvfp4(source, target.global_scale, layout=target.layout)
        target.data.copy_(made.data)
        target.scale.view(torch.uint8).copy_(made.scale.view(torch.uint8))
    assert torch.equal(pages[0].pool, pages[1].pool) and bool(pages[0].pool.any())


@pytest.mark.parametrize("pool", [False, True])
def test_four_bits_with_a_scale_of_powers_of_two(pool: bool) -> None:
    keys = rows(0)[:, 0]
    shape = (32, 64) if pool else (4, 8, 64)
    cache = quantize_mxfp4(torch.zeros(shape))
    ops.append_index(keys, cache, SLOTS, format="mxfp4")
    wanted = quantize_mxfp4(keys[KEPT]).dequantize()
    assert torch.equal(cache.dequantize().view(32, 64)[SLOTS[KEPT]], wanted)
    others = [slot for slot in range(32) if slot not in SLOTS.tolist()]
    assert not cache.dequantize().view(32, 64)[others].any()


def test_errors_of_four_bits() -> None:
    made = [quantize_nvfp4(torch.zeros(4, 2, 8, 64)) for _ in range(2)]
    with pytest.raises(TypeError, match="k_cache: got format 'nvfp4'; wanted 'e4m3', as format says"):
        ops.append_kv(rows(), rows(), *made, SLOTS, format="e4m3")
    with pytest.raises(TypeError, match="v_cache: got format 'mxfp4'; wanted 'nvfp4' like k_cache"):
        ops.append_kv(rows(), rows(), made[0], quantize_mxfp4(torch.zeros(4, 2, 8, 64)), SLOTS)
    with pytest.raises(ValueError, match="k_scale: got a Tensor beside a QuantizedTensor"):
        ops.append_kv(rows(), rows(), *made, SLOTS, k_scale=torch.ones(()))
    with pytest.raises(ValueError, match="k_cache: got 32 values in a row; wanted 64 like k"):
        ops.append_kv(rows(), rows(), *(quantize_nvfp4(torch.zeros(4, 2, 8, 32)) for _ in range(2)), SLOTS)
    with pytest.raises(ValueError, match="the scales of k_cache: got the layout 'interleaved' for slots"):
        pools = [quantize_nvfp4(torch.zeros(32, 4, 64), layout="interleaved") for _ in range(2)]
        ops.append_kv(torch.zeros(6, 4, 64), torch.zeros(6, 4, 64), *pools, SLOTS)


@pytest.mark.parametrize("quantise", [quantize_nvfp4, quantize_mxfp4])
def test_kernels_write_four_bits(quantise: Any) -> None:
    made = [quantise(torch.zeros(4, 2, 8, 128)) for _ in range(2)]
    k = torch.zeros(6, 2, 128).to(BF16)
    names = ("q16kv4", "q16k4") if quantise is quantize_nvfp4 else ("q16kvmx4", "q16kmx4")
    told = msa_tiles.explain(ops.append_kv, k, k, *made, SLOTS, device="sm90")
    assert told.served and f"append_kv.tilelang.sm90.{names[0]}" in str(told)
    told = msa_tiles.explain(ops.append_index, k[:, 0], quantise(torch.zeros(4, 8, 128)), SLOTS, device="sm90")
    assert told.served and f".sm90.{names[1]}" in str(told)


def base(**changed: Any) -> dict[str, Any]:
    k_cache, v_cache = hnd()
    return {"k": rows(), "v": rows(1), "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": SLOTS} | changed


def fp8(**changed: Any) -> dict[str, Any]:
    caches = {name: torch.zeros(4, 2, 8, 64).to(FP8) for name in ("k_cache", "v_cache")}
    return base(**caches, k_scale=torch.ones(()), v_scale=torch.ones(())) | changed


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (base(k=rows().half()), TypeError, "k: got dtype torch.float16; wanted torch.bfloat16 or torch.float32"),
        (base(k=rows()[:, 0]), ValueError, r"k: got shape \[6, 64\]; wanted 3 dimensions \[T, Hkv, D\]"),
        (base(v=rows(1, torch.float32)), TypeError, "v: got dtype torch.float32; wanted torch.bfloat16 like k"),
        (base(v=rows()[:5]), ValueError, r"v: got shape \[5, 2, 64\]; wanted \[6, 2, 64\] like k"),
        (base(slot_mapping=SLOTS[:5]), ValueError, r"slot_mapping: got shape \[5\]; wanted \[T\] = \[6\] like k"),
        (base(slot_mapping=SLOTS.short()), TypeError, "slot_mapping: got dtype torch.int16; wanted torch.int64 or"),
        (base(k_cache=hnd()[0][:, :1]), ValueError, r"k_cache: got shape \[4, 1, 8, 64\]; wanted \[pages, Hkv, page"),
        (base(k_cache=hnd()[0][..., :32]), ValueError, "k_cache: got 32 values in a row; wanted 64 like k"),
        (base(k_cache=hnd()[0].byte()), TypeError, "k_cache: got dtype torch.uint8 without a format; wanted"),
        (base(format="e5m2"), ValueError, "format: got 'e5m2'; wanted one of 'bf16', 'e4m3'"),
        (base(format="e4m3"), TypeError, "k_cache: got dtype torch.bfloat16; wanted torch.float8_e4m3fn or torch.ui"),
        (base(k_scale=torch.ones(())), ValueError, "k_scale: got a Tensor; wanted None"),
        (base(v_cache=hnd()[1].float()), TypeError, "v_cache: got dtype torch.float32; wanted torch.bfloat16 like"),
        (base(v_cache=hnd()[1][:3]), ValueError, r"v_cache: got shape \[3, 2, 8, 64\]; wanted \[4, 2, 8, 64\] like k_"),
        (base(k_cache=torch.zeros(1, 2, 8, 64).to(BF16).expand(4, 2, 8, 64)), ValueError, "k_cache: got strides"),
        (fp8(k_scale=None), ValueError, r"k_scale: got None; wanted float32 \[\], \[Hkv\] or \[pages, Hkv, page\]"),
        (fp8(k_scale=torch.ones(3)), ValueError, r"k_scale: got shape \[3\]; wanted \[\], \[Hkv\] or \[pages, Hkv"),
        (fp8(k_scale=torch.ones(4, 2, 8)), ValueError, "v_scale: got given scales; wanted the same kind as k_scale"),
        (fp8(v_scale=torch.ones(()).double()), TypeError, "v_scale: got dtype torch.float64; wanted torch.float32"),
        (base(backend="tilelang"), ValueError, "backend: got 'tilelang' for tensors on cpu"),
    ],
)  # fmt: skip
def test_errors_say_what_came_and_what_is_wanted(arguments: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ops.append_kv(**arguments)


def test_one_cache_cannot_be_both() -> None:
    cache = hnd()[0]
    with pytest.raises(ValueError, match="v_cache: got memory of k_cache; wanted a buffer of its own"):
        ops.append_kv(rows(), rows(), cache, cache, SLOTS)


def test_torch_library() -> None:
    k_cache, v_cache = token_major()
    opcheck(
        torch.ops.msa_tiles.append_kv.default,
        (rows(), rows(1), SLOTS, None, None, "auto", k_cache, v_cache, None, None),
    )
    keys, scales = torch.zeros(4, 8, 64).to(FP8), torch.zeros(4, 8)
    opcheck(
        torch.ops.msa_tiles.append_index.default, (rows()[:, 0], SLOTS, None, "auto", keys, scales),
        test_utils="test_faketensor",  # torch cannot compare e4m3
    )  # fmt: skip

    def step(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
        ops.append_kv(k * 1, v, k_cache, v_cache, slots)
        return k_cache.sum()

    k_cache, v_cache = hnd()
    total = torch.compile(step, fullgraph=True, backend="aot_eager")(rows(), rows(1), k_cache, v_cache, SLOTS)
    assert torch.equal(read(k_cache, SLOTS[KEPT]), rows()[KEPT]) and total == k_cache.sum()


def test_autograd_hears_of_the_write() -> None:
    k_cache, v_cache = hnd()
    weight = torch.ones(64, dtype=BF16, requires_grad=True)
    product = (k_cache * weight).sum()
    ops.append_kv(rows(), rows(), k_cache, v_cache, SLOTS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with pytest.raises(ValueError, match="k_cache: got a tensor that requires grad"):
        ops.append_kv(rows(), rows(), torch.zeros(4, 2, 8, 64, dtype=BF16, requires_grad=True), v_cache, SLOTS)


def test_what_the_kernels_get(launched: list[Any]) -> None:
    arguments = fp8(v_scale=torch.tensor([0.5, 2.0]))
    ops.append_kv(**arguments)
    facts, (k, _, slots, k_cache, k_scale, v_cache, v_scale), _ = launched
    assert (facts.op, facts.precision) == ("append_kv", "q16kv8") and not facts.refusals
    assert dict(facts.variant) == {"head_dim": 64, "float32_rows": 0, "token_scales": 0}
    assert k is arguments["k"] and slots.dtype == torch.int32 and slots.shape == (6, 2)
    assert (slots[:, 1].long() * (1 << 32) + (slots[:, 0].long() & 0xFFFFFFFF)).tolist() == SLOTS.tolist()
    assert k_scale.tolist() == [1.0, 1.0] and k_scale.stride() == (0,) and v_scale.tolist() == [0.5, 2.0]
    assert k_cache.data_ptr() == arguments["k_cache"].data_ptr() and v_cache.shape == (4, 2, 8, 64)


def test_what_the_kernels_get_of_vllms_pages(launched: list[Any]) -> None:
    pages = vllm_pages(torch.zeros(5, 4, 8, 36, dtype=torch.uint8), torch.tensor(0.5))
    ops.append_kv(rows(), rows(1), pages.k, pages.v, SLOTS)
    facts, (_, _, _, k_cache, k_scale, k_outer, v_cache, v_scale, v_outer) = launched
    assert (facts.precision, dict(facts.variant)) == ("q16kv4", {"head_dim": 64, "float32_rows": 0})
    assert k_cache is pages.k.data and v_cache is pages.v.data and not facts.refusals and not facts.features
    # One loader: a token's place has two dimensions, whose strides tell the layouts apart.
    assert k_scale.shape == v_scale.shape == (5, 2, 2, 4, 4) and k_scale.dtype == torch.uint8
    assert k_scale.stride()[2:] == (16, 4, 1) and v_scale.stride()[2:] == (16, 1, 4)
    assert (k_scale.data_ptr(), v_scale.data_ptr()) == (pages.k.scale.data_ptr(), pages.v.scale.data_ptr())
    assert k_outer.tolist() == [0.5, 0.5] and v_outer.tolist() == [1.0, 1.0] and v_outer.stride() == (0,)


@pytest.mark.parametrize(("page", "span"), [(8, 4), (6, 1), (0, 1)])
def test_what_the_kernel_of_index_keys_of_four_bits_gets(launched: list[Any], page: int, span: int) -> None:
    """Pages of any size, and slots alone."""
    shape = (4, page, 64) if page else (32, 64)
    ops.append_index(rows()[:, 0], quantize_mxfp4(torch.zeros(shape)), SLOTS)
    facts, (idx_k, slots, stored, scale) = launched
    assert facts.precision == "q16kmx4" and idx_k.shape == (6, 1, 64) and slots.shape == (6, 2)
    pages = 4 if page else 32
    assert stored.shape == (pages, 1, page or 1, 32) and scale.shape == (pages, 1, (page or 1) // span, span, 2)


def test_what_the_kernel_of_index_keys_gets(launched: list[Any]) -> None:
    cache, scales = torch.zeros(32, 64).to(FP8), torch.zeros(32)
    for scale, token_scales, wanted, used in (
        (None, 0, (1,), 0),
        (torch.ones(()), 0, (1,), 1),
        (scales, 1, (32, 1, 1), 0),
    ):
        launched.clear()
        ops.append_index(rows(0, torch.float32)[:, 0], cache, SLOTS.int(), scale=scale)
        facts, (idx_k, slots, stored, given, use_scale), *_ = launched
        assert dict(facts.variant) == {"head_dim": 64, "float32_rows": 1, "token_scales": token_scales}
        assert facts.precision == "q8k8" and idx_k.shape == (6, 1, 64) and slots.shape == (6, 1)
        assert stored.shape == (32, 1, 1, 64) and tuple(given.shape) == wanted and use_scale == used
    launched.clear()
    ops.append_index(rows()[:0, 0], cache, SLOTS[:0])
    assert len(launched) == 1  # nothing to do, though a kernel must be there


@pytest.mark.parametrize("kind", ["bf16", "bytes", "given", "computed"])
@pytest.mark.parametrize("pool", [False, True])
def test_a_call_that_was_seen_launches_the_same(kind: str, pool: bool, launched: list[Any]) -> None:
    """Twice the same kernel with the same arguments, the second time past validation and dispatch."""
    shape = (32, 2) if pool else (4, 2, 8)
    dtype = {"bf16": BF16, "bytes": torch.uint8}.get(kind, FP8)
    caches = [torch.zeros(*shape, 64).to(dtype) for _ in range(2)]
    options: dict[str, Any] = {"format": "e4m3"} if kind == "bytes" else {}
    if kind != "bf16":
        scales = [torch.zeros(shape) if kind == "computed" else torch.tensor([0.5, 2.0]) for _ in range(2)]
        options |= dict(zip(("k_scale", "v_scale"), scales, strict=True))
    index = {"scale": options["k_scale"][:, 0]} if kind == "computed" else {}
    k, v = rows(), rows(1)
    for call in (
        lambda: ops.append_kv(k, v, *caches, SLOTS, **options),
        lambda: ops.append_index(
            k[:, 0], caches[0][:, 0], SLOTS, **index, **{k: v for k, v in options.items() if k == "format"}
        ),
    ):
        launched.clear()
        version = caches[0]._version
        call()
        first = list(launched)
        launched.clear()
        call()
        facts, arguments = first[0], next(each for each in first if isinstance(each, tuple))
        assert launched == [again for again in launched if isinstance(again, tuple)] and len(launched) == 1
        assert facts.op in ("append_kv", "append_index") and caches[0]._version > version + 1
        for one, other in zip(arguments, launched[0], strict=True):
            if isinstance(one, Tensor):
                assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
                assert one.data_ptr() == other.data_ptr()
            else:
                assert one == other
    with pytest.raises(ValueError, match="k_scale"):
        ops.append_kv(rows(), rows(1), *caches, SLOTS, **options | {"k_scale": torch.ones(7)})


def test_what_no_kernel_counts(monkeypatch: pytest.MonkeyPatch, launched: list[Any]) -> None:
    monkeypatch.setattr(launch, "MOST_SLOTS", 32)
    monkeypatch.setattr(launch, "MOST_ROWS", 12)
    ops.append_kv(**base())
    assert launched[0].refusals == (
        "the cache has 32 slots, wanted fewer than 2**31",
        "12 rows of tokens and heads, wanted fewer than 2**30",
    )
