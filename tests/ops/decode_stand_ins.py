"""Stand-ins for the decode kernels: they compute on the CPU from exactly what a launch hands to a generated kernel.

Arguments are bound to the parameter names of the generated files, so that an order other than theirs gives a wrong
answer or an error.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import types
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from msa_tiles import paths, quant, reference, runtime
from msa_tiles.call import backends
from msa_tiles.launch import decode

SMS = 4
LOG2_E = math.log2(math.e)


@functools.cache
def parameters(op: str, precision: str = "bf16") -> tuple[str, ...]:
    """The names of the generated kernel's arguments, in their order."""
    # The merge reads partial results, which are stored alike in every precision.
    stored = precision if op in ("decode_score", "sparse_decode") else "bf16"
    file = paths.generated_dir() / f"tilelang/sm90/{op}_{stored}.py"
    if not file.exists():
        # Where no kernel is generated yet: e4m3 keys and values are followed by their scales.
        names = (((name, f"{name}_scale") if name in ("k", "v") else (name,)) for name in parameters(op))
        return tuple(itertools.chain(*names))
    tree = ast.parse(file.read_text())
    (main,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "main")
    return tuple(argument.arg for argument in main.args.args)


def dequantized(variant: Mapping[str, int], given: Mapping[str, Any], name: str) -> torch.Tensor:
    """Keys or values as a kernel of e4m3 reads them, with every scale that it is given."""
    data, scale = given[name], given.get(f"{name}_scale")
    if scale is None:
        return data
    assert scale.dtype == torch.float32
    assert scale.shape == (data.shape[:-1] if variant["token_scales"] else data.shape[1:2])
    return quant.dequantize(data, scale)


def where_of(given: Mapping[str, Any], pages_per_block: int = 0) -> dict[str, Any]:
    """The reference's arguments, read from what a kernel is told as a decode kernel reads it."""
    where = {"cu_seqlens_q": given["cu_seqlens_q"], "cu_seqlens_k": given["cu_seqlens_k"]}
    if given["use_seqused"]:
        where["seqused_k"] = given["seqused_k"]
    if given["use_positions"]:
        where["q_positions"] = given["q_positions"]
    if pages_per_block:
        assert given["use_seqused"], "paged kernels read lengths from seqused_k"
        where |= {"cu_seqlens_k": None, "page_table": given["page_table"]}
    return where


def decode_score(variant: Mapping[str, int], **given: Any) -> None:
    """Writes the blocks that a request has, as the kernel does, and nothing else."""
    assert given["num_ctas"] == SMS * decode.SCORE_CTAS
    out, starts = given["out"], given["cu_seqlens_q"].tolist()
    where = where_of(given, variant["pages_per_block"])
    score = reference.index_score(
        given["idx_q"],
        given["idx_k"],
        block_size=variant["block_size"],
        causal=bool(given["causal"]),
        num_blocks=out.shape[2],
        q_scale=given["q_scale"] if given.get("use_q_scale") else None,
        k_scale=given["k_scale"]
        if variant.get("key_scales")
        else given["k_scale"][0]
        if given.get("use_k_scale")
        else None,
        **where,
    )
    lengths = given["seqused_k"] if given["use_seqused"] else given["cu_seqlens_k"].diff()
    for request, length in enumerate(lengths.tolist()):
        rows, blocks = slice(starts[request], starts[request + 1]), -(-length // variant["block_size"])
        out[:, rows, :blocks] = score[:, rows, :blocks]


def decode_topk(variant: Mapping[str, int], **given: Any) -> None:
    out, mode = given["out"], given["valid_mode"]
    where = where_of(given)
    out.copy_(
        reference.topk_select(
            given["score"],
            out.shape[2],
            num_kv_heads=out.shape[0],
            num_valid_blocks={0: None, 1: given["num_valid_scalar"], 2: given["num_valid"]}[mode],
            order=("ascending", "score", "local_last")[given["order"]],
            block_size=given["block_size"],
            init_blocks=given["init_blocks"],
            local_blocks=given["local_blocks"],
            **where,
        )
    )


def sparse_decode(variant: Mapping[str, int], **given: Any) -> None:
    """Every split attends to its share of the slots; with scores the ids are chosen from them first."""
    q, ids = given["q"], given["block_indices"]
    partial_out, partial_lse = given["partial_out"], given["partial_lse"]
    block_size, topk = variant["block_size"], ids.shape[2]
    where = where_of(given, variant["pages_per_block"])
    if variant["scored_blocks"]:
        assert given["score"].shape[2] == variant["scored_blocks"]
        forced = {"init_blocks": given["init_blocks"], "local_blocks": given["local_blocks"]}
        ranked = {name: value for name, value in where.items() if name != "page_table"}
        ids.copy_(
            reference.topk_select(
                given["score"], topk, num_kv_heads=ids.shape[0], block_size=block_size, **forced, **ranked
            )
        )
    share = -(-topk // len(partial_out))
    for split in range(len(partial_out)):
        mine = torch.full_like(ids, -1)
        mine[..., split * share : (split + 1) * share] = ids[..., split * share : (split + 1) * share]
        scale = given["scale_log2"] / LOG2_E
        k, v = (dequantized(variant, given, name) for name in ("k", "v"))
        partial_out[split], partial_lse[split] = reference.sparse_attention(
            q.to(k.dtype), k, v, mine, block_size=block_size, softmax_scale=scale, **where
        )


def combine(variant: Mapping[str, int], **given: Any) -> None:
    out, lse = reference.combine(given["partial_out"], given["partial_lse"])
    given["out"].copy_(out)
    given["lse"].copy_(lse)


STAND_INS = {
    "decode_score": decode_score,
    "decode_topk": decode_topk,
    "sparse_decode": sparse_decode,
    "combine": combine,
}


@pytest.fixture
def decode_kernels(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Route CPU tensors to the stand-ins. `found` are the facts they were found by, `launched` (op, arguments).

    With `compute` set to False they compute nothing.
    """
    seen = types.SimpleNamespace(found=[], launched=[], compute=True)

    def find_kernel(op: str, facts: Any, backend: str = "auto", *, helper: bool = False) -> Any:
        assert facts.op == op
        # A step is sparse_decode's call: the DSL asked for must have that kernel, the others come from where they are.
        assert not (helper and op == "sparse_decode")
        seen.found.append(facts)

        def kernel(*arguments: Any) -> None:
            given = dict(zip(parameters(op, facts.precision), arguments, strict=True))
            seen.launched.append((op, given))
            if seen.compute:
                STAND_INS[op](facts.variant, **given)

        return kernel

    monkeypatch.setattr(backends, "runs_reference", lambda backend, device: backend == "reference")
    monkeypatch.setattr(decode, "num_sms", lambda index: SMS)
    monkeypatch.setattr(runtime, "find_kernel", find_kernel)
    return seen
