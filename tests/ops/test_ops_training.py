"""The differentiable operators on CPU tensors: gradients, and that compilers, checkpoints and autocast keep them."""

from __future__ import annotations

import inspect
import os
import sys

import pytest
import torch
from ops.calls import TERMS
from ops.training_calls import NAMES, OPERATORS, call, place, tensors
from reference import differentiable
from reference.batches import Batch
from rounding import close, unit
from seeds import SHARE
from torch.autograd import gradcheck
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from msa_tiles import ops

WHERE = (
    "cu_seqlens_q=None, cu_seqlens_k=None, page_table=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, "
    "q_positions=None, k_offset=None, check=False"
)
SIGNATURES = {
    "dense_attention": "q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
    "check=False, softmax_scale=None, return_lse=False, deterministic=None, backend='auto'",
    "index_kl": f"q, k, lse, idx_q, idx_k, block_indices, *, {WHERE}, block_size=128, softmax_scale=None, "
    "index_scale=None, token_weights=None, schedule=None, workspace=None, deterministic=None, backend='auto'",
    "msa_attention": f"q, k, v, idx_q, idx_k, topk, *, {WHERE}, block_size=128, init_blocks=0, local_blocks=1, "
    "softmax_scale=None, index_scale=None, token_weights=None, workspace=None, return_lse=False, return_kl=False, "
    "return_block_indices=False, deterministic=None, batch_invariant=False, backend='auto'",
    "sparse_attention_backward": "dout, q, k, v, out, lse, block_indices, *, dlse=None, "
    f"{WHERE.replace(' page_table=None,', '')}, block_size=128, softmax_scale=None, schedule=None, workspace=None, "
    "deterministic=None, backend='auto'",
}
LENGTHS = (9, 0, 14)
OPTIONS = {"block_size": 4, **place(*LENGTHS)}


def training_loss(q, k, v, idx_q, idx_k, **where):
    """Everything that msa_attention gives a gradient for."""
    where = where or OPTIONS
    out, lse, kl = ops.msa_attention(q, k, v, idx_q, idx_k, 2, return_lse=True, return_kl=True, **where)
    return (out.float() * torch.arange(8.0)).square().sum() + lse.clamp_min(-9.0).square().sum() + 3 * kl


def gradients(loss, data):
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in data.items()}
    loss(**leaves).backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def module(name):
    """The module of an operator: its function, of the same name, stands in its place in the package."""
    return sys.modules[f"msa_tiles.ops.{name}"]


def same(found, wanted, **tolerance):
    exact = tolerance or {"rtol": 0, "atol": 0}
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], msg=lambda text, name=name: f"{name}: {text}", **exact)


@pytest.mark.parametrize("op", SIGNATURES)
def test_signatures_are_the_contract(op):
    parameters = inspect.signature(OPERATORS[op]).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[op]})"


class TestGradients:
    def test_gradcheck(self):
        """Numerical derivatives in float64: with lengths that cut blocks, and of every input that has a gradient."""
        data, where = tensors(torch.float64, (3, 0, 7), group=1, requires_grad=True), place(3, 0, 7)
        q, k, v, idx_q, idx_k = data.values()
        ids = ops.select_blocks(idx_q, idx_k, 2, block_size=2, **where)
        _, lse = ops.sparse_attention(q, k, v, ids, block_size=2, return_lse=True, **where)
        _, whole = ops.dense_attention(q, k, v, return_lse=True, **where)
        weights = torch.rand(10)

        def divergence(lse, ids):
            return lambda *index: ops.index_kl(
                q, k, lse, *index, ids, block_size=2, token_weights=weights, index_scale=0.7, **where
            )

        assert gradcheck(lambda *a: ops.sparse_attention(*a, ids, block_size=2, **where), (q, k, v), fast_mode=True)
        assert gradcheck(lambda *a: ops.dense_attention(*a, **where), (q, k, v), fast_mode=True)
        assert gradcheck(divergence(lse, ids), (idx_q, idx_k), fast_mode=SHARE in os.environ)
        assert gradcheck(divergence(whole, None), (idx_q, idx_k), fast_mode=SHARE in os.environ)

    @pytest.mark.parametrize("group", [1, 4, 16])
    def test_the_whole_equals_the_dense_formulas(self, group):
        """Float32 against float64 autograd of the masked formulas, LSE included, with a teacher that is detached."""
        batch = Batch(list(LENGTHS), list(LENGTHS), [0, 0, 0], 0, "flat", 4, None, False, 3)
        data = tensors(group=group)
        ids = ops.select_blocks(data["idx_q"], data["idx_k"], 2, **OPTIONS)

        def dense(q, k, v, idx_q, idx_k):
            keys, values, idx_keys = (list(tensor.split(LENGTHS)) for tensor in (k, v, idx_k))
            scale = 8**-0.5
            out, lse = differentiable.attention(batch, q, keys, values, ids, 4, scale)
            teacher = [part.detach() for part in keys]
            weights = torch.ones(sum(LENGTHS))
            kl = differentiable.index_kl(batch, q.detach(), teacher, idx_q, idx_keys, ids, 4, scale, 0.5, weights)
            return (out * torch.arange(8.0)).square().sum() + lse.clamp_min(-9.0).square().sum() + 3 * kl

        wanted = gradients(dense, {name: tensor.double() for name, tensor in data.items()})
        found = gradients(training_loss, data)
        for name, gradient in found.items():
            want = wanted[name]
            assert (gradient - want).abs().max() < 1e-4 * want.abs().max(), name
            assert torch.cosine_similarity(gradient.double().flatten(), want.flatten(), dim=0) > 0.9999, name

    @pytest.mark.parametrize("prefix", [False, True])
    def test_the_divergence_reaches_the_index_branch_alone(self, prefix):
        """Neither q, k, lse nor v get a gradient, though all of them record one."""
        data = tensors(requires_grad=True)
        if prefix:
            _, lse = ops.dense_attention(data["q"], data["k"], data["v"], return_lse=True, **place(*LENGTHS))
            lse = lse.clone().requires_grad_()
            main = data["q"], data["k"], lse
            kl = ops.index_kl(*main, data["idx_q"], data["idx_k"], None, **place(*LENGTHS))
            assert lse.grad is None
        else:
            _, kl = ops.msa_attention(**data, topk=2, return_kl=True, **OPTIONS)
        kl.backward()
        assert [name for name in NAMES if data[name].grad is not None] == ["idx_q", "idx_k"]
        assert data["idx_q"].grad.abs().max() > 1e-5 and data["idx_k"].grad.abs().max() > 1e-5

    def test_attention_does_not_reach_the_index_branch(self):
        data = tensors(requires_grad=True)
        ops.msa_attention(**data, topk=2, **OPTIONS).sum().backward()
        assert [name for name in NAMES if data[name].grad is not None] == ["q", "k", "v"]

    def test_the_incoming_gradient_scales_the_divergence(self):
        data = {name: tensor for name, tensor in call("index_kl").items()}
        one, seven = (
            gradients(lambda factor=factor, **index: factor * ops.index_kl(**{**data, **index}), {
                name: data[name] for name in ("idx_q", "idx_k")
            })
            for factor in (1.0, 7.0)
        )  # fmt: skip
        same(seven, {name: 7 * gradient for name, gradient in one.items()}, rtol=8 * unit(torch.float32), atol=0.0)

    def test_parts_of_the_gradient(self):
        """Through the LSE alone, for one input alone, and none at all."""
        arguments = call("sparse_attention_backward")
        data = {name: arguments[name] for name in ("q", "k", "v")}
        rest = {"block_indices": arguments["block_indices"], **OPTIONS}
        whole = gradients(lambda **x: ops.sparse_attention(**x, **rest).sum(), data)
        for name in data:
            leaf = data[name].clone().requires_grad_()
            ops.sparse_attention(**{**data, name: leaf}, **rest).sum().backward()
            torch.testing.assert_close(leaf.grad, whole[name], rtol=0, atol=0)
        through_lse = gradients(lambda **x: ops.sparse_attention(**x, **rest, return_lse=True)[1].sum(), data)
        assert not through_lse["v"].any() and through_lse["q"].any() and through_lse["k"].any()
        names = ("q", "k", "v", "out", "lse", "block_indices")
        dq, dk, dv = ops.sparse_attention_backward(
            torch.zeros_like(arguments["out"]), *(arguments[name] for name in names),
            dlse=torch.ones_like(arguments["lse"]), **OPTIONS,
        )  # fmt: skip
        same(through_lse, {"q": dq, "k": dk, "v": dv})
        with torch.no_grad():
            assert not ops.sparse_attention(**{**data, "q": data["q"].clone().requires_grad_()}, **rest).requires_grad

    def test_a_query_with_one_block(self):
        """Its probabilities are those inside the block, and nothing divides by zero where it sees one key."""
        data = tensors(requires_grad=True)
        out, lse, kl, ids = ops.msa_attention(
            **data, topk=1, return_lse=True, return_kl=True, return_block_indices=True, **OPTIONS
        )
        assert ids.shape == (2, 23, 1) and bool(
            (ids[:, :, 0] == torch.cat([torch.arange(9), torch.arange(14)]) // 4).all()
        )
        (out.sum() + kl).backward()
        assert all(data[name].grad.isfinite().all() for name in NAMES)
        # The first query of a block sees one key: P = Q = 1.
        alone = ops.index_kl(
            data["q"][:1], data["k"][:1], lse[:1], data["idx_q"][:1], data["idx_k"][:1], ids[:, :1], block_size=4
        )
        close(alone, torch.zeros(()), terms=TERMS)

    def test_a_second_derivative_is_refused(self):
        arguments = call("index_kl")
        arguments["idx_q"].requires_grad_()
        with pytest.raises(RuntimeError, match="msa_tiles::index_kl is differentiable once"):
            torch.autograd.grad(ops.index_kl(**arguments), arguments["idx_q"], create_graph=True)

    def test_lse_of_dense_attention_is_a_constant(self):
        data = tensors(requires_grad=True)
        out, lse = ops.dense_attention(data["q"], data["k"], data["v"], return_lse=True)
        assert out.requires_grad and not lse.requires_grad

    def test_paged_keys_have_no_gradient(self):
        """Said when it is wanted, not before: serving calls on parameters that record gradients go on."""
        q, pool = torch.randn(5, 2, 8, requires_grad=True), torch.randn(3, 1, 4, 8)
        table, used = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
        ids = torch.zeros(1, 5, 1, dtype=torch.int32)
        out = ops.sparse_attention(q, pool, pool, ids, page_table=table, seqused_k=used, block_size=4)
        with pytest.raises(
            ValueError, match="page_table: got paged keys in a call that is differentiated; wanted flat"
        ):
            out.sum().backward()

    @pytest.mark.parametrize("name", ["out", "lse", "workspace"])
    def test_a_buffer_has_no_gradient(self, name):
        arguments = call("sparse_attention_backward")
        data = {key: arguments[key] for key in ("q", "k", "v", "block_indices")}
        data["q"].requires_grad_()
        buffers = {"out": torch.empty(23, 4, 8), "lse": torch.empty(23, 4), "workspace": torch.empty(16).byte()}
        message = f"{name}: got a buffer where gradients are recorded; wanted None, or a call under torch.no_grad"
        with pytest.raises(ValueError, match=message):
            ops.sparse_attention(**data, **OPTIONS, **{name: buffers[name]})
        with torch.no_grad():
            ops.sparse_attention(**data, **OPTIONS, **{name: buffers[name]})

    def test_deterministic_follows_torch(self, monkeypatch):
        seen = []
        pair = module("sparse_attention_backward")._OPERATOR
        recording = type(
            "Pair", (), {"functional": lambda self, *args: seen.append(args[0].deterministic) or pair.functional(*args)}
        )
        monkeypatch.setattr(module("sparse_attention_backward"), "_OPERATOR", recording())
        arguments = call("sparse_attention_backward")
        ops.sparse_attention_backward(**arguments)
        ops.sparse_attention_backward(**arguments, deterministic=True)
        torch.use_deterministic_algorithms(True)
        try:
            ops.sparse_attention_backward(**arguments)
            ops.sparse_attention_backward(**arguments, deterministic=False)
        finally:
            torch.use_deterministic_algorithms(False)
        assert seen == [False, True, True, False]


class TestCompile:
    @pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
    def test_one_graph_gives_the_same_gradients(self, backend):
        torch._dynamo.reset()
        compiled = torch.compile(training_loss, fullgraph=True, backend=backend)
        same(gradients(compiled, tensors()), gradients(training_loss, tensors()))

    def test_shapes_depend_on_no_data(self):
        """Other tokens, lengths and ids run the same graph, forward and backward."""
        torch._dynamo.reset()
        compiled = torch.compile(training_loss, fullgraph=True, backend="aot_eager", dynamic=True)

        def run(loss, lengths, seed):
            where = {"block_size": 4, **place(*lengths)}
            return gradients(lambda **x: loss(**x, **where), tensors(lengths=lengths, seed=seed))

        same(run(compiled, (9, 0, 14, 5, 2), 1), run(training_loss, (9, 0, 14, 5, 2), 1))
        with torch.compiler.set_stance("fail_on_recompile"):
            same(run(compiled, (3, 21, 11), 2), run(training_loss, (3, 21, 11), 2))

    def test_warm_up_compiles(self):
        torch._dynamo.reset()

        def loss(q, k, v, idx_q, idx_k):
            out, lse = ops.dense_attention(q, k, v, return_lse=True, **place(*LENGTHS))
            return out.square().sum() + ops.index_kl(q, k, lse, idx_q, idx_k, None, **place(*LENGTHS))

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        same(gradients(compiled, tensors()), gradients(loss, tensors()))

    @pytest.mark.parametrize("op", ["dense_attention", "index_kl", "sparse_attention", "sparse_attention_backward"])
    @pytest.mark.drawn(1)
    def test_opcheck(self, op, monkeypatch):
        """Schema, fake kernel and, where there is one, the autograd registration."""
        pair, seen = module(op)._OPERATOR, []
        recording = type("Pair", (), {"functional": lambda self, call: seen.append(call) or pair.functional(call)})
        monkeypatch.setattr(module(op), "_OPERATOR", recording())
        if op == "sparse_attention":
            given = call("sparse_attention_backward")
            arguments = {name: value for name, value in given.items() if name not in ("dout", "out", "lse")}
        else:
            arguments = call(op)
        for name in ("q", "k", "v", "idx_q", "idx_k"):
            if op != "sparse_attention_backward" and name in arguments:
                arguments[name].requires_grad_()
        getattr(ops, op)(**arguments)
        if op == "index_kl":
            getattr(ops, op)(**(arguments | {"block_indices": None, "token_weights": torch.rand(23)}))
        for made in seen:
            args = pair.layout.flatten(made)
            opcheck(getattr(torch.ops.msa_tiles, op).default, args)
            with torch.no_grad():
                outputs = pair.functional(made)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            detached = [value.detach() if isinstance(value, torch.Tensor) else value for value in args]
            twin = getattr(torch.ops.msa_tiles, f"{op}_out").default
            scratch = (None,) if op == "sparse_attention" else ()
            opcheck(twin, (*detached, *(torch.empty_like(output) for output in outputs), *scratch))


class TestCheckpointing:
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_a_replay_selects_the_same_blocks(self, reentrant, monkeypatch):
        chosen = []
        original = module("msa_attention").select_blocks
        monkeypatch.setattr(
            module("msa_attention"),
            "select_blocks",
            lambda *a, **k: chosen.append(original(*a, **k)) or chosen[-1],
        )
        # Ties everywhere: only a rule decides between blocks.
        data = {name: tensor.round() for name, tensor in tensors().items()}
        found = gradients(lambda **x: checkpoint(training_loss, *x.values(), use_reentrant=reentrant), data)
        assert len(chosen) == 2 and torch.equal(*chosen)
        chosen.clear()
        same(found, gradients(training_loss, data))
        assert len(chosen) == 1

    def test_inside_a_compiled_graph(self):
        torch._dynamo.reset()

        def loss(**x):
            return checkpoint(training_loss, *x.values(), use_reentrant=False)

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        same(gradients(compiled, tensors()), gradients(training_loss, tensors()))


class TestAutocast:
    def test_gradients_have_the_dtype_of_the_parameters(self):
        def loss(**x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return training_loss(**x)

        def selected(data, dtype):
            return ops.select_blocks(data["idx_q"].to(dtype), data["idx_k"].to(dtype), 2, **OPTIONS)

        # Where two blocks score alike, rounding turns the choice, and gradients are those of another block.
        draws = (tensors(seed=seed) for seed in range(8))
        data = next(x for x in draws if torch.equal(selected(x, torch.float32), selected(x, torch.bfloat16)))
        found, wanted = gradients(loss, data), gradients(training_loss, data)
        for name, gradient in found.items():
            assert gradient.dtype == torch.float32
            assert torch.cosine_similarity(gradient.flatten(), wanted[name].flatten(), dim=0) > 0.999, name
            assert not torch.equal(gradient, wanted[name]), name
        torch._dynamo.reset()
        same(gradients(torch.compile(loss, fullgraph=True, backend="aot_eager"), data), found)

    def test_the_tensors_are_cast_and_the_steps_inside_are_not(self):
        data = tensors()
        rounded = {name: tensor.bfloat16() for name, tensor in data.items()}
        wanted = ops.msa_attention(**rounded, topk=2, return_lse=True, return_kl=True, **OPTIONS)
        dense = ops.dense_attention(rounded["q"], rounded["k"], rounded["v"], return_lse=True)
        score = ops.index_score(data["idx_q"], data["idx_k"], **OPTIONS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = ops.msa_attention(**data, topk=2, return_lse=True, return_kl=True, **OPTIONS)
            dense_found = ops.dense_attention(data["q"], data["k"], data["v"], return_lse=True)
            # An operator that is not cast computes in float32 all the same.
            assert torch.equal(ops.index_score(data["idx_q"], data["idx_k"], **OPTIONS), score)
        for one, other in zip((*found, *dense_found), (*wanted, *dense), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert found[0].dtype == torch.bfloat16 and found[1].dtype == found[2].dtype == torch.float32

    def test_double_is_left_alone(self):
        data = tensors(torch.float64)
        wanted = ops.msa_attention(**data, topk=2, return_kl=True, **OPTIONS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = ops.msa_attention(**data, topk=2, return_kl=True, **OPTIONS)
        assert found[0].dtype == found[1].dtype == torch.float64
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


class TestValues:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
    def test_shapes_and_dtypes(self, dtype):
        data = tensors(dtype)
        out, lse, kl, ids = ops.msa_attention(
            **data, topk=3, return_lse=True, return_kl=True, return_block_indices=True, **OPTIONS
        )
        assert out.shape == (23, 4, 8) and out.dtype == dtype and lse.shape == (23, 4) and lse.dtype == torch.float32
        assert kl.shape == () and kl.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.equal(ids, ops.select_blocks(data["idx_q"], data["idx_k"], 3, **OPTIONS))
        close(out, ops.sparse_attention(data["q"], data["k"], data["v"], ids, **OPTIONS), terms=TERMS)
        assert torch.equal(ops.msa_attention(**data, topk=3, **OPTIONS), out)

    def test_every_block_is_the_whole_prefix(self):
        """With topk as large as the sequences, sparse training is warm-up."""
        data, where = tensors(lengths=(21,)), {"block_size": 4}
        out, lse, kl = ops.msa_attention(**data, topk=6, return_lse=True, return_kl=True, **where)
        dense, dense_lse = ops.dense_attention(data["q"], data["k"], data["v"], return_lse=True)
        close((out, lse), (dense, dense_lse), terms=TERMS)
        main = data["q"], data["k"], dense_lse
        close(ops.index_kl(*main, data["idx_q"], data["idx_k"], None), kl, terms=TERMS)

    def test_token_weights_are_a_mean_over_some_tokens(self):
        """Weights of T over the number of tokens that count: the loss of those tokens alone."""
        arguments = call("index_kl")
        weights = torch.zeros(23)
        weights[9:] = 23 / 14
        where = {"block_size": arguments["block_size"]}
        last = {name: arguments[name][9:] for name in ("q", "k", "lse", "idx_q", "idx_k")}
        alone = ops.index_kl(**last, block_indices=arguments["block_indices"][:, 9:], **where)
        close(ops.index_kl(**arguments, token_weights=weights), alone, terms=TERMS)
        assert ops.index_kl(**arguments, token_weights=torch.zeros(23)).item() == 0.0

    @pytest.mark.parametrize("lengths", [(0,), (0, 0), ()])
    def test_nothing_at_all(self, lengths):
        data = tensors(lengths=lengths, requires_grad=True)
        out, kl = ops.msa_attention(**data, topk=2, return_kl=True, block_size=4, **place(*lengths))
        (out.sum() + kl).backward()
        assert kl.item() == 0.0 and all(tensor.grad.shape == tensor.shape for tensor in data.values())

    def test_rows_that_see_nothing(self):
        """Queries in front of their first key, and rows past the last sequence: loss 0, gradients 0, never NaN."""
        data = tensors(lengths=(12,), requires_grad=True)
        where = {"cu_seqlens_q": torch.tensor([0, 6, 9], dtype=torch.int32), "block_size": 4}
        where["cu_seqlens_k"] = torch.tensor([0, 2, 9], dtype=torch.int32)
        out, lse, kl = ops.msa_attention(**data, topk=2, return_lse=True, return_kl=True, **where)
        blind = torch.tensor([0, 1, 2, 3, 9, 10, 11])
        assert (lse[blind] == -torch.inf).all() and not out[blind].any()
        dense, dense_lse = ops.dense_attention(
            data["q"], data["k"], data["v"], return_lse=True,
            **{name: where[name] for name in ("cu_seqlens_q", "cu_seqlens_k")},
        )  # fmt: skip
        assert (dense_lse[blind] == -torch.inf).all() and not dense[blind].any()
        (out.sum() + dense.sum() + 5 * kl).backward()
        assert kl.item() > 0
        for name in NAMES:
            gradient = data[name].grad
            assert gradient.isfinite().all()
            assert not (gradient[blind] if name in ("q", "idx_q") else gradient[9:]).any(), name

    def test_strides(self):
        """Slices of fused projections, gradients that are expanded or transposed."""
        data = tensors()
        wide = {name: torch.cat([tensor, tensor], -2)[..., : tensor.shape[-2], :] for name, tensor in data.items()}
        wide["idx_k"] = torch.cat([data["idx_k"]] * 2, -1)[:, :4]
        assert not any(tensor.is_contiguous() for tensor in wide.values())
        for views in (data, wide):
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in views.items()}
            out, kl = ops.msa_attention(**leaves, topk=2, return_kl=True, **OPTIONS)
            (out.sum() + (out.transpose(0, 2) * torch.arange(23.0)).sum() + kl).backward()
            found = {name: leaf.grad for name, leaf in leaves.items()}
            if views is data:
                wanted = found
        same(found, wanted)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_what_vmap_calls_are_those_of_the_calls_one_by_one():
    data = tensors(lengths=(17,))
    pairs = {name: torch.stack([tensor, -2 * tensor]) for name, tensor in data.items()}

    def losses(*one):
        out, kl = ops.msa_attention(*one, 2, block_size=4, return_kl=True)
        return out.square().sum() + kl

    def by_hand(*several):
        return torch.stack([losses(*one) for one in zip(*several, strict=True)])

    found, wanted = [], []
    for run, gradients in ((torch.vmap(losses), found), (by_hand, wanted)):
        leaves = [tensor.clone().requires_grad_() for tensor in pairs.values()]
        (run(*leaves) * torch.tensor([1.0, 3.0])).sum().backward()
        gradients += [leaf.grad for leaf in leaves]
    close(found, wanted, terms=TERMS)
    assert all(bool(gradient.any()) for gradient in wanted)


def test_a_chunk_without_lengths_sees_every_key():
    """The last 5 of 17 tokens, as one request that nothing but the tensors describes."""
    data = tensors(lengths=(17,))
    tail = {name: value[-5:] if name in ("q", "idx_q") else value for name, value in data.items()}
    late = (torch.arange(17) >= 12).float()
    whole, of_late = ops.msa_attention(**data, topk=2, block_size=4, return_kl=True, token_weights=late)
    out, loss = ops.msa_attention(**tail, topk=2, block_size=4, return_kl=True)
    close(out, whole[-5:], terms=TERMS)
    close(loss, of_late * 17 / 5, terms=TERMS)
