"""The kernel path without a GPU: the facts and the positional arguments that operators hand to the runtime.

The kernels here are stand-ins that compute from exactly what they are given, so a wrong or missing argument gives a
wrong result.
"""

from __future__ import annotations

import pytest
import torch
from ops import training_calls
from ops.calls import BLOCK, EVERY_OPERATOR, OPERATORS, call, tensors
from ops.kernel_stand_ins import STAND_INS

from msa_tiles import ops, tables
from msa_tiles.call import backends
from msa_tiles.call.where import Where
from msa_tiles.launch import lookup, places, windows
from msa_tiles.runtime.registry import default_registry


def lengths_known():
    """The ways to say where flat queries and keys stand."""
    starts_q, starts_k = tensors()["cu_seqlens_q"], tensors()["cu_seqlens_k"]
    used = torch.tensor([9, 0, 20], dtype=torch.int32)
    yield "lone", {"cu_seqlens_q": None, "cu_seqlens_k": None}
    yield "varlen", {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
    yield "used", {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "seqused_k": used}
    yield "lone used", {"cu_seqlens_q": None, "cu_seqlens_k": None, "seqused_k": used[2:]}


PLACES = pytest.mark.parametrize("where", [w for _, w in lengths_known()], ids=[name for name, _ in lengths_known()])
OPTIONS = {
    "index_score": [{}, {"causal": False}, {"layout": "token_major"}],
    "topk_select": [
        {"init_blocks": 1, "local_blocks": 2, "order": "score"},
        {"num_valid_blocks": 4, "order": "local_last"},
        {"num_valid_blocks": torch.arange(11, dtype=torch.int32).clamp_max(5), "local_blocks": 0},
    ],
    "select_blocks": [{"init_blocks": 1, "local_blocks": 2, "order": "local_last"}, {"order": "score"}],
    "sparse_attention": [{}, {"softmax_scale": 0.7}],
}


@PLACES
@pytest.mark.parametrize("op", OPTIONS)
def test_kernels_get_what_the_reference_gets(op, where, kernels):
    for options in OPTIONS[op]:
        arguments = call(op) | where | options
        found = OPERATORS[op](**arguments)
        torch.testing.assert_close(found, OPERATORS[op](**arguments, backend="reference"), rtol=0, atol=0)


@pytest.mark.parametrize("where", [{}, {"seqused_k": torch.tensor([9, 0, 20], dtype=torch.int32)}], ids=["q", "used"])
def test_lengths_of_operators_without_keys(where, kernels):
    """No key starts: as many keys as queries, or as many as are used."""
    arguments = call("topk_select") | {"cu_seqlens_k": None} | where
    wanted = ops.topk_select(**arguments, backend="reference")
    assert torch.equal(ops.topk_select(**arguments), wanted)
    starts = tensors()["cu_seqlens_q"]
    given = Where(starts, seqused_k=where.get("seqused_k"))
    at = places.place(given, 11, None, BLOCK, starts.device)
    assert at.cu_seqlens_q.tolist() == [0, 5, 5, 11]
    assert at.cu_seqlens_k.tolist() == ([0, 9, 9, 29] if where else [0, 5, 5, 11])
    assert at.seqused_k.tolist() == ([9, 0, 20] if where else [0, 5, 5, 11])
    assert at.use_seqused == bool(where)


def test_facts_of_a_call(kernels):
    ops.index_score(**call("index_score", torch.bfloat16))
    ops.select_blocks(**call("select_blocks"))
    ops.topk_select(**call("topk_select") | {"score": torch.zeros(4, 11, 5).bfloat16()})
    (score, _), (select, _), (rank, backend) = kernels.found
    assert (score.op, score.precision, score.device.type) == ("index_score", "bf16", "cpu")
    assert score.variant == {"head_dim": 16, "block_size": BLOCK, "pages_per_block": 0}
    assert select.precision == "float32"
    assert select.variant == {
        "head_dim": 16, "block_size": BLOCK, "topk": 3, "heads_per_group": 2, "pages_per_block": 0
    }  # fmt: skip
    assert (rank.precision, rank.variant) == ("bf16", {"topk": 3})
    assert rank.refusals == ("score is torch.bfloat16, wanted torch.float32",)
    assert backend == "auto"
    assert not score.features and not score.refusals


def test_features_that_a_call_needs(kernels, monkeypatch):
    monkeypatch.setitem(STAND_INS, "select_blocks", lambda variant, *args: None)
    arguments = call("select_blocks")
    positions = torch.arange(11, dtype=torch.int32)
    ops.select_blocks(**arguments | {"q_positions": positions, "k_offset": torch.zeros(3, dtype=torch.int32)})
    shifted = torch.zeros(11 * 4 * 16 + 1)[1:].view(11, 4, 16)
    ops.select_blocks(**arguments | {"idx_q": shifted})
    odd = torch.zeros(40, 17)[:, :16]
    ops.select_blocks(**arguments | {"idx_k": odd})
    pool, used = torch.zeros(9, BLOCK, 16), torch.tensor([1, 0, 2], dtype=torch.int32)
    table = {"page_table": torch.zeros(3, 4, dtype=torch.int32), "seqused_k": used, "cu_seqlens_k": None}
    ops.select_blocks(**arguments | {"idx_k": pool} | table)
    ops.select_blocks(**arguments | {"idx_k": torch.zeros(1, 16).expand(40, 16)})
    found = [set(facts.features) for facts, _ in kernels.found]
    assert found == [{"q_positions"}, {"strided_unaligned"}, {"strided_unaligned"}, {"paged"}, {"expanded"}]
    assert [facts.variant["pages_per_block"] for facts, _ in kernels.found] == [0, 0, 0, 1, 0]


@pytest.mark.parametrize("pages_per_block", [1, 2, 4])
@pytest.mark.parametrize("positions", [False, True])
def test_paged_calls_on_kernels(pages_per_block, positions, kernels):
    page = BLOCK // pages_per_block
    table = torch.randperm(9 * pages_per_block, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    where = {
        "cu_seqlens_k": None,
        "page_table": table.view(3, -1),
        "seqused_k": torch.tensor([9, 0, 20], dtype=torch.int32),
    }
    if positions:
        where["q_positions"] = torch.tensor([0, 8, 3, 5, -1, 19, 2, 30, 7, 11, 0], dtype=torch.int32)
    pool = torch.randn(9 * pages_per_block, page, 16, generator=torch.Generator().manual_seed(1))
    cache = torch.randn(9 * pages_per_block, page, 2, 16, generator=torch.Generator().manual_seed(2)).transpose(1, 2)
    for op, keys in (
        ("index_score", {"idx_k": pool}),
        ("select_blocks", {"idx_k": pool}),
        ("sparse_attention", {"k": cache, "v": cache.flip(0)}),
    ):
        arguments = call(op) | where | keys
        found = OPERATORS[op](**arguments)
        torch.testing.assert_close(found, OPERATORS[op](**arguments, backend="reference"), rtol=0, atol=0)


def test_a_schedule_belongs_to_its_page_table(kernels):
    """Its tasks name rows of keys, and paged requests count those in the width of their table."""
    table = torch.arange(9, dtype=torch.int32).view(3, 3)
    where = {"cu_seqlens_k": None, "page_table": table, "seqused_k": torch.tensor([9, 0, 20], dtype=torch.int32)}
    cache = torch.randn(9, BLOCK, 2, 16, generator=torch.Generator().manual_seed(3)).transpose(1, 2)
    flat, paged = call("sparse_attention"), call("sparse_attention") | where | {"k": cache, "v": cache}
    made = ops.build_schedule(**call("build_schedule") | where)
    ops.sparse_attention(**paged, schedule=made)
    with pytest.raises(ValueError, match="schedule: got one for a page_table of 3 columns; wanted flat keys"):
        ops.sparse_attention(**flat, schedule=made)
    with pytest.raises(ValueError, match="schedule: got one for flat keys; wanted a page_table of 3 columns"):
        ops.sparse_attention(**paged, schedule=ops.build_schedule(**call("build_schedule")))


def test_a_page_table_too_large_for_virtual_rows_is_refused(kernels):
    table = torch.zeros(3, 1, dtype=torch.int32).expand(3, 1 << 26)
    used = torch.tensor([9, 0, 20], dtype=torch.int32)
    given = Where(tensors()["cu_seqlens_q"], page_table=table, seqused_k=used)
    (sentence,) = lookup.oversized_table(given, BLOCK)
    assert "virtual rows" in sentence and "2**31" in sentence
    assert lookup.oversized_table(given, 1) == ()


def test_rules_of_the_specs_become_refusals(kernels):
    wide = torch.zeros(4, 11, 16385)
    ops.topk_select(**call("topk_select") | {"score": wide})
    assert kernels.found[0][0].refusals == ("topk = 3, max_blocks = 16385, wanted max_blocks <= 16384",)
    ids = torch.full((2, 11, 65), -1, dtype=torch.int32)
    ops.sparse_attention(**call("sparse_attention") | {"block_indices": ids})
    assert kernels.attention.seen[0].refusals == ("topk = 65, wanted topk <= 64",)


def test_attention_gets_schedule_and_workspace(kernels):
    arguments = call("sparse_attention")
    ops.sparse_attention(**arguments)
    facts, schedule, workspace, size = kernels.attention.seen
    assert facts.variant == {"head_dim": 16, "block_size": BLOCK, "group": 2, "pages_per_block": 0}
    assert schedule is None and workspace is None and size == 1 << 30
    scratch, made = torch.empty(128, dtype=torch.uint8), ops.build_schedule(**call("build_schedule"))
    found = ops.sparse_attention(**arguments, schedule=made, workspace=scratch)
    _, schedule, workspace, size = kernels.attention.seen
    assert workspace.data_ptr() == scratch.data_ptr() and size == 128
    assert torch.equal(schedule.edges, made.edges) and schedule.window == made.window
    torch.testing.assert_close(found, ops.sparse_attention(**arguments, backend="reference"), rtol=0, atol=0)


def test_calls_that_hold_no_key_launch_nothing(kernels, monkeypatch):
    """Said by the bound on lengths, or by a page table of no columns: there may be rows of keys all the same."""
    monkeypatch.setattr(kernels.attention, "find", None)
    lengths = {"cu_seqlens_k": torch.zeros(4, dtype=torch.int32), "max_seqlen_k": 0}
    pages = {"cu_seqlens_k": None, "page_table": torch.zeros(3, 0, dtype=torch.int32)}
    pages |= {"seqused_k": torch.zeros(3, dtype=torch.int32)}
    pages |= {name: torch.zeros(2, 2, BLOCK, 16) for name in "kv"}
    for where in (lengths, pages):
        buffers = {"out": torch.full((11, 4, 16), 7.0), "lse": torch.full((11, 4), 7.0)}
        ops.sparse_attention(**call("sparse_attention") | where, **buffers)
        assert not buffers["out"].any() and (buffers["lse"] == -torch.inf).all()
        assert kernels.found[-1][0].op == "sparse_attention", "a kernel must be there all the same"


def test_combine_on_kernels(kernels):
    arguments = call("combine", torch.bfloat16)
    found = ops.combine(**arguments)
    torch.testing.assert_close(found, ops.combine(**arguments, backend="reference"), rtol=0, atol=0)
    ((facts, _),) = kernels.found
    assert facts.variant == {"head_dim": 16} and facts.precision == "bf16"


def test_empty_calls_launch_nothing(kernels, monkeypatch):
    """They still ask for a kernel, so that a call that none serves fails for empty batches too."""

    def refuse(*args, **kwargs):
        raise AssertionError("launched")

    def find_kernel(facts, backend):
        kernels.found.append(facts.op)
        return refuse

    monkeypatch.setattr(lookup, "find_kernel", find_kernel)
    for name in ("find", "build"):
        monkeypatch.setattr(kernels.attention, name, refuse)
    data = tensors()
    ids = torch.zeros(2, 11, 3, dtype=torch.int32)
    none = {"cu_seqlens_q": torch.zeros(1, dtype=torch.int32), "cu_seqlens_k": torch.zeros(1, dtype=torch.int32)}
    empty_keys = {"idx_k": data["idx_k"][:0]}
    for where, keys in (({}, empty_keys), (none, {"idx_k": data["idx_k"]})):
        assert (ops.index_score(data["idx_q"], **keys, **where, out=torch.zeros(4, 11, 2)) == -torch.inf).all()
        assert (ops.select_blocks(data["idx_q"], **keys, topk=3, **where) == -1).all()
    assert ops.index_score(data["idx_q"][:0], data["idx_k"]).shape == (4, 0, 1)
    assert ops.select_blocks(data["idx_q"][:0], data["idx_k"], 3).shape == (4, 0, 3)
    assert (ops.topk_select(torch.zeros(4, 11, 0), 3) == -1).all()
    assert (ops.topk_select(torch.zeros(4, 11, 2), 3, cu_seqlens_q=none["cu_seqlens_q"]) == -1).all()
    for k, where in ((data["k"][:0], {}), (data["k"], none)):
        out, lse = ops.sparse_attention(data["q"], k, k, ids, return_lse=True, **where)
        assert not out.any() and (lse == -torch.inf).all()
    assert ops.sparse_attention(data["q"][:0], data["k"], data["v"], ids[:, :0]).shape == (0, 4, 16)
    out, lse = ops.combine(torch.zeros(0, 5, 4, 16), torch.zeros(0, 5, 4))
    assert not out.any() and (lse == -torch.inf).all()
    assert set(kernels.found) == {"index_score", "select_blocks", "topk_select", "sparse_attention", "combine"}


def test_one_sequence_is_made_on_the_device():
    where = Where()
    at = places.place(where, 7, 300, BLOCK, torch.device("cpu"))
    assert (at.cu_seqlens_q.tolist(), at.cu_seqlens_k.tolist(), at.use_seqused) == ([0, 7], [0, 300], 0)
    assert at.seqused_k is at.cu_seqlens_k and at.cu_seqlens_q.dtype == torch.int32


def test_schedules_have_room_for_what_the_kernels_write():
    """The launcher sizes buffers and windows without asking the kernels: its numbers must be theirs."""
    cells = {cell.op: cell for cell in default_registry().select(precision="bf16", dsl="tilelang", target="sm90")}
    for cell in default_registry().select(op="build_schedule"):
        assert tables.constants_of(cell.file)["CHUNK"] == windows.CHUNK
    variants = cells["sparse_attention"].variants
    assert max(variants["group"]) == windows.LARGEST_GROUP
    assert max(variants["head_dim"]) == windows.LARGEST_HEAD_DIM


class SeenError(Exception):
    """Carries the refusals of a call's facts."""


@pytest.mark.parametrize("op", [*EVERY_OPERATOR, "index_kl", "sparse_attention_backward"])
def test_more_heads_than_an_axis_of_a_grid_holds_are_refused(op, monkeypatch):
    made = (call if op in OPERATORS else training_calls.call)(op)

    def facts(*arguments):
        raise SeenError(*arguments[5])

    monkeypatch.setattr(backends, "runs_reference", lambda backend, device: False)
    monkeypatch.setattr(lookup, "CallFacts", facts)
    with pytest.raises(SeenError) as caught:
        getattr(ops, op)(**made)
    assert not caught.value.args or "heads" not in caught.value.args[-1]
    monkeypatch.setattr(lookup, "MOST_HEADS", 1)
    with pytest.raises(SeenError) as caught:
        getattr(ops, op)(**made)
    assert caught.value.args[-1].endswith("heads, wanted at most 1: they lie along an axis of the grid")
