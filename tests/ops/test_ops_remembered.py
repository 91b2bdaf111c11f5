"""A call into the caller's buffers whose like was seen before skips validation and dispatch, and nothing else."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from ops.calls import OPERATORS, PARTIAL, RANKERS, call, paged
from rounding import close

from msa_tiles import ops
from msa_tiles.call.where import Where
from msa_tiles.launch import attention, lookup
from msa_tiles.library import remember

BF16 = torch.bfloat16
REMEMBERING = ["select_blocks", "topk_select", "decode_topk", "sparse_attention", "sparse_decode"]
ATTENDING = ["sparse_attention", "sparse_decode"]
SELECTING = ["select_blocks", "topk_select", "decode_topk"]


@functools.cache
def made(op):
    """Arguments of a call with lengths on the device, but for its buffers."""
    if op in RANKERS:
        arguments = call(op) | {"seqused_k": torch.tensor([17, 0, 20], dtype=torch.int32)}
    else:
        arguments = paged(op)
        for name in ("q", "k", "v", "idx_q", "idx_k"):
            if name in arguments:
                arguments[name] = arguments[name].nan_to_num().to(BF16)
    return arguments


def with_buffers(op):
    """The arguments and the caller's buffers."""
    arguments = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in made(op).items()}
    if op in SELECTING:
        return arguments | {"out": torch.empty(2, 11, 3, dtype=torch.int32)}
    out, lse = torch.empty(11, 4, 16, dtype=BF16), torch.empty(11, 4)
    return arguments | {"out": out, "lse": lse, "workspace": torch.empty(1 << 14, dtype=torch.uint8)}


@pytest.fixture
def validated(monkeypatch, kernels, decode_kernels):
    """The calls that were validated, on stand-ins for the kernels of every operator."""
    # To make arguments takes validated calls of its own.
    for op in REMEMBERING:
        made(op)
    calls, validate = [], Where.validate

    def counted(self, *arguments):
        calls.append(arguments)
        return validate(self, *arguments)

    monkeypatch.setattr(Where, "validate", counted)
    return calls


@pytest.fixture(autouse=True)
def both_kinds_of_kernels(monkeypatch, kernels, decode_kernels):
    """Operators of decoding find their kernels through the runtime, `kernels` stands in front of it for the others."""
    from msa_tiles import runtime

    prefill = lookup.find_kernel

    def find_kernel(facts, backend):
        if facts.op == "decode_topk":
            return runtime.find_kernel(facts.op, facts, backend=backend)
        return prefill(facts, backend)

    monkeypatch.setattr(lookup, "find_kernel", find_kernel)


def poisoned(arguments):
    """The same call into other buffers."""
    fresh = {"out": torch.full_like(arguments["out"], 77)}
    if "lse" in arguments:
        fresh["lse"] = torch.full_like(arguments["lse"], 77)
    return arguments | fresh


def wanted(op, arguments):
    arguments = poisoned(arguments)
    OPERATORS[op](**arguments | {"backend": "reference"})
    return [arguments[name] for name in ("out", "lse") if name in arguments]


def other_contents(op, arguments):
    """Other values at other addresses: all that may differ between calls of one signature."""
    changed = {}
    for name in ("q", "k", "v", "idx_q", "idx_k", "score"):
        if name in arguments:
            changed[name] = arguments[name].flip(0) + 1
    changed["seqused_k"] = arguments["seqused_k"] - torch.tensor([3, 0, 9], dtype=torch.int32)
    changed["cu_seqlens_q"] = torch.tensor([0, 2, 3, 10], dtype=torch.int32)
    if "page_table" in arguments:
        changed["page_table"] = arguments["page_table"].clamp_min(0).flip(0)
    if "block_indices" in arguments:
        changed["block_indices"] = arguments["block_indices"].flip(1)
    return poisoned(arguments | changed)


@pytest.mark.parametrize("op", REMEMBERING)
def test_other_contents_give_their_own_answer(op, validated):
    first = with_buffers(op)
    OPERATORS[op](**first)
    assert len(validated) == 1
    second = other_contents(op, first)
    result = OPERATORS[op](**second)
    assert len(validated) == 1, "the second call goes the short way"
    assert result is second["out"]
    found = [second[name] for name in ("out", "lse") if name in second]
    close(found, wanted(op, second), **PARTIAL)
    assert not torch.equal(first["out"], second["out"])
    again = poisoned(first)
    OPERATORS[op](**again)
    assert torch.equal(again["out"], first["out"])


@pytest.mark.parametrize("op", ATTENDING)
def test_what_is_left_out_is_made_anew(op, validated):
    arguments = with_buffers(op) | {"lse": None, "workspace": 1 << 14}
    _, first = OPERATORS[op](**arguments, return_lse=True)
    out, second = OPERATORS[op](**arguments, return_lse=True)
    assert len(validated) == 1
    assert out is arguments["out"] and second.data_ptr() != first.data_ptr()
    torch.testing.assert_close(second, first, rtol=0, atol=0)


ODD = torch.zeros(11 * 4 * 16 + 1, dtype=BF16)[1:].view(11, 4, 16)
POSITIONS = torch.tensor([0, 8, 3, 5, -1, 19, 2, 30, 7, 11, 0], dtype=torch.int32)
ANOTHER = {
    "select_blocks": [
        {"topk": 2, "out": torch.empty(2, 11, 2, dtype=torch.int32)},
        {"num_kv_heads": 4, "out": torch.empty(4, 11, 3, dtype=torch.int32)},
        {"order": "score"},
        {"init_blocks": 1},
        {"local_blocks": 2},
        {"idx_q": ODD},
        {"idx_k": torch.zeros(12, 4, 32, dtype=BF16)[..., ::2][..., :16].contiguous().repeat(2, 1, 1)},
        {"block_size": 4},
    ],
    "topk_select": [
        {"topk": 2, "out": torch.empty(2, 11, 2, dtype=torch.int32)},
        {"num_valid_blocks": 4},
        {"num_valid_blocks": torch.full((11,), 4, dtype=torch.int32)},
        {"order": "local_last"},
        {"score": torch.zeros(4, 11, 6)},
        {"score": torch.zeros(11, 4, 5), "layout": "token_major"},
        {"init_blocks": 2},
        {"local_blocks": 0},
        {"block_size": 4},
    ],
    "sparse_attention": [
        {"softmax_scale": 0.5},
        {"workspace": torch.empty(1 << 13, dtype=torch.uint8)},
        {"workspace": 1 << 14},
        {"lse": torch.empty(11, 8)[:, :4]},
        {"q": ODD},
        {"block_indices": torch.zeros(2, 11, 4, dtype=torch.int32)},
        {"deterministic": True},
        {"page_table": torch.zeros(3, 7, dtype=torch.int32)},
    ],
}
ANOTHER["decode_topk"] = ANOTHER["topk_select"]
ANOTHER["sparse_decode"] = [change for change in ANOTHER["sparse_attention"] if "deterministic" not in change]
CHANGES = [(op, change) for op, changes in ANOTHER.items() for change in changes]
EVERYWHERE = [
    {"check": True},
    {"q_positions": POSITIONS},
    {"max_seqlen_q": 6},
    {"max_seqlen_k": 23},
    {"backend": "reference"},
    {"k_offset": torch.zeros(3, dtype=torch.int32)},
]
CHANGES += [(op, change) for op in REMEMBERING for change in EVERYWHERE]


@pytest.mark.parametrize(("op", "change"), CHANGES, ids=[f"{op}-{'-'.join(change)}" for op, change in CHANGES])
@pytest.mark.drawn(25)
def test_another_call_is_validated_and_right(op, change, validated):
    arguments = with_buffers(op)
    OPERATORS[op](**arguments)
    arguments |= change
    found = [arguments[name].fill_(77) for name in ("out", "lse") if name in arguments]
    OPERATORS[op](**arguments)
    assert len(validated) == 2
    close(found, wanted(op, arguments), **PARTIAL)


def wrong_arguments():
    floats, short = torch.zeros(3), torch.zeros(2, dtype=torch.int32)
    everywhere = [
        ("out", torch.empty(11, 5, 7)),
        ("out", [0]),
        ("seqused_k", floats),
        ("seqused_k", short),
        ("cu_seqlens_q", torch.zeros(8, dtype=torch.int32)[::2]),
        ("max_seqlen_q", 6.0),
        ("max_seqlen_q", True),
        ("block_size", True),
        ("backend", "fast"),
    ]
    yield from ((op, *wrong) for op in REMEMBERING for wrong in everywhere)
    for op in SELECTING:
        yield from ((op, *wrong) for wrong in (("topk", True), ("order", "best"), ("local_blocks", 1.0)))
    for op in ATTENDING:
        yield from (
            (op, *wrong)
            for wrong in (
                ("lse", torch.empty(11, 5)),
                ("v", torch.zeros(12, 2, 4, 16)),
                ("k_scale", torch.ones(())),
                ("workspace", torch.empty(1 << 14, dtype=torch.uint8)[3:]),
                ("workspace", True),
                ("softmax_scale", True),
            )
        )


WRONG = list(wrong_arguments())


@pytest.mark.parametrize(
    ("op", "name", "wrong"), WRONG, ids=[f"{op}-{name}-{n}" for n, (op, name, _) in enumerate(WRONG)]
)
def test_a_wrong_argument_is_still_refused(op, name, wrong, validated):
    arguments = with_buffers(op) | ({"max_seqlen_q": 6} if name == "max_seqlen_q" else {})
    if name in ("topk", "block_size", "local_blocks"):
        # What equals the wrong value was seen: 1 == True == 1.0.
        arguments |= {name: 1} | ({"out": torch.empty(2, 11, 1, dtype=torch.int32)} if name == "topk" else {})
        if name == "block_size" and "page_table" in arguments:
            arguments |= {"block_size": 4}
    if name == "softmax_scale":
        arguments |= {"softmax_scale": 1.0}
    OPERATORS[op](**arguments)
    for _ in range(2):
        with pytest.raises((ValueError, TypeError), match=f"^{name}: "):
            OPERATORS[op](**arguments | {name: wrong})


@pytest.mark.parametrize("op", REMEMBERING)
def test_calls_without_a_buffer_are_not_remembered(op, validated):
    arguments = with_buffers(op) | {"out": None}
    OPERATORS[op](**arguments)
    OPERATORS[op](**arguments)
    assert len(validated) == 2


@pytest.mark.parametrize("op", REMEMBERING)
def test_versions_rise(op, validated, kernels, decode_kernels):
    arguments = with_buffers(op)
    OPERATORS[op](**arguments)
    names = [name for name in ("out", "lse", "workspace") if name in arguments]
    before = {name: arguments[name]._version for name in names}
    OPERATORS[op](**arguments)
    assert len(validated) == 1
    assert all(arguments[name]._version > before[name] for name in names)


@pytest.mark.parametrize("op", ATTENDING)
def test_gradients_are_not_lost(op, validated):
    """A call that autograd records was seen without: it goes the whole way."""
    arguments = with_buffers(op)
    OPERATORS[op](**arguments)
    learnt = arguments | {"q": arguments["q"].clone().requires_grad_()}
    if op == "sparse_attention":
        with pytest.raises(ValueError, match=r"^out: got a buffer where gradients are recorded"):
            ops.sparse_attention(**learnt)
    with torch.no_grad():
        OPERATORS[op](**learnt)
    assert torch.equal(learnt["out"], arguments["out"])


def test_how_the_launch_code_is_set_belongs_to_a_call(validated, monkeypatch):
    arguments = with_buffers("sparse_attention")
    ops.sparse_attention(**arguments)
    monkeypatch.setattr(attention, "FILL", 5)
    ops.sparse_attention(**arguments)
    assert len(validated) == 2


def test_no_tensor_of_a_call_is_kept(validated, kernels, decode_kernels):
    for op in REMEMBERING:
        arguments = with_buffers(op)
        OPERATORS[op](**arguments)
        kept = {name: weakref.ref(value) for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        OPERATORS[op](**arguments)
        del arguments
        # The stand-ins note what they got.
        validated.clear()
        decode_kernels.launched.clear()
        kernels.attention.seen = None
        gc.collect()
        assert [name for name, tensor in kept.items() if tensor() is not None] == [], op


def test_the_memory_is_bounded():
    remembered = remember.Remembered(most=3)
    for number in range(10):
        remembered.keep(number, str(number))
    assert remembered.get(9) == "9" and sum(remembered.get(number) is not None for number in range(10)) <= 3
    remembered.keep(None, "nothing")
    remembered.keep(7, None)
    assert remembered.get(None) is None and remembered.get(7) is None
    remember.forget_all()
    assert remembered.get(9) is None


def test_a_signature_tells_apart_what_validation_tells_apart():
    x = torch.zeros(4, 6)
    known = remember.signature((x, None), (1, "auto"))
    assert known == remember.signature((torch.ones(4, 6), None), (1, "auto")), "contents and addresses are free"
    for tensors, scalars in (
        ((x[:, :5], None), (1, "auto")),
        ((torch.zeros(6, 4).T, None), (1, "auto")),
        ((x.double(), None), (1, "auto")),
        ((x.to("meta"), None), (1, "auto")),
        ((torch.zeros(25)[1:].view(4, 6), None), (1, "auto")),
        ((None, x), (1, "auto")),
        ((x, x), (1, "auto")),
        ((x, None), (True, "auto")),
        ((x, None), (1.0, "auto")),
        ((x, None), (1, None)),
    ):
        assert remember.signature(tensors, scalars) != known
    for unusual in (x.to_sparse(), [1], x.clone().requires_grad_(), x.as_subclass(type("Own", (torch.Tensor,), {}))):
        assert remember.signature((unusual, None), (1, "auto")) is None
    assert remember.signature((x, None), ([], "auto")) is None
