"""torch.library registration: opcheck of both twins of every operator, and tracing by torch.compile without breaks."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch
from ops.calls import (
    ATTENTION,
    BLOCK,
    EVERY_OPERATOR,
    OPERATORS,
    RANKERS,
    SCORERS,
    WITH_KEYS,
    WITH_OFFSETS,
    call,
    lengths,
    paged,
    tensors,
)
from torch.library import opcheck

from msa_tiles import ops


def recorded(monkeypatch, arguments_of):
    """The torch.ops calls, with their arguments, that public calls make."""
    seen = []
    for name in EVERY_OPERATOR:
        module = sys.modules[f"msa_tiles.ops.{name}"]
        pair = module._OPERATOR

        def functional(made, name=name, pair=pair):
            seen.append((f"{name}", pair.layout.flatten(made)))
            return pair.functional(made)

        def mutating(made, *outputs, name=name, pair=pair):
            seen.append((f"{name}_out", (*pair.layout.flatten(made), *outputs)))
            return pair.mutating(made, *outputs)

        monkeypatch.setattr(module, "_OPERATOR", types.SimpleNamespace(functional=functional, mutating=mutating))
    for op, arguments in arguments_of:
        OPERATORS[op](**arguments)
    monkeypatch.undo()
    return seen


def sample_calls():
    """Public calls that reach every registered operator in its kinds: flat, paged, buffers, optional tensors."""
    for op in EVERY_OPERATOR:
        for dtype in (torch.float32, torch.bfloat16):
            yield op, call(op, dtype)
    for op in WITH_KEYS:
        yield op, paged(op)
        positions = torch.arange(11, dtype=torch.int32)
        offsets = {"k_offset": positions[:3].clone()} if op in WITH_OFFSETS else {}
        yield op, call(op) | {"q_positions": positions, "max_seqlen_k": 60} | offsets
    for op in SCORERS:
        yield op, call(op) | {"out": torch.empty(4, 11, 5)}
        yield op, call(op) | {"layout": "token_major", "causal": False}
    for op in RANKERS:
        yield op, call(op) | {"num_valid_blocks": torch.ones(11, dtype=torch.int32)}
        yield op, call(op) | {"num_valid_blocks": 2, "layout": "head_major", "order": "score"}
    ids = torch.empty(11, 2, 3, dtype=torch.int32).transpose(0, 1)
    for op in (*RANKERS, "select_blocks"):
        yield op, call(op) | {"out": ids.clone()}
    yield "sparse_attention", call("sparse_attention") | {"schedule": ops.build_schedule(**call("build_schedule"))}
    for op in (*ATTENTION, "msa_decode"):
        buffers = {"out": torch.empty(11, 8, 16)[:, ::2], "workspace": torch.empty(9, dtype=torch.uint8)}
        yield op, call(op) | buffers
    yield "msa_decode", call("msa_decode") | {"block_indices": ids.clone(), "init_blocks": 1, "local_blocks": 2}
    yield "combine", call("combine") | {"out": torch.empty(5, 4, 16), "lse": torch.empty(5, 4)}


@pytest.mark.slow
def test_opcheck_of_every_operator(monkeypatch):
    calls = recorded(monkeypatch, sample_calls())
    # build_schedule has no caller's buffers in its public form; its twin is checked all the same.
    schedule = next(args for name, args in calls if name == "build_schedule")
    destinations = torch.ops.msa_tiles.build_schedule(*schedule)
    calls.append(("build_schedule_out", (*schedule, *(torch.empty_like(part) for part in destinations))))
    reached = {name for name, _ in calls}
    assert reached == {name + twin for name in EVERY_OPERATOR for twin in ("", "_out")}
    for name, args in calls:
        opcheck(getattr(torch.ops.msa_tiles, name).default, args)


def layer(idx_q, idx_k, q, k, v, cu_seqlens_q, cu_seqlens_k):
    """Every operator once, caller's buffers among them."""
    where = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "block_size": BLOCK}
    score = torch.empty(idx_q.shape[0], idx_q.shape[1], 5)
    ops.index_score(idx_q, idx_k, layout="token_major", out=score, **where)
    ranked = ops.topk_select(score, 3, num_kv_heads=2, layout="token_major", order="local_last", **where)
    ids = ops.select_blocks(idx_q * 1, idx_k, 3, num_kv_heads=2, order="local_last", **where)
    schedule = ops.build_schedule(ids, **where)
    out, lse = ops.sparse_attention(q, k, v, ids, schedule=schedule, return_lse=True, **where)
    second, second_lse = torch.empty_like(q), torch.empty_like(lse)
    workspace = torch.empty(16, dtype=torch.uint8)
    ops.sparse_attention(q, k, v, ranked, out=second, lse=second_lse, workspace=workspace, **where)
    merged, merged_lse = ops.combine(torch.stack([out, second]), torch.stack([lse, second_lse]))
    decoded = decode(idx_q, idx_k, q, k, v, where)
    return score + 0, ranked, ids, out, lse, second, second_lse, merged, merged_lse, *decoded


def decode(idx_q, idx_k, q, k, v, where):
    """The operators of a decode step, one by one and in one, each also with buffers."""
    score = ops.decode_score(idx_q, idx_k, **where)
    ids = torch.empty(2, idx_q.shape[0], 3, dtype=torch.int32)
    ops.decode_topk(score, 3, num_kv_heads=2, out=ids, **where)
    out, lse = ops.sparse_decode(q, k, v, ids, return_lse=True, **where)
    second, chosen = torch.empty_like(q), torch.empty_like(ids)
    ops.sparse_decode(q, k, v, ids, out=second, **where)
    third = torch.empty_like(q)
    workspace = torch.empty(16, dtype=torch.uint8)
    ops.msa_decode(q, k, v, idx_q * 1, idx_k, 3, out=third, block_indices=chosen, workspace=workspace, **where)
    fourth, fourth_lse = ops.msa_decode(q, k, v, idx_q * 1, idx_k, 3, return_lse=True, **where)
    return score, ids + 0, out, lse, second + 0, third + 0, chosen + 0, fourth, fourth_lse


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.drawn(1)
def test_compiles_as_one_graph(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    data = tensors()
    # A fifth start: four of them would tie the number of requests to the number of heads.
    data |= {name: torch.cat([starts, starts[-1:]]) for name, starts in lengths(data).items()}
    torch.testing.assert_close(compiled(**data), layer(**data), rtol=0, atol=0)
    if dynamic:
        # Other numbers of tokens and requests run the same graph: shapes depend on no data.
        other = data | {"idx_q": data["idx_q"][:9], "q": data["q"][:9]}
        other["cu_seqlens_q"] = data["cu_seqlens_q"][[0, 1, 3]].clamp_max(9)
        other["cu_seqlens_k"] = data["cu_seqlens_k"][[0, 1, 3]]
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(compiled(**other), layer(**other), rtol=0, atol=0)


@pytest.mark.slow
def test_compiles_with_inductor():
    torch._dynamo.reset()
    data = tensors()
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(**data), layer(**data), rtol=0, atol=0)


def test_a_schedule_may_enter_a_graph():
    torch._dynamo.reset()
    arguments = call("sparse_attention")
    schedule = ops.build_schedule(**call("build_schedule"))

    def attend(q, schedule):
        return ops.sparse_attention(**(arguments | {"q": q, "schedule": schedule}))

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(arguments["q"], schedule), attend(arguments["q"], schedule), rtol=0, atol=0)


def test_check_is_refused_inside_a_graph():
    torch._dynamo.reset()
    arguments = call("build_schedule")

    def build(ids):
        return ops.build_schedule(**(arguments | {"block_indices": ids}), check=True).edges

    compiled = torch.compile(build, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"check: got True under torch\.compile"):
        compiled(arguments["block_indices"])


@pytest.mark.parametrize("op", EVERY_OPERATOR)
def test_shapes_are_known_without_data(op):
    """The fake kernels: meta tensors in, meta tensors of the right shape out."""
    arguments = call(op)
    real = OPERATORS[op](**arguments)
    meta = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    fake = OPERATORS[op](**meta)
    if op == "build_schedule":
        real, fake = (real.edges, real.tasks, real.counts), (fake.edges, fake.tasks, fake.counts)
    real, fake = (value if isinstance(value, tuple) else (value,) for value in (real, fake))
    assert [(x.shape, x.stride(), x.dtype) for x in fake] == [(x.shape, x.stride(), x.dtype) for x in real]
    assert all(x.is_meta for x in fake)


@pytest.mark.slow  # beside it, test_first_calls_import_nothing_slow
def test_operators_on_the_cpu_load_no_dsl():
    script = (
        "import sys, torch; from msa_tiles import ops; "
        "ops.select_blocks(torch.zeros(4, 1, 8), torch.zeros(4, 8), 2); "
        "print(sorted({'tilelang', 'tvm', 'tvm_ffi', 'cutlass'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
