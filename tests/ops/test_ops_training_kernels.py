"""The differentiable operators on kernels, without a GPU: facts, arguments, shards, and the libraries for dense calls.

Kernels and libraries are stand-ins that compute from exactly what they are given.
"""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ops.calls import BLOCK, TERMS
from ops.kernel_stand_ins import Attention, where_of
from ops.test_ops_training import gradients, module, same
from ops.training_calls import call, place, tensors
from reference.batches import batches, selections
from rounding import close
from seeds import examples

from msa_tiles import ops, reference
from msa_tiles.call import backends
from msa_tiles.call.workspace import WORKSPACE_BYTES
from msa_tiles.launch import attention, backward, dense, kl, lookup, schedules
from msa_tiles.runtime import NoKernelError

RANDOM = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class StandIns:
    """Kernels that know no k_offset, fill every row of what they are handed, and remember how they were called."""

    def __init__(self):
        self.facts, self.options = [], []

    def backward(self, facts, call, at, longest_k, dq, dk, dv):
        self.options.append((longest_k, call.schedule is not None, call.workspace_bytes, call.deterministic))
        results = reference.sparse_attention_backward(
            *call[:7], dlse=call.dlse, block_size=call.block_size, softmax_scale=call.softmax_scale,
            **where_of(at, call.block_size),
        )  # fmt: skip
        for destination, result in zip((dq, dk, dv), results, strict=True):
            destination.copy_(result)

    def kl(self, facts, call, at, longest_k, loss, d_idx_q, d_idx_k):
        self.options.append((longest_k, call.schedule is not None, call.workspace_bytes, call.deterministic))
        results = reference.index_kl(
            *call[:6], block_size=call.block_size, softmax_scale=call.softmax_scale, index_scale=call.index_scale,
            token_weights=call.token_weights, gradients=d_idx_q is not None, **where_of(at, call.block_size),
        )  # fmt: skip
        for destination, result in zip((loss, d_idx_q, d_idx_k), results, strict=True):
            assert (destination is None) == (result is None)
            if destination is not None:
                destination.copy_(result)


@pytest.fixture
def kernels(monkeypatch):
    made = StandIns()

    def find_kernel(facts, backend):
        made.facts.append(facts)

    monkeypatch.setattr(backends, "runs_reference", lambda backend, device: backend == "reference")
    monkeypatch.setattr(lookup, "find_kernel", find_kernel)
    monkeypatch.setattr(backward, "launch", made.backward)
    monkeypatch.setattr(kl, "launch", made.kl)
    monkeypatch.setattr(schedules, "find", lambda facts, backend, block_size: block_size)
    monkeypatch.setattr(schedules, "build", Attention().build)
    return made


def test_facts_and_options(kernels):
    arguments = call("sparse_attention_backward", torch.bfloat16)
    ops.sparse_attention_backward(**arguments)
    schedule = ops.build_schedule(
        arguments["block_indices"], block_size=arguments["block_size"], **place(9, 0, 14)
    )  # fmt: skip
    bounds = {"max_seqlen_k": 14, "workspace": 99, "deterministic": True, "schedule": schedule}
    ops.sparse_attention_backward(**arguments, **bounds, q_positions=torch.arange(23, dtype=torch.int32))
    divergence = call("index_kl", torch.bfloat16)
    ops.index_kl(**divergence, **bounds)
    ops.index_kl(**{**divergence, "block_indices": None})
    assert [facts.op for facts in kernels.facts] == ["sparse_attention_backward"] * 2 + ["index_kl"] * 2
    assert {facts.precision for facts in kernels.facts} == {"bf16"}
    assert kernels.facts[0].variant == {"head_dim": 8, "block_size": 4, "group": 2}
    assert kernels.facts[1].features == {"q_positions"}
    expected = {"head_dim": 8, "index_dim": 4, "block_size": 4, "group": 2}
    assert [facts.variant for facts in kernels.facts[2:]] == [expected | {"prefix": prefix} for prefix in (0, 1)]
    # Four values of two bytes: rows of the index branch begin at odd places for the widest loads.
    assert kernels.facts[2].features == {"strided_unaligned"}
    default = WORKSPACE_BYTES
    assert kernels.options == [(23, False, default, False)] + [(14, True, 99, True)] * 2 + [(23, False, default, False)]


@pytest.mark.parametrize("op", ["index_kl", "sparse_attention_backward"])
def test_a_broken_rule_is_among_the_facts(kernels, op):
    arguments = call(op, torch.bfloat16)
    arguments["block_indices"] = torch.full((2, 23, 65), -1, dtype=torch.int32)
    getattr(ops, op)(**arguments)
    assert kernels.facts[-1].refusals == ("topk = 65, wanted topk <= 64",)


def test_empty_calls_ask_for_a_kernel_and_launch_none(kernels):
    empty = {name: tensor[:0] for name, tensor in tensors().items()}
    lse, ids = torch.empty(0, 4), torch.empty(2, 0, 2, dtype=torch.int32)
    loss = ops.index_kl(empty["q"], empty["k"], lse, empty["idx_q"], empty["idx_k"], ids)
    assert loss.item() == 0.0
    q, k, v = empty["q"], *(tensors()[name] for name in ("k", "v"))
    dq, dk, dv = ops.sparse_attention_backward(q, q, k, v, q, lse, ids)
    assert dq.shape == (0, 4, 8) and not dk.any() and not dv.any()
    # Nor is there a key where lengths are bounded by none, though there be rows of keys.
    nothing = torch.zeros(2, dtype=torch.int32)
    where = {"cu_seqlens_q": torch.tensor([0, 23], dtype=torch.int32), "cu_seqlens_k": nothing, "max_seqlen_k": 0}
    data = tensors()
    lse, leaves = torch.full((23, 4), -torch.inf), [data[name].requires_grad_() for name in ("idx_q", "idx_k")]
    for ids in (None, torch.zeros(2, 23, 2, dtype=torch.int32)):
        loss = ops.index_kl(data["q"], data["k"], lse, *leaves, ids, **where)
        assert loss.item() == 0.0 and not any(found.any() for found in torch.autograd.grad(loss, leaves))
    out = torch.zeros_like(data["q"])
    found = ops.sparse_attention_backward(data["q"], data["q"], data["k"], data["v"], out, lse, ids, **where)
    assert not any(gradient.any() for gradient in found)
    assert len(kernels.facts) == 5 and kernels.options == []


def test_gradients_through_kernels_are_those_of_the_reference(kernels, monkeypatch):
    """The forward calls stay on the reference: their kernels have stand-ins of their own."""
    data = tensors()
    options = {"block_size": 4, **place(9, 0, 14)}
    ids = ops.select_blocks(data["idx_q"], data["idx_k"], 2, backend="reference", **options)
    monkeypatch.setattr(attention, "prepare", forward_by_reference)

    def loss(q, k, v, idx_q, idx_k, backend="auto"):
        out, lse = ops.sparse_attention(q, k, v, ids, return_lse=True, backend=backend, **options)
        kl = ops.index_kl(q, k, lse, idx_q, idx_k, ids, backend=backend, **options)
        return out.square().sum() + lse.square().sum() + kl

    found = gradients(loss, data)
    assert {facts.op for facts in kernels.facts} == {"index_kl", "sparse_attention_backward"}
    same(found, gradients(lambda **x: loss(**x, backend="reference"), data))
    with torch.no_grad():
        loss(**data)
    assert len(kernels.options) == 3


def forward_by_reference(made, _out):
    return lambda given, workspace, out, lse: module("sparse_attention").by_reference(made, out, lse)


@RANDOM
@given(data=st.data(), prefix=st.booleans(), whole_blocks=st.booleans())
def test_shards(kernels, data, prefix, whole_blocks):
    """A shard is a call of its own; one that begins inside a block gets NaN, where the reference serves it."""
    batch = data.draw(batches(BLOCK, ("flat", "used"), shards=True))
    assume(sum(batch.lengths_q))
    if whole_blocks:
        batch.offsets = [offset // BLOCK * BLOCK for offset in batch.offsets]
    ids = data.draw(selections(2, batch.total_q, -(-batch.max_end // BLOCK), 3))
    q, dout, idx_q = (
        batch.random(batch.total_q, 4, 8),
        batch.random(batch.total_q, 4, 8),
        batch.random(batch.total_q, 2, 4),
    )
    k, v, idx_k = (
        batch.store(batch.keys(*dims), dtype=torch.float64)[0].nan_to_num(0.0) for dims in ((2, 8), (2, 8), (4,))
    )
    where = {**batch.where(), "block_size": BLOCK}
    out, lse = ops.sparse_attention(q, k, v, ids, return_lse=True, backend="reference", **where)
    if prefix:
        reference_where = {name: value for name, value in where.items() if name not in ("block_size", "max_seqlen_k")}
        _, lse = reference.dense_attention(q, k, v, **reference_where)

    def run(backend):
        backward = ops.sparse_attention_backward(dout, q, k, v, out, lse, ids, backend=backend, **where)
        index = {"idx_q": idx_q, "idx_k": idx_k}
        kl = []

        def divergence(**index):
            kl.append(ops.index_kl(q, k, lse, **index, block_indices=None if prefix else ids, backend=backend, **where))
            return kl[0]

        return (*(backward if not prefix else ()), *gradients(divergence, index).values(), kl[0].detach())

    found, wanted = run("auto"), run("reference")
    broken = torch.tensor([offset % BLOCK != 0 for offset in batch.offsets] + [False])
    rows = torch.tensor([request for request, _ in batch.rows()], dtype=torch.int64)
    if not broken[rows].any():
        close(found, wanted, terms=TERMS)
        return
    assert found[-1].isnan()
    for part, want in zip(found[:-1], wanted[:-1], strict=True):
        if len(part) == batch.total_q and part.shape != k.shape and part.shape != idx_k.shape:
            close(part[~broken[rows]], want[~broken[rows]], terms=TERMS)
            assert part[broken[rows]].isnan().all()
        else:
            assert part.isnan().all()


class Library:
    """A library for dense attention: LSE [Hq, T], garbage in what it leaves unwritten."""

    def __init__(self, empty_lse):
        self.empty_lse, self.calls = empty_lse, []

    def forward(self, q, k, v, starts_q, starts_k, max_q, max_k, scale):
        self.calls.append(("forward", max_q, max_k))
        out, lse = reference.dense_attention(
            q, k, v, softmax_scale=scale, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k
        )  # fmt: skip
        lse = lse.masked_fill(lse == -torch.inf, self.empty_lse)
        out[int(starts_q[-1]) :], lse[int(starts_q[-1]) :] = torch.nan, torch.nan
        return out, lse.T.contiguous()

    def backward(self, dout, q, k, v, out, lse, starts_q, starts_k, max_q, max_k, scale):
        self.calls.append(("backward", max_q, max_k))
        assert dout.isfinite().all() and lse.is_contiguous() and dout.is_contiguous()
        end_q, end_k = int(starts_q[-1]), int(starts_k[-1])
        # A row without keys comes back as the library gave it out; behind the last sequence it looks at nothing.
        rows = lse.T[:end_q].isinf().any(-1)
        assert (lse.T[:end_q][rows] == self.empty_lse).all()
        lse = lse.T.masked_fill(lse.T.isinf(), -torch.inf)
        parts = reference.dense_attention_backward(
            dout, q, k, v, out, lse, softmax_scale=scale, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k
        )
        for part, end in zip(parts, (end_q, end_k, end_k), strict=True):
            part[end:] = torch.nan
        return parts


@pytest.fixture(params=["fa4", "torch"])
def library(request, monkeypatch):
    made = Library(-torch.inf if request.param == "fa4" else torch.inf)
    made.name, made.deterministic = request.param, []

    def fa4_forward(
        q, k, v, *, causal, return_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale
    ):
        assert causal and return_lse
        out, lse = made.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale)
        return out, lse, None, None, None

    def fa4_backward(
        q, k, v, out, dout, lse, *, causal, deterministic, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale,
    ):  # fmt: skip
        assert causal
        made.deterministic.append(deterministic)
        where = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return *made.backward(dout, q, k, v, out, lse, *where, softmax_scale), None

    def torch_forward(q, k, v, starts_q, starts_k, max_q, max_k, dropout, causal, debug, *, scale):
        assert dropout == 0.0 and causal and not debug
        out, lse = made.forward(q, k, v, starts_q, starts_k, max_q, max_k, scale)
        return out, lse, None, None, None

    def torch_backward(
        dout, q, k, v, out, lse, starts_q, starts_k, max_q, max_k, dropout, causal, seed, unused, *, scale
    ):
        assert dropout == 0.0 and causal and seed.shape == (2,)
        made.deterministic.append(torch.are_deterministic_algorithms_enabled())
        return made.backward(dout, q, k, v, out, lse, starts_q, starts_k, max_q, max_k, scale)

    monkeypatch.setattr(backends, "runs_reference", lambda backend, device: backend == "reference")
    monkeypatch.setattr(dense, "_refusal", lambda name, q: None if name == request.param else "it is absent")
    monkeypatch.setattr(dense, "_fa4", lambda: (fa4_forward, fa4_backward))
    aten = types.SimpleNamespace(_flash_attention_forward=torch_forward, _flash_attention_backward=torch_backward)
    monkeypatch.setattr(dense, "_aten", lambda: aten)
    return made


def test_dense_attention_by_a_library_keeps_the_contract(library):
    """Its layouts, bounds and unwritten rows: blind queries, rows behind the last sequence, sequences without any."""
    data = {name: tensor for name, tensor in tensors(lengths=(20,)).items() if name in ("q", "k", "v")}
    where = {
        "cu_seqlens_q": torch.tensor([0, 6, 6, 11, 15], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 2, 9, 18, 18], dtype=torch.int32),
    }

    def loss(q, k, v, backend="auto", **options):
        out, lse = ops.dense_attention(q, k, v, return_lse=True, softmax_scale=0.3, backend=backend, **where, **options)
        results.append((out.detach(), lse))
        return (out * torch.arange(8.0)).sum()

    results = []
    found = gradients(loss, data)
    wanted = gradients(lambda **x: loss(**x, backend="reference"), data)
    same(found, wanted)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert library.calls == [("forward", 20, 20), ("backward", 20, 20)]
    gradients(lambda **x: loss(**x, max_seqlen_q=6, max_seqlen_k=9, deterministic=True), data)
    assert library.calls[2:] == [("forward", 6, 9), ("backward", 6, 9)]
    assert library.deterministic == [False, True] and not torch.are_deterministic_algorithms_enabled()
    where.clear()
    same(gradients(loss, data), gradients(lambda **x: loss(**x, backend="reference"), data))
    assert ops.dense_attention(data["q"][:0], data["k"], data["v"]).shape == (0, 4, 8)
    assert len(library.calls) == 6


def test_the_other_library_is_refused_by_name(library):
    other = "torch" if library.name == "fa4" else "fa4"
    with pytest.raises(NoKernelError) as caught:
        dense.choose(tensors()["q"], other)
    assert str(caught.value) == "\n  ".join(
        ["dense_attention: no library serves this call (cpu, torch.float32, head_dim=8):"]
        + ([f"fa4: backend='{other}' was asked for"] if other == "torch" else ["fa4: it is absent"])
        + ([f"torch: backend='{other}' was asked for"] if other == "fa4" else ["torch: it is absent"])
    )


def test_libraries_refuse_in_words(monkeypatch):
    narrow, wide = torch.empty(1, 1, 8, dtype=torch.bfloat16), torch.empty(1, 1, 512, dtype=torch.bfloat16)
    refusal = dense._refusal
    assert refusal("fa4", narrow.float()) == "it is called with bfloat16, the call is torch.float32"
    assert "flash_attn.cute: No module named" in refusal("fa4", narrow)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert refusal("torch", narrow) == "torch was built without it"
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert refusal("torch", wide) == "head_dim is 512, wanted a multiple of 8 up to 256"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert refusal("torch", narrow) == "it needs capability 8.0, the device has 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert refusal("torch", narrow) is None


@pytest.mark.parametrize("op", ["index_kl", "sparse_attention_backward"])
def test_without_a_kernel_the_refusal_is_the_dispatchers(op, monkeypatch):
    """No silent way around: the reference does not step in for CUDA tensors."""

    def find_kernel(facts, backend):
        raise NoKernelError(f"{facts.op}: no kernel serves this call")

    monkeypatch.setattr(backends, "runs_reference", lambda backend, device: backend == "reference")
    monkeypatch.setattr(lookup, "find_kernel", find_kernel)
    with pytest.raises(NoKernelError, match=f"{op}: no kernel serves this call"):
        getattr(ops, op)(**call(op))
