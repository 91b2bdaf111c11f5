"""dequantize_kv against msa_tiles.quant.dequantize, row by row: every code and scale, pages, and what is no page."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from msa_tiles import ops, quant
from msa_tiles.quant import FP8, GROUPS, QuantizedTensor
from msa_tiles.verify.caches import bits

POISON = 7.0


def every_code() -> QuantizedTensor:
    """e4m3 [256, 2, 256]: every code under many scales."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 2, 1).view(FP8)
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(256, 2, generator=generator) * 2.0 ** torch.randint(-20, 20, (256, 2), generator=generator)
    return QuantizedTensor(codes, scale, "e4m3")


def every_pair(format: str, global_scale: Tensor | None) -> QuantizedTensor:
    """[256, 1, 64] of 4 bits: every code of two under every scale."""
    groups = GROUPS[format]
    data = torch.arange(256, dtype=torch.uint8).view(8, 1, 32).repeat(32, 1, 1)
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1, 1).expand(256, 1, 64 // groups.size)
    return QuantizedTensor(data, scale.contiguous().view(groups.dtype), format, "linear", global_scale)


KINDS = {
    "e4m3": every_code(),
    "nvfp4": every_pair("nvfp4", torch.tensor(0.37)),
    "nvfp4 without a global scale": every_pair("nvfp4", None),
    "mxfp4": every_pair("mxfp4", None),
}


def paged(flat: QuantizedTensor, page: int, table: Tensor, lengths: list[int], pages: int) -> QuantizedTensor:
    """The same rows in pages, request after request."""
    parts = []
    for part in (flat.data, flat.scale):
        plain = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
        fill = 0x7F if plain.dtype == torch.uint8 else torch.nan
        pool = torch.full((pages, page, *plain.shape[1:]), fill, dtype=plain.dtype)
        start = 0
        for request, length in enumerate(lengths):
            for token in range(length):
                pool[table[request, token // page], token % page] = plain[start + token]
            start += length
        parts.append(pool.transpose(1, 2).view(part.dtype))
    return dataclasses.replace(flat, data=parts[0], scale=parts[1])


@pytest.mark.parametrize("kind", KINDS)
def test_flat_rows_are_the_dequantised_ones(kind: str) -> None:
    stored = KINDS[kind]
    turned = dataclasses.replace(stored, data=stored.data.view(torch.uint8).flip(-1).view(stored.data.dtype))
    k, v = ops.dequantize_kv(stored, turned)
    assert k.dtype == v.dtype == torch.bfloat16 and k.is_contiguous()
    for got, of in ((k, stored), (v, turned)):
        assert torch.equal(bits(got), bits(of.dequantize(torch.bfloat16)))
    if kind == "e4m3":
        assert bool(k[:, :, 0x7F].isnan().all()) and int(k.isnan().sum()) == 2 * 2 * len(k)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [1, 4, 32])
def test_pages_are_gathered(kind: str, page: int) -> None:
    stored, lengths = KINDS[kind], [100, 0, 156]
    columns = 156 // page + 2
    pages = 3 * columns + 1
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(1))[: 3 * columns].view(3, columns)
    pool = paged(stored, page, table, lengths, pages)
    table = torch.where(torch.arange(columns) * page < torch.tensor(lengths)[:, None], table, -1).to(torch.int32)
    used = torch.tensor(lengths, dtype=torch.int32)
    span = columns * page
    out = torch.full((2, 3 * span, *stored.data.shape[1:-1], stored.shape[-1]), POISON, dtype=torch.bfloat16)
    pool_v = pool.with_layout("interleaved") if page % 4 == 0 and stored.format != "e4m3" else pool
    found = ops.dequantize_kv(pool, pool_v, page_table=table, seqused_k=used, k_out=out[0], v_out=out[1])
    wanted, start = stored.dequantize(torch.bfloat16), 0
    assert found[0].data_ptr() == out[0].data_ptr()
    for request, length in enumerate(lengths):
        for got in out:
            rows = got[request * span : (request + 1) * span]
            assert torch.equal(bits(rows[:length]), bits(wanted[start : start + length]))
            assert bool((rows[length:] == POISON).all())
        start += length


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_what_is_no_page_are_0(kind: str) -> None:
    stored = KINDS[kind]
    table = torch.tensor([[3, -1, 0], [64, torch.iinfo(torch.int32).max, 1]])
    safe = torch.tensor([[3, 2, 0], [5, 6, 1]])
    pool = paged(stored, 4, safe, [12, 12], 64)
    used = torch.tensor([12, 30], dtype=torch.int32)  # a length past the table ends with it
    k, _ = ops.dequantize_kv(pool, pool, page_table=table.to(torch.int32), seqused_k=used)
    wanted = stored.dequantize(torch.bfloat16)[:24]
    wanted[4:8] = 0
    wanted[12:20] = 0
    assert torch.equal(bits(k), bits(wanted))


def test_a_scale_of_every_kind() -> None:
    codes = torch.randn(5, 2, 16).to(FP8)
    of_tokens = torch.rand(5, 2) + 0.5
    for k_scale, v_scale in ((torch.tensor(0.3), torch.tensor([0.3, 5.0])), (torch.tensor([1.0, 2.0]), of_tokens)):
        k, v = ops.dequantize_kv(codes, codes, k_scale=k_scale, v_scale=v_scale)
        assert torch.equal(k, quant.dequantize(codes, k_scale, torch.bfloat16))
        assert torch.equal(v, quant.dequantize(codes, v_scale, torch.bfloat16))


def test_it_compiles_as_one_graph() -> None:
    pool, one = torch.randn(6, 2, 4, 16).to(FP8), torch.ones(())
    where = {"page_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), "k_scale": one, "v_scale": one}
    where["seqused_k"] = torch.tensor([8, 8], dtype=torch.int32)
    compiled = torch.compile(lambda keys: ops.dequantize_kv(keys, keys, **where), fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(pool), ops.dequantize_kv(pool, pool, **where)))


def test_nothing_to_write() -> None:
    one = torch.ones(())
    k, v = ops.dequantize_kv(torch.zeros(0, 2, 16).to(FP8), torch.zeros(0, 2, 16).to(FP8), k_scale=one, v_scale=one)
    assert k.shape == v.shape == (0, 2, 16)
    pool = torch.zeros(0, 2, 4, 16).to(FP8)
    where = {"page_table": torch.zeros(2, 1, dtype=torch.int32), "seqused_k": torch.tensor([4, 4], dtype=torch.int32)}
    k, _ = ops.dequantize_kv(pool, pool, k_scale=one, v_scale=one, **where)
    assert k.shape == (8, 2, 16) and not bool(k.any())


ONE, CODES = torch.ones(()), torch.zeros(8, 2, 16).to(FP8)
TABLE, USED = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
FOUR = quant.quantize_nvfp4(torch.zeros(8, 2, 16))


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"k": torch.zeros(8, 2, 16)}, TypeError, "k: got dtype torch.float32"),
        ({"k": CODES[0]}, ValueError, "k: got shape"),
        ({"v": CODES[:4]}, ValueError, "v: got shape"),
        ({"k_scale": None}, ValueError, "k_scale: got None"),
        ({"k": FOUR}, ValueError, "k_scale"),
        ({"k": FOUR, "k_scale": None}, TypeError, "v: got dtype"),
        ({"seqused_k": USED}, ValueError, "seqused_k: got a tensor"),
        ({"page_table": TABLE}, ValueError, "k: got shape"),
        ({"k": CODES[None], "v": CODES[None], "page_table": TABLE}, ValueError, "seqused_k: got None"),
        (
            {"k": CODES[None], "v": CODES[None], "page_table": TABLE, "seqused_k": USED[:1]},
            ValueError,
            "seqused_k: got shape",
        ),
        ({"k": CODES[:, :0], "v": CODES[:, :0]}, ValueError, "k: got shape"),
        ({"k_out": torch.zeros(8, 2, 16)}, TypeError, "k_out: got dtype"),
        ({"v_out": torch.zeros(7, 2, 16, dtype=torch.bfloat16)}, ValueError, "v_out: got shape"),
        ({"backend": "triton"}, ValueError, "backend"),
    ],
)
def test_errors_name_the_argument(change: dict[str, Any], error: type[Exception], sentence: str) -> None:
    given: dict[str, Any] = {"k": CODES, "v": CODES, "k_scale": ONE, "v_scale": ONE} | change
    with pytest.raises(error, match=sentence):
        ops.dequantize_kv(**given)
