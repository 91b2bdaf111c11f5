"""FP8 queries and keys of the indexer: which scales a call may have, what they do, and what kernels get of them."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from ops.calls import OPERATORS, SCORERS, call, paged

from msa_tiles import ops, reference
from msa_tiles.call import backends
from msa_tiles.launch import decode, lookup
from msa_tiles.quant import FP8, QuantizedTensor, quantize_fp8
from msa_tiles.runtime import dispatch
from msa_tiles.runtime.facts import target_facts
from msa_tiles.runtime.registry import default_registry

INDEXERS = [*SCORERS, "select_blocks"]
Q_SHAPES, K_SHAPES = (None, (), (4,), (11, 4)), (None, (), "keys")


def scale(*shape: int, seed: int = 0) -> torch.Tensor:
    """Powers of two, so that everything stays exact."""
    return 2.0 ** torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def fp8(op: str, base=call, q_shape=(11, 4), k_shape="keys"):
    """A valid call on FP8 queries and keys with scales of these shapes."""
    arguments = base(op)
    arguments["idx_q"], arguments["idx_k"] = arguments["idx_q"].to(FP8), arguments["idx_k"].to(FP8)
    if q_shape is not None:
        arguments["q_scale"] = scale(*q_shape)
    if k_shape is not None:
        arguments["k_scale"] = scale(*(arguments["idx_k"].shape[:-1] if k_shape == "keys" else k_shape), seed=1)
    return arguments


def spelled_out(arguments):
    """The same call on float32 values, without scales."""
    plain = dict(arguments)
    q_scale, k_scale = plain.pop("q_scale", None), plain.pop("k_scale", None)
    plain["idx_q"], plain["idx_k"] = plain["idx_q"].float(), plain["idx_k"].float()
    if q_scale is not None:
        plain["idx_q"] = plain["idx_q"] * q_scale.expand(11, 4)[..., None]
    if k_scale is not None:
        plain["idx_k"] = plain["idx_k"] * k_scale.expand(plain["idx_k"].shape[:-1])[..., None]
    return plain


@pytest.mark.parametrize("base", [call, paged], ids=["flat", "paged"])
@pytest.mark.parametrize("op", INDEXERS)
def test_scores_are_those_of_the_dequantised_values(op, base):
    plain = {"decode_score": "index_score"}
    for q_shape, k_shape in itertools.product(Q_SHAPES, K_SHAPES):
        arguments = fp8(op, base, q_shape, k_shape)
        found = OPERATORS[op](**arguments)
        assert torch.equal(found, OPERATORS[op](**spelled_out(arguments)))
        same = getattr(reference.plain, plain.get(op, op))(**arguments)
        assert torch.equal(found[..., : same.shape[-1]], same)


@pytest.mark.parametrize("op", INDEXERS)
def test_scales_change_the_answer(op):
    arguments = fp8(op) | ({"topk": 1, "local_blocks": 0} if op == "select_blocks" else {})
    found = OPERATORS[op](**arguments)
    for name in ("q_scale", "k_scale"):
        assert not torch.equal(found, OPERATORS[op](**arguments | {name: None}))


@pytest.mark.parametrize("op", INDEXERS)
def test_a_quantised_tensor_stands_for_a_tensor_and_its_scale(op):
    arguments = fp8(op)
    found = OPERATORS[op](**arguments)
    wrapped = dict(arguments)
    for name in ("idx_q", "idx_k"):
        wrapped[name] = QuantizedTensor(arguments[name], wrapped.pop(f"{name[-1]}_scale"))
    assert torch.equal(found, OPERATORS[op](**wrapped))
    again = {"q_scale": arguments["q_scale"]}
    with pytest.raises(ValueError, match="q_scale: got a Tensor beside a QuantizedTensor; wanted None: idx_q has its"):
        OPERATORS[op](**wrapped | again)


def test_quantised_normal_values_select_nearly_what_they_selected_before():
    generator = torch.Generator().manual_seed(3)
    idx_q, idx_k = torch.randn(40, 4, 128, generator=generator), torch.randn(2000, 128, generator=generator)
    exact = ops.index_score(idx_q, idx_k, block_size=64)
    score = ops.index_score(quantize_fp8(idx_q, "token_head"), quantize_fp8(idx_k, "token_head"), block_size=64)
    seen = exact.isfinite()
    assert torch.equal(seen, score.isfinite())
    assert 0 < (score - exact)[seen].abs().max() < 2


@pytest.mark.parametrize(
    ("name", "value", "message", "error"),
    [
        ("q_scale", 1.0, "q_scale: got float; wanted a float32 tensor [], [Hi] or [T, Hi]", TypeError),
        ("k_scale", torch.ones(40).double(), "k_scale: got dtype torch.float64; wanted torch.float32", TypeError),
        (
            "k_scale",
            torch.ones(40).to_sparse(),
            "k_scale: got layout torch.sparse_coo; wanted torch.strided",
            TypeError,
        ),
        ("k_scale", torch.ones(40).to(torch.float8_e8m0fnu), "k_scale: got dtype torch.float8_e8m0fnu", TypeError),
        (
            "q_scale",
            torch.ones(11),
            "q_scale: got shape [11]; wanted [], [Hi] or [T, Hi] = one of [], [4], [11, 4]",
            ValueError,
        ),
        ("k_scale", torch.ones(39), "k_scale: got shape [39]; wanted [] or [Tk] = one of [], [40]", ValueError),
        ("k_scale", torch.ones(40, device="meta"), "k_scale: got device meta; wanted cpu like idx_k", ValueError),
    ],
)
@pytest.mark.parametrize("op", INDEXERS)
def test_wrong_scales(op, name, value, message, error):
    with pytest.raises(error, match=re.escape(message)):
        OPERATORS[op](**fp8(op) | {name: value})


@pytest.mark.parametrize("op", INDEXERS)
def test_scales_of_pages_have_their_shape(op):
    message = "k_scale: got shape [40]; wanted [] or [pages, page] = one of [], [12, 4]"
    with pytest.raises(ValueError, match=re.escape(message)):
        OPERATORS[op](**fp8(op, paged) | {"k_scale": torch.ones(40)})


@pytest.mark.parametrize("op", INDEXERS)
def test_both_sides_are_fp8_or_neither(op):
    arguments = fp8(op)
    message = "idx_k: got dtype torch.bfloat16; wanted torch.float8_e4m3fn like idx_q"
    with pytest.raises(TypeError, match=message):
        OPERATORS[op](**arguments | {"idx_k": arguments["idx_k"].bfloat16()})
    message = "idx_k: got dtype torch.float8_e4m3fn; wanted torch.bfloat16 like idx_q, or idx_q quantised as well"
    with pytest.raises(TypeError, match=message):
        OPERATORS[op](**arguments | {"idx_q": arguments["idx_q"].bfloat16()})
    message = "idx_q: got dtype torch.float8_e5m2; wanted .*torch.float64 or torch.float8_e4m3fn"
    with pytest.raises(TypeError, match=message):
        OPERATORS[op](**arguments | {"idx_q": arguments["idx_q"].float().to(torch.float8_e5m2)})


@pytest.mark.parametrize("value", [-1.0, torch.nan, torch.inf])
@pytest.mark.parametrize("op", INDEXERS)
def test_check_refuses_scales_that_are_negative_or_not_finite(op, value):
    for base, (q_shape, k_shape) in itertools.product((call, paged), ((None, ()), ((), "keys"), ((4,), "keys"))):
        arguments = fp8(op, base, q_shape, k_shape)
        OPERATORS[op](**arguments, check=True)
        for name in ("q_scale", "k_scale"):
            if name in arguments:
                spoiled = arguments[name].clone()
                # A row in use: the first of the flat keys, or of the page of the first request.
                place = (int(arguments["page_table"][0, 0]), 0) if base is paged and spoiled.dim() == 2 else 0
                spoiled.view(-1)[0] = value if place == 0 else spoiled.view(-1)[0]
                if place != 0:
                    spoiled[place] = value
                message = f"{name}: got {value}; wanted finite numbers, not below 0"
                with pytest.raises(ValueError, match=re.escape(message)):
                    OPERATORS[op](**arguments | {name: spoiled}, check=True)


def test_check_looks_at_scales_in_use_only():
    arguments = fp8("select_blocks", paged)
    used = torch.zeros(12, 4, dtype=torch.bool)
    for request, length in enumerate(arguments["seqused_k"].tolist()):
        for token in range(length):
            used[int(arguments["page_table"][request, token // 4]), token % 4] = True
    assert not used.all()
    poisoned = arguments["k_scale"].masked_fill(~used, torch.nan)
    found = ops.select_blocks(**arguments | {"k_scale": poisoned}, check=True)
    assert torch.equal(found, ops.select_blocks(**arguments))
    behind = fp8("select_blocks") | {"cu_seqlens_q": torch.tensor([0, 5, 5, 9], dtype=torch.int32)}
    behind["q_scale"][9:] = torch.nan
    ops.select_blocks(**behind, check=True)


def select_blocks(
    variant, idx_q, idx_k, table, starts_q, starts_k, used, positions, q_scale, k_scale, out,
    use_seqused, use_positions, use_q_scale, init, local, order,
):  # fmt: skip
    """Stands in for the kernel: computes from exactly what a kernel reads."""
    assert q_scale.shape == idx_q.shape[:2] and q_scale.dtype == k_scale.dtype == torch.float32
    assert use_seqused or variant["pages_per_block"] == 0
    where = {"cu_seqlens_q": starts_q}
    where |= {"page_table": table, "seqused_k": used} if variant["pages_per_block"] else {"cu_seqlens_k": starts_k}
    heads = idx_q.shape[1] // variant["heads_per_group"]
    scales = {"q_scale": q_scale if use_q_scale else None, "k_scale": k_scale if variant["key_scales"] else None}
    parameters = {"block_size": variant["block_size"], "init_blocks": init, "local_blocks": local}
    order = ("ascending", "score", "local_last")[order]
    chosen = reference.select_blocks(
        idx_q, idx_k, out.shape[2], num_kv_heads=heads, order=order, **parameters, **scales, **where
    )
    out.copy_(chosen)


def block_scores(
    variant, idx_q, q_scale, idx_k, k_scale, table, starts_q, starts_k, used, positions, out, use_seqused,
    use_positions, use_q_scale, use_k_scale, causal, *grid,
):  # fmt: skip
    """Stands in for the kernels that write scores."""
    assert q_scale.shape == idx_q.shape[:2] and q_scale.dtype == k_scale.dtype == torch.float32
    assert k_scale.dim() == (idx_k.dim() - 1 if variant["key_scales"] else 1)
    assert use_seqused or variant["pages_per_block"] == 0
    where = {"cu_seqlens_q": starts_q}
    where |= {"page_table": table, "seqused_k": used} if variant["pages_per_block"] else {"cu_seqlens_k": starts_k}
    of_keys = k_scale if variant["key_scales"] else k_scale[0] if use_k_scale else None
    scores = reference.index_score(
        idx_q, idx_k, block_size=variant["block_size"], causal=bool(causal), num_blocks=out.shape[2],
        q_scale=q_scale if use_q_scale else None, k_scale=of_keys, **where,
    )  # fmt: skip
    out.copy_(scores)


KERNELS = {"select_blocks": select_blocks, "index_score": block_scores, "decode_score": block_scores}


@pytest.fixture
def found(monkeypatch):
    """Route CPU tensors to the stand-ins; the facts by which kernels are looked for."""
    seen = []

    def find_kernel(facts, backend):
        seen.append(facts)
        return lambda *args: KERNELS[facts.op](facts.variant, *args)

    monkeypatch.setattr(backends, "runs_reference", lambda backend, device: backend == "reference")
    monkeypatch.setattr(lookup, "find_kernel", find_kernel)
    monkeypatch.setattr(decode, "num_sms", lambda index: 132)
    return seen


@pytest.mark.parametrize("base", [call, paged], ids=["flat", "paged"])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_kernels_get_the_scales_that_can_change_a_ranking(num_kv_heads, base, found):
    for q_shape, k_shape in itertools.product(Q_SHAPES, K_SHAPES):
        arguments = fp8("select_blocks", base, q_shape, k_shape) | {"num_kv_heads": num_kv_heads, "order": "score"}
        wanted = ops.select_blocks(**arguments, backend="reference")
        assert torch.equal(ops.select_blocks(**arguments), wanted)
        assert (found[-1].precision, found[-1].variant["key_scales"]) == ("q8k8", int(k_shape == "keys"))


@pytest.mark.parametrize("base", [call, paged], ids=["flat", "paged"])
@pytest.mark.parametrize("op", SCORERS)
def test_kernels_that_write_scores_get_all_scales(op, base, found):
    for q_shape, k_shape in itertools.product(Q_SHAPES, K_SHAPES):
        arguments = fp8(op, base, q_shape, k_shape)
        assert torch.equal(OPERATORS[op](**arguments), OPERATORS[op](**arguments, backend="reference"))
        assert (found[-1].precision, found[-1].variant["key_scales"]) == ("q8k8", int(k_shape == "keys"))


@pytest.mark.parametrize("op", INDEXERS)
def test_a_shard_of_fp8_keys(op, found):
    """k_offset: the keys of a call are a part of each request's, and so are their scales."""
    arguments = fp8(op, k_shape="keys") | {"k_offset": torch.tensor([8, 0, 16], dtype=torch.int32)}
    if op != "select_blocks":
        arguments["max_seqlen_k"] = 64
    assert torch.equal(OPERATORS[op](**arguments), OPERATORS[op](**arguments, backend="reference"))


def test_only_cells_of_fp8_are_compiled_for_scales_of_keys():
    cells = {cell.precision: cell for cell in default_registry().select("select_blocks", "tilelang")}
    assert "key_scales" not in cells["bf16"].variants and cells["q8k8"].variants["key_scales"] == (0, 1)
    assert len(cells["bf16"].ci) == 20 and all("key_scales" not in point for point in cells["bf16"].ci)


@pytest.mark.parametrize("op", INDEXERS)
def test_fp8_is_served_and_cells_without_say_why(op):
    registry = default_registry()
    device = target_facts(registry.targets["sm90"])
    variant = {**registry.of(op)[0].ci[0], "key_scales": 1}
    decision = dispatch.decide(dispatch.CallFacts(op, torch.device("cuda"), "q8k8", variant), device, registry)
    assert decision.chosen is not None
    assert f"{op}.tilelang.sm90.bf16: it takes bf16, the call is q8k8" in decision.complaint()


def test_traced():
    arguments = fp8("select_blocks")
    compiled = torch.compile(lambda **kwargs: ops.select_blocks(**kwargs), fullgraph=True, backend="eager")
    assert torch.equal(compiled(**arguments), ops.select_blocks(**arguments))

    def quantised(idx_q, idx_k, q_scale, k_scale, **rest):
        return ops.select_blocks(QuantizedTensor(idx_q, q_scale), QuantizedTensor(idx_k, k_scale), **rest)

    compiled = torch.compile(quantised, fullgraph=True, backend="eager")
    assert torch.equal(compiled(**arguments), ops.select_blocks(**arguments))
