"""e4m3 keys and values under attention: which scales a call may have, what they do, and what kernels get of them."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from ops.calls import ATTENTION, OPERATORS, PARTIAL, TERMS, call, paged
from ops.decode_stand_ins import dequantized
from rounding import close

from msa_tiles import ops, quant
from msa_tiles.call import backends
from msa_tiles.launch import decode, lookup, operands
from msa_tiles.quant import FP8, QuantizedTensor, quantize_fp8
from msa_tiles.runtime import NoKernelError

BF16 = torch.bfloat16
ATTENDING = [*ATTENTION, "msa_decode"]
DECODING = ["sparse_decode", "msa_decode"]
BASES = pytest.mark.parametrize("base", [call, paged], ids=["flat", "paged"])
PER = ("tensor", "head", "token_head")
EXACT = {"rtol": 0, "atol": 0, "equal_nan": True}


def powers(shape, seed):
    """Powers of two of any size, so that dequantised values stay exact and no scale can be left out unnoticed."""
    return 2.0 ** torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def scale_of(data, per, seed=0):
    shape = {"tensor": (), "head": data.shape[1:2], "token_head": data.shape[:-1]}[per]
    return powers(shape, seed)


def quantised(op, base=call, k_per="head", v_per="head", index=False):
    """A valid call on e4m3 keys and values under bfloat16 queries; with ``index`` the indexer's are e4m3 too."""
    arguments = base(op)
    for name in ("q", "idx_q", "idx_k"):
        if name in arguments:
            arguments[name] = arguments[name].to(FP8 if index and name != "q" else BF16)
    for number, (name, per) in enumerate((("k", k_per), ("v", v_per))):
        arguments[name] = arguments[name].to(FP8)
        arguments[f"{name}_scale"] = scale_of(arguments[name], per, number)
    if index and op == "msa_decode":
        arguments["index_q_scale"] = powers((11, 4), 2)
        arguments["index_k_scale"] = powers(arguments["idx_k"].shape[:-1], 3)
    return arguments


def spelled_out(arguments):
    """The same call on float32 values, without scales."""
    plain = dict(arguments)
    for name, scale in (("k", "k_scale"), ("v", "v_scale"), ("idx_q", "index_q_scale"), ("idx_k", "index_k_scale")):
        if name in plain:
            plain[name] = quant.dequantize(plain[name], plain.pop(scale, None))
    return plain | {"q": plain["q"].float()}


def answer(op, arguments):
    """out, lse and, of a decode step, the ids."""
    if op == "msa_decode":
        arguments = arguments | {"block_indices": torch.full((2, 11, 3), 77, dtype=torch.int32)}
    found = OPERATORS[op](**arguments, return_lse=True)
    return (*found, *([arguments["block_indices"]] if op == "msa_decode" else []))


def agree(found, wanted, arguments):
    """The results of kernels and of the reference: out within what the values of its head allow."""
    values = quant.dequantize(arguments["v"], arguments["v_scale"]).nan_to_num(0.0).abs().float()
    most = values.transpose(0, 1).flatten(1).amax(1).repeat_interleave(4 // values.shape[1])
    close(found[0], wanted[0], **PARTIAL | {"size": most[:, None].double()})
    close(found[1:], wanted[1:], terms=TERMS)


@BASES
@pytest.mark.parametrize("op", ATTENDING)
def test_answers_are_those_of_the_dequantised_values(op, base):
    for k_per, v_per in itertools.product(PER, PER):
        arguments = quantised(op, base, k_per, v_per)
        out, *found = answer(op, arguments)
        wanted, *further = answer(op, spelled_out(arguments))
        assert out.dtype == BF16
        torch.testing.assert_close((out, *found), (wanted.to(BF16), *further), **EXACT)


@BASES
def test_a_step_may_be_quantised_throughout(base):
    arguments = quantised("msa_decode", base, "token_head", "head", index=True)
    out, *found = answer("msa_decode", arguments)
    wanted, *further = answer("msa_decode", spelled_out(arguments))
    torch.testing.assert_close((out, *found), (wanted.to(BF16), *further), **EXACT)


@pytest.mark.parametrize("op", ATTENDING)
def test_queries_may_be_quantised_too(op):
    arguments = quantised(op)
    arguments["q"] = arguments["q"].to(FP8)
    for shape in ((), (4,), (11, 4)):
        scaled = arguments | {"q_scale": powers(shape, 5)}
        exact = spelled_out(arguments) | {"q": quant.dequantize(arguments["q"], scaled["q_scale"])}
        torch.testing.assert_close(OPERATORS[op](**scaled), OPERATORS[op](**exact).to(BF16), **EXACT)
    message = "q_scale: got None; wanted float32 [], [Hq] or [T, Hq]: q is torch.float8_e4m3fn"
    with pytest.raises(ValueError, match=re.escape(message)):
        OPERATORS[op](**arguments)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("op", ATTENDING)
def test_each_scale_is_applied_once(op, name):
    """Twice the scale is another answer, and not that of four times the scale."""
    arguments = quantised(op)
    answers = [OPERATORS[op](**arguments | {name: arguments[name] * factor}) for factor in (1, 2, 4)]
    exact = [OPERATORS[op](**spelled_out(arguments | {name: arguments[name] * factor})) for factor in (1, 2, 4)]
    assert not torch.equal(answers[0], answers[1]) and not torch.equal(answers[1], answers[2])
    for found, wanted in zip(answers, exact, strict=True):
        torch.testing.assert_close(found, wanted.to(BF16), **EXACT)


@pytest.mark.parametrize("op", ATTENDING)
def test_one_head_may_be_scaled_a_thousandfold(op):
    arguments = quantised(op)
    arguments["v_scale"] = torch.tensor([1.0, 1000.0])
    torch.testing.assert_close(
        OPERATORS[op](**arguments), OPERATORS[op](**spelled_out(arguments)).to(BF16), **EXACT
    )  # fmt: skip


@BASES
@pytest.mark.parametrize("op", ATTENDING)
def test_a_quantised_tensor_stands_for_a_tensor_and_its_scale(op, base):
    arguments = quantised(op, base, "token_head", "tensor")
    wrapped = dict(arguments)
    for name in ("k", "v"):
        wrapped[name] = QuantizedTensor(arguments[name], wrapped.pop(f"{name}_scale"))
    assert torch.equal(OPERATORS[op](**arguments), OPERATORS[op](**wrapped))
    for name in ("k_scale", "v_scale"):
        message = f"{name}: got a Tensor beside a QuantizedTensor; wanted None: {name[0]} has its scale"
        with pytest.raises(ValueError, match=re.escape(message)):
            OPERATORS[op](**wrapped | {name: arguments[name]})


@pytest.mark.parametrize("op", ATTENDING)
def test_scales_may_have_any_strides(op):
    """A server keeps [Hkv, tokens], a slice of a cache, or one number for all."""
    arguments = quantised(op, call, "token_head", "token_head")
    wanted = OPERATORS[op](**arguments)
    views = {name: arguments[name].T.contiguous().T for name in ("k_scale", "v_scale")}
    assert views["k_scale"].stride(0) == 1 and torch.equal(OPERATORS[op](**arguments | views), wanted)
    wide = {name: torch.stack([arguments[name]] * 3, -1)[..., 1] for name in ("k_scale", "v_scale")}
    assert torch.equal(OPERATORS[op](**arguments | wide), wanted)
    one = {name: torch.tensor(0.5).expand(40, 2) for name in ("k_scale", "v_scale")}
    same = OPERATORS[op](**arguments | {name: torch.tensor(0.5) for name in one})
    assert torch.equal(OPERATORS[op](**arguments | one), same)


@pytest.mark.parametrize("op", ATTENDING)
def test_out_is_bfloat16(op):
    arguments = quantised(op) | {"q": quantised(op)["q"].to(FP8), "q_scale": torch.tensor(1.0)}
    message = "out: got dtype torch.float8_e4m3fn; wanted torch.bfloat16"
    with pytest.raises(TypeError, match=message):
        OPERATORS[op](**arguments, out=torch.empty(11, 4, 16).to(FP8))
    out = torch.empty(11, 4, 16, dtype=BF16)
    assert torch.equal(OPERATORS[op](**arguments, out=out), OPERATORS[op](**arguments))


DIMS = "[], [Hkv] or [Tk, Hkv]"
WRONG = [
    ("k_scale", None, f"k_scale: got None; wanted float32 {DIMS}: k is torch.float8_e4m3fn", ValueError),
    ("v_scale", None, f"v_scale: got None; wanted float32 {DIMS}: v is torch.float8_e4m3fn", ValueError),
    ("q_scale", torch.ones(()), "q_scale: got a Tensor; wanted None", ValueError),
    ("k_scale", 1.0, f"k_scale: got float; wanted a float32 tensor {DIMS}", TypeError),
    ("v_scale", torch.ones(2).double(), "v_scale: got dtype torch.float64; wanted torch.float32", TypeError),
    ("k_scale", torch.ones(4), f"k_scale: got shape [4]; wanted {DIMS} = one of [], [2], [40, 2]", ValueError),
    ("k_scale", torch.ones(2, 40), f"k_scale: got shape [2, 40]; wanted {DIMS} = one of [], [2], [40, 2]", ValueError),
    ("v_scale", torch.ones(2, device="meta"), "v_scale: got device meta; wanted cpu like v", ValueError),
    ("v", torch.zeros(40, 2, 16), "v: got dtype torch.float32; wanted torch.float8_e4m3fn like k", TypeError),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "message", "error"), WRONG, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(WRONG)]
)
@pytest.mark.parametrize("op", ATTENDING)
def test_wrong_scales(op, name, value, message, error):
    with pytest.raises(error, match=re.escape(message)):
        OPERATORS[op](**quantised(op) | {name: value})


@pytest.mark.parametrize("op", ATTENDING)
def test_scales_of_pages_have_their_shape(op):
    message = "k_scale: got shape [40, 2]; wanted [], [Hkv] or [pages, Hkv, page] = one of [], [2], [12, 2, 4]"
    with pytest.raises(ValueError, match=re.escape(message)):
        OPERATORS[op](**quantised(op, paged) | {"k_scale": torch.ones(40, 2)})


@pytest.mark.parametrize("op", ATTENDING)
def test_a_scale_of_what_is_not_quantised_is_refused(op):
    for name in ("q_scale", "k_scale", "v_scale"):
        with pytest.raises(ValueError, match=f"{name}: got a Tensor; wanted None"):
            OPERATORS[op](**call(op), **{name: torch.ones(())})


@pytest.mark.parametrize("op", ATTENDING)
def test_e5m2_is_refused(op):
    arguments = quantised(op)
    coarse = {name: arguments[name].float().to(torch.float8_e5m2) for name in ("k", "v")}
    wanted = r"torch\.bfloat16 like q, torch\.float8_e4m3fn, or 4 bits"
    with pytest.raises(TypeError, match=rf"k: got dtype torch\.float8_e5m2; wanted {wanted}"):
        OPERATORS[op](**arguments | coarse)
    with pytest.raises(TypeError, match=r"v: got dtype torch\.float8_e5m2; wanted torch.float8_e4m3fn like k"):
        OPERATORS[op](**arguments | {"v": coarse["v"]})


@pytest.mark.parametrize("value", [-1.0, torch.nan, torch.inf])
@BASES
@pytest.mark.parametrize("op", ATTENDING)
@pytest.mark.drawn(6)
def test_check_refuses_scales_that_are_negative_or_not_finite(op, base, value):
    for per in PER:
        arguments = quantised(op, base, per, per)
        OPERATORS[op](**arguments, check=True)
        OPERATORS[op](**arguments | {"k_scale": torch.zeros_like(arguments["k_scale"])}, check=True)
        for name in ("k_scale", "v_scale"):
            spoiled = arguments[name].clone()
            row = int(arguments["page_table"][0, 0]) if base is paged else 0
            spoiled[row if per == "token_head" else ...] = value
            with pytest.raises(ValueError, match=re.escape(f"{name}: got {value}; wanted finite numbers, not below 0")):
                OPERATORS[op](**arguments | {name: spoiled}, check=True)


def test_check_looks_at_scales_in_use_only():
    arguments = quantised("sparse_decode", paged, "token_head", "token_head")
    used = torch.zeros(12, 4, dtype=torch.bool)
    for request, length in enumerate(arguments["seqused_k"].tolist()):
        for token in range(length):
            used[int(arguments["page_table"][request, token // 4]), token % 4] = True
    assert not used.all()
    wanted = ops.sparse_decode(**arguments)
    spoiled = {name: arguments[name].masked_fill(~used[:, None], torch.nan) for name in ("k_scale", "v_scale")}
    torch.testing.assert_close(ops.sparse_decode(**arguments | spoiled, check=True), wanted, **EXACT)


@pytest.mark.parametrize("name", ["q", "k"])
def test_a_call_that_is_differentiated_is_refused(name):
    arguments = quantised("sparse_attention")
    arguments["q"].requires_grad_()
    if name == "q":
        arguments |= {"q": arguments["q"].detach().to(FP8).requires_grad_(), "q_scale": torch.ones(())}
    message = f"{name}: got dtype torch.float8_e4m3fn; wanted bfloat16, float32 or float64 where gradients are recorded"
    with pytest.raises(TypeError, match=message):
        ops.sparse_attention(**arguments)
    with torch.no_grad():
        ops.sparse_attention(**arguments)


@pytest.mark.parametrize("op", ["dense_attention", "index_kl", "msa_attention", "sparse_attention_backward"])
def test_training_takes_no_quantised_tensors(op):
    from ops.training_calls import call as training_call

    arguments = training_call(op)
    for wrong, error in (
        (arguments["k"].to(FP8), "dtype torch.float8_e4m3fn"),
        (quantize_fp8(arguments["k"]), "Quantized"),
    ):
        with pytest.raises(TypeError, match=f"^k: got {error}"):
            getattr(ops, op)(**arguments | {"k": wrong})


@pytest.mark.parametrize("k_per", PER)
@pytest.mark.parametrize("v_per", PER)
@BASES
@pytest.mark.parametrize("op", DECODING)
@pytest.mark.drawn(12)
def test_decode_kernels_get_every_scale_once(op, base, k_per, v_per, decode_kernels):
    """A stand-in multiplies by every scale that it is given, of the shape that its variant says."""
    arguments = quantised(op, base, k_per, v_per)
    found, wanted = answer(op, arguments), answer(op, arguments | {"backend": "reference"})
    agree(found, wanted, arguments)
    (facts,) = (facts for facts in decode_kernels.found if facts.op == "sparse_decode")
    assert (facts.precision, facts.variant["token_scales"]) == ("q16kv8", int("token_head" in (k_per, v_per)))
    given = next(given for op, given in decode_kernels.launched if op == "sparse_decode")
    for name, per in (("k", k_per), ("v", v_per)):
        scale = arguments[f"{name}_scale"]
        assert given[f"{name}_scale"].untyped_storage().data_ptr() == scale.untyped_storage().data_ptr(), "a view"
        assert per == "token_head" or 0 in given[f"{name}_scale"].stride() or scale.dim() == 1


def test_a_step_has_the_precision_of_its_indexer_and_of_its_attention(decode_kernels):
    arguments = quantised("msa_decode", paged, "token_head", "head", index=True)
    found, wanted = (answer("msa_decode", arguments | backend) for backend in ({}, {"backend": "reference"}))
    agree(found, wanted, arguments)
    precisions = {facts.op: facts.precision for facts in decode_kernels.found}
    assert (precisions["decode_score"], precisions["sparse_decode"]) == ("q8k8", "q16kv8")
    variants = {facts.op: facts.variant for facts in decode_kernels.found}
    assert variants["decode_score"]["key_scales"] == 1 and variants["sparse_decode"]["token_scales"] == 1


@pytest.mark.parametrize("op", DECODING)
def test_other_scales_are_another_call(op, decode_kernels):
    """What is remembered of one granularity does not serve another, and other numbers in the same tensor count."""
    buffers = {
        "out": torch.empty(11, 4, 16, dtype=BF16), "lse": torch.empty(11, 4),
        "workspace": torch.empty(1 << 14, dtype=torch.uint8),
    }  # fmt: skip
    if op == "msa_decode":
        buffers["block_indices"] = torch.empty(2, 11, 3, dtype=torch.int32)
    for per in ("tensor", "head", "token_head", "tensor"):
        for seed in (0, 7):
            arguments = quantised(op, paged, per, per) | buffers
            arguments["v_scale"].copy_(scale_of(arguments["v"], per, seed))
            OPERATORS[op](**arguments)
            out = buffers["out"].clone()
            OPERATORS[op](**arguments, backend="reference")
            agree([out], [buffers["out"]], arguments)


@pytest.mark.parametrize("k_per", PER)
@pytest.mark.parametrize("v_per", PER)
@BASES
def test_prefill_kernels_get_every_scale_once(base, k_per, v_per, monkeypatch):
    arguments = quantised("sparse_attention", base, k_per, v_per)
    seen = []

    def part_kernel(facts, backend, op, variant, *rest):
        return lambda *given: seen.append((op, facts, variant, given))

    monkeypatch.setattr(backends, "runs_reference", lambda backend, device: backend == "reference")
    monkeypatch.setattr(lookup, "part_kernel", part_kernel)
    monkeypatch.setattr(lookup, "part_serves", lambda *part: False)
    chip = type("Chip", (), {"multi_processor_count": 1})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    ops.sparse_attention(**arguments)
    facts, variant, (_, k, k_scale, v, v_scale, *_) = next(rest for op, *rest in seen if op == "sparse_attention")
    assert (facts.precision, variant["token_scales"]) == ("q16kv8", int("token_head" in (k_per, v_per)))
    given = {"k": k, "k_scale": k_scale, "v": v, "v_scale": v_scale}
    for name in ("k", "v"):
        wanted = quant.dequantize(arguments[name], arguments[f"{name}_scale"])
        torch.testing.assert_close(dequantized(variant, given, name), wanted, **EXACT)
    # What a round of heads is handed has the scales of its heads.
    for heads in (slice(0, 1), slice(1, 2)):
        part = dict(zip(given, operands.of_heads((k, k_scale, v, v_scale), heads), strict=True))
        for name in ("k", "v"):
            whole = dequantized(variant, given, name)
            torch.testing.assert_close(dequantized(variant, part, name), whole[:, heads], **EXACT)


def test_without_a_kernel_the_call_is_refused(monkeypatch):
    """No scale is dropped for want of a kernel: the refusal names the precision."""
    monkeypatch.setattr(backends, "runs_reference", lambda backend, device: backend == "reference")
    monkeypatch.setattr(decode, "num_sms", lambda index: 132)
    arguments = quantised("sparse_decode")
    arguments |= {"q": arguments["q"].to(FP8), "q_scale": torch.ones(())}
    with pytest.raises(NoKernelError, match="float8_e4m3fn"):
        ops.sparse_decode(**arguments)


def test_traced():
    arguments = quantised("sparse_attention", call, "token_head", "head")
    compiled = torch.compile(lambda **kwargs: ops.sparse_attention(**kwargs), fullgraph=True, backend="eager")
    assert torch.equal(compiled(**arguments), ops.sparse_attention(**arguments))

    def wrapped(k, v, k_scale, v_scale, **rest):
        return ops.sparse_decode(k=QuantizedTensor(k, k_scale), v=QuantizedTensor(v, v_scale), **rest)

    compiled = torch.compile(wrapped, fullgraph=True, backend="eager")
    assert torch.equal(compiled(**arguments), ops.sparse_decode(**arguments))
