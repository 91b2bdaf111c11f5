"""norm_rope_append: values, layouts, formats, errors, torch.library and the launch of its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import msa_tiles
from msa_tiles import ops, reference
from msa_tiles.call import norm_rope as calls
from msa_tiles.quant import FP8, QuantizedTensor, quantize_mxfp4, quantize_nvfp4, vllm_pages

BF16 = torch.bfloat16
TOKENS, DIM = 6, 64
SIZES = (4, 2, 2, 3, 1)  # heads of q, k, v, idx_q, idx_k
POSITIONS = torch.tensor([0, 8, 3, -1, 9, 5])  # of 9: two of them are none
SLOTS = torch.tensor([7, 0, -1, 30, 31, 12])  # of 32
INDEX_SLOTS = torch.tensor([1, -1, 2, 31, 32, 9])
WEIGHTS = ("q_weight", "k_weight", "idx_q_weight", "idx_k_weight")


def projected(dtype: torch.dtype = BF16, seed: int = 0, dim: int = DIM) -> Tensor:
    """What one projection puts out: rows of all tensors beside each other."""
    return torch.randn(TOKENS, sum(SIZES) * dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parts(of: Tensor, dim: int = DIM) -> dict[str, Tensor]:
    q, k, v, idx_q, idx_k = of.view(TOKENS, -1, dim).split(SIZES, 1)
    return {"q": q, "k": k, "v": v, "idx_q": idx_q, "idx_k": idx_k[:, 0]}


def table(rotary_dim: int = 32, dtype: torch.dtype = torch.float32) -> Tensor:
    angles = torch.arange(9)[:, None] * 0.7 ** torch.arange(rotary_dim // 2)
    return torch.cat([angles.cos(), angles.sin()], -1).to(dtype)


def base(**changed: Any) -> dict[str, Any]:
    """A call on caches of bfloat16: K beside V, tokens first."""
    dtype = changed.pop("dtype", BF16)
    generator = torch.Generator().manual_seed(9)
    weights = {name: (0.3 * torch.randn(DIM, generator=generator)).to(dtype) for name in WEIGHTS}
    k_cache, v_cache = torch.zeros(4, 8, 2, 2 * DIM).to(dtype).transpose(1, 2).split(DIM, -1)
    made = {
        **parts(projected(dtype)), **weights, "cos_sin": table(), "positions": POSITIONS, "k_cache": k_cache,
        "v_cache": v_cache, "slot_mapping": SLOTS, "index_cache": torch.zeros(4, 8, DIM).to(dtype),
        "index_slot_mapping": INDEX_SLOTS, "weight_offset": 1.0,
    }  # fmt: skip
    return made | changed


def dense(**changed: Any) -> dict[str, Any]:
    """One without an index branch."""
    index = ("idx_q", "idx_k", "idx_q_weight", "idx_k_weight", "index_cache", "index_slot_mapping")
    return {name: value for name, value in base(**changed).items() if name not in index or name in changed}


def read(cache: Tensor, slots: Tensor) -> Tensor:
    """[pages, …, page, D] -> the rows of the slots that there are."""
    page = cache.shape[-2]
    return torch.stack([cache[s // page, ..., s % page, :] for s in slots.tolist() if 0 <= s < len(cache) * page])


def kept(rows: Tensor, slots: Tensor) -> Tensor:
    return rows[(slots >= 0) & (slots < 32)]


def oracle(rows: Tensor, weight: Tensor, cos_sin: Tensor, offset: float, eps: float = 1e-6) -> Tensor:
    """Rotation as a product of complex numbers, one row after the other, in float64."""
    rows = rows.double()
    out = torch.empty_like(rows)
    half = cos_sin.shape[1] // 2
    for token, position in enumerate(POSITIONS.tolist()):
        for head in range(rows.shape[1]):
            row = rows[token, head]
            row = row / (row @ row / len(row) + eps) ** 0.5 * (weight.double() + offset)
            if 0 <= position < len(cos_sin):
                turn = torch.complex(cos_sin[position, :half].double(), cos_sin[position, half:].double())
                turned = torch.complex(row[:half], row[half : 2 * half]) * turn
                row = torch.cat([turned.real, turned.imag, row[2 * half :]])
            out[token, head] = row
    return out


@pytest.mark.parametrize("rotary_dim", [2, 32, DIM])
@pytest.mark.parametrize("offset", [0, 1])
def test_values_are_those_of_an_oracle(offset: int, rotary_dim: int) -> None:
    call = base(dtype=torch.float32, weight_offset=offset, cos_sin=table(rotary_dim))
    before = {name: call[name].clone() for name in ("q", "k", "v", "idx_q", "idx_k")}
    assert ops.norm_rope_append(**call) is None
    before["idx_k"] = before["idx_k"][:, None]
    wanted = {
        name: oracle(before[name], call[f"{name}_weight"], call["cos_sin"], offset)
        for name in ("q", "k", "idx_q", "idx_k")
    }
    near = {"rtol": 1e-5, "atol": 1e-5}
    for name in ("q", "idx_q"):  # in place, those without a slot or a position too
        torch.testing.assert_close(call[name].double(), wanted[name], **near)
    torch.testing.assert_close(read(call["k_cache"], SLOTS).double(), kept(wanted["k"], SLOTS), **near)
    torch.testing.assert_close(
        read(call["index_cache"], INDEX_SLOTS).double(), kept(wanted["idx_k"][:, 0], INDEX_SLOTS), **near
    )
    assert torch.equal(read(call["v_cache"], SLOTS), kept(before["v"], SLOTS))
    for name in ("k", "v"):  # are read alone
        assert torch.equal(call[name], before[name])
    for name, number in (("k_cache", 2 * 4), ("v_cache", 2 * 4), ("index_cache", 4)):
        assert int((call[name] != 0).any(-1).sum()) == number + (2 if "index" not in name else 0)


def test_values_are_those_of_transformers() -> None:
    modelling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    call = base(dtype=torch.float32, positions=torch.arange(TOKENS))
    before = {name: call[name].clone() for name in ("q", "k", "idx_q", "idx_k")}
    ops.norm_rope_append(**call)
    norms = {}
    for name in before:
        norms[name] = modelling.MiniMaxM3VLRMSNorm(DIM, eps=1e-6)
        norms[name].weight.data = call[f"{name}_weight"]
    both = table()[:TOKENS].chunk(2, -1)
    cosines, sines = (torch.cat([each, each], -1)[None] for each in both)
    for queries, keys, cache, slots in (("q", "k", "k_cache", SLOTS), ("idx_q", "idx_k", "index_cache", INDEX_SLOTS)):
        rows = (norms[name](before[name].view(TOKENS, -1, DIM)).transpose(0, 1)[None] for name in (queries, keys))
        q, k = (each[0].transpose(0, 1) for each in modelling.apply_rotary_pos_emb(*rows, cosines, sines))
        torch.testing.assert_close(call[queries], q)
        torch.testing.assert_close(read(call[cache], slots).flatten(), kept(k, slots).flatten())


def test_keys_are_rounded_once() -> None:
    """1 + 2**-4 + 2**-12 lies above the middle of two numbers of e4m3; bfloat16 would lay it on the middle first."""
    weight = torch.full((DIM,), 2.0**-4 + 2.0**-12)
    caches = {name: torch.zeros(1, 1, 4, DIM).to(FP8) for name in ("k_cache", "v_cache")}
    rows = {name: torch.ones(1, 1, DIM) for name in "qkv"}
    one, where = torch.ones(()), torch.tensor([0])
    ops.norm_rope_append(
        **rows, q_weight=weight, k_weight=weight, cos_sin=table(), positions=where, **caches, slot_mapping=where,
        weight_offset=1, k_scale=one, v_scale=one, eps=1e-12,
    )  # fmt: skip
    assert (caches["k_cache"].float()[0, 0, 0] == 1.125).all() and (caches["v_cache"].float()[0, 0, 0] == 1).all()


def nothing() -> dict[str, Any]:
    return {}


def pools() -> dict[str, Any]:
    caches = {name: torch.zeros(32, 2, DIM).to(BF16) for name in ("k_cache", "v_cache")}
    return caches | {"index_cache": torch.zeros(32, DIM).to(BF16)}


def given() -> dict[str, Any]:
    made = {name: torch.zeros(4, 2, 8, DIM).to(FP8) for name in ("k_cache", "v_cache")}
    scales = {
        "k_scale": torch.tensor([0.01, 0.5]),
        "v_scale": torch.tensor(0.25),
        "index_cache_scale": torch.tensor(0.5),
    }
    return made | {"index_cache": torch.zeros(4, 8, DIM).to(FP8)} | scales


def computed() -> dict[str, Any]:
    scales = {name: torch.zeros(4, 8, 2).transpose(1, 2) for name in ("k_scale", "v_scale")}
    return given() | scales | {"index_cache_scale": torch.zeros(4, 8)}


def bytes_alone() -> dict[str, Any]:
    made = given()
    caches = {name: made[name].view(torch.uint8) for name in ("k_cache", "v_cache", "index_cache")}
    return made | caches | {"format": "e4m3"}


def beside_bf16() -> dict[str, Any]:
    """e4m3 beside index keys of bfloat16."""
    return given() | {"index_cache": torch.zeros(4, 8, DIM).to(BF16), "index_cache_scale": None}


def of_vllm() -> dict[str, Any]:
    scale = torch.tensor(0.02)
    pages = vllm_pages(torch.zeros(4, 4, 8, 36, dtype=torch.uint8), scale, scale)
    return {"k_cache": pages.k, "v_cache": pages.v, "index_cache": quantize_nvfp4(torch.zeros(4, 8, DIM), 1.0)}


def mxfp4() -> dict[str, Any]:
    caches = {name: quantize_mxfp4(torch.zeros(4, 2, 8, DIM)) for name in ("k_cache", "v_cache")}
    return caches | {"index_cache": quantize_mxfp4(torch.zeros(4, 8, DIM))}


@pytest.mark.parametrize(
    "kind", [nothing, pools, given, computed, bytes_alone, beside_bf16, of_vllm, mxfp4], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("wide", [torch.int64, torch.int32])
def test_caches_are_those_of_append_kv_and_append_index(kind: Callable[[], dict[str, Any]], wide: torch.dtype) -> None:
    """On rows that are turned in float32, whatever a cache is and wherever it lies."""
    places = {"slot_mapping": SLOTS.to(wide), "positions": POSITIONS.to(wide)}
    call, other = (base(**places, **kind()) for _ in range(2))
    ops.norm_rope_append(**call)

    def turned(name: str, rows: Tensor) -> Tensor:
        weight = other[f"{name}_weight"]
        return reference.norm_rope(rows, weight, other["cos_sin"], POSITIONS, weight_offset=1.0)

    scales = {name: other.get(name) for name in ("k_scale", "v_scale")}
    k, v = turned("k", other["k"]), other["v"].float()
    ops.append_kv(k, v, other["k_cache"], other["v_cache"], SLOTS, format=other.get("format"), **scales)
    cache, form = other["index_cache"], calls.index_format(other["index_cache"], other.get("format"))
    idx_k = turned("idx_k", other["idx_k"][:, None])[:, 0]
    ops.append_index(idx_k, cache, INDEX_SLOTS, format=form, scale=other.get("index_cache_scale"))
    for name in ("k_cache", "v_cache", "index_cache", "k_scale", "v_scale", "index_cache_scale"):
        got, wanted = call.get(name), other.get(name)
        pairs = [(got, wanted)]
        if isinstance(got, QuantizedTensor):
            pairs = [(got.data, wanted.data), (got.scale, wanted.scale)]
        for one, two in pairs:
            if one is None or not one.dim():
                continue
            one, two = (each.contiguous().view(torch.uint8) for each in (one, two))
            assert torch.equal(one, two) and bool(one.any())
    assert torch.equal(call["q"], turned("q", other["q"]).to(BF16))
    assert torch.equal(call["idx_q"], turned("idx_q", other["idx_q"]).to(BF16))


def test_queries_go_where_they_are_asked_to() -> None:
    call, other = base(), base()
    q_out, idx_out = torch.full_like(call["q"], torch.nan), torch.zeros(TOKENS, 3, DIM).to(FP8)
    ops.norm_rope_append(**call, q_out=q_out, idx_out=idx_out)
    ops.norm_rope_append(**other, q_out=other["q"])
    assert torch.equal(q_out, other["q"])
    single = reference.norm_rope(call["idx_q"], call["idx_q_weight"], call["cos_sin"], POSITIONS, weight_offset=1.0)
    assert torch.equal(idx_out.view(torch.uint8), single.to(FP8).view(torch.uint8))
    for name in ("q", "idx_q"):
        assert torch.equal(call[name], base()[name]) and not torch.equal(other[name], base()[name])
    loud = base(idx_q_weight=torch.full((DIM,), 1e4).to(BF16))
    ops.norm_rope_append(**loud, idx_out=idx_out)
    assert idx_out.float().abs().max() == 448


def test_a_dense_layer_has_no_index_branch() -> None:
    call, whole = dense(), base()
    ops.norm_rope_append(**call)
    ops.norm_rope_append(**whole)
    for name in ("q", "k_cache", "v_cache"):
        assert torch.equal(call[name], whole[name])


def test_index_keys_have_the_slots_of_keys_where_none_are_given() -> None:
    call = base(index_slot_mapping=None)
    ops.norm_rope_append(**call)
    assert (call["index_cache"] != 0).any(-1).flatten().nonzero().flatten().tolist() == [0, 7, 12, 30, 31]


def test_rows_without_a_slot_are_not_looked_at() -> None:
    call, other = base(), base()
    for name in ("k", "v"):
        call[name][SLOTS < 0] = torch.nan
    call["idx_k"][(INDEX_SLOTS < 0) | (INDEX_SLOTS > 31)] = torch.nan
    for each in (call, other):
        ops.norm_rope_append(**each)
    for name in ("q", "idx_q", "k_cache", "v_cache", "index_cache"):
        assert torch.equal(call[name], other[name])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (base(q=base()["q"].half()), TypeError, "q: got dtype torch.float16; wanted torch.bfloat16 or torch.float32"),
        (base(k=base()["k"].float()), TypeError, "k: got dtype torch.float32; wanted torch.bfloat16 like q"),
        (base(v=base()["v"][:5]), ValueError, r"v: got shape \[5, 2, 64\]; wanted \[T, Hkv, D\] with T = 6 and D = 64"),
        (base(v=base()["q"]), ValueError, r"v: got shape \[6, 4, 64\]; wanted \[6, 2, 64\] like k"),
        (base(q_weight=torch.ones(32).to(BF16)), ValueError, r"q_weight: got shape \[32\]; wanted \[D\] = \[64\]"),
        (base(k_weight=torch.ones(64)), TypeError, "k_weight: got dtype torch.float32; wanted torch.bfloat16 like q"),
        (base(cos_sin=table(30)[:, :-1]), ValueError, r"cos_sin: got shape \[9, 29\]; wanted .* an even rotary_dim of"),
        (base(cos_sin=table(66)), ValueError, r"cos_sin: got shape \[9, 66\]; wanted .* of 2 to D = 64"),
        (base(cos_sin=table().double()), TypeError, "cos_sin: got dtype torch.float64; wanted torch.bfloat16 or t"),
        (base(positions=POSITIONS[:5]), ValueError, r"positions: got shape \[5\]; wanted \[T\] = \[6\] like q"),
        (base(positions=POSITIONS.float()), TypeError, "positions: got dtype torch.float32; wanted torch.int64 or"),
        (base(slot_mapping=SLOTS[:5]), ValueError, r"slot_mapping: got shape \[5\]; wanted \[T\] = \[6\] like q"),
        (base(index_slot_mapping=SLOTS[:5]), ValueError, r"index_slot_mapping: got shape \[5\]; wanted \[T\] ="),
        (base(eps=0), ValueError, "eps: got 0.0; wanted a finite number above 0"),
        (base(eps="1"), TypeError, "eps: got str; wanted a number"),
        (base(weight_offset=2), ValueError, "weight_offset: got 2.0; wanted 0 or 1"),
        (base(idx_k=None), ValueError, "idx_k: got None; wanted a tensor, or None for each of idx_q, idx_k,"),
        (dense(idx_out=base()["idx_q"]), ValueError, "idx_out: got a Tensor; wanted None without idx_q, idx_k"),
        (base(idx_k=base()["idx_k"][:, :32]), ValueError, r"idx_k: got shape \[6, 32\]; wanted \[T, D\] with T = 6"),
        (base(q_out=base()["q"][:, :2]), ValueError, r"q_out: got shape \[6, 2, 64\]; wanted \[T, Hq, D\] ="),
        (base(q_out=base()["q"].to(FP8)), TypeError, "q_out: got dtype torch.float8_e4m3fn; wanted torch.bfloat16"),
        (base(idx_out=base()["idx_q"].float()), TypeError, "idx_out: got dtype torch.float32; wanted torch.bf"),
        (base(q_out=3), TypeError, r"q_out: got int; wanted a tensor \[T, Hq, D\]"),
        (base(k_cache=base()["k_cache"][:, :1]), ValueError, r"k_cache: got shape \[4, 1, 8, 64\]; wanted \[pages"),
        (base(v_cache=base()["v_cache"].float()), TypeError, "v_cache: got dtype torch.float32; wanted torch.bf"),
        (base(index_cache=torch.zeros(4, 8, 32).to(BF16)), ValueError, "index_cache: got 32 values in a row; wanted"),
        (base(**{**given(), "k_scale": None}), ValueError, r"k_scale: got None; wanted float32 \[\], \[Hkv\]"),
        (base(index_cache_scale=torch.ones(())), ValueError, "index_cache_scale: got a Tensor; wanted None"),
        (base(backend="tilelang"), ValueError, "backend: got 'tilelang' for tensors on cpu"),
    ],
)  # fmt: skip
def test_errors_say_what_came_and_what_is_wanted(arguments: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ops.norm_rope_append(**arguments)


def test_buffers_are_of_their_own() -> None:
    call = base()
    with pytest.raises(ValueError, match="q_out: got memory of q; wanted a buffer of its own"):
        ops.norm_rope_append(**call, q_out=projected_over(call["q"]))
    with pytest.raises(ValueError, match="v_cache: got memory of k_cache"):
        ops.norm_rope_append(**base(v_cache=call["k_cache"], k_cache=call["k_cache"]))
    shared = call["q"][:, :3]
    with pytest.raises(ValueError, match="idx_out: got memory of q_out; wanted a buffer of its own"):
        ops.norm_rope_append(**call, idx_out=shared)


def projected_over(rows: Tensor) -> Tensor:
    """Rows that begin at the second head of others."""
    return rows.as_strided(rows.shape, rows.stride(), rows.storage_offset() + DIM)


def test_torch_library() -> None:
    call = base()
    made, written = calls.norm_rope_append(
        **call, eps=1e-6, q_out=None, idx_out=None, format=None, k_scale=None, v_scale=None, index_cache_scale=None,
        backend="auto",
    )  # fmt: skip
    opcheck(torch.ops.msa_tiles.norm_rope_append.default, (*made, *written.buffers))

    def step(shift: Tensor, **named: Tensor) -> Tensor:
        ops.norm_rope_append(**{**named, "k": named["k"] * shift}, weight_offset=1)
        return named["q"].float().sum() + named["k_cache"].float().sum()

    tensors = {name: value for name, value in base().items() if isinstance(value, Tensor)}
    total = torch.compile(step, fullgraph=True, backend="aot_eager")(torch.ones((), dtype=BF16), **tensors)
    ops.norm_rope_append(**call)
    assert total == call["q"].float().sum() + call["k_cache"].float().sum()
    assert torch.equal(tensors["index_cache"], call["index_cache"])


def test_autograd_hears_of_the_write() -> None:
    call = base()
    weight = torch.ones(DIM, dtype=BF16, requires_grad=True)
    product = (call["q"] * weight).sum()
    ops.norm_rope_append(**call)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with pytest.raises(ValueError, match="q: got a tensor that requires grad"):
        ops.norm_rope_append(**base(q=base()["q"].requires_grad_()))


def same(one: Any, two: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == two) and type(one) is type(two)
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (two.data_ptr(), two.shape, two.stride(), two.dtype)


@pytest.mark.parametrize(
    ("call", "precision", "variant"),
    [
        (base(), "bf16", {"float32_table": 1, "bf16_index": 0}),
        (dense(cos_sin=table(32, BF16)), "bf16", {"float32_table": 0, "bf16_index": 0}),
        (base(**pools()), "bf16", {"float32_table": 1, "bf16_index": 0}),
        (base(**given()), "q16kv8", {"float32_table": 1, "bf16_index": 0, "token_scales": 0}),
        (base(**computed()), "q16kv8", {"float32_table": 1, "bf16_index": 0, "token_scales": 1}),
        (base(**beside_bf16()), "q16kv8", {"float32_table": 1, "bf16_index": 1, "token_scales": 0}),
        (base(**bytes_alone(), idx_out=base()["idx_q"].to(FP8)), "q16kv8",
         {"float32_table": 1, "bf16_index": 0, "token_scales": 0}),
        (base(q_out=base()["q"].clone()), "bf16", {"float32_table": 1, "bf16_index": 0}),
    ],
)  # fmt: skip
def test_a_repeated_call_hands_its_kernel_the_same(
    call: dict[str, Any], precision: str, variant: dict[str, int], launched: list[Any]
) -> None:
    norm_rope_append = msa_tiles.ops.norm_rope_append
    norm_rope_append(**call)
    facts, first, again = launched
    assert (facts.op, facts.precision, again) == ("norm_rope_append", precision, facts) and not facts.refusals
    assert dict(facts.variant) == {"head_dim": DIM, **variant}
    norm_rope_append(**call)
    assert len(launched) == 4 and all(map(same, first, launched[3])) and len(first) == len(launched[3])
    assert first[0].data_ptr() == call["q"].data_ptr() and first[15].data_ptr() == call["k_cache"].data_ptr()
    halves = first[6].shape[-1] == DIM // 2
    assert halves == (call.get("idx_out") is not None and call["idx_out"].dtype == FP8)
    heads = 3 if call.get("idx_q") is not None else 0
    numbers = [value for value in first if not isinstance(value, Tensor)]
    scale = call.get("index_cache_scale")
    use_scale = [int(scale is not None and not scale.dim())] if "token_scales" in variant else []
    assert numbers == [heads, 1.0, 1e-6, *use_scale]


@pytest.mark.parametrize(
    ("call", "refusal"),
    [
        (base(cos_sin=table(24)), "wanted rotary_dim % 16 == 0"),
        (base(dtype=torch.float32), "rows are torch.float32, wanted torch.bfloat16"),
        (base(index_cache=torch.zeros(4, 8, DIM).to(FP8)), "index_cache stores float8_e4m3fn, wanted bfloat16, as"),
        (base(**{**computed(), "index_cache_scale": None}), "index_cache_scale is given, wanted one that is computed"),
        (base(**{**given(), "index_cache_scale": torch.zeros(4, 8)}), "index_cache_scale is computed, wanted one that"),
    ],
)  # fmt: skip
def test_kernels_say_why_they_refuse(call: dict[str, Any], refusal: str) -> None:
    told = msa_tiles.explain(ops.norm_rope_append, **call, device="sm90")
    assert not told.served and refusal in str(told)


@pytest.mark.parametrize(
    ("caches", "precision"),
    [(nothing, "bf16"), (given, "q16kv8"), (of_vllm, "q16kv4"), (mxfp4, "q16kvmx4")],
)
@pytest.mark.parametrize("backend", ["tilelang", "cutedsl"])
def test_kernels_serve_every_format(caches: Callable[[], dict[str, Any]], precision: str, backend: str) -> None:
    told = msa_tiles.explain(ops.norm_rope_append, **base(**caches()), backend=backend, device="sm90")
    assert told.served and f"norm_rope_append.{backend}.sm90.{precision}" in str(told)
