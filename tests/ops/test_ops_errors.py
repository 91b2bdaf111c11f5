"""Wrong arguments: every error names the argument, what came and what is wanted."""

from __future__ import annotations

import re

import pytest
import torch
from ops.calls import (
    ATTENTION,
    BLOCK,
    EVERY_OPERATOR,
    OPERATORS,
    RANKERS,
    SCORERS,
    WITH_KEYS,
    WITH_LENGTHS,
    WITH_OFFSETS,
    call,
    paged,
)

from msa_tiles import ops


def fails(op, change, message, error=ValueError, base=call):
    arguments = base(op)
    arguments |= change(arguments) if callable(change) else change
    with pytest.raises(error, match=re.escape(message)):
        OPERATORS[op](**arguments)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("op", "name", "dims"),
    [
        *((op, "idx_q", "[T, Hi, Di]") for op in (*SCORERS, "select_blocks", "msa_decode")),
        *((op, "idx_k", "[Tk, Di]") for op in (*SCORERS, "select_blocks", "msa_decode")),
        *((op, "score", "[Hi, T, NB]") for op in RANKERS),
        *((op, "q", "[T, Hq, D]") for op in (*ATTENTION, "msa_decode")),
        *((op, name, "[Tk, Hkv, D]") for op in (*ATTENTION, "msa_decode") for name in ("k", "v")),
        ("combine", "partial_out", "[S, T, Hq, D]"),
    ],
)
def test_float_tensors(op, name, dims):
    rank = dims.count(",") + 1
    fails(op, {name: [[1.0]]}, f"{name}: got list; wanted a tensor {dims}", TypeError)
    fails(op, {name: torch.zeros(3)}, f"{name}: got shape [3]; wanted {rank} dimensions {dims}")
    wanted = "torch.float32 like "
    refused = [torch.float16, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2]
    if name == "idx_q":
        wanted = "torch.bfloat16, torch.float32, torch.float64 or torch.float8_e4m3fn"
        refused.remove(torch.float8_e4m3fn)
    elif name == "q":
        # Quantised, it wants a scale; keys and values like it.
        wanted = "torch.bfloat16, torch.float32, torch.float64 or torch.float8_e4m3fn"
        refused.remove(torch.float8_e4m3fn)
    elif name == "k":
        refused.remove(torch.float8_e4m3fn)
    elif name in ("score", "partial_out"):
        wanted = "torch.bfloat16, torch.float32 or torch.float64"
    for dtype in refused:
        message = f"{name}: got dtype {dtype}; wanted {wanted}"
        fails(op, lambda a, dtype=dtype: {name: a[name].to(dtype)}, message, TypeError)
    spread = f"{name}: got stride 2 on the last dimension; wanted stride 1 (.contiguous() makes one)"
    fails(op, lambda a: {name: a[name].repeat_interleave(2, -1)[..., ::2]}, spread)
    if "like" in wanted:
        fails(op, lambda a: {name: a[name].to("meta")}, f"{name}: got device meta; wanted cpu like ")


def test_keys_that_lie_otherwise_than_the_call_says():
    """Pages without a page table, and flat keys with one."""
    for op in (*ATTENTION, "msa_decode"):
        message = "k: got shape [12, 2, 4, 16]; wanted 3 dimensions [Tk, Hkv, D]; keys in pages come with page_table"
        fails(op, lambda a, op=op: {"k": paged(op)["k"]}, message)
        message = "got shape [40, 2, 16]; wanted 4 dimensions [pages, Hkv, page, D]; flat keys come without page_table"
        fails(op, lambda a, op=op: {"k": call(op)["k"]}, f"k: {message}", base=paged)
        fails(op, lambda a, op=op: {"v": call(op)["v"]}, f"v: {message}", base=paged)
    for op in (*SCORERS, "select_blocks", "msa_decode"):
        message = "idx_k: got shape [12, 4, 16]; wanted 2 dimensions [Tk, Di]; keys in pages come with page_table"
        fails(op, lambda a, op=op: {"idx_k": paged(op)["idx_k"]}, message)
        message = "wanted 3 dimensions [pages, page, Di]; flat keys come without page_table"
        fails(op, lambda a, op=op: {"idx_k": call(op)["idx_k"]}, f"idx_k: got shape [40, 16]; {message}", base=paged)
    flat = torch.zeros(8, 2, 16).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"k: got shape .*; flat keys come without page_table"):
        ops.dequantize_kv(flat, flat, page_table=torch.zeros(1, 1, dtype=torch.int32))


@pytest.mark.parametrize("op", [*ATTENTION, "msa_decode"])
def test_pages_token_by_token_are_told_as_such(op):
    def turned(arguments):
        return {"q": arguments["q"][:, :2]} | {name: arguments[name].transpose(1, 2) for name in ("k", "v")}

    wanted = "[pages, Hkv, page, D] with Hkv a divisor of the 2 heads of q"
    message = (
        f"k: got shape [12, 4, 2, 16]; wanted {wanted}; pages that lie token by token come as views, k.transpose(1, 2)"
    )
    fails(op, turned, message, base=paged)


def test_half_precision_is_refused_by_every_operator():
    for op in EVERY_OPERATOR:
        if op != "build_schedule":
            arguments = call(op)
            halved = {
                n: v.half() for n, v in arguments.items() if isinstance(v, torch.Tensor) and v.is_floating_point()
            }
            fails(op, halved, "got dtype torch.float16; wanted torch.bfloat16, torch.float32", TypeError)


@pytest.mark.parametrize("op", ["build_schedule", *ATTENTION])
def test_block_indices(op):
    name = "block_indices"
    fails(op, {name: [[1]]}, f"{name}: got list; wanted a tensor [Hkv, T, k]", TypeError)
    fails(op, lambda a: {name: a[name].long()}, f"{name}: got dtype torch.int64; wanted torch.int32", TypeError)
    fails(op, lambda a: {name: a[name][0]}, f"{name}: got shape [11, 3]; wanted 3 dimensions [Hkv, T, k]")
    if op in ATTENTION:
        fails(op, lambda a: {name: a[name][:1]}, f"{name}: got shape [1, 11, 3]; wanted [Hkv, T, k] = [2, 11, k]")
        fails(op, lambda a: {name: a[name][:, :9]}, f"{name}: got shape [2, 9, 3]; wanted [Hkv, T, k] = [2, 11, k]")
        fails(op, lambda a: {name: a[name].to("meta")}, f"{name}: got device meta; wanted cpu like q")


def test_shapes_that_must_agree():
    for op in (*SCORERS, "select_blocks", "msa_decode"):
        fails(op, lambda a: {"idx_k": a["idx_k"][:, :8]}, "idx_k: got index dim 8; wanted 16 like idx_q")
    for op in (*ATTENTION, "msa_decode"):
        fails(op, lambda a: {"k": a["k"][..., :8]}, "k: got head dim 8; wanted 16 like q")
        fails(op, lambda a: {"v": a["v"][..., :8]}, "v: got head dim 8; wanted 16 like q")
        fails(op, lambda a: {"v": a["v"][1:]}, "v: got shape [39, 2, 16]; wanted [40, 2, 16] like k")
        fails(op, lambda a: {"q": a["q"][:, :3]}, "q: got 3 heads; wanted a multiple of the 2 KV heads of k")
        no_heads = {"k": torch.zeros(40, 0, 16), "v": torch.zeros(40, 0, 16)}
        fails(op, no_heads, "q: got 4 heads; wanted a multiple of the 0 KV heads of k")
    message = "partial_lse: got shape [3, 5, 3]; wanted [3, 5, 4] like partial_out"
    fails("combine", lambda a: {"partial_lse": a["partial_lse"][..., :3]}, message)
    message = "partial_lse: got dtype torch.float64; wanted torch.float32"
    fails("combine", lambda a: {"partial_lse": a["partial_lse"].double()}, message, TypeError)
    fails("combine", {"partial_lse": 1.0}, "partial_lse: got float; wanted a tensor [S, T, Hq]", TypeError)
    message = "partial_lse: got device meta; wanted cpu like partial_out"
    fails("combine", lambda a: {"partial_lse": a["partial_lse"].to("meta")}, message)


def test_queries_and_keys_of_the_indexer_must_fit_those_of_attention():
    op = "msa_decode"
    index = {"idx_q": torch.zeros(11, 4, 16).bfloat16(), "idx_k": torch.zeros(40, 16).bfloat16()}
    fails(op, index, "idx_q: got dtype torch.bfloat16; wanted torch.float32 like q", TypeError)
    fails(op, {"idx_q": torch.zeros(12, 4, 16)}, "idx_q: got 12 tokens; wanted 11 like q")
    fails(op, lambda a: {"idx_k": a["idx_k"][1:]}, "idx_k: got shape [39, 16]; wanted the tokens of k")
    wanted = "wanted the pages and page size of k"
    fails(op, lambda a: {"idx_k": a["idx_k"][1:]}, f"idx_k: got shape [11, 4, 16]; {wanted}", base=paged)
    fails(op, {"idx_k": torch.zeros(12, 8, 16)}, f"idx_k: got shape [12, 8, 16]; {wanted}", base=paged)
    sentence = "idx_q: got 3 index heads; wanted a multiple of the 2 KV heads of k"
    fails(op, lambda a: {"idx_q": a["idx_q"][:, :3]}, sentence)
    fails(op, lambda a: {"idx_q": a["idx_q"][:, :3]}, sentence, base=paged)
    given = {name: torch.zeros(5, 8, 16) for name in ("q", "k", "v")} | {"idx_k": torch.zeros(5, 16)}
    given["k"] = given["v"] = torch.zeros(5, 4, 16)
    with pytest.raises(ValueError, match="idx_q: got 2 index heads; wanted a multiple of the 4 KV heads of k"):
        ops.msa_attention(**given, idx_q=torch.zeros(5, 2, 16), topk=2)


@pytest.mark.parametrize("op", WITH_LENGTHS)
def test_lengths(op):
    fails(op, {"cu_seqlens_q": [0, 11]}, "cu_seqlens_q: got list; wanted a tensor [B + 1]", TypeError)
    message = "cu_seqlens_q: got dtype torch.int64; wanted torch.int32"
    fails(op, lambda a: {"cu_seqlens_q": a["cu_seqlens_q"].long()}, message, TypeError)
    fails(op, {"cu_seqlens_q": torch.zeros(2, 2).int()}, "cu_seqlens_q: got shape [2, 2]; wanted 1 dimensions [B + 1]")
    fails(op, {"cu_seqlens_q": int32()}, "cu_seqlens_q: got shape [0]; wanted [B + 1], at least one element")
    spread = int32(0, 0, 5, 0, 5, 0, 11)[::2]
    fails(op, {"cu_seqlens_q": spread}, "cu_seqlens_q: got strides [2]; wanted a contiguous tensor")
    fails(op, {"cu_seqlens_q": int32(0, 11).to("meta")}, "cu_seqlens_q: got device meta; wanted cpu like ")
    fails(op, {"cu_seqlens_k": int32(0, 40)}, "cu_seqlens_k: got shape [2]; wanted [B + 1] = [4]")
    fails(op, {"seqused_k": int32(1, 2)}, "seqused_k: got shape [2]; wanted [B] = [3]")
    if op in WITH_OFFSETS:
        fails(op, {"k_offset": int32(1, 2)}, "k_offset: got shape [2]; wanted [B] = [3]")
    fails(op, {"q_positions": int32(1, 2)}, "q_positions: got shape [2]; wanted [T] = [11]")
    message = "q_positions: got dtype torch.int64; wanted torch.int32"
    fails(op, {"q_positions": torch.arange(11)}, message, TypeError)
    fails(op, {"seqused_k": int32(1, 0, 1, 0, 1)[::2]}, "seqused_k: got strides [2]; wanted a contiguous tensor")
    fails(op, {"max_seqlen_q": -1}, "max_seqlen_q: got -1; wanted at least 0")
    fails(op, {"max_seqlen_k": 2.0}, "max_seqlen_k: got float; wanted an integer of at least 0", TypeError)
    message = "cu_seqlens_q: got None beside cu_seqlens_k of 3 requests; wanted int32 [B + 1], "
    fails(op, {"cu_seqlens_q": None}, f"{message}where the queries of each request begin")


@pytest.mark.parametrize("op", WITH_KEYS)
def test_keys_of_several_requests(op):
    message = "cu_seqlens_k: got None; wanted int32 [B + 1] for the flat keys of 3 requests"
    fails(op, {"cu_seqlens_k": None}, message)


@pytest.mark.parametrize("op", WITH_KEYS)
def test_pages(op):
    fails(op, {"seqused_k": None}, "seqused_k: got None; wanted int32 [B] with page_table", base=paged)
    message = "cu_seqlens_k: got a tensor beside page_table; wanted None: seqused_k tells paged lengths"
    fails(op, {"cu_seqlens_k": int32(0, 17, 17, 40)}, message, base=paged)
    message = "page_table: got dtype torch.int64; wanted torch.int32"
    fails(op, lambda a: {"page_table": a["page_table"].long()}, message, TypeError, base=paged)
    message = "page_table: got shape [2, 6]; wanted [B, max_pages] = [3, max_pages]"
    fails(op, lambda a: {"page_table": a["page_table"][:2]}, message, base=paged)
    message = "page_table: got stride 2 on the last dimension; wanted stride 1"
    fails(op, lambda a: {"page_table": a["page_table"].repeat_interleave(2, 1)[:, ::2]}, message, base=paged)
    message = "page_table: got 6 pages of 4 tokens; wanted pages for max_seqlen_k = 25 tokens"
    fails(op, {"max_seqlen_k": 25}, message, base=paged)
    keys = "k" if op in ATTENTION else "idx_k"
    message = f"{keys}: got pages of 4 tokens; wanted a page size that divides block_size = 6"
    fails(op, {"block_size": 6}, message, base=paged)
    dims = "[pages, Hkv, page, D]" if op in ATTENTION else "[pages, page, Di]"
    rank = 4 if op in ATTENTION else 3
    fails(op, {keys: torch.zeros(4, 16)}, f"{keys}: got shape [4, 16]; wanted {rank} dimensions {dims}", base=paged)


@pytest.mark.parametrize("op", WITH_LENGTHS)
def test_block_size(op):
    fails(op, {"block_size": 0}, "block_size: got 0; wanted at least 1")
    fails(op, {"block_size": 8.0}, "block_size: got float; wanted an integer of at least 1", TypeError)
    fails(op, {"block_size": True}, "block_size: got bool; wanted an integer of at least 1", TypeError)


@pytest.mark.parametrize("op", [name for name in EVERY_OPERATOR if name != "build_schedule"])
def test_backend(op):
    fails(op, {"backend": "cuda"}, "backend: got 'cuda'; wanted one of 'auto', 'tilelang', 'cutedsl', 'reference'")
    message = "backend: got 'tilelang' for tensors on cpu; wanted 'auto' or 'reference', kernels need CUDA tensors"
    fails(op, {"backend": "tilelang"}, message)


@pytest.mark.parametrize("op", [*RANKERS, "select_blocks", "msa_decode"])
def test_selection_parameters(op):
    fails(op, {"topk": 0}, "topk: got 0; wanted at least 1")
    fails(op, {"topk": 1 << 40}, "topk: got 1099511627776; wanted at most 65536")
    fails(op, {"topk": 2.5}, "topk: got float; wanted an integer of at least 1", TypeError)
    fails(op, {"init_blocks": -1}, "init_blocks: got -1; wanted at least 0")
    fails(op, {"local_blocks": -2}, "local_blocks: got -2; wanted at least 0")
    if op == "msa_decode":
        return
    fails(op, {"num_kv_heads": 0}, "num_kv_heads: got 0; wanted at least 1")
    source = "score" if op in RANKERS else "idx_q"
    message = f"num_kv_heads: got 3; wanted a divisor of the 4 index heads of {source}"
    fails(op, {"num_kv_heads": 3}, message)
    fails(op, {"order": "up"}, "order: got 'up'; wanted one of 'ascending', 'score', 'local_last'")


def test_layouts():
    for op in SCORERS + RANKERS:
        fails(op, {"layout": "thd"}, "layout: got 'thd'; wanted one of 'head_major', 'token_major'")
    for op in RANKERS:
        fails(op, {"score": torch.zeros(3), "layout": "token_major"}, "wanted 3 dimensions [T, Hi, NB]")


@pytest.mark.parametrize("op", RANKERS)
def test_valid_blocks(op):
    fails(op, {"num_valid_blocks": -1}, "num_valid_blocks: got -1; wanted at least 0")
    fails(op, {"num_valid_blocks": 6}, "num_valid_blocks: got 6; wanted at most the 5 columns of score")
    message = "num_valid_blocks: got float; wanted an integer of at least 0"
    fails(op, {"num_valid_blocks": 1.5}, message, TypeError)
    message = "num_valid_blocks: got shape [3]; wanted [T] = [11]"
    fails(op, {"num_valid_blocks": int32(1, 2, 3)}, message)
    message = "num_valid_blocks: got dtype torch.int64; wanted torch.int32"
    fails(op, {"num_valid_blocks": torch.ones(11).long()}, message, TypeError)


@pytest.mark.parametrize(
    ("op", "name"),
    [(op, name) for op in (*SCORERS, "select_blocks") for name in ("q_scale", "k_scale")]
    + [(op, name) for op in ATTENTION for name in ("q_scale", "k_scale", "v_scale")],
)
def test_a_scale_is_never_ignored(op, name):
    message = f"{name}: got a Tensor; wanted None: bfloat16, float32 and float64 tensors have no scale"
    fails(op, {name: torch.ones(())}, message)


@pytest.mark.parametrize(
    ("op", "name", "dims", "shape", "dtype"),
    [
        *((op, "out", "[Hi, T, NB] = [4, 11, NB]", (4, 11, 5), torch.float32) for op in SCORERS),
        *(
            (
                op,
                "block_indices" if op == "msa_decode" else "out",
                "[Hkv, T, topk] = [2, 11, 3]",
                (2, 11, 3),
                torch.int32,
            )
            for op in (*RANKERS, "select_blocks", "msa_decode")
        ),
        *((op, "out", "[T, Hq, D] = [11, 4, 16]", (11, 4, 16), torch.float32) for op in (*ATTENTION, "msa_decode")),
        *((op, "lse", "[T, Hq] = [11, 4]", (11, 4), torch.float32) for op in (*ATTENTION, "msa_decode")),
        ("combine", "out", "[T, Hq, D] = [5, 4, 16]", (5, 4, 16), torch.float32),
        ("combine", "lse", "[T, Hq] = [5, 4]", (5, 4), torch.float32),
    ],
)
def test_buffers_of_the_caller(op, name, dims, shape, dtype):
    good = torch.zeros(shape, dtype=dtype)
    fails(op, {name: 3}, f"{name}: got int; wanted a tensor {dims.split(' = ')[0]}", TypeError)
    fails(op, {name: good.to(torch.int16)}, f"{name}: got dtype torch.int16; wanted {dtype}", TypeError)
    taller = torch.zeros(shape[0] + 1, *shape[1:], dtype=dtype)
    fails(op, {name: taller}, f"{name}: got shape {list(taller.shape)}; wanted {dims}")
    fails(op, {name: good.to("meta")}, f"{name}: got device meta; wanted cpu like ")
    spread = good.repeat_interleave(2, -1)[..., ::2]
    fails(op, {name: spread}, f"{name}: got stride 2 on the last dimension; wanted stride 1")
    repeated = good[:1].expand(shape)
    message = f"{name}: got strides {list(repeated.stride())}; wanted a buffer that holds every element once"
    fails(op, {name: repeated}, message)
    # Rows that run into each other.
    sizes = list(shape)
    folded = torch.zeros(good.numel(), dtype=dtype).as_strided(sizes, [*[max(sizes[-1] // 2, 1)] * (len(sizes) - 1), 1])
    message = f"{name}: got strides {list(folded.stride())}; wanted a buffer that holds every element once"
    fails(op, {name: folded}, message)


@pytest.mark.parametrize("op", SCORERS)
def test_width_of_a_score_buffer(op):
    narrow = torch.zeros(4, 11, 2)
    message = "out: got 2 columns; wanted at least 3, the blocks of 23 keys"
    fails(op, {"out": narrow, "max_seqlen_k": 23}, message)
    lone = {"idx_q": torch.zeros(2, 4, 16), "cu_seqlens_q": None, "cu_seqlens_k": None, "out": torch.zeros(4, 2, 4)}
    fails(op, lone, "out: got 4 columns; wanted at least 5, the blocks of 40 keys")
    message = "max_seqlen_k: got None with k_offset; wanted a bound of k_offset plus the keys of a request"
    fails(op, {"k_offset": int32(0, 0, 8)}, message)


@pytest.mark.parametrize("op", SCORERS)
def test_causal_is_a_boolean(op):
    for value, came in ((None, "NoneType"), (1, "int"), ("no", "str")):
        fails(op, {"causal": value}, f"causal: got {came}; wanted True or False", TypeError)


def test_sizes_of_zero_that_mean_nothing():
    for op in (*SCORERS, "select_blocks", "msa_decode"):
        fails(op, lambda a: {"idx_q": a["idx_q"][:, :0]}, "idx_q: got 0 index heads; wanted at least 1")
    for op in RANKERS:
        fails(op, lambda a: {"score": a["score"][:0]}, "score: got 0 index heads; wanted at least 1")
    flat = {"q": torch.zeros(11, 4, 0), "k": torch.zeros(40, 2, 0), "v": torch.zeros(40, 2, 0)}
    for op in (*ATTENTION, "msa_decode"):
        fails(op, flat, "q: got head dim 0; wanted at least 1")


@pytest.mark.parametrize("op", WITH_LENGTHS)
def test_the_reference_refuses_lengths_that_fall(op):
    """It reads them to the host anyway; kernels find out only with check=True."""
    fails(op, {"cu_seqlens_q": int32(0, 7, 5, 11)}, "cu_seqlens_q: got 5 after 7; wanted sorted values")
    fails(op, {"cu_seqlens_k": int32(0, 17, 16, 40)}, "cu_seqlens_k: got 16 after 17; wanted sorted values")


@pytest.mark.parametrize("op", [*ATTENTION, "msa_decode"])
def test_attention_parameters(op):
    fails(op, {"softmax_scale": "1"}, "softmax_scale: got str; wanted a number or None", TypeError)
    message = "softmax_scale: got Tensor; wanted a number or None"
    fails(op, {"softmax_scale": torch.ones(())}, message, TypeError)
    if op == "msa_decode":
        fails(op, {"workspace": 1 << 20}, "workspace: got int; wanted a tensor [bytes]", TypeError)
    else:
        fails(op, {"workspace": 0}, "workspace: got 0; wanted at least 1")
        fails(op, {"workspace": 1.5}, "workspace: got float; wanted an integer of at least 1", TypeError)
    message = "workspace: got dtype torch.float32; wanted torch.uint8"
    fails(op, {"workspace": torch.zeros(4)}, message, TypeError)
    bytes_ = torch.zeros(8, dtype=torch.uint8)
    fails(op, {"workspace": bytes_[::2]}, "workspace: got strides [2]; wanted a contiguous tensor")
    fails(op, {"workspace": bytes_.to("meta")}, "workspace: got device meta; wanted cpu like q")
    message = "workspace: got an address 3 bytes behind a multiple of 16; wanted a multiple of 16"
    fails(op, {"workspace": bytes_[3:]}, message)
    fails(op, {"workspace": bytes_[None]}, "workspace: got shape [1, 8]; wanted 1 dimensions [bytes]")


@pytest.mark.parametrize(("op", "name"), [("sparse_attention", "block_indices"), ("combine", "partial_lse")])
def test_sparse_tensors(op, name):
    message = f"{name}: got layout torch.sparse_coo; wanted torch.strided"
    fails(op, lambda a: {name: a[name].to_sparse()}, message, TypeError)


def test_schedules_of_another_call():
    message = "schedule: got tuple; wanted a Schedule of build_schedule, or None"
    fails("sparse_attention", {"schedule": (1, 2)}, message, TypeError)
    schedule = ops.build_schedule(torch.zeros(2, 11, 4, dtype=torch.int32), block_size=BLOCK)
    message = (
        "schedule: got one for 2 KV heads, 11 queries, topk 4, block_size 8; "
        "wanted 2 KV heads, 11 queries, topk 3, block_size 8"
    )
    fails("sparse_attention", {"schedule": schedule}, message)
    elsewhere = ops.build_schedule(torch.zeros(2, 11, 3, dtype=torch.int32, device="meta"), block_size=BLOCK)
    fails("sparse_attention", {"schedule": elsewhere}, "schedule: got device meta; wanted cpu like block_indices")


def test_decoding_takes_no_schedule():
    schedule = ops.build_schedule(**call("build_schedule"))
    message = "schedule: got a Schedule; wanted None: decoding walks block_indices themselves"
    fails("sparse_decode", {"schedule": schedule}, message)


def test_workspace_bytes():
    q, idx_q = torch.zeros(3, 4, 16), torch.zeros(3, 2, 16)

    def refused(message, error, *arguments, **options):
        with pytest.raises(error, match=re.escape(message)):
            ops.decode_workspace_bytes(*arguments, **options)

    refused("q: got list; wanted a tensor [T, Hq, D]", TypeError, [1], 4, 2)
    refused("q: got shape [3, 4]; wanted 3 dimensions [T, Hq, D]", ValueError, q[..., 0], 4, 2)
    refused("idx_q: got str; wanted a tensor [T, Hi, Di]", TypeError, q, 4, 2, idx_q="x")
    refused("topk: got 0; wanted at least 1", ValueError, q, 0, 2)
    refused("topk: got 65537; wanted at most 65536", ValueError, q, 65537, 2)
    refused("num_kv_heads: got 0; wanted at least 1", ValueError, q, 4, 0)
    refused("num_kv_heads: got 3; wanted a divisor of the 4 heads of q", ValueError, q, 4, 3)
    refused("max_seqlen_k: got -1; wanted at least 0", ValueError, q, 4, 2, max_seqlen_k=-1)
    refused("block_size: got 0; wanted at least 1", ValueError, q, 4, 2, block_size=0)
    assert ops.decode_workspace_bytes(q, 4, 2, idx_q=idx_q, max_seqlen_k=1000) == 0, "the reference needs none"
    assert ops.decode_workspace_bytes(q, 4, 2, device="cpu") == 0
    wanted = "wanted where the call will run, such as 'sm90', 'cuda' or 'cpu'"
    refused(f"device: got None for tensors on meta; {wanted}", ValueError, q.to("meta"), 4, 2)
    refused("device: got int; wanted a name, a torch.device or None", TypeError, q, 4, 2, device=0)
    refused("device sm91 is unknown", ValueError, q, 4, 2, device="sm91")
