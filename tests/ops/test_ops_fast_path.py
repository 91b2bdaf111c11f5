"""Which calls go past torch's dispatcher, and that going past it changes nothing."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from ops.calls import EVERY_OPERATOR, OPERATORS, TERMS, call
from rounding import close
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from msa_tiles import ops


def module_of(op):
    return importlib.import_module(f"msa_tiles.ops.{op}")


@pytest.fixture
def ways(monkeypatch):
    """How calls of operators went: "fast" or "registered"."""
    seen = []

    def noted(way, function):
        def run(*arguments):
            seen.append(way)
            return function(*arguments)

        return run

    for op in EVERY_OPERATOR:
        pair = module_of(op)._OPERATOR
        spied = dataclasses.replace(
            pair,
            write=noted("fast", pair.write),
            registered_functional=noted("registered", pair.registered_functional),
            registered_mutating=noted("registered", pair.registered_mutating),
        )
        monkeypatch.setattr(module_of(op), "_OPERATOR", spied)
    return seen


def merge(**change):
    return ops.combine(**call("combine") | change)


def outputs(op, made):
    """Poisoned buffers for a call of a functional operator, and the scratch tensor where there is one."""
    pair = module_of(op)._OPERATOR
    results = pair.registered_functional(*pair.layout.flatten(made))
    results = results if isinstance(results, tuple) else (results,)
    made = [torch.full_like(result, 77) for result in results]
    return results, [*made, *([torch.zeros(64, dtype=torch.uint8)] * (len(pair.buffers) - len(made)))]


def operator_call(op, monkeypatch):
    """What the public call hands to its operator."""
    seen = []
    pair = module_of(op)._OPERATOR
    with monkeypatch.context() as patch:
        note = dataclasses.replace(pair, allocate=lambda made: seen.append(made) or pair.allocate(made))
        patch.setattr(module_of(op), "_OPERATOR", note)
        OPERATORS[op](**call(op))
    return seen[0]


@pytest.mark.parametrize("op", EVERY_OPERATOR)
def test_both_ways_give_the_same(op, monkeypatch):
    pair, made = module_of(op)._OPERATOR, operator_call(op, monkeypatch)
    wanted, fast = outputs(op, made)
    found = pair.functional(made)
    exact = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(found if isinstance(found, tuple) else (found,), wanted, **exact)
    _, registered = outputs(op, made)
    assert pair.mutating(made, *fast) is None
    assert pair.registered_mutating(*pair.layout.flatten(made), *registered) is None
    torch.testing.assert_close(fast, registered, **exact)
    torch.testing.assert_close(tuple(fast[: len(wanted)]), wanted, **exact)


@pytest.mark.parametrize("op", EVERY_OPERATOR)
def test_plain_calls_go_past_the_dispatcher(op, ways):
    arguments = call(op)
    ways.clear()
    OPERATORS[op](**arguments)
    assert ways == ["fast"]


def test_parameters_and_no_grad_are_plain(ways):
    frozen = torch.nn.Parameter(call("combine")["partial_out"], requires_grad=False)
    merge(partial_out=frozen)
    learnt = torch.nn.Parameter(call("combine")["partial_out"])
    for without_gradients in (torch.no_grad, torch.inference_mode):
        with without_gradients():
            merge(partial_out=learnt)
            out = torch.empty(5, 4, 16)
            merge(partial_out=learnt, out=out)
    assert ways == ["fast"] * 5


def test_a_call_that_requires_grad_is_registered(ways):
    merge(partial_out=call("combine")["partial_out"].requires_grad_())
    merge(partial_lse=call("combine")["partial_lse"].requires_grad_(), out=torch.empty(5, 4, 16))
    arguments = call("msa_decode")
    arguments["idx_k"].requires_grad_()
    ops.msa_decode(**arguments)
    assert ways == ["registered"] * 3


def test_a_subclass_of_tensor_is_registered(ways):
    class Own(torch.Tensor):
        pass

    merge(partial_out=call("combine")["partial_out"].as_subclass(Own))
    assert ways == ["registered"]


def test_tensors_without_data_are_registered(ways):
    meta = {name: value.to("meta") for name, value in call("combine").items()}
    assert ops.combine(**meta)[0].is_meta
    assert ways == ["registered"]


def test_fake_tensors_are_registered(ways):
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(value) for name, value in call("combine").items()}
        out, lse = ops.combine(**fake)
    assert (out.shape, lse.shape) == ((5, 4, 16), (5, 4))
    assert ways == ["registered"]


def test_traced_calls_are_registered():
    from torch.fx.experimental.proxy_tensor import make_fx

    arguments = call("sparse_decode")

    def attend(q):
        return ops.sparse_decode(**arguments | {"q": q})

    graph = make_fx(attend)(arguments["q"])
    names = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert "msa_tiles.sparse_decode.default" in names
    torch.testing.assert_close(graph(arguments["q"]), attend(arguments["q"]), rtol=0, atol=0)


def test_compiled_calls_are_registered():
    torch._dynamo.reset()
    graphs = []

    def keep(module, inputs):
        graphs.append(module)
        return module.forward

    arguments = call("msa_decode")
    own = {"out": torch.empty(11, 4, 16), "lse": torch.empty(11, 4), "workspace": torch.empty(64, dtype=torch.uint8)}
    own["block_indices"] = torch.empty(2, 11, 3, dtype=torch.int32)

    def decode(q, buffers):
        ops.msa_decode(**arguments | {"q": q}, **buffers)
        return ops.msa_decode(**arguments | {"q": q}), buffers["out"] + 0

    compiled = torch.compile(decode, fullgraph=True, backend=keep)
    torch.testing.assert_close(compiled(arguments["q"], own), decode(arguments["q"], own), rtol=0, atol=0)
    (graph,) = graphs
    names = [str(node.target) for node in graph.graph.nodes if "msa_tiles" in str(node.target)]
    assert names == ["msa_tiles.msa_decode_out.default", "msa_tiles.msa_decode.default"] or names == [
        "msa_tiles.msa_decode_out",
        "msa_tiles.msa_decode",
    ]


def test_a_step_with_all_buffers_may_be_transformed(monkeypatch):
    """What is remembered of steps must not look into tensors that have no address."""
    arguments = call("msa_decode")
    q = torch.stack([arguments["q"], arguments["q"] + 1])
    workspace = torch.empty(64, dtype=torch.uint8)
    seen = []
    pair = module_of("msa_decode")._OPERATOR
    spied = dataclasses.replace(pair, registered_mutating=lambda *given: seen.append(given))
    monkeypatch.setattr(module_of("msa_decode"), "_OPERATOR", spied)

    def decode(q):
        buffers = {"out": torch.empty_like(q), "lse": q[..., 0] * 0}
        buffers["block_indices"] = torch.empty(2, 11, 3, dtype=torch.int32)
        return ops.msa_decode(**arguments | {"q": q}, **buffers, workspace=workspace)

    assert torch.vmap(decode)(q).shape == q.shape
    assert len(seen) == 1


def test_transformed_calls_are_registered(ways):
    partial_out, partial_lse = torch.randn(2, 3, 5, 4, 16), torch.randn(2, 3, 5, 4)
    out, lse = torch.vmap(ops.combine)(partial_out, partial_lse)
    assert ways[0] == "registered"
    for one in range(2):
        close((out[one], lse[one]), ops.combine(partial_out[one], partial_lse[one]), terms=TERMS)


DUAL = {"combine": "partial_out", "index_score": "idx_q", "sparse_attention": "v", "msa_decode": "q"}


@pytest.mark.parametrize("op", DUAL)
@pytest.mark.parametrize("buffer", [False, True])
def test_forward_mode_is_refused(op, buffer):
    """Torch takes the tangent of an operator without a rule for 0."""
    arguments, name = call(op), DUAL[op]

    def run(value):
        given = arguments | {name: value}
        if buffer:
            given["out"] = torch.empty_like(result)
        found = OPERATORS[op](**given)
        return found[0] if isinstance(found, tuple) else found

    result = OPERATORS[op](**arguments)
    result = result[0] if isinstance(result, tuple) else result
    value = arguments[name]
    message = f"msa_tiles::{op} has no derivative in forward mode"
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(run, (value,), (value,))
    with forward_ad.dual_level():
        assert torch.equal(run(value), result), "a constant has no tangent to lose"
        with pytest.raises(RuntimeError, match=message):
            run(forward_ad.make_dual(value, value))
    if not buffer:
        several = torch.stack([value, value])
        with pytest.raises(RuntimeError, match=message):
            torch.func.jvp(torch.vmap(run), (several,), (several,))


@pytest.mark.parametrize("op", ["sparse_attention", "sparse_decode", "select_blocks"])
def test_transforms_that_take_gradients_are_refused(op):
    arguments = call(op)

    name = "idx_q" if "idx_q" in arguments else "q"

    def run(value):
        found = OPERATORS[op](**arguments | {name: value})
        return (found[0] if isinstance(found, tuple) else found).sum()

    message = rf"msa_tiles::{op} does not run under torch.func.grad or vjp; torch.autograd \(backward\) takes it"
    with pytest.raises(RuntimeError, match=message):
        torch.func.grad(run)(arguments[name])
    with pytest.raises(RuntimeError, match=message):
        torch.func.vjp(run, arguments[name])
    with pytest.raises(RuntimeError, match=message):
        torch.vmap(torch.func.grad(run))(torch.stack([arguments[name]] * 2))


def test_ids_are_constants_in_forward_mode():
    arguments = call("select_blocks")
    with forward_ad.dual_level():
        ids = ops.select_blocks(**arguments | {"idx_q": forward_ad.make_dual(arguments["idx_q"], arguments["idx_q"])})
    assert torch.equal(ids, ops.select_blocks(**arguments))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_traces_hold_the_operator():
    """A launch past the dispatcher leaves no trace: the graph would return what its example gave."""
    arguments = call("sparse_decode")
    graph = torch.jit.trace(lambda q: ops.sparse_decode(**arguments | {"q": q}), (arguments["q"],), check_trace=False)
    assert "msa_tiles::sparse_decode" in str(graph.graph)
    q = arguments["q"].flip(0)
    assert torch.equal(graph(q), ops.sparse_decode(**arguments | {"q": q}))


@pytest.mark.parametrize("way", ["fast", "registered"])
@pytest.mark.parametrize("op", EVERY_OPERATOR)
def test_versions_of_mutated_buffers_rise(op, way, monkeypatch):
    pair, made = module_of(op)._OPERATOR, operator_call(op, monkeypatch)
    _, buffers = outputs(op, made)
    flat = pair.layout.flatten(made)
    given = [value for value in flat if isinstance(value, torch.Tensor)]
    before = [tensor._version for tensor in buffers + given]
    if way == "fast":
        pair.mutating(made, *buffers)
    else:
        pair.registered_mutating(*flat, *buffers)
    after = [tensor._version for tensor in buffers + given]
    risen = [later > earlier for earlier, later in zip(before, after, strict=True)]
    assert risen == [True] * len(buffers) + [False] * len(given)


def test_autograd_notices_a_buffer_that_was_written_after_it_was_saved():
    buffer, weight = torch.zeros(5, 4, 16), torch.ones(5, 4, 16, requires_grad=True)
    product = (buffer * weight).sum()
    merge(out=buffer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_workspace_left_out_is_no_buffer():
    out = torch.empty(11, 4, 16)
    before = out._version
    ops.sparse_decode(**call("sparse_decode"), out=out)
    assert out._version > before


def test_views_share_their_version():
    whole = torch.zeros(11, 8, 16)
    before = whole._version
    ops.msa_decode(**call("msa_decode"), out=whole[:, ::2])
    assert whole._version > before and whole[:, ::2].any() and not whole[:, 1::2].any()
