"""append_kv, append_index and norm_rope_append on a GPU: all kinds of float32, graphs that serve other slots.

And nothing synchronises.
"""

from __future__ import annotations

import pytest
import torch
from gpu_calls import Named
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.quant import FP8, QuantizedTensor, quantize_mxfp4, quantize_nvfp4, vllm_pages
from msa_tiles.verify.caches import bits

pytestmark = pytest.mark.gpu

DSLS = [named for named in (Named("tilelang"), Named("cutedsl")) if named.has("append_kv")]
each_dsl = pytest.mark.parametrize("named", DSLS, ids=lambda named: named.backend)


@each_dsl
@pytest.mark.parametrize("scaled", [False, True])
def test_e4m3_is_that_of_torch_for_all_kinds_of_float32(named: Named, scaled: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(int(torch.randint(1 << 31, ())))
    rows, head_dim = 1 << 15, 128
    patterns = torch.randint(-(1 << 31), 1 << 31, (rows, head_dim), generator=generator, device="cuda")
    values = patterns.to(torch.int32).view(torch.float32)
    # Random bits are rarely near e4m3's range: half of the rows are, ties and their neighbours among them.
    codes = torch.arange(127, dtype=torch.uint8, device="cuda").view(FP8).float()
    ties = (codes[1:] + codes[:-1]) / 2
    picked = ties[torch.randint(0, 126, (rows // 2, head_dim), generator=generator, device="cuda")]
    moved = picked.view(torch.int32) + torch.randint(-1, 2, picked.shape, generator=generator, device="cuda")
    values[::2] = moved.to(torch.int32).view(torch.float32)
    scale = torch.rand((), generator=generator, device="cuda") + 0.1 if scaled else None
    found, wanted = (torch.zeros(rows, 1, head_dim, device="cuda").to(FP8) for _ in range(2))
    slots = torch.randperm(rows, generator=generator, device="cuda")
    named.append_index(values, found, slots, scale=scale)
    reference.append_index(values, wanted, slots, scale=scale)
    assert torch.equal(bits(found), bits(wanted))


@each_dsl
@pytest.mark.parametrize("token_scales", [False, True])
def test_a_graph_serves_other_rows_and_slots(named: Named, token_scales: bool) -> None:
    tokens, heads = 64, 4
    k, v = (torch.randn(tokens, heads, 128, device="cuda").to(torch.bfloat16) for _ in range(2))
    caches = [torch.zeros(9, 128, heads, 256, device="cuda").to(FP8).transpose(1, 2) for _ in range(2)]
    scales = [torch.ones(9, 128, heads, 2, device="cuda").transpose(1, 2) for _ in range(2)]
    slots = torch.arange(tokens, device="cuda")

    def append(append_kv: object, number: int) -> None:
        k_cache, v_cache = caches[number].split(128, -1)
        k_scale, v_scale = scales[number].unbind(-1) if token_scales else (torch.ones_like(scales[0][0, :, 0, 0]),) * 2
        append_kv(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)  # type: ignore[operator]

    append(named.append_kv, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append(named.append_kv, 0)
    for part in (*caches, *scales):
        part.zero_()
    for _ in range(3):
        slots.copy_(torch.randperm(9 * 128, device="cuda")[:tokens])
        slots[::7] = -1
        slots[3] = 9 * 128
        k.normal_()
        graph.replay()
        append(_by_reference, 1)
        assert torch.equal(bits(caches[0]), bits(caches[1])) and torch.equal(scales[0], scales[1])


def _by_reference(*arguments: Tensor, **scales: Tensor) -> None:
    ops.append_kv(*arguments, **scales, backend="reference")  # type: ignore[misc]


def all_kinds(rows: int, generator: torch.Generator) -> Tensor:
    """float32 [rows, 128]: random bits, and values whose groups have scales near the middle of two e4m3 numbers."""
    patterns = torch.randint(-(1 << 31), 1 << 31, (rows, 128), generator=generator, device="cuda")
    values = patterns.to(torch.int32).view(torch.float32).clone()
    codes = torch.arange(8, 127, dtype=torch.uint8, device="cuda").view(FP8).double()
    middles = (codes[1:] + codes[:-1]) / 2
    near = (6 * middles[torch.randint(0, 118, (rows // 2, 1), generator=generator, device="cuda")]).float()
    shares = torch.randint(0, 25, (rows // 2, 128), generator=generator, device="cuda") / 24
    values[::2] = near * shares
    return values


@each_dsl
@pytest.mark.parametrize("global_scale", [1e-6, 0.37, 1.0, 1e4])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_four_bits_are_those_of_the_quantiser_for_all_kinds_of_float32(
    named: Named, format: str, global_scale: float
) -> None:
    if format == "mxfp4" and global_scale != 1.0:
        pytest.skip("mxfp4 has no global scale")
    generator = torch.Generator("cuda").manual_seed(int(torch.randint(1 << 31, ())))
    rows = 1 << 13
    values = all_kinds(rows, generator) * global_scale
    made = quantize_mxfp4(values) if format == "mxfp4" else quantize_nvfp4(values, global_scale)
    cache = QuantizedTensor(
        torch.zeros_like(made.data), torch.zeros_like(made.scale), format, "linear", made.global_scale
    )
    slots = torch.randperm(rows, generator=generator, device="cuda")
    named.append_index(values[slots], cache, slots)
    nan = made.scale.float().isnan()
    assert torch.equal(cache.data, made.data) and torch.equal(cache.scale.float().isnan(), nan)
    found, wanted = (each.scale.view(torch.uint8).masked_fill(nan, 0) for each in (cache, made))
    assert torch.equal(found, wanted)


@each_dsl
def test_a_graph_fills_vllms_pages(named: Named) -> None:
    tokens, heads = 64, 4
    k, v = (torch.randn(tokens, heads, 128, device="cuda").to(torch.bfloat16) for _ in range(2))
    scale = torch.tensor(0.01, device="cuda")
    pages = [
        vllm_pages(torch.zeros(9, 2 * heads, 128, 72, dtype=torch.uint8, device="cuda"), scale, scale) for _ in range(2)
    ]
    slots = torch.arange(tokens, device="cuda")
    named.append_kv(k, v, pages[0].k, pages[0].v, slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        named.append_kv(k, v, pages[0].k, pages[0].v, slots)
    pages[0].pool.zero_()
    for _ in range(3):
        slots.copy_(torch.randperm(9 * 128, device="cuda")[:tokens])
        slots[::7] = -1
        k.normal_()
        graph.replay()
        ops.append_kv(k, v, pages[1].k, pages[1].v, slots, backend="reference")
        assert torch.equal(pages[0].pool, pages[1].pool)


@each_dsl
def test_nothing_synchronises(named: Named) -> None:
    rows, cache = torch.randn(7, 128, device="cuda"), torch.zeros(4, 16, 128, device="cuda").to(torch.bfloat16)
    slots = torch.arange(7, device="cuda", dtype=torch.int32)
    named.append_index(rows, cache, slots)
    torch.cuda.set_sync_debug_mode("error")
    try:
        named.append_index(rows, cache, slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(cache[0, :7], rows.to(torch.bfloat16))


@each_dsl
def test_offsets_have_64_bits(named: Named) -> None:
    """Slots behind 2**32 elements and bytes."""
    pages = (1 << 33) // (128 * 128) + 3
    try:
        cache = torch.zeros(pages, 128, 128, device="cuda", dtype=torch.uint8)
    except torch.cuda.OutOfMemoryError:
        pytest.skip("8 GiB do not fit")
    slots = torch.tensor([pages * 128 - 1, 1 << 25, 3, pages * 128], device="cuda")
    rows = torch.randn(4, 128, device="cuda")
    named.append_index(rows, cache, slots, format="e4m3")
    kept = cache.view(128 * pages, 128)[slots[:3]].view(FP8)
    assert torch.equal(bits(kept), bits(rows[:3].clamp(-448, 448).to(FP8)))


# Heads of q, k, v, idx_q and idx_k of MiniMax M3, and of one of eight GPUs.
LAYERS = [(64, 4, 4, 4, 1), (8, 1, 1, 1, 1)]
ROTARY, POSITIONS = 64, 4096


class Layer:
    """Rows that are slices of one projection's output, and what else norm_rope_append takes."""

    def __init__(self, sizes: tuple[int, ...], tokens: int, slots: int, table: torch.dtype = torch.bfloat16) -> None:
        self.projected = torch.randn(tokens, sum(sizes) * 128, device="cuda").to(torch.bfloat16)
        self.sizes, self.num_slots = sizes, slots
        weights = [(0.3 * torch.randn(128, device="cuda")).to(torch.bfloat16) for _ in range(4)]
        angles = torch.randn(POSITIONS, ROTARY // 2, device="cuda")
        self.fixed = dict(zip(("q_weight", "k_weight", "idx_q_weight", "idx_k_weight"), weights, strict=True))
        self.fixed |= {"cos_sin": torch.cat([angles.cos(), angles.sin()], -1).to(table), "weight_offset": 1}
        self.places = {
            "positions": torch.randint(0, POSITIONS, (tokens,), device="cuda"),
            "slot_mapping": torch.arange(tokens, device="cuda"),
        }
        self.draw()

    def draw(self) -> None:
        """Other rows, positions and slots at the same addresses; rows of tokens without a slot hold NaN."""
        self.projected.normal_()
        self.places["positions"].random_(0, POSITIONS)
        slots = self.places["slot_mapping"]
        slots.copy_(torch.randperm(self.num_slots, device="cuda")[: len(slots)])
        slots[::5] = -1
        for name in ("k", "v", "idx_k"):
            self.rows()[name][::5] = torch.nan

    def rows(self, projected: Tensor | None = None) -> dict[str, Tensor]:
        of = self.projected if projected is None else projected
        q, k, v, idx_q, idx_k = of.view(len(of), -1, 128).split(self.sizes, 1)
        return {"q": q, "k": k, "v": v, "idx_q": idx_q, "idx_k": idx_k[:, 0]}

    def call(self, **further: object) -> dict[str, object]:
        return {**self.rows(), **self.fixed, **self.places, **further}


def token_major(heads: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """vLLM's pages on Hopper, K beside V, full of NaN."""
    pages = torch.full((9, 128, heads, 256), torch.nan, device="cuda").to(dtype).transpose(1, 2)
    k_cache, v_cache = pages.split(128, -1)
    return {"k_cache": k_cache, "v_cache": v_cache}


def pools(heads: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """SGLang's slots, each of its own."""
    return {
        name: torch.full((9 * 128, heads, 128), torch.nan, device="cuda").to(dtype) for name in ("k_cache", "v_cache")
    }


def near(got: Tensor, wanted: Tensor) -> bool:
    """Of numbers that differ in float32's last bits before they are rounded: equal, or a step away, and rarely so."""
    step, least = (2.0**-7, 1e-5) if got.dtype == torch.bfloat16 else (2.0**-3, 2.0**-9)
    one, two = (each.float().nan_to_num() for each in (got, wanted))
    apart = (one - two).abs()
    return bool((apart <= step * two.abs() + least).all()) and float((apart > 0).float().mean()) < 1e-2


@each_dsl
@pytest.mark.parametrize("sizes", LAYERS, ids=str)
@pytest.mark.parametrize("layout", [token_major, pools])
@pytest.mark.parametrize("stored", ["bf16", "e4m3", "e4m3, bf16 index"])
def test_a_layer_in_place_is_the_references(named: Named, stored: str, layout: object, sizes: tuple[int, ...]) -> None:
    dtype = torch.bfloat16 if stored == "bf16" else FP8
    of_index = FP8 if stored == "e4m3" else torch.bfloat16
    layer = Layer(sizes, 300, 9 * 128)
    copies = []
    for backend in (named.backend, "reference"):
        caches = layout(sizes[1], dtype)  # type: ignore[operator]
        index = torch.full((9, 128, 128), torch.nan, device="cuda").to(of_index)
        scales = {name: torch.tensor(0.5, device="cuda") for name in ("k_scale", "v_scale")} if dtype == FP8 else {}
        if of_index == FP8:
            scales["idx_out"] = torch.zeros_like(layer.rows()["idx_q"]).to(FP8)
        projected = layer.projected.clone()
        rows = layer.rows(projected)
        ops.norm_rope_append(**layer.call(**rows, **caches, index_cache=index, **scales), backend=backend)
        copies.append((rows, {**caches, "index": index}, projected, scales.get("idx_out")))
    (got, got_caches, projected, queries), (wanted, wanted_caches, _, wanted_queries) = copies
    assert near(got["q"], wanted["q"])
    assert near(*((got["idx_q"], wanted["idx_q"]) if queries is None else (queries, wanted_queries)))
    for name in ("k", "v", "idx_k"):  # are read alone
        assert torch.equal(bits(got[name]), bits(layer.rows()[name]))
    assert torch.equal(bits(got_caches["v_cache"]), bits(wanted_caches["v_cache"]))
    for name in ("k_cache", "index"):
        assert near(got_caches[name], wanted_caches[name])
        untouched = wanted_caches[name].float().isnan()
        assert torch.equal(got_caches[name].float().isnan(), untouched) and bool(untouched.any())


@each_dsl
def test_a_graph_turns_other_rows(named: Named) -> None:
    layer = Layer(LAYERS[1], 64, 9 * 128, torch.float32)
    scale = torch.tensor(0.02, device="cuda")
    pages = [vllm_pages(torch.zeros(9, 2, 128, 72, dtype=torch.uint8, device="cuda"), scale, scale) for _ in range(2)]
    index = [torch.zeros(9, 128, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    outs = [
        {"q_out": torch.zeros_like(layer.rows()["q"]), "idx_out": torch.zeros_like(layer.rows()["idx_q"])}
        for _ in range(2)
    ]

    def append(number: int, backend: str) -> None:
        caches = {"k_cache": pages[number].k, "v_cache": pages[number].v, "index_cache": index[number]}
        ops.norm_rope_append(**layer.call(**caches, **outs[number]), backend=backend)

    append(0, named.backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append(0, named.backend)
    for part in (pages[0].pool, index[0]):
        part.zero_()
    for _ in range(3):
        layer.draw()
        graph.replay()
        append(1, "reference")
        for name in ("q_out", "idx_out"):
            assert near(outs[0][name], outs[1][name])
        assert near(index[0], index[1])
        assert torch.equal(pages[0].v.data, pages[1].v.data)
        assert float((pages[0].pool != pages[1].pool).float().mean()) < 1e-3


@each_dsl
def test_a_dense_layer_touches_no_index(named: Named) -> None:
    layer = Layer(LAYERS[0], 33, 9 * 128)
    copies = []
    for backend in (named.backend, "reference"):
        projected, caches = layer.projected.clone(), token_major(4, torch.bfloat16)
        call = layer.call(**layer.rows(projected), **caches)
        for name in ("idx_q", "idx_k", "idx_q_weight", "idx_k_weight"):
            del call[name]
        ops.norm_rope_append(**call, backend=backend)
        copies.append((projected, caches))
    assert near(copies[0][0], copies[1][0]) and near(copies[0][1]["k_cache"], copies[1][1]["k_cache"])
    assert torch.equal(bits(copies[0][0][:, 68 * 128 :]), bits(layer.projected[:, 68 * 128 :]))


@each_dsl
def test_turning_synchronises_with_nothing(named: Named) -> None:
    layer = Layer(LAYERS[1], 7, 9 * 128)
    call = layer.call(**token_major(1, torch.bfloat16), index_cache=torch.zeros(9, 128, 128, device="cuda").bfloat16())
    ops.norm_rope_append(**call, backend=named.backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.norm_rope_append(**call, backend=named.backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
