"""torch's default device and dtype are the caller's affair: no operator makes a tensor by them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ops import calls, training_calls
from torch.utils._pytree import tree_leaves

from msa_tiles import nn, ops, quant, reference
from msa_tiles.verify import gradient_parts, index_parts
from msa_tiles.verify.inputs import Source

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}
for name in calls.EVERY_OPERATOR:
    CALLS[name] = getattr(ops, name), calls.call(name)
for name in calls.WITH_KEYS:
    CALLS[f"{name}, paged"] = getattr(ops, name), calls.paged(name)
for name in calls.ATTENTION:
    CALLS[f"{name}, with lse"] = getattr(ops, name), {**calls.call(name), "return_lse": True, "check": True}
for name in calls.WITH_OFFSETS:
    offsets = torch.tensor([0, 8, 16], dtype=torch.int32)
    CALLS[f"{name}, a shard"] = getattr(ops, name), {**calls.call(name), "k_offset": offsets, "max_seqlen_k": 40}
for name in calls.RANKERS:
    CALLS[f"{name}, counted"] = getattr(ops, name), {**calls.call(name), "num_valid_blocks": 2, "order": "score"}
for name in training_calls.OPERATORS:
    CALLS[name] = getattr(ops, name), training_calls.call(name)
CALLS["index_kl, prefix"] = ops.index_kl, {**training_calls.call("index_kl"), "block_indices": None}
CALLS["msa_attention, with KL"] = ops.msa_attention, {
    **training_calls.call("msa_attention"), "return_kl": True, "return_block_indices": True, "return_lse": True,
}  # fmt: skip


def fp8(op: str) -> dict[str, Any]:
    """The call of an indexer on e4m3 queries and keys, one scale a head and one a key."""
    arguments = calls.call(op)
    arguments["idx_q"] = quant.quantize_fp8(arguments["idx_q"], per="head")
    return arguments | {"idx_k": quant.quantize_fp8(arguments["idx_k"], per="token_head")}


CALLS["select_blocks, FP8"] = ops.select_blocks, fp8("select_blocks")


def appended(op: str, **given: Any) -> dict[str, Any]:
    """What an operator that writes into caches leaves in them."""
    getattr(ops, op)(**given)
    return {name: given[name] for name in given if "cache" in name or "scale" in name}


CALLS["append_kv"] = (
    functools.partial(appended, "append_kv"),
    {
        **{name: torch.ones(3, 2, 16) for name in ("k", "v")},
        **{name: torch.zeros(2, 2, 4, 16).to(quant.FP8) for name in ("k_cache", "v_cache")},
        **{name: torch.zeros(2, 2, 4) for name in ("k_scale", "v_scale")},
        "slot_mapping": torch.tensor([0, 5, -1]),
    },
)
CALLS["append_index"] = functools.partial(appended, "append_index"), {
    "idx_k": torch.ones(3, 16), "cache": torch.zeros(2, 4, 16).to(quant.FP8),
    "slot_mapping": torch.tensor([0, 5, -1]), "scale": torch.tensor(0.3),
}  # fmt: skip
CALLS["norm_rope_append"] = functools.partial(appended, "norm_rope_append"), {
    **{name: torch.ones(3, 2, 16) for name in ("q", "k", "v", "idx_q", "q_out", "idx_out")},
    **{name: torch.ones(16) for name in ("q_weight", "k_weight", "idx_q_weight", "idx_k_weight")},
    "idx_k": torch.ones(3, 16), "cos_sin": torch.full((7, 8), 0.5), "positions": torch.tensor([0, 6, 7]),
    **{name: torch.zeros(2, 2, 4, 16) for name in ("k_cache", "v_cache")}, "index_cache": torch.zeros(2, 4, 16),
    "slot_mapping": torch.tensor([0, 5, -1]),
}  # fmt: skip
STORED = quant.quantize_nvfp4(torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(3)), torch.tensor(0.5))
CALLS["dequantize_kv"] = ops.dequantize_kv, {"k": STORED, "v": STORED}
CALLS["dequantize_kv, paged"] = ops.dequantize_kv, {
    **{name: torch.ones(3, 2, 4, 16).to(quant.FP8) for name in "kv"},
    **{name: torch.tensor(0.3) for name in ("k_scale", "v_scale")},
    "page_table": torch.tensor([[2, 0], [1, -1]], dtype=torch.int32),
    "seqused_k": torch.tensor([8, 8], dtype=torch.int32),
}  # fmt: skip


def source() -> Source:
    return Source(torch.device("cpu"), 0, "normal")


def rows() -> dict[str, Any]:
    dims = {"total_q": 7, "num_q_heads": 4, "head_dim": 16}
    return gradient_parts.random_rows(source(), dims, False)._asdict()


def parts() -> dict[str, Any]:
    dims = {"total_q": 7, "total_k": 40, "num_kv_heads": 2, "num_q_heads": 4, "head_dim": 16, "topk": 3}
    dims |= {"block_size": 8, "num_tasks": 5, "num_sums": 80}
    return gradient_parts.random_parts(source(), dims)._asdict()


def index_gradients() -> dict[str, Any]:
    dims = {"total_q": 16, "total_k": 40, "num_kv_heads": 2, "index_dim": 16, "topk": 3, "block_size": 8}
    made = source()
    lengths = made.lengths([(16, 40)], shortened=False)
    return index_parts.random_parts(made, {**dims, "num_tasks": 5}, lengths, 2)._asdict()


# The reference as whole matrices.
for name in ("combine", "index_score", "select_blocks", "sparse_attention", "topk_select"):
    CALLS[f"reference.plain.{name}"] = getattr(reference.plain, name), calls.call(name)

# What the operators' kernels are compared with, one by one.
for name, make in (("gradient_rows", rows), ("merge_gradients", parts), ("index_gradients", index_gradients)):
    CALLS[f"reference.{name}"] = getattr(reference, name), make()
SELECTED = {name: value for name, value in calls.call("sparse_attention").items() if name not in ("q", "k", "v")}
CALLS["reference.split_selection"] = reference.split_selection, {**SELECTED, "tile_tokens": 4, "fill": 1}
CALLS["reference.index_lse"] = reference.index_lse, {
    **SELECTED, "idx_q": calls.tensors()["idx_q"][:, :2], "idx_k": calls.tensors()["idx_k"], "index_scale": 0.2,
}  # fmt: skip

for per in ("tensor", "head", "token_head"):
    values = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(0))
    CALLS[f"quantize_fp8 per {per}"] = quant.quantize_fp8, {"tensor": values, "per": per}
    CALLS[f"dequantize per {per}"] = quant.quantize_fp8(values, per).dequantize, {}
CALLS["quantize_fp8 of nothing"] = quant.quantize_fp8, {"tensor": torch.zeros(0, 2, 16), "per": "head"}


@contextmanager
def defaults(dtype: torch.dtype) -> Iterator[None]:
    """A device that holds no data, and a dtype that no call has."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def tensors_of(result: Any) -> list[torch.Tensor]:
    if isinstance(result, ops.Schedule | quant.QuantizedTensor):
        result = list(vars(result).values())
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def check_same(got: Any, wanted: Any) -> None:
    pairs = list(zip(tensors_of(got), tensors_of(wanted), strict=True))
    assert pairs
    for one, other in pairs:
        assert (one.device, one.dtype) == (other.device, other.dtype)
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) if one.is_floating_point() and one.itemsize > 1 \
            else torch.equal(one.view(torch.uint8), other.view(torch.uint8))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("call", CALLS)
def test_an_answer_does_not_depend_on_the_defaults(call: str, dtype: torch.dtype) -> None:
    function, arguments = CALLS[call]
    wanted = function(**_fresh(arguments))
    with defaults(dtype):
        got = function(**_fresh(arguments))
    check_same(got, wanted)


def _fresh(arguments: dict[str, Any]) -> dict[str, Any]:
    """Copies: some functions work in place."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def test_every_public_operator_is_called() -> None:
    named = {call.split(",")[0] for call in CALLS}
    assert named >= set(ops.__all__) - {"Schedule", "decode_workspace_bytes"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["dense_attention", "index_kl", "msa_attention"])
def test_gradients_do_not_depend_on_the_defaults(name: str, dtype: torch.dtype) -> None:
    arguments = training_calls.call(name)
    inputs = [value.requires_grad_() for key, value in arguments.items() if key in ("q", "k", "idx_q", "idx_k")]
    options = {"return_kl": True} if name == "msa_attention" else {}

    def gradients() -> list[torch.Tensor | None]:
        result = training_calls.OPERATORS[name](**arguments, **options)
        total = sum(part.sum() for part in (result if isinstance(result, tuple) else (result,)))
        return list(torch.autograd.grad(total, inputs, allow_unused=True))

    wanted = gradients()
    with defaults(dtype):
        got = gradients()
    check_same(got, wanted)


@pytest.mark.parametrize("warmup", [False, True])
def test_the_layer_does_not_depend_on_the_defaults(warmup: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MiniMaxSparseAttention(
        20, 4, 2, head_dim=8, index_dim=12, topk=2, block_size=4, rotary_dim=4, warmup=warmup,
        device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    hidden = torch.randn(2, 16, 20)
    wanted = layer(hidden, return_kl=True, return_block_indices=True)
    with defaults(torch.float16):
        got = layer(hidden, return_kl=True, return_block_indices=True)
    check_same(tuple(got), tuple(wanted))
