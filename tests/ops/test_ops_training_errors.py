"""Wrong arguments of the differentiable operators: every error names the argument, what came and what is wanted."""

from __future__ import annotations

import re

import pytest
import torch
from ops import calls
from ops.training_calls import OPERATORS, call

from msa_tiles import ops


def fails(op, change, message, error=ValueError):
    arguments = call(op)
    arguments |= change(arguments) if callable(change) else change
    with pytest.raises(error, match=re.escape(message)):
        OPERATORS[op](**arguments)


@pytest.mark.parametrize("op", OPERATORS)
def test_dtypes_and_devices(op):
    halved = call(op)
    halved = {n: v.half() for n, v in halved.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    fails(op, halved, "got dtype torch.float16; wanted torch.bfloat16, torch.float32 or torch.float64", TypeError)
    fails(op, {"q": [[1.0]]}, "q: got list; wanted a tensor [T, Hq, D]", TypeError)
    fails(op, lambda a: {"k": a["k"].double()}, "k: got dtype torch.float64; wanted torch.float32 like q", TypeError)
    fails(op, lambda a: {"k": a["k"].to("meta")}, "k: got device meta; wanted cpu like q")
    fails(op, lambda a: {"k": a["k"][..., :4]}, "k: got head dim 4; wanted 8 like q")
    fails(op, lambda a: {"q": a["q"][:, :3]}, "q: got 3 heads; wanted a multiple of the 2 KV heads of k")
    fails(
        op,
        {"cu_seqlens_q": torch.tensor([0, 23])},
        "cu_seqlens_q: got dtype torch.int64; wanted torch.int32",
        TypeError,
    )
    fails(op, {"cu_seqlens_k": None}, "cu_seqlens_k: got None; wanted int32 [B + 1] for the flat keys of 3 requests")
    fails(op, {"max_seqlen_k": -1}, "max_seqlen_k: got -1; wanted at least 0")
    fails(op, {"softmax_scale": "1"}, "softmax_scale: got str; wanted a number or None", TypeError)
    fails(op, {"deterministic": 1}, "deterministic: got int; wanted True or False", TypeError)
    fails(op, {"check": True, "max_seqlen_q": 3}, "max_seqlen_q: got 3; wanted at least the longest request, 14")


def test_backend():
    for op in OPERATORS:
        known = "'auto', 'fa4', 'torch', 'reference'" if op == "dense_attention" else "'auto', 'tilelang', 'cutedsl'"
        fails(op, {"backend": "cuda"}, f"backend: got 'cuda'; wanted one of {known}")
    fails("dense_attention", {"backend": "fa4"}, "backend: got 'fa4' for tensors on cpu; wanted 'auto' or 'reference'")
    fails(
        "index_kl", {"backend": "tilelang"}, "backend: got 'tilelang' for tensors on cpu; wanted 'auto' or 'reference'"
    )


def test_the_index_branch():
    op = "index_kl"
    fails(op, lambda a: {"idx_q": a["idx_q"][1:]}, "idx_q: got 22 tokens; wanted 23 like q")
    message = "idx_q: got 4 index heads; wanted the 2 KV heads of k, one for each"
    fails(op, lambda a: {"idx_q": a["idx_q"].repeat(1, 2, 1)}, message)
    fails(op, lambda a: {"idx_q": a["idx_q"][..., :0]}, "idx_q: got index dim 0; wanted at least 1")
    message = "idx_k: got shape [22, 4]; wanted [23, 4]: the tokens of k, the index dim of idx_q"
    fails(op, lambda a: {"idx_k": a["idx_k"][1:]}, message)
    fails(op, lambda a: {"idx_k": a["idx_k"][:, None]}, "idx_k: got shape [23, 1, 4]; wanted 2 dimensions [Tk, Di]")
    message = "idx_k: got stride 2 on the last dimension; wanted stride 1"
    fails(op, lambda a: {"idx_k": a["idx_k"].repeat_interleave(2, 1)[:, ::2]}, message)
    fails(op, lambda a: {"lse": a["lse"].double()}, "lse: got dtype torch.float64; wanted torch.float32", TypeError)
    fails(op, lambda a: {"lse": a["lse"].T}, "lse: got shape [4, 23]; wanted [T, Hq] = [23, 4]")
    message = "token_weights: got shape [4]; wanted [T] = [23]"
    fails(op, {"token_weights": torch.ones(4)}, message)
    message = "token_weights: got dtype torch.int64; wanted torch.float32"
    fails(op, {"token_weights": torch.ones(23).long()}, message, TypeError)
    message = "token_weights: got strides [2]; wanted a contiguous tensor"
    fails(op, {"token_weights": torch.ones(46)[::2]}, message)
    fails(op, {"index_scale": "1"}, "index_scale: got str; wanted a number or None", TypeError)
    message = "page_table: got a tensor; wanted None: the indexer is trained on flat keys"
    fails(op, {"page_table": torch.zeros(3, 1).int()}, message)


def test_the_whole():
    op = "msa_attention"
    fails(op, lambda a: {"idx_q": a["idx_q"][1:]}, "idx_q: got 22 tokens; wanted 23 like q")
    # Selection would count positions from other lengths than attention.
    whole = {"cu_seqlens_q": None, "cu_seqlens_k": None}
    message = "idx_k: got shape [22, 4]; wanted the tokens of k"
    fails(op, lambda a: {**whole, "idx_k": a["idx_k"][1:]}, message)
    fails(op, {"idx_k": [[1.0]]}, "idx_k: got list; wanted a tensor [Tk, Di]", TypeError)
    fails(op, {"index_scale": "1"}, "index_scale: got str; wanted a number or None", TypeError)
    fails(op, {"token_weights": torch.ones(4)}, "token_weights: got shape [4]; wanted [T] = [23]")
    message = "idx_q: got dtype torch.bfloat16; wanted torch.float32 like q"
    fails(op, lambda a: {name: a[name].bfloat16() for name in ("idx_q", "idx_k")}, message, TypeError)
    many = {"return_kl": True}
    message = "idx_q: got 4 index heads; wanted the 2 KV heads of k, one for each"
    fails(op, lambda a: {"idx_q": a["idx_q"].repeat(1, 2, 1), **many}, message)
    arguments = call(op)
    arguments["idx_q"] = arguments["idx_q"].repeat(1, 2, 1)
    ops.msa_attention(**arguments)  # selection and attention take several index heads for each KV head
    fails(op, {"topk": 0}, "topk: got 0; wanted at least 1")
    fails(op, {"workspace": torch.empty(3).byte()}, "workspace: got Tensor; wanted an integer of at least 1", TypeError)
    for name in ("return_lse", "return_kl", "return_block_indices"):
        fails(op, {name: 1}, f"{name}: got int; wanted True or False", TypeError)


def test_the_backward():
    op = "sparse_attention_backward"
    for name in ("dout", "out"):
        fails(op, lambda a, name=name: {name: a[name][1:]}, f"{name}: got shape [22, 4, 8]; wanted [23, 4, 8]")
        message = f"{name}: got dtype torch.bfloat16; wanted torch.float32 like q"
        fails(op, lambda a, name=name: {name: a[name].bfloat16()}, message, TypeError)
    for name in ("lse", "dlse"):
        fails(op, {name: torch.zeros(4, 23)}, f"{name}: got shape [4, 23]; wanted [T, Hq] = [23, 4]")
        fails(op, {name: 1.0}, f"{name}: got float; wanted a tensor [T, Hq]", TypeError)


@pytest.mark.parametrize("op", ["index_kl", "sparse_attention_backward"])
def test_selections_and_schedules(op):
    fails(op, {"block_size": 0}, "block_size: got 0; wanted at least 1")
    message = "block_indices: got shape [2, 22, 2]; wanted [Hkv, T, k] = [2, 23, k]"
    fails(op, lambda a: {"block_indices": a["block_indices"][:, 1:]}, message)
    fails(op, {"workspace": 0}, "workspace: got 0; wanted at least 1")
    fails(op, {"schedule": 3}, "schedule: got int; wanted a Schedule of build_schedule, or None", TypeError)

    def other_schedule(arguments):
        where = {name: arguments[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
        return {"schedule": ops.build_schedule(arguments["block_indices"], block_size=2, **where)}

    fails(op, other_schedule, "schedule: got one for 2 KV heads, 23 queries, topk 2, block_size 2; wanted")

    def schedule_without_keys(arguments):
        """The last 9 queries alone on all keys of one sequence."""
        names = ("dout", "q", "out", "lse", "dlse", "idx_q")
        rows = {name: arguments[name][-9:] for name in names if arguments.get(name) is not None}
        rows |= {"cu_seqlens_q": None, "cu_seqlens_k": None, "block_indices": arguments["block_indices"][:, -9:]}
        made = ops.build_schedule(rows["block_indices"], block_size=arguments["block_size"])
        return {**rows, "schedule": made}

    message = "schedule: got one made without key lengths, for as many keys as queries (9); wanted one made with"
    fails(op, schedule_without_keys, message)
    if op == "index_kl":
        message = "schedule: got a schedule without block_indices; wanted None: the whole prefix needs none"
        fails(op, lambda a: {**other_schedule(a), "block_indices": None}, message)
    message = "block_indices: got id 9 at [0, 0, 0]; wanted -1 or a block of the request, 0 to 2"
    fails(op, lambda a: {"block_indices": torch.full_like(a["block_indices"], 9), "check": True}, message)


@pytest.mark.parametrize("op", ["index_score", "decode_score", "sparse_decode", "msa_decode", "combine"])
def test_what_has_no_gradient_says_what_has(op):
    arguments = calls.call(op)
    for value in arguments.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_()
    found = calls.OPERATORS[op](**arguments)
    message = (
        f"msa_tiles::{op} is not differentiable; sparse_attention, dense_attention, index_kl and msa_attention are"
    )
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        (found[0] if isinstance(found, tuple) else found).sum().backward()
