"""NVFP4 and MXFP4 keys, values and index keys: answers are those of the dequantised values, and nothing else passes."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from ops.calls import ATTENTION, OPERATORS, SCORERS, call, paged

from msa_tiles import ops
from msa_tiles.call import indexer
from msa_tiles.call.where import Where
from msa_tiles.launch import index, lookup, operands
from msa_tiles.quant import GROUPS, QuantizedTensor, layouts, quantize_fp8, quantize_mxfp4, quantize_nvfp4

BF16 = torch.bfloat16
FORMATS = {"nvfp4": quantize_nvfp4, "mxfp4": quantize_mxfp4}
KEYS = ("k", "v", "idx_k")
ATTENDING, INDEXERS = [*ATTENTION, "msa_decode"], [*SCORERS, "select_blocks"]
EXACT = {"rtol": 0, "atol": 0, "equal_nan": True}
each_format = pytest.mark.parametrize("name", FORMATS)
BASES = pytest.mark.parametrize("base", [call, paged], ids=["flat", "paged"])


def drawn(op, base=call, dim=64):
    """A valid call in BF16 of another head dim; unused rows of pages hold NaN."""
    arguments = base(op)
    generator = torch.Generator().manual_seed(dim)
    for name in ("q", "idx_q", *KEYS):
        if name in arguments:
            given = arguments[name]
            fresh = torch.randn(*given.shape[:-1], dim, generator=generator)
            arguments[name] = torch.where(given[..., :1].isnan(), torch.nan, fresh).to(BF16)
    return arguments


def packed(arguments, name, layout="linear"):
    """The same call with keys of 4 bits, where it has some."""
    made = {key: FORMATS[name](arguments[key]) for key in KEYS if key in arguments}
    return arguments | {key: value.with_layout(layout) for key, value in made.items()}


def spelled_out(arguments):
    """The same call on float32 values."""
    plain = {n: v.dequantize() if isinstance(v, QuantizedTensor) else v for n, v in arguments.items()}
    return plain | {name: plain[name].float() for name in ("q", "idx_q", *KEYS) if name in plain}


def answer(op, arguments):
    if op in INDEXERS:
        return (OPERATORS[op](**arguments),)
    if op == "msa_decode":
        arguments = arguments | {"block_indices": torch.full((2, 11, 3), 77, dtype=torch.int32)}
    out, lse = OPERATORS[op](**arguments, return_lse=True)
    return (out.to(BF16), lse, *([arguments["block_indices"]] if op == "msa_decode" else []))


def agree(op, arguments):
    found = answer(op, arguments)
    torch.testing.assert_close(found, answer(op, spelled_out(arguments)), **EXACT)
    return found


@each_format
@BASES
@pytest.mark.parametrize("op", [*ATTENDING, *INDEXERS])
@pytest.mark.drawn(10)
def test_answers_are_those_of_the_dequantised_values(op, base, name):
    arguments = packed(drawn(op, base), name)
    found = agree(op, arguments)
    assert not any(part.isnan().any() for part in found if part.is_floating_point()), "hidden NaN"
    if base is paged:
        again = answer(op, packed(drawn(op, base), name, "interleaved"))
        torch.testing.assert_close(again, found, **EXACT)
    elif op not in ("msa_decode", "select_blocks"):
        assert not torch.equal(found[0], answer(op, drawn(op))[0]), "4 bits change the answer"


@pytest.mark.parametrize("index", ["bf16", "e4m3", "q16k4", "q8k4", "q16kmx4", "q8kmx4"])
@pytest.mark.parametrize("kv", ["bf16", "e4m3", "nvfp4", "mxfp4"])
@pytest.mark.drawn(10)
def test_a_step_takes_any_index_format_with_any_of_keys(index, kv):
    arguments = drawn("msa_decode", paged if len(kv) == 5 else call)
    clean = {name: arguments[name].nan_to_num(0.0) for name in KEYS}
    quantize = FORMATS | {"e4m3": quantize_fp8, "bf16": lambda value: value}
    for name in ("k", "v"):
        arguments[name] = quantize[kv](clean[name])
    if index == "e4m3" or index.startswith("q8"):
        arguments["idx_q"] = quantize_fp8(arguments["idx_q"])
    format = {"bf16": "bf16", "e4m3": "e4m3"}.get(index, "mxfp4" if "mx" in index else "nvfp4")
    arguments["idx_k"] = quantize[format](clean["idx_k"])
    agree("msa_decode", arguments)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("outer", [1e-6, 1e4])
def test_global_scales_are_applied_once(outer, dim):
    """To scores and to outputs, and neither left out nor applied twice; None stands for 1."""
    arguments = drawn("sparse_attention", dim=dim)
    plain = {name: quantize_nvfp4(arguments[name], 1.0) for name in ("k", "v")}
    without = {name: QuantizedTensor(made.data, made.scale, "nvfp4") for name, made in plain.items()}
    wanted, *_ = agree("sparse_attention", arguments | plain)
    assert torch.equal(agree("sparse_attention", arguments | without)[0], wanted)
    of_size = torch.tensor(outer)
    made = {name: QuantizedTensor(v.data, v.scale, "nvfp4", global_scale=of_size) for name, v in plain.items()}
    scale = {"softmax_scale": dim**-0.5 / outer}
    out, *_ = agree("sparse_attention", arguments | made | scale)
    torch.testing.assert_close(out.float() / outer, wanted.float(), rtol=2**-7, atol=1e-4)
    for name in ("k", "v"):
        other, *_ = agree("sparse_attention", arguments | made | scale | {name: without[name]})
        assert not torch.equal(other, out)


@pytest.mark.parametrize("op", ATTENTION)
def test_odd_head_ratios(op):
    arguments = packed(drawn(op), "nvfp4")
    arguments["q"] = torch.randn(11, 6, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    agree(op, arguments)


def largest(format, shape):
    """Codes of 6 under the largest scale: more than e4m3 holds."""
    groups = GROUPS[format]
    data = torch.full((*shape[:-1], shape[-1] // 2), 0x77, dtype=torch.uint8)
    code = 0x7E if format == "nvfp4" else 0x8A
    scale = torch.full((*shape[:-1], shape[-1] // groups.size), code, dtype=torch.uint8).view(groups.dtype)
    return QuantizedTensor(data, scale, format)


@each_format
def test_values_beyond_e4m3_and_scales_of_zero(name):
    arguments = packed(drawn("sparse_attention"), name) | {"v": largest(name, (40, 2, 64))}
    wanted = 2688.0 if name == "nvfp4" else 6 * 2.0**11
    out, *_ = agree("sparse_attention", arguments)
    assert (out.float() == torch.tensor(wanted).to(BF16)).all()
    zeros = torch.zeros_like(arguments["v"].scale.view(torch.uint8)).view(GROUPS[name].dtype)
    small = agree("sparse_attention", arguments | {"v": QuantizedTensor(arguments["v"].data, zeros, name)})[0]
    assert (small == 0).all() if name == "nvfp4" else (small.abs() < 1e-37).all()
    # Scores are 0 where groups are: every visible key has the same weight.
    nothing = FORMATS[name](torch.zeros(40, 2, 64))
    agree("sparse_attention", packed(drawn("sparse_attention"), name) | {"k": nothing})


@each_format
def test_a_visible_nan(name):
    arguments = drawn("sparse_attention")
    arguments["k"][3, 0, 5] = torch.nan
    out, lse = agree("sparse_attention", packed(arguments, name))
    assert out.isnan().any() and not out[5:].isnan().any() and not out[:, 2:].isnan().any() and lse.isnan().any()
    arguments = drawn("index_score")
    arguments["idx_k"][0:8] = torch.nan
    (score,) = agree("index_score", packed(arguments, name))
    assert (score[:, :5, 0] == -torch.inf).all() and score[:, 4, 1].isfinite().all()


def with_layout(layout):
    return lambda given: {"k": given["k"].with_layout(layout)}


WRONG = {
    "k: got dtype torch.uint8; wanted bytes in a QuantizedTensor, which says what they hold": lambda given: {
        "k": given["k"].data, "v": given["v"].data
    },
    "v: got dtype torch.uint8; wanted bytes in a QuantizedTensor": lambda given: {"v": given["v"].data},
    "k: got scales in the layout 'swizzled'; wanted 'linear' or 'interleaved'": with_layout("swizzled"),
    "k_scale: got the layout 'interleaved' for flat keys; wanted 'linear', or pages": lambda given: {
        "k": QuantizedTensor(given["k"].data.repeat(1, 2, 1), given["k"].scale.repeat(1, 2, 1), "nvfp4").with_layout(
            "interleaved"
        ),
        "v": QuantizedTensor(given["v"].data.repeat(1, 2, 1), given["v"].scale.repeat(1, 2, 1), "nvfp4"),
    },
    "v: got format 'mxfp4'; wanted 'nvfp4' like k": lambda given: {"v": quantize_mxfp4(given["v"].dequantize())},
    "v: got dtype torch.bfloat16; wanted torch.uint8 like k": lambda given: {"v": given["v"].dequantize(BF16)},
    "k_scale: got a Tensor beside a QuantizedTensor; wanted None: k has its scale": lambda given: {
        "k_scale": torch.tensor(1.0)
    },
    "q: got format 'nvfp4'; wanted values without scales, or 'e4m3': only keys have 4 bits": lambda given: {
        "q": quantize_nvfp4(given["q"])
    },
    "k: got head dim 32; wanted 64 like q": lambda given: {
        name: quantize_nvfp4(given[name].dequantize()[..., :32]) for name in ("k", "v")
    },
    "k.global_scale: got inf; wanted finite numbers, not below 0": lambda given: {
        "k": quantize_nvfp4(given["k"].dequantize(), torch.tensor(torch.inf)), "check": True
    },
    "v_scale: got -2.0; wanted finite numbers, not below 0": lambda given: {
        "v": QuantizedTensor(given["v"].data, torch.full((40, 2, 4), -2.0).to(torch.float8_e4m3fn), "nvfp4"),
        "check": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_what_is_refused(message):
    arguments = packed(drawn("sparse_attention"), "nvfp4")
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        ops.sparse_attention(**arguments | WRONG[message](arguments))


def test_what_an_indexer_refuses():
    arguments = packed(drawn("select_blocks"), "nvfp4")
    keys = arguments["idx_k"]
    for wrong, message in (
        ({"idx_k": keys.data}, "idx_k: got dtype torch.uint8; wanted bytes in a QuantizedTensor"),
        ({"idx_k": keys.with_layout("interleaved")}, "k_scale: got the layout 'interleaved' for flat keys"),
        ({"idx_k": quantize_nvfp4(keys.dequantize()[:, :32])}, "idx_k: got index dim 32; wanted 64 like idx_q"),
        ({"idx_q": quantize_nvfp4(arguments["idx_q"])}, "idx_q: got format 'nvfp4'"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            ops.select_blocks(**arguments | wrong)
    step = packed(drawn("msa_decode"), "nvfp4")
    for name in KEYS:
        with pytest.raises(TypeError, match=f"{name}: got dtype torch.uint8; wanted bytes in a QuantizedTensor"):
            ops.msa_decode(**step | {name: step[name].data})


def test_check_looks_at_what_is_used():
    """Groups that are NaN are values; scales of unused rows may be anything."""
    for base, layout in ((call, "linear"), (paged, "linear"), (paged, "interleaved")):
        arguments = packed(drawn("sparse_attention", base), "nvfp4", layout)
        ops.sparse_attention(**arguments, check=True)
        scale = arguments["v"].scale.float()
        arguments["v"] = QuantizedTensor(arguments["v"].data, (-scale).to(torch.float8_e4m3fn), "nvfp4", layout)
        with pytest.raises(ValueError, match=r"v_scale: got -\d"):
            ops.sparse_attention(**arguments, check=True)


def test_training_takes_none():
    arguments = packed(drawn("sparse_attention"), "nvfp4")
    recorded = arguments | {"q": arguments["q"].requires_grad_()}
    with pytest.raises(TypeError, match=r"k: got dtype torch.uint8; .* where gradients are recorded"):
        ops.sparse_attention(**recorded)
    q, k = arguments["q"].detach(), arguments["k"]
    ids, lse = arguments["block_indices"], torch.zeros(11, 4)
    for refused in (
        lambda: ops.dense_attention(q, k, k),
        lambda: ops.sparse_attention_backward(q, q, k, k, q, lse, ids),
        lambda: ops.msa_attention(q, k, k, q, k, 2),
        lambda: ops.index_kl(q, k, lse, q, k, ids),
    ):
        with pytest.raises(TypeError, match="k: got QuantizedTensor; wanted a tensor"):
            refused()


@each_format
def test_kernels_get_scales_as_they_lie(name):
    """Of pages [.., 4, G] by their strides, of flat keys as they are; nothing is copied."""
    for layout, strides in (("linear", lambda g: (g, 1)), ("interleaved", lambda g: (1, 4))):
        arguments = packed(drawn("sparse_attention", paged), name, layout)
        arguments["v"] = FORMATS[name](arguments["v"].dequantize()).with_layout("linear")
        given = operands.Attention(
            arguments["q"], arguments["k"].data, arguments["v"].data, arguments["block_indices"], None, None,
            arguments["k"].scale, arguments["v"].scale, None, arguments["k"].global_scale,
        )  # fmt: skip
        got = operands.keys_and_values(given)
        groups = 64 // GROUPS[name].size
        assert len(got) == (6 if name == "nvfp4" else 4)
        scale = got[1]
        assert scale.shape == (12, 2, 1, 4, groups) and scale.stride()[-2:] == strides(groups)
        assert scale.untyped_storage().data_ptr() == arguments["k"].scale.untyped_storage().data_ptr()
        linear = layouts.to_linear(arguments["k"].scale, layout, 4, groups)
        assert torch.equal(scale.flatten(2, 3).view(torch.uint8), linear.view(torch.uint8))
        some = operands.of_heads(got, slice(1, 2))
        assert [part.shape[part.dim() > 1] for part in some] == [1] * len(got)
        if name == "nvfp4":
            assert got[2].tolist() == [arguments["k"].global_scale.item()] * 2 and got[5].tolist() == [1.0, 1.0]
            assert got[5].data_ptr() == operands.keys_and_values(given)[5].data_ptr()


def test_a_call_has_the_precision_of_its_scales():
    q = torch.empty(0, dtype=BF16)
    for name, precision in (("nvfp4", "query bfloat16, key_value nvfp4"), ("mxfp4", "query bfloat16, key_value mxfp4")):
        assert lookup.precision(query=q, key_value=name) in (precision, "q16kv4", "q16kvmx4")


def test_buffers_are_remembered_by_format():
    arguments = drawn("sparse_attention")
    out = torch.empty(11, 4, 64, dtype=BF16)
    for name, again in itertools.product(FORMATS, range(2)):
        made = packed(arguments, name)
        ops.sparse_attention(**made, out=out)
        assert torch.equal(out, ops.sparse_attention(**made)), again


def test_traced():
    arguments = packed(drawn("sparse_attention"), "nvfp4")
    parts = {"k": arguments.pop("k"), "v": arguments.pop("v")}

    def attention(k, k_scale, v, v_scale, outer, **rest):
        k, v = (QuantizedTensor(x, s, "nvfp4", "linear", outer) for x, s in ((k, k_scale), (v, v_scale)))
        return ops.sparse_attention(k=k, v=v, **rest)

    outer = torch.tensor(0.5)
    given = (parts["k"].data, parts["k"].scale, parts["v"].data, parts["v"].scale, outer)
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*given, **arguments), attention(*given, **arguments))


@each_format
def test_scales_that_kernels_cannot_read(name):
    """Those of a token lie together, at a multiple of as many bytes, as do the tensors; those of keys are linear."""
    pages = {layout: packed(drawn("sparse_decode", paged), name, layout) for layout in ("linear", "interleaved")}

    def given(k, v):
        ids, where = pages["linear"]["block_indices"], Where(page_table=pages["linear"]["page_table"])
        q = pages["linear"]["q"]
        return operands.Attention(q, k.data, v.data, ids, where, None, k.scale, v.scale)

    linear, interleaved = pages["linear"]["k"], pages["interleaved"]["k"]
    for k, v in ((linear, linear), (linear, interleaved)):
        assert operands.interleaved_keys(given(k, v)) == () and not operands.has_odd_scales(given(k, v))
    [refusal] = operands.interleaved_keys(given(interleaved, linear))
    assert "scales of k are interleaved, wanted linear ones" in refusal
    kind, groups = GROUPS[name].dtype, 64 // GROUPS[name].size
    shape = linear.scale.shape
    shifted = torch.zeros(linear.scale.numel() + 1, dtype=torch.uint8)[1:].view(kind).view(shape)
    apart = torch.zeros(*shape[:-1], 2 * groups, dtype=torch.uint8).view(kind)[..., ::2]
    uneven = torch.zeros(*shape[:-1], groups + 1, dtype=torch.uint8).view(kind)[..., :groups]
    wide = torch.zeros(*shape[:-1], 3 * groups, dtype=torch.uint8).view(kind)[..., :groups]
    for scale, odd in ((shifted, True), (apart, True), (uneven, True), (wide, False)):
        made = QuantizedTensor(linear.data, scale, name)
        assert operands.has_odd_scales(given(linear, made)) == operands.has_odd_scales(given(made, linear)) == odd


@pytest.mark.parametrize("heads_per_group", [1, 2])
def test_e4m3_queries_are_widened_for_kernels_that_score_every_block(heads_per_group):
    """Exactly; scales stay for scores, and reach a selection where they rank heads of a group."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).expand(3, 4, 256)
    keys = quantize_nvfp4(torch.randn(40, 256, generator=torch.Generator().manual_seed(0)))
    scale = torch.tensor([0.5, 1.0, 3.0, 0.1]).expand(3, 4)
    given = indexer.operands_of(codes, keys, Where(), scale, None)
    scored = index.widened("index_score", given)
    assert scored.idx_q.dtype == BF16 and scored.q_scale is scale
    torch.testing.assert_close(scored.idx_q.float(), codes.float(), rtol=0, atol=0, equal_nan=True)
    assert index.widened("decode_score", given) is given  # its kernels take e4m3
    selected = index.widened_for_selection(given, heads_per_group)
    assert selected.idx_q.dtype == BF16 and selected.q_scale is None
    wanted = codes.float() if heads_per_group == 1 else codes.float() * scale[..., None]
    torch.testing.assert_close(selected.idx_q, wanted.to(BF16), rtol=0, atol=0, equal_nan=True)
    for other in (indexer.operands_of(codes.to(BF16), keys, Where(), None, None),
                  indexer.operands_of(codes, codes[0], Where(), None, None)):  # fmt: skip
        assert (
            index.widened("index_score", other) is other
            and index.widened_for_selection(other, heads_per_group) is other
        )
