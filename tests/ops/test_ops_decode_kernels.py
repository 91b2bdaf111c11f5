"""How decode kernels are launched, without a GPU: arguments, splits, workspaces, and what is allocated."""

from __future__ import annotations

import itertools

import pytest
import torch
from ops.calls import BLOCK, OPERATORS, PARTIAL, call, paged, tensors
from ops.decode_stand_ins import SMS
from rounding import close
from torch.utils._python_dispatch import TorchDispatchMode

from msa_tiles import explain, ops
from msa_tiles.call import step
from msa_tiles.call.where import Where
from msa_tiles.launch import decode, places
from msa_tiles.launch.decode import choose_splits
from msa_tiles.library import registration

BF16 = torch.bfloat16
USED = torch.tensor([9, 0, 20], dtype=torch.int32)
POSITIONS = torch.tensor([0, 8, 3, 5, -1, 19, 2, 30, 7, 11, 0], dtype=torch.int32)
LONE = {"cu_seqlens_q": None, "cu_seqlens_k": None}
PLACES = {
    "varlen": {},
    "used": {"seqused_k": USED},
    "lone": LONE,
    "lone used": LONE | {"seqused_k": USED[2:]},
    "positions": {"q_positions": POSITIONS},
}


def paged_bf16(op, pages_per_block=2):
    """`paged(op)` in bfloat16 pages of other sizes, without NaN in what no request uses."""
    arguments = paged(op)
    for name in ("idx_k", "k", "v"):
        if name not in arguments:
            continue
        pool = arguments[name].nan_to_num()
        if pages_per_block == 1:
            # Two neighbours make a page of a whole block, found by tables of their own.
            pool = torch.cat([pool, pool.flip(0)], dim=-2)
        arguments[name] = pool.to(BF16)
    if pages_per_block == 1:
        arguments["page_table"] = arguments["page_table"][:, :3].clamp_min(0)
    for name in ("q", "idx_q"):
        if name in arguments:
            arguments[name] = arguments[name].to(BF16)
    return arguments


def agree(op, arguments, decode_kernels):
    found = OPERATORS[op](**arguments)
    assert decode_kernels.launched
    wanted = OPERATORS[op](**arguments, backend="reference")
    close(found, wanted, **PARTIAL)


OPTIONS = {
    "decode_score": [{}, {"causal": False}, {"layout": "token_major"}],
    "decode_topk": [
        {"init_blocks": 1, "local_blocks": 2, "order": "score"},
        {"num_valid_blocks": 4, "order": "local_last"},
        {"num_valid_blocks": torch.arange(11, dtype=torch.int32).clamp_max(5), "local_blocks": 0},
    ],
    "sparse_decode": [{"return_lse": True}, {"softmax_scale": 0.7, "workspace": 1}],
    "msa_decode": [{"return_lse": True}, {"init_blocks": 1, "local_blocks": 2, "softmax_scale": 0.7}],
}


@pytest.mark.parametrize("where", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("op", OPTIONS)
def test_kernels_get_what_the_reference_gets(op, where, decode_kernels):
    for options in OPTIONS[op]:
        arguments = call(op, BF16 if op != "decode_topk" else torch.float32) | where | options
        agree(op, arguments, decode_kernels)


@pytest.mark.parametrize("pages_per_block", [1, 2])
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("op", ["decode_score", "sparse_decode", "msa_decode"])
def test_paged_kernels_get_what_the_reference_gets(op, positions, pages_per_block, decode_kernels):
    arguments = paged_bf16(op, pages_per_block)
    if positions:
        arguments["q_positions"] = POSITIONS
    agree(op, arguments, decode_kernels)
    assert {facts.variant.get("pages_per_block", pages_per_block) for facts in decode_kernels.found} == {
        pages_per_block
    }
    features = {facts.op: facts.features for facts in decode_kernels.found}
    wanted = {"paged", "q_positions"} if positions else {"paged"}
    assert features.pop("combine", frozenset()) == frozenset(), "a merge reads partial results only"
    assert set(features.values()) == {frozenset(wanted)}


def test_ids_of_a_step_come_from_its_scores(decode_kernels):
    ids = torch.full((2, 11, 3), 99, dtype=torch.int32)
    ops.msa_decode(**call("msa_decode", BF16), block_indices=ids)
    assert torch.equal(ids, ops.select_blocks(**call("select_blocks", BF16), backend="reference"))
    assert [op for op, _ in decode_kernels.launched] == ["decode_score", "sparse_decode"]
    score, attend = (given for _, given in decode_kernels.launched)
    assert attend["score"].data_ptr() == score["out"].data_ptr()
    assert attend["block_indices"].data_ptr() == ids.data_ptr()


def test_facts_of_a_step(decode_kernels):
    ops.msa_decode(**call("msa_decode", BF16))
    pages = {"pages_per_block": 0}
    assert {facts.op: facts.variant for facts in decode_kernels.found} == {
        "decode_score": {"head_dim": 16, "block_size": BLOCK, **pages},
        "sparse_decode": {"head_dim": 16, "block_size": BLOCK, "group": 2, "scored_blocks": 5, **pages},
        "combine": {"head_dim": 16},
    }
    assert {facts.precision for facts in decode_kernels.found} == {"bf16"}
    decode_kernels.found.clear()
    ops.sparse_decode(**call("sparse_decode", BF16))
    assert decode_kernels.found[0].variant["scored_blocks"] == 0
    decode_kernels.found.clear()
    ops.decode_topk(**call("decode_topk"))
    assert (decode_kernels.found[0].precision, decode_kernels.found[0].variant) == ("bf16", {"max_blocks": 5})


def test_rules_of_the_specs_become_refusals(decode_kernels):
    decode_kernels.compute = False
    ops.decode_topk(**call("decode_topk") | {"score": torch.zeros(4, 11, 16385)})
    ops.decode_topk(**call("decode_topk") | {"score": torch.zeros(4, 11, 5).bfloat16()})
    ops.sparse_decode(**call("sparse_decode", BF16) | {"block_indices": torch.zeros(2, 11, 65, dtype=torch.int32)})
    ops.msa_decode(**call("msa_decode", BF16) | {"topk": 65})
    refusals = [facts.refusals for facts in decode_kernels.found if facts.op in ("decode_topk", "sparse_decode")]
    assert refusals == [
        ("topk = 3, max_blocks = 16385, wanted max_blocks <= 16384",),
        ("score is torch.bfloat16, wanted torch.float32",),
        ("topk = 65, wanted topk <= 64",),
        ("topk = 65, max_blocks = 5, wanted topk <= 64",),
    ]


class TestSplits:
    def test_few_rows_are_split_and_many_are_not(self):
        assert choose_splits(4, 16, 132, 100) > 4
        assert choose_splits(4 * 32, 16, 132, 100) == 1
        assert choose_splits(1 << 20, 16, 132, 100) == 1
        assert choose_splits(4, 1, 132, 100) == 1

    @pytest.mark.parametrize("topk", [1, 3, 16, 64])
    @pytest.mark.parametrize("rows", [1, 4, 30, 131, 133, 5000])
    def test_never_more_than_there_are_slots_or_the_workspace_holds(self, rows, topk):
        for most in (0, 1, 2, 5, 1000):
            assert 1 <= choose_splits(rows, topk, 132, most) <= max(1, min(topk, most))

    @pytest.mark.parametrize("most", [1, 2, 3])
    def test_a_bound_that_is_the_choice_changes_nothing(self, most):
        """A workspace made for the choice is filled by it."""
        for rows in range(1, 300):
            chosen = choose_splits(rows, 16, 132, 1 << 20)
            assert choose_splits(rows, 16, 132, chosen) == chosen

    def test_the_workspace_bounds_the_splits(self, decode_kernels):
        arguments = one_query("sparse_decode")
        one = decode.split_bytes(*arguments["q"].shape)
        wanted = ops.sparse_decode(**arguments, backend="reference")
        for size, splits in ((1, 1), (2 * one - 1, 1), (2 * one, 2), (3 * one - 1, 2), (1 << 20, 2)):
            for workspace in (size, torch.empty(size, dtype=torch.uint8)):
                decode_kernels.launched.clear()
                close(ops.sparse_decode(**arguments, workspace=workspace), wanted, **PARTIAL)
                (_, attend), *merges = decode_kernels.launched
                assert len(attend["partial_out"]) == splits and len(merges) == (splits > 1)


def one_query(op):
    """Two KV heads of one query are two rows for four multiprocessors: its four slots are split in two."""
    data = tensors(BF16)
    arguments = {name: data[name] for name in ("k", "v")} | {"q": data["q"][:1], "block_size": BLOCK}
    if op == "msa_decode":
        return arguments | {"idx_q": data["idx_q"][:1], "idx_k": data["idx_k"], "topk": 4}
    return arguments | {"block_indices": torch.tensor([[[0, 3, 1, 4]], [[4, -1, 2, 0]]], dtype=torch.int32)}


@pytest.mark.parametrize("op", ["sparse_decode", "msa_decode"])
def test_shares_are_merged(op, decode_kernels):
    arguments = one_query(op)
    found = OPERATORS[op](**arguments, return_lse=True)
    assert [name for name, _ in decode_kernels.launched][-2:] == ["sparse_decode", "combine"]
    attend, merge = (given for _, given in decode_kernels.launched[-2:])
    assert len(attend["partial_out"]) == 2 and attend["partial_out"].dtype == BF16
    assert merge["partial_out"].data_ptr() == attend["partial_out"].data_ptr()
    close(found, OPERATORS[op](**arguments, return_lse=True, backend="reference"), **PARTIAL)


def test_parts_of_a_workspace_do_not_overlap(decode_kernels):
    arguments = one_query("msa_decode")
    ops.msa_decode(**arguments)
    attend = next(given for op, given in decode_kernels.launched if op == "sparse_decode")
    spans = sorted(
        (part.data_ptr(), part.data_ptr() + part.numel() * part.element_size())
        for part in (attend["score"], attend["partial_out"], attend["partial_lse"])
    )
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert (attend["partial_out"].data_ptr() - attend["score"].data_ptr()) % decode.PART == 0


def needed(arguments):
    """`decode_workspace_bytes` as it answers for CUDA tensors."""
    q, idx_q = arguments["q"], arguments["idx_q"]
    parts = decode.step_bytes(q, idx_q, arguments["topk"], 2, -(-arguments["max_seqlen_k"] // BLOCK), False)
    return sum(parts)


def test_a_step_refuses_a_small_workspace(decode_kernels):
    arguments = one_query("msa_decode") | {"max_seqlen_k": 40}
    size = needed(arguments)
    assert size == 256 + 2 * 4 * (2 * 16 + 4), "scores of 4 heads and 5 blocks, rounded up; two splits of 4 heads"
    wanted = ops.msa_decode(**arguments, backend="reference")
    close(ops.msa_decode(**arguments, workspace=torch.empty(size, dtype=torch.uint8)), wanted, **PARTIAL)
    message = f"workspace: got {size - 1} bytes; wanted at least {size}, see decode_workspace_bytes"
    with pytest.raises(ValueError, match=message):
        ops.msa_decode(**arguments, workspace=torch.empty(size - 1, dtype=torch.uint8))


def test_workspace_bytes_of_cuda_tensors(monkeypatch):
    """Shapes are all that it looks at, so that tensors without data do."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(decode, "num_sms", lambda index: 132)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, idx_q = torch.empty(1, 64, 128, device="cuda", dtype=BF16), torch.empty(1, 4, 128, device="cuda", dtype=BF16)
        splits = choose_splits(4, 16, 132, 1 << 20)
        assert splits > 1
        partials = splits * 64 * (2 * 128 + 4)
        assert ops.decode_workspace_bytes(q, 16, 4) == partials
        scores = 4 * 4 * 1001
        whole = ops.decode_workspace_bytes(q, 16, 4, idx_q=idx_q, max_seqlen_k=128 * 1000 + 1)
        assert whole == -(-scores // 256) * 256 + partials
        many = torch.empty(512, 64, 128, device="cuda", dtype=BF16)
        assert ops.decode_workspace_bytes(many, 16, 4) == 0, "many rows are not split"
        assert ops.decode_workspace_bytes(torch.empty(0, 64, 128, device="cuda", dtype=BF16), 16, 4) == 0


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_workspace_bytes_are_planned_without_a_gpu(place):
    """What calls on that device need, to the byte: `explain` refuses one less."""
    q, idx_q = torch.empty(2, 64, 128, device=place, dtype=BF16), torch.empty(2, 4, 128, device=place, dtype=BF16)
    keys, idx_k = (torch.empty(64, *shape, device=place, dtype=BF16) for shape in ((4, 128, 128), (128, 128)))
    where = {
        "page_table": torch.empty(2, 32, device=place, dtype=torch.int32),
        "seqused_k": torch.empty(2, device=place, dtype=torch.int32),
        "cu_seqlens_q": torch.empty(3, device=place, dtype=torch.int32),
        "max_seqlen_k": 4096,
    }
    planned = {}
    for device in ("sm90", "H200", "sm100"):
        size = ops.decode_workspace_bytes(q, 16, 4, idx_q=idx_q, max_seqlen_k=4096, device=device)
        planned[device] = size
        assert ops.decode_workspace_bytes(q, 16, 4, device=device) < size
    assert planned["sm90"] == planned["H200"] > 0, "as many multiprocessors"

    def told(size):
        workspace = torch.empty(size, device=place, dtype=torch.uint8)
        return explain(ops.msa_decode, q, keys, keys, idx_q, idx_k, 16, **where, workspace=workspace, device="sm90")

    assert told(planned["sm90"]).served
    with pytest.raises(ValueError, match=f"workspace: got {planned['sm90'] - 1} bytes; wanted at least"):
        told(planned["sm90"] - 1)


class Fresh(TorchDispatchMode):
    """Counts the results of torch's operators that lie in storage which no argument had."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {
            x.untyped_storage()._cdata for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in before:
                self.made.append(str(func))
        return result


def fresh(monkeypatch, op, arguments):
    """The torch operators of one call that allocate."""
    # A dispatch mode sends calls to the registered operator, whose inside it does not see.
    monkeypatch.setattr(registration, "untraced", lambda: True)
    with Fresh() as mode:
        OPERATORS[op](**arguments)
    monkeypatch.undo()
    return mode.made


def with_buffers(op, paged_keys):
    arguments = paged_bf16(op) if paged_keys else call(op, BF16)
    out = torch.empty(11, 4, 16, dtype=BF16)
    if op == "decode_score":
        return arguments | {"out": torch.empty(4, 11, 5)}
    if op == "decode_topk":
        return call(op) | {"out": torch.empty(2, 11, 3, dtype=torch.int32)}
    buffers = {"out": out, "lse": torch.empty(11, 4), "workspace": torch.empty(1 << 14, dtype=torch.uint8)}
    if op == "msa_decode":
        buffers["block_indices"] = torch.empty(2, 11, 3, dtype=torch.int32)
    return arguments | buffers


@pytest.mark.parametrize("paged_keys", [False, True], ids=["flat", "paged"])
@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("op", ["decode_score", "decode_topk", "sparse_decode", "msa_decode"])
def test_nothing_is_allocated_when_all_buffers_are_given(op, again, paged_keys, decode_kernels, monkeypatch):
    decode_kernels.compute = False
    arguments = with_buffers(op, paged_keys)
    if again:
        OPERATORS[op](**arguments)
    with monkeypatch.context() as patch:
        assert fresh(patch, op, arguments) == []
    assert decode_kernels.launched


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("decode_score", "out"),
        ("decode_score", "cu_seqlens_q"),
        ("sparse_decode", "lse"),
        ("msa_decode", "workspace"),
        ("msa_decode", "block_indices"),
    ],
)
def test_what_is_left_out_is_allocated(op, name, decode_kernels, monkeypatch):
    decode_kernels.compute = False
    arguments = with_buffers(op, False) | {name: None}
    if name == "cu_seqlens_q":
        arguments["cu_seqlens_k"] = None
    with monkeypatch.context() as patch:
        assert fresh(patch, op, arguments)


class TestRememberedSteps:
    """A step with all buffers skips validation when the same call was seen before."""

    @pytest.fixture
    def validated(self, monkeypatch):
        calls, validate = [], step.validated

        def counted(*arguments, **options):
            calls.append(arguments)
            return validate(*arguments, **options)

        monkeypatch.setattr(step, "validated", counted)
        return calls

    def test_the_second_call_gives_what_the_first_gave(self, decode_kernels, validated):
        first, second = with_buffers("msa_decode", True), with_buffers("msa_decode", True)
        second["q"] = second["q"] + 1
        second["seqused_k"] = second["seqused_k"] - torch.tensor([3, 0, 9], dtype=torch.int32)
        ops.msa_decode(**first)
        found = len(decode_kernels.found)
        ops.msa_decode(**second)
        assert len(validated) == 1 and len(decode_kernels.found) == found
        names = ("out", "lse", "block_indices")
        wanted = second | {name: torch.empty_like(second[name]) for name in names}
        ops.msa_decode(**wanted, backend="reference")
        for name in names:
            close(second[name], wanted[name], **PARTIAL)

    @pytest.mark.parametrize(
        "change",
        [
            {"topk": 2, "block_indices": torch.empty(2, 11, 2, dtype=torch.int32)},
            {"softmax_scale": 0.5},
            {"local_blocks": 2},
            {"init_blocks": 1},
            {"max_seqlen_k": 23},
            {"q_positions": POSITIONS},
            {"lse": torch.empty(11, 8)[:, :4]},
            {"q": torch.zeros(11 * 4 * 16 + 1, dtype=BF16)[1:].view(11, 4, 16)},
            {"workspace": torch.empty(1 << 13, dtype=torch.uint8)},
            {"check": True},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_another_call_is_validated(self, change, decode_kernels, validated):
        arguments = with_buffers("msa_decode", True)
        ops.msa_decode(**arguments)
        ops.msa_decode(**arguments | change)
        assert len(validated) == 2

    @pytest.mark.parametrize(
        ("name", "wrong"),
        [
            ("out", torch.empty(11, 4, 16)),
            ("lse", torch.empty(11, 5)),
            ("workspace", torch.empty(1 << 14, dtype=torch.uint8)[3:]),
            ("workspace", torch.empty(8, dtype=torch.uint8)),
            ("block_indices", torch.empty(2, 11, 3)),
            ("seqused_k", torch.zeros(3)),
            ("page_table", torch.zeros(2, 6, dtype=torch.int32)),
        ],
    )
    def test_a_wrong_argument_is_still_refused(self, name, wrong, decode_kernels):
        arguments = with_buffers("msa_decode", True)
        ops.msa_decode(**arguments)
        with pytest.raises((ValueError, TypeError), match=f"^{name}: "):
            ops.msa_decode(**arguments | {name: wrong})

    def test_calls_without_a_buffer_are_not_remembered(self, decode_kernels, validated):
        arguments = with_buffers("msa_decode", True) | {"lse": None}
        ops.msa_decode(**arguments)
        ops.msa_decode(**arguments)
        assert len(validated) == 2

    def test_versions_rise(self, decode_kernels):
        decode_kernels.compute = False  # what a stand-in writes would raise them too
        arguments = with_buffers("msa_decode", True)
        ops.msa_decode(**arguments)
        names = ("out", "lse", "block_indices", "workspace")
        before = [arguments[name]._version for name in names]
        ops.msa_decode(**arguments)
        assert all(arguments[name]._version > version for name, version in zip(names, before, strict=True))


def test_empty_calls_launch_nothing(decode_kernels):
    """They still ask for a kernel, so that a call that none serves fails for empty batches too."""
    data = tensors(BF16)
    q, k, v, idx_q, idx_k = (data[name] for name in ("q", "k", "v", "idx_q", "idx_k"))
    none = {"cu_seqlens_q": torch.zeros(1, dtype=torch.int32), "cu_seqlens_k": torch.zeros(1, dtype=torch.int32)}
    ids = torch.zeros(2, 11, 3, dtype=torch.int32)
    for keys, where in ((0, {}), (40, none)):
        assert (ops.decode_score(idx_q, idx_k[:keys], **where, out=torch.zeros(4, 11, 2)) == -torch.inf).all()
        out, lse = ops.sparse_decode(q, k[:keys], v[:keys], ids, return_lse=True, **where)
        assert not out.any() and (lse == -torch.inf).all()
        chosen = torch.zeros_like(ids)
        out, lse = ops.msa_decode(
            q, k[:keys], v[:keys], idx_q, idx_k[:keys], 3, return_lse=True, block_indices=chosen, **where
        )
        assert not out.any() and (lse == -torch.inf).all() and (chosen == -1).all()
    assert ops.decode_score(idx_q[:0], idx_k).shape == (4, 0, 1)
    assert (ops.decode_topk(torch.zeros(4, 11, 0), 3) == -1).all()
    assert ops.sparse_decode(q[:0], k, v, ids[:, :0]).shape == (0, 4, 16)
    assert ops.msa_decode(q[:0], k, v, idx_q[:0], idx_k, 3).shape == (0, 4, 16)
    assert not decode_kernels.launched
    assert {facts.op for facts in decode_kernels.found} >= {"decode_score", "decode_topk", "sparse_decode"}


def test_decode_kernels_find_pages_without_virtual_rows():
    """The place of a paged call has nothing made for it; `places.place` would make starts of keys."""
    arguments = paged_bf16("msa_decode")
    where = Where(
        arguments["cu_seqlens_q"], None, arguments["page_table"], arguments["seqused_k"], None, None, None, None
    )
    at = decode.place(where, 11, 12, torch.device("cpu"))
    assert at.page_table is arguments["page_table"] and at.seqused_k is arguments["seqused_k"]
    assert at.cu_seqlens_q is at.cu_seqlens_k is arguments["cu_seqlens_q"] and at.use_seqused == 1
    assert places.place(where, 11, 12, BLOCK, torch.device("cpu")).cu_seqlens_k.tolist() == [0, 48, 96, 144]


def test_the_multiprocessors_of_the_stand_ins_split_one_query():
    assert choose_splits(2, 4, SMS, 1000) == 2
