"""Prefill over quantised keys and values through a copy in bfloat16: which calls, and what its kernels are handed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ops import kernel_stand_ins
from torch import Tensor

import msa_tiles
from msa_tiles import ops, quant, reference
from msa_tiles.call import attention as calls
from msa_tiles.call.where import Where
from msa_tiles.launch import attention, copied, lookup
from msa_tiles.quant import FP8, GROUPS, QuantizedTensor
from msa_tiles.runtime import evidence

kernels = kernel_stand_ins.kernels
BLOCK, DIM, KV_HEADS, HEADS, TOPK = 128, 128, 4, 64, 16
BYTES = 2 * 2 * KV_HEADS * DIM  # of a key in a copy
FORMATS = ("e4m3", *GROUPS)
MOST = {"e4m3": 8, "nvfp4": 16, "mxfp4": 16}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def stored(format: str, *shape: int) -> QuantizedTensor:
    """Keys or values of the M3 shape without memory."""
    if format == "e4m3":
        return QuantizedTensor(meta(*shape, DIM, dtype=FP8), meta(dtype=torch.float32), format)
    groups = GROUPS[format]
    scale = meta(*shape, DIM // groups.size, dtype=groups.dtype)
    return QuantizedTensor(meta(*shape, DIM // 2, dtype=torch.uint8), scale, format)


def told(format: str, queries: int, keys: int, *, topk: int = TOPK, page: int = 0, requests: int = 1, **further: Any):
    """What `explain` says of a call; the keys are those of every request where there are pages."""
    where: dict[str, Any] = {}
    shape = (keys, KV_HEADS)
    if page:
        where = {"page_table": meta(requests, keys // page, dtype=torch.int32)}
        where |= {"seqused_k": meta(requests, dtype=torch.int32)}
        where |= {"cu_seqlens_q": meta(requests + 1, dtype=torch.int32)}
        shape = (keys // page * requests, KV_HEADS, page)
    return msa_tiles.explain(
        ops.sparse_attention, meta(queries, HEADS, DIM), stored(format, *shape), stored(format, *shape),
        meta(KV_HEADS, queries, topk, dtype=torch.int32), **where, **further, device="sm90",
    )  # fmt: skip


def is_copied(answer: Any) -> bool:
    """Whether the call attends to a copy, which every kernel says that it launches."""
    launched = {kernel.op: kernel for kernel in answer.kernels if kernel.launches}
    assert answer.served and ("sparse_attention" in launched)
    wide = {launched[op].precision for op in ("sparse_attention", "shared_attention") if op in launched}
    assert wide == {"bf16"} or "bf16" not in wide
    assert ("dequantize_kv" in launched) == (wide == {"bf16"})
    return "dequantize_kv" in launched


@pytest.fixture(autouse=True)
def run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels have run on their GPU."""
    monkeypatch.setattr(evidence, "has_run", lambda cell, registry: True)


@pytest.fixture
def knob(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield lambda value: monkeypatch.setattr(attention, "COPY", value)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("page", [0, BLOCK, BLOCK // 4])
@pytest.mark.drawn(4)
def test_a_copy_is_made_of_so_many_keys_a_query(format: str, page: int) -> None:
    queries = 4096
    most = MOST[format] * queries
    assert {8: MOST["e4m3"], 4: MOST["nvfp4"]} == copied.KEYS_PER_QUERY
    assert is_copied(told(format, queries, most, page=page))
    assert not is_copied(told(format, queries, most + BLOCK, page=page))
    # Of pages every request has as many as the table.
    if page:
        assert not is_copied(told(format, queries, most // 2 + BLOCK, page=page, requests=2))
        assert is_copied(told(format, queries, 2 * most, page=page, max_seqlen_k=most))


def test_few_queries_and_few_selected_keys_read_the_storage() -> None:
    assert is_copied(told("nvfp4", copied.LEAST_QUERIES, 4096))
    assert not is_copied(told("nvfp4", copied.LEAST_QUERIES - 1, 4096))
    assert is_copied(told("e4m3", 4096, 8 * 1024, topk=4)) and not is_copied(told("e4m3", 4096, 8 * 1024 + 1, topk=4))


def test_a_copy_takes_no_more_than_the_workspace() -> None:
    keys = 8192
    reads = told("e4m3", keys, keys, workspace=keys * BYTES - 1)
    copies = told("e4m3", keys, keys, workspace=keys * BYTES)
    assert is_copied(copies) and not is_copied(reads)
    assert copies.workspace_bytes >= 2 * keys * BYTES
    assert copies.workspace_bytes - reads.workspace_bytes >= keys * BYTES - (1 << 20)
    # 1 GiB where the call does not say.
    assert is_copied(told("e4m3", 1 << 19, 1 << 19)) and not is_copied(told("e4m3", 1 << 19, (1 << 19) + BLOCK))
    given = meta(keys * BYTES, dtype=torch.uint8)
    assert is_copied(told("e4m3", keys, keys, workspace=given))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_depend_on_nothing_else_are_never_read_from_a_copy(format: str, knob: Any) -> None:
    for wanted in (None, True):
        knob(wanted)
        assert is_copied(told(format, 4096, 4096)) and not is_copied(told(format, 4096, 4096, batch_invariant=True))


def test_a_call_may_be_made_to(knob: Any) -> None:
    knob(False)
    assert not is_copied(told("e4m3", 4096, 4096))
    knob(True)
    assert is_copied(told("e4m3", 128, 1 << 17)) and not is_copied(told("e4m3", 128, 1 << 17, workspace=1 << 20))


def test_a_copy_is_told_first_and_has_a_grid() -> None:
    answer = told("mxfp4", 4096, 4096, page=64)
    ops_told = [kernel.op for kernel in answer.kernels]
    assert set(ops_told) == {
        "sparse_attention",
        "shared_attention",
        "split_selection",
        "build_schedule",
        "dequantize_kv",
    }
    [maker] = (kernel for kernel in answer.kernels if kernel.op == "dequantize_kv")
    assert maker.launches == 1 and maker.grid is not None and maker.grid[0] == KV_HEADS * 4096 // 64
    assert maker.precision == "q16kvmx4" and maker.variant["paged"] == 1
    assert all(
        kernel.variant["pages_per_block"] == 0 for kernel in answer.kernels if "pages_per_block" in kernel.variant
    )


def test_a_copy_that_no_kernel_has_made_yet_is_not_chosen(knob: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "has_run", lambda cell, registry: cell.op != "dequantize_kv")
    assert not is_copied(told("e4m3", 4096, 4096))
    knob(True)
    assert is_copied(told("e4m3", 4096, 4096))


def test_other_tensors_are_as_before() -> None:
    bf16 = {"k": meta(4096, KV_HEADS, DIM), "v": meta(4096, KV_HEADS, DIM)}
    answer = msa_tiles.explain(
        ops.sparse_attention, meta(4096, HEADS, DIM), **bf16, device="sm90",
        block_indices=meta(KV_HEADS, 4096, TOPK, dtype=torch.int32),
    )  # fmt: skip
    assert "dequantize_kv" not in {kernel.op for kernel in answer.kernels}


# What runs: 11 queries of three requests, a block is 8 keys.
SMALL = {"block_size": 8}
STARTS_Q, USED = torch.tensor([0, 5, 5, 11], dtype=torch.int32), [17, 0, 23]


def keys_of(format: str, seed: int) -> QuantizedTensor:
    values = torch.randn(40, 2, 32, generator=torch.Generator().manual_seed(seed))
    if format == "e4m3":
        return quant.quantize_fp8(values, per="token_head" if seed else "head")
    return quant.quantize_nvfp4(values, torch.tensor(0.3)) if format == "nvfp4" else quant.quantize_mxfp4(values)


def in_pages(flat: QuantizedTensor, page: int, table: Tensor, pages: int) -> QuantizedTensor:
    """The requests' rows in pages; what no request uses is NaN."""
    if flat.format == "e4m3" and flat.scale.dim() == 1:
        made = in_pages(dataclasses.replace(flat, scale=flat.scale.expand(flat.data.shape[:-1])), page, table, pages)
        return dataclasses.replace(made, scale=flat.scale)
    parts = []
    for part in (flat.data, flat.scale):
        plain = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
        pool = torch.full((pages, page, *plain.shape[1:]), 0x7F if plain.dtype == torch.uint8 else torch.nan)
        pool = pool.to(plain.dtype)
        begin = 0
        for request, length in enumerate(USED):
            for token in range(length):
                pool[table[request, token // page], token % page] = plain[begin + token]
            begin += length
        parts.append(pool.transpose(1, 2).view(part.dtype))
    return dataclasses.replace(flat, data=parts[0], scale=parts[1])


@pytest.fixture
def copies(kernels: Any, knob: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls attend to copies: the kernel that makes them is the reference over what it is handed; what that was."""
    handed: list[Any] = []

    def make(*arguments: Any) -> None:
        handed.append(arguments)
        *keys, table, lengths, k_out, v_out = arguments
        half = len(keys) // 2
        if table.shape == (1, 1):  # flat keys
            table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([len(k_out)], dtype=torch.int32)
        for (values, scale, *outer), out in ((keys[:half], k_out), (keys[half:], v_out)):
            out.fill_(torch.nan)
            given = _scale_of(values, scale)
            reference.dequantize_kv(
                values, values, out, out.clone(), page_table=table, seqused_k=lengths, k_scale=given, v_scale=given,
                k_global_scale=None, v_global_scale=None,
            )  # fmt: skip
            if outer:
                wide = quant.dequantize(values.transpose(1, 2).flatten(0, 1), given.transpose(1, 2).flatten(0, 1))
                assert wide.shape[1:] == out.shape[1:]
                out.mul_(outer[0][:, None].bfloat16())

    knob(True)
    monkeypatch.setattr(lookup, "part_serves", lambda facts, backend, op, *_, **__: op == "dequantize_kv")
    monkeypatch.setattr(lookup, "serves", lambda facts, backend: True)
    monkeypatch.setattr(lookup, "part_kernel", lambda facts, backend, op, *_: make)
    return handed


def _scale_of(values: Tensor, scale: Tensor) -> Tensor:
    """Scales as the reference takes them."""
    if values.dtype != torch.uint8:
        return scale
    dtype = FP8 if values.shape[-1] * 2 // scale.shape[-1] == GROUPS["nvfp4"].size else torch.float8_e8m0fnu
    return scale.flatten(2, 3).contiguous().view(dtype)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("page", [0, 8, 4])
@pytest.mark.parametrize("bounded", [False, True])
def test_what_the_kernels_behind_a_copy_get(
    format: str, page: int, bounded: bool, copies: list[Any], kernels: Any
) -> None:
    k, v = (keys_of(format, seed) for seed in range(2))
    if format == "nvfp4":  # the stand-in rounds twice, where the scale is no power of two
        k, v = (dataclasses.replace(part, global_scale=torch.tensor(0.25)) for part in (k, v))
    q = torch.randn(11, 4, 32, generator=torch.Generator().manual_seed(5)).bfloat16()
    ids = torch.tensor([[0, 2, 1]], dtype=torch.int32).expand(2, 11, 3).contiguous()
    starts = torch.tensor([0, 17, 17, 40], dtype=torch.int32)
    where: dict[str, Any] = {"cu_seqlens_q": STARTS_Q, "cu_seqlens_k": starts}
    flat = ops.sparse_attention(
        q, *(part.dequantize(torch.bfloat16) for part in (k, v)), ids, **where, **SMALL, return_lse=True,
        backend="reference",
    )  # fmt: skip
    if page:
        columns = 24 // page + 2
        table = torch.randperm(3 * columns, generator=torch.Generator().manual_seed(6)).view(3, columns)
        k, v = (in_pages(part, page, table, 3 * columns + 1) for part in (k, v))
        where = {"cu_seqlens_q": STARTS_Q, "page_table": table.to(torch.int32)}
        where |= {"seqused_k": torch.tensor(USED, dtype=torch.int32)}
        where |= {"max_seqlen_k": 23} if bounded else {}
    out, lse = ops.sparse_attention(q, k, v, ids, **where, **SMALL, return_lse=True)
    [arguments] = copies
    facts = kernels.attention.seen[0]
    assert facts.precision == "bf16" and facts.variant["pages_per_block"] == 0 and "token_scales" not in facts.variant
    rows = 40 if not page else 3 * page * (-(-23 // page) if bounded else 24 // page + 2)
    assert arguments[-1].shape == (rows, 2, 32) and arguments[-1].transpose(0, 1).is_contiguous()
    assert torch.equal(lse, flat[1]) and torch.equal(out, flat[0])


@pytest.mark.parametrize("page", [0, 8])
def test_a_schedule_of_pages_is_read_with_them(page: int, copies: list[Any], kernels: Any) -> None:
    k, v = (keys_of("mxfp4", seed) for seed in range(2))
    q, ids = torch.randn(11, 4, 32).bfloat16(), torch.zeros(2, 11, 1, dtype=torch.int32)
    where: dict[str, Any] = {"cu_seqlens_q": STARTS_Q, "cu_seqlens_k": torch.tensor([0, 17, 17, 40], dtype=torch.int32)}
    if page:
        table = torch.arange(9).view(3, 3)
        k, v = (in_pages(part, page, table, 9) for part in (k, v))
        where = {"cu_seqlens_q": STARTS_Q, "page_table": table.to(torch.int32)}
        where |= {"seqused_k": torch.tensor(USED, dtype=torch.int32)}
    schedule = ops.build_schedule(ids, **where, **SMALL)
    options = {**where, **SMALL, "schedule": schedule, "workspace": 1 << 20}
    given = calls.operands_of(q, k, v, ids, Where(**where), None, None, None)
    call, _ = calls.validated(
        given, check=False, softmax_scale=None, deterministic=False, backend="auto", batch_invariant=False,
        **{name: options[name] for name in ("block_size", "schedule", "workspace")},
    )  # fmt: skip
    assert (copied.copied_call(call, True) is None) == bool(page)
    if not page:
        wanted = ops.sparse_attention(q, k, v, ids, **where, **SMALL, backend="reference")
        torch.testing.assert_close(ops.sparse_attention(q, k, v, ids, **options), wanted, rtol=0, atol=2.0**-6)
        assert len(copies) == 1
