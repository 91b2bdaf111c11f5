"""Attention over NVFP4 and MXFP4 keys and values under BF16 queries, against the reference on what they stand for."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_calls import reading
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.quant import (
    GROUPS,
    QuantizedTensor,
    quantize_index_pages,
    quantize_mxfp4,
    quantize_nvfp4,
    quantize_pages,
)
from msa_tiles.runtime.registry import default_registry

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LENGTHS_K = [700, 130, 333, 0, 640]
LENGTHS = {"sparse_attention": [600, 1, 200, 0, 640], "sparse_decode": [4, 1, 32, 0, 7]}
HEADS, TOPK = 2, 6
FORMATS = {"q16kv4": "nvfp4", "q16kvmx4": "mxfp4"}
SERVED = sorted(
    (cell.op, cell.dsl, FORMATS[cell.precision])
    for cell in default_registry().cells
    if cell.target == "sm90" and cell.op in LENGTHS and cell.precision in FORMATS
)
each_kernel = pytest.mark.parametrize(("op", "dsl", "name"), SERVED)
# Flat, pages with scales in two orders, and the pages of two servers in a pool of three layers.
LAYOUTS = ("flat", "linear", "interleaved", "vllm", "sglang")


@pytest.fixture(autouse=True, params=[False, True], ids=["stored", "copied"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prefill both ways."""
    Drawn.copied = request.param
    yield from reading(request.param, request.node.callspec.params.get("op", ""))


class Drawn:
    """Requests with keys and values of 4 bits, and ids of blocks; rows that nobody may see are NaN."""

    copied = False  # whether attention reads keys and values that are rounded to bfloat16

    def __init__(self, op: str, name: str, layout: str, group: int = 16, dim: int = 128, block: int = 128) -> None:
        generator = torch.Generator(DEVICE).manual_seed(int(torch.randint(1 << 31, ())))
        self.group, self.block = group, block
        lengths, blocks = LENGTHS[op], -(-max(LENGTHS_K) // block)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE)

        starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
        total = int(starts[-1])
        request = torch.arange(len(lengths), device=DEVICE).repeat_interleave(torch.tensor(lengths, device=DEVICE))
        ends = torch.tensor(LENGTHS_K, device=DEVICE)[request]
        self.positions = ends - starts[1:][request] + torch.arange(total, device=DEVICE)
        self.request = request
        self.where: dict[str, Any] = {"cu_seqlens_q": starts, "block_size": block}
        if layout == "flat":
            self.where["cu_seqlens_k"] = torch.tensor([0, *LENGTHS_K], device=DEVICE).cumsum(0).int()
            keys = [normal(sum(LENGTHS_K), HEADS, dim) for _ in "kv"]
        else:
            page, width = block // 2, 2 * blocks
            table = torch.randperm(len(lengths) * width, generator=generator, device=DEVICE).int().view(-1, width)
            self.where |= {"page_table": table, "seqused_k": torch.tensor(LENGTHS_K, device=DEVICE).int()}
            keys = [normal(table.numel(), HEADS, page, dim) for _ in "kv"]
            for number, length in enumerate(LENGTHS_K):
                hidden = torch.arange(width * page, device=DEVICE).view(width, page) >= length
                for part in keys:
                    part[table[number].long()] = part[table[number].long()].masked_fill(
                        hidden[:, None, :, None], torch.nan
                    )
        self.k, self.v = quantised(keys, name, layout)
        self.q = normal(total, HEADS * group, dim).bfloat16()
        order = torch.rand(HEADS, total, blocks, generator=generator, device=DEVICE).argsort(-1)[..., :TOPK]
        # The last block that a query sees is always among them.
        order[..., 0] = self.positions.clamp_min(0) // block
        twice = (order[..., 1:] == order[..., :1]) | (order[..., 1:] > (self.positions // block)[:, None])
        order[..., 1:] = order[..., 1:].masked_fill(twice, -1)
        self.ids = order.int()

    def attend(self, op: str, backend: str, **more: Any) -> tuple[Tensor, Tensor]:
        call = getattr(ops, op)
        return call(self.q, self.k, self.v, self.ids, return_lse=True, backend=backend, **self.where, **more)

    def wanted(self) -> tuple[Tensor, Tensor]:
        # Codes times scales of groups have 6 bits; a global scale takes as many as a copy rounds away.
        k, v = (part.dequantize(torch.bfloat16 if self.copied else torch.float32).float() for part in (self.k, self.v))
        return reference.sparse_attention(self.q.float(), k, v, self.ids, **self.where)

    def check(self, found: tuple[Tensor, Tensor]) -> None:
        """What is read is exact in 16 bits: what is off comes of weights, and of rounding the output."""
        (out, lse), (wanted, wanted_lse) = found, self.wanted()
        assert torch.equal(out.isnan(), wanted.isnan()) and torch.equal(lse.isnan(), wanted_lse.isnan())
        size = wanted.nan_to_num(0.0).abs().amax().clamp_min(1e-30)
        assert ((out.float() - wanted).nan_to_num(0.0).abs() <= 2**-7 * size).all()
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=2e-3, equal_nan=True)


def quantised(keys: list[Tensor], name: str, layout: str) -> tuple[QuantizedTensor, QuantizedTensor]:
    if layout in ("vllm", "sglang"):
        pages, heads, page, dim = keys[0].shape
        shape = (pages, 3, 2 * heads, page, dim // 16 * 9)
        pool = torch.zeros(shape if layout == "vllm" else (*shape[:2], 2 * heads * page * dim // 16 * 9),
                           dtype=torch.uint8, device=DEVICE)  # fmt: skip
        outer = (torch.tensor(0.01, device=DEVICE), torch.tensor(0.03, device=DEVICE))
        made = quantize_pages(*keys, layout, k_global_scale=outer[0], v_global_scale=outer[1], pool=pool[:, 1])
        return made.k, made.v
    k, v = map({"nvfp4": quantize_nvfp4, "mxfp4": quantize_mxfp4}[name], keys)
    return k, v.with_layout("interleaved") if layout == "interleaved" else v


@each_kernel
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("group", "dim", "block"), [(16, 128, 128), (8, 64, 128), (2, 64, 64)])
def test_it_is_attention_over_what_the_codes_stand_for(
    op: str, dsl: str, name: str, layout: str, group: int, dim: int, block: int
) -> None:
    if name == "mxfp4" and layout in ("vllm", "sglang"):
        pytest.skip("a layout of nvfp4")
    given = Drawn(op, name, layout, group, dim, block)
    found = given.attend(op, dsl)
    given.check(found)
    assert not any(part.isnan().any() for part in found)
    for _ in range(3):
        assert all(map(torch.equal, given.attend(op, dsl), found))


@each_kernel
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_group_that_is_nan_reaches_who_sees_it_alone(op: str, dsl: str, name: str, which: str) -> None:
    given = Drawn(op, name, "flat")
    clean = given.attend(op, dsl)
    token = LENGTHS_K[0] - 60
    getattr(given, which).scale.view(torch.uint8)[token, 1, 2] = 0x7F if name == "nvfp4" else 0xFF
    found = given.attend(op, dsl)
    given.check(found)
    reads = (given.ids[1] == token // given.block).any(-1) & (given.request == 0) & (given.positions >= token)
    heads = slice(given.group, None)
    assert found[0][reads][:, heads].isnan().any() and not found[0][~reads].isnan().any()
    assert torch.equal(found[0][:, : given.group], clean[0][:, : given.group])


@each_kernel
def test_extreme_scales(op: str, dsl: str, name: str) -> None:
    """Groups of zeros, and codes under scales that e4m3 cannot hold the product of; global scales of any size."""
    given = Drawn(op, name, "flat")
    groups = GROUPS[name]
    given.v.data[:] = 0x77
    given.v.scale.view(torch.uint8)[:] = 0x7E if name == "nvfp4" else 0x8A
    given.v.scale.view(torch.uint8)[:, 1] = 0
    given.k.scale.view(torch.uint8)[:, 0] = 0
    given.check(given.attend(op, dsl))
    if groups.has_global:
        given = Drawn(op, name, "flat")
        for size in (1e-6, 1e4):
            outer = torch.tensor(size, device=DEVICE)
            given.k, given.v = (QuantizedTensor(x.data, x.scale, name, global_scale=outer) for x in (given.k, given.v))
            scale = {"softmax_scale": 128**-0.5 / size / 400}
            given.where |= scale
            given.check(given.attend(op, dsl))
        given.k, given.v = (QuantizedTensor(x.data, x.scale, name) for x in (given.k, given.v))
        given.where |= {"softmax_scale": 128**-0.5 / 400}
        given.check(given.attend(op, dsl))


@pytest.mark.parametrize(("op", "dsl", "name"), [served for served in SERVED if served[0] == "sparse_decode"])
def test_nothing_is_copied_and_a_graph_reads_new_bytes(op: str, dsl: str, name: str) -> None:
    given = Drawn(op, name, "interleaved")
    out, lse = torch.empty_like(given.q), torch.empty(given.q.shape[:2], device=DEVICE)
    size = ops.decode_workspace_bytes(given.q, TOPK, HEADS)
    workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    attend = functools.partial(given.attend, op, dsl, out=out, lse=lse, workspace=workspace)
    attend()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    attend()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    given.k.data.copy_(given.k.data.flip(0))
    given.v.scale.view(torch.uint8).copy_(given.v.scale.view(torch.uint8).flip(2))
    graph.replay()
    found = out.clone(), lse.clone()
    for again, once in zip(attend(), found, strict=True):
        torch.testing.assert_close(again, once, rtol=0, atol=0, equal_nan=True)
    given.check(found)


INDEXERS = {"q16k4": "nvfp4", "q16kmx4": "mxfp4"}
OF_BF16, OF_E4M3 = ({"nvfp4": f"q{bits}k4", "mxfp4": f"q{bits}kmx4"} for bits in (16, 8))  # precisions by queries


def has_kernel(op: str, dsl: str, precision: str) -> bool:
    return bool(default_registry().select(op, dsl, "sm90", precision))


each_indexer = pytest.mark.parametrize(
    ("dsl", "name"),
    sorted(
        (cell.dsl, INDEXERS[cell.precision])
        for cell in default_registry().of("decode_score")
        if cell.target == "sm90" and cell.precision in INDEXERS
    ),
)


def index_keys(given: Drawn, name: str, paged: bool, dim: int) -> tuple[Tensor, QuantizedTensor]:
    """Queries of 4 index heads and keys where those of attention are; SGLang's pages of nvfp4."""
    generator = torch.Generator(DEVICE).manual_seed(5)
    rows = (given.k.shape[0], given.k.shape[2]) if paged else given.k.shape[:1]
    keys = torch.randn(*rows, dim, generator=generator, device=DEVICE)
    idx_q = torch.randn(len(given.q), 4, dim, generator=generator, device=DEVICE).bfloat16()
    if name == "mxfp4":
        return idx_q, quantize_mxfp4(keys)
    if paged:
        return idx_q, quantize_index_pages(keys, global_scale=torch.tensor(0.02, device=DEVICE))[1]
    return idx_q, quantize_nvfp4(keys)


@each_indexer
@pytest.mark.parametrize("layout", ["flat", "linear"])
@pytest.mark.parametrize(("dim", "block"), [(128, 128), (64, 64)])
def test_scores_are_those_of_what_the_codes_stand_for(dsl: str, name: str, layout: str, dim: int, block: int) -> None:
    """Products of BF16 queries with codes times scales are exact in float32 but for the order of their sums."""
    given = Drawn("sparse_decode", "nvfp4", layout, dim=dim, block=block)
    idx_q, idx_k = index_keys(given, name, layout != "flat", dim)
    found = ops.decode_score(idx_q, idx_k, backend=dsl, **given.where)
    wanted = reference.index_score(idx_q.float(), idx_k.dequantize(), num_blocks=found.shape[2], **given.where)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
    assert torch.equal(ops.decode_score(idx_q, idx_k, backend=dsl, **given.where), found)
    if has_kernel("index_score", dsl, OF_BF16[name]):
        # Not bit for bit: the two add up in orders of their own.
        torch.testing.assert_close(
            ops.index_score(idx_q, idx_k, backend=dsl, **given.where), found, rtol=1e-4, atol=1e-3
        )
    rounded, half = idx_q.to(torch.float8_e4m3fn), torch.full((), 0.5, device=DEVICE)
    wanted = reference.index_score(rounded.float(), idx_k.dequantize(), num_blocks=found.shape[2], **given.where)
    scorers = (("decode_score", OF_E4M3[name]), ("index_score", OF_BF16[name]))
    for op in (op for op, precision in scorers if has_kernel(op, dsl, precision)):
        of_rounded = getattr(ops, op)(rounded, idx_k, q_scale=half, backend=dsl, **given.where)
        torch.testing.assert_close(of_rounded, wanted / 2, rtol=1e-4, atol=1e-3)
    # A group that is NaN takes its key out; a block of such keys has the score of none.
    scale = idx_k.scale.view(torch.uint8)
    places = given.where["page_table"][0, :2].long() if layout != "flat" else slice(0, block)
    scale[places] = 0x7F if name == "nvfp4" else 0xFF
    hidden = ops.decode_score(idx_q, idx_k, backend=dsl, **given.where)
    first = given.request == 0
    assert (hidden[:, first, 0] == -torch.inf).all() and torch.equal(hidden[:, ~first], found[:, ~first])


@each_indexer
@pytest.mark.parametrize("layout", ["flat", "linear"])
@pytest.mark.parametrize("heads_per_group", [1, 2, 4])
def test_selections_are_those_of_its_scores(dsl: str, name: str, layout: str, heads_per_group: int) -> None:
    """Kernels add products up in orders of their own, so that a few blocks may change places."""
    if not has_kernel("select_blocks", dsl, OF_BF16[name]):
        pytest.skip(f"select_blocks has no kernel of {name} in {dsl}")
    given = Drawn("sparse_decode", "nvfp4", layout)
    idx_q, idx_k = index_keys(given, name, layout != "flat", 128)
    where = {"num_kv_heads": 4 // heads_per_group, **given.where}
    found = ops.select_blocks(idx_q, idx_k, TOPK, backend=dsl, **where)
    scores = ops.decode_score(idx_q, idx_k, backend=dsl, **given.where)
    of_scores = {each: value for each, value in where.items() if each != "page_table"}
    assert (found == reference.topk_select(scores, TOPK, **of_scores)).float().mean() > 0.999
    # e4m3 queries, with powers of two as scales, which products of bfloat16 hold.
    rounded = idx_q.to(torch.float8_e4m3fn)
    scale = torch.tensor([2.0, 1.0, 0.5, 4.0], device=DEVICE).expand(len(rounded), 4)
    found = ops.select_blocks(rounded, idx_k, TOPK, q_scale=scale, backend=dsl, **where)
    scaled = (rounded.float() * scale[..., None]).to(torch.bfloat16)
    scores = ops.decode_score(scaled, idx_k, backend=dsl, **given.where)
    assert (found == reference.topk_select(scores, TOPK, **of_scores)).float().mean() > 0.999


@each_indexer
@pytest.mark.parametrize("kv", ["nvfp4", "mxfp4"])
def test_a_step_of_four_bits_throughout(dsl: str, name: str, kv: str) -> None:
    given = Drawn("sparse_decode", kv, "interleaved")
    idx_q, idx_k = index_keys(given, name, True, 128)
    ids = torch.full((HEADS, len(given.q), TOPK), 99, dtype=torch.int32, device=DEVICE)
    out, lse = ops.msa_decode(
        given.q, given.k, given.v, idx_q, idx_k, TOPK, block_indices=ids, return_lse=True, backend=dsl, **given.where
    )
    given.ids = ids
    given.check((out, lse))
    scores = reference.index_score(idx_q.float(), idx_k.dequantize(), **given.where)
    chosen = reference.topk_select(scores, TOPK, num_kv_heads=HEADS, **{
        n: v for n, v in given.where.items() if n != "page_table"})  # fmt: skip
    assert (ids == chosen).float().mean() > 0.99
