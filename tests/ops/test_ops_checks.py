"""``check=True`` reads device contents to the host; without it the same contents are not looked at."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch
from ops import training_calls
from ops.calls import ATTENTION, OPERATORS, RANKERS, SCORERS, WITH_KEYS, WITH_LENGTHS, WITH_OFFSETS, call, paged

from msa_tiles import ops
from msa_tiles.call import validate


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def refused(op, change, message, base=call):
    arguments = base(op)
    arguments |= change(arguments) if callable(change) else change
    with pytest.raises(ValueError, match=re.escape(message)):
        OPERATORS[op](**arguments, check=True)


@pytest.mark.parametrize("op", WITH_LENGTHS)
def test_valid_calls_pass(op):
    checked, unchecked = OPERATORS[op](**call(op), check=True), OPERATORS[op](**call(op))
    if op == "build_schedule":
        checked, unchecked = checked.edges, unchecked.edges
    torch.testing.assert_close(checked, unchecked, rtol=0, atol=0)
    if op in WITH_KEYS:
        torch.testing.assert_close(OPERATORS[op](**paged(op), check=True), OPERATORS[op](**paged(op)), rtol=0, atol=0)


@pytest.mark.parametrize("op", [name for name in WITH_LENGTHS if name != "build_schedule"])
def test_rows_behind_the_last_request_are_padding(op):
    """As of a captured graph: of no request, and nothing is said of them; queries get what sees nothing gets."""
    arguments = call(op) | {"cu_seqlens_q": int32(0, 5, 5, 8)}
    queries = [name for name in ("q", "idx_q") if name in arguments]
    short = arguments | {name: arguments[name][:8] for name in queries}
    for name in ("score", "block_indices"):
        if name in arguments:
            short[name] = arguments[name][:, :8]
    for name in queries:
        arguments[name] = arguments[name].clone()
        arguments[name][8:] = torch.nan
    lse = {"return_lse": True} if op in (*ATTENTION, "msa_decode") else {}
    found, wanted = (OPERATORS[op](**given, **lse, check=True) for given in (arguments, short))
    if lse:
        (out, found_lse), (wanted_out, wanted_lse) = found, wanted
        torch.testing.assert_close(out[:8], wanted_out, rtol=0, atol=0)
        torch.testing.assert_close(found_lse[:8], wanted_lse, rtol=0, atol=0)
        assert not out[8:].any() and (found_lse[8:] == -torch.inf).all()
    else:
        torch.testing.assert_close(found[:, :8], wanted, rtol=0, atol=0)
        assert (found[:, 8:] == (-torch.inf if op in SCORERS else -1)).all()


@pytest.mark.parametrize("op", WITH_LENGTHS)
def test_lengths(op):
    refused(op, {"cu_seqlens_q": int32(0, 7, 5, 11)}, "cu_seqlens_q: got 5 after 7; wanted sorted values")
    refused(op, {"cu_seqlens_q": int32(1, 5, 5, 11)}, "cu_seqlens_q: got 1 first; wanted 0 first")
    refused(op, {"cu_seqlens_q": int32(0, 5, 5, 12)}, "cu_seqlens_q: got 12 last; wanted at most the 11 queries given")
    refused(op, {"cu_seqlens_k": int32(0, 17, 16, 40)}, "cu_seqlens_k: got 16 after 17; wanted sorted values")
    refused(op, {"max_seqlen_q": 5}, "max_seqlen_q: got 5; wanted at least the longest request, 6")
    refused(op, {"max_seqlen_k": 22}, "max_seqlen_k: got 22; wanted at least the longest request, 23")
    used = {"seqused_k": int32(17, 0, 24)}
    refused(op, used, "seqused_k: got 24 used keys in request 2; wanted 0 to the 23 keys of storage")
    refused(op, {"seqused_k": int32(-1, 0, 0)}, "seqused_k: got -1 used keys in request 0; wanted 0 to the 17 keys")


@pytest.mark.parametrize("op", WITH_OFFSETS)
def test_offsets(op):
    offsets = {"k_offset": int32(0, 0, 8), "max_seqlen_k": 30}
    refused(op, offsets, "max_seqlen_k: got 30; wanted at least the longest request, 31")
    refused(op, {"k_offset": int32(0, -8, 0), "max_seqlen_k": 40}, "k_offset: got -8; wanted at least 0")


@pytest.mark.parametrize("op", WITH_KEYS)
def test_storage(op):
    refused(op, {"cu_seqlens_k": int32(0, 17, 17, 41)}, "cu_seqlens_k: got 41 last; wanted at most the 40 keys given")
    used = {"seqused_k": int32(17, 0, 25)}
    message = "seqused_k: got 25 used keys in request 2; wanted 0 to the 24 keys of 6 pages of page_table"
    refused(op, used, message, base=paged)
    for page in (-1, 12):

        def replaced(arguments, page=page):
            table = arguments["page_table"].clone()
            table[2, 1] = page
            return {"page_table": table}

        refused(op, replaced, f"page_table: got page {page} at [2, 1]; wanted 0 to 11 for a page in use", base=paged)


@pytest.mark.parametrize("op", ["build_schedule", *ATTENTION])
def test_block_ids(op):
    def one_id(value):
        def change(arguments):
            ids = arguments["block_indices"].clone()
            ids[1, 7] = int32(0, value, 1)
            return {"block_indices": ids}

        return change

    message = "block_indices: got id 3 at [1, 7, 1]; wanted -1 or a block of the request, 0 to 2"
    refused(op, one_id(3), message)
    refused(op, one_id(-2), message.replace("id 3", "id -2"))
    refused(op, one_id(1), "block_indices: got id 1 twice at [1, 7]; wanted distinct ids in a row")
    empty = {"seqused_k": int32(17, 0, 0)}
    refused(op, empty, "block_indices: got id 0 at [0, 5, 0]; wanted -1 or a block of the request, which has no keys")
    arguments = call(op)
    arguments |= one_id(-1)(arguments)
    OPERATORS[op](**arguments, check=True)


@pytest.mark.parametrize("op", ATTENTION)
def test_wild_ids_are_absent_when_nobody_checks(op):
    arguments = call(op)
    wild = torch.where(arguments["block_indices"] == 0, 2**31 - 1, arguments["block_indices"])
    tame = torch.where(arguments["block_indices"] == 0, -1, arguments["block_indices"])
    found = OPERATORS[op](**(arguments | {"block_indices": wild}))
    torch.testing.assert_close(found, OPERATORS[op](**(arguments | {"block_indices": tame})), rtol=0, atol=0)


def test_score_columns_and_valid_blocks():
    counts = torch.full((11,), 6, dtype=torch.int32)
    message = "num_valid_blocks: got values from 6 to 6; wanted 0 to the 5 columns of score"
    for op in RANKERS:
        refused(op, {"num_valid_blocks": counts}, message)
        narrow = "score: got 2 columns; wanted at least the 3 blocks of a request"
        refused(op, lambda a: {"score": a["score"][..., :2]}, narrow)
    narrow = "out: got 2 columns; wanted at least the 3 blocks of a request"
    for op in SCORERS:
        refused(op, {"out": torch.zeros(4, 11, 2)}, narrow)


@pytest.mark.parametrize("seed", range(20))
def test_buffers_that_hold_every_element_once(seed):
    """Views of dense tensors do; of what is taken to do so, no two elements share a place."""
    generator = random.Random(seed)
    for _ in range(100):
        sizes, strides = ([generator.randint(low, high) for _ in range(3)] for low, high in ((1, 4), (0, 20)))
        places = [
            sum(i * stride for i, stride in zip(index, strides, strict=True))
            for index in itertools.product(*map(range, sizes))
        ]
        if validate._holds_once(torch.empty(200).as_strided(sizes, strides)):
            assert len(set(places)) == len(places)
        dense = torch.empty([size + generator.randint(0, 2) for size in sizes]).permute(generator.sample(range(3), 3))
        view = dense[tuple(slice(generator.randrange(size), None, generator.randint(1, 2)) for size in dense.shape)]
        assert validate._holds_once(view)


SCHEDULED = {
    "flat": lambda: call("sparse_attention"),
    "paged": lambda: paged("sparse_attention"),
    "shard": lambda: call("sparse_attention") | {"k_offset": int32(3, 0, 8), "max_seqlen_k": 40},
    "positions": lambda: call("sparse_attention") | {"q_positions": torch.arange(11, dtype=torch.int32) * 2},
    "padded": lambda: call("sparse_attention") | {"cu_seqlens_q": int32(0, 5, 5, 8)},
}


def schedule_for(arguments, **other):
    return ops.build_schedule(**{name: part for name, part in arguments.items() if name not in "qkv"} | other)


@pytest.mark.parametrize("name", SCHEDULED)
def test_a_schedule_of_these_ids_passes(name):
    arguments = SCHEDULED[name]()
    made = schedule_for(arguments)
    found = ops.sparse_attention(**arguments, schedule=made, check=True)
    torch.testing.assert_close(found, ops.sparse_attention(**arguments), rtol=0, atol=0)
    # In other slots the ids are the same, and so is the answer.
    turned = schedule_for(arguments, block_indices=arguments["block_indices"].flip(2))
    torch.testing.assert_close(ops.sparse_attention(**arguments, schedule=turned, check=True), found, rtol=0, atol=0)


@pytest.mark.parametrize("name", SCHEDULED)
def test_a_schedule_of_other_ids(name):
    arguments = SCHEDULED[name]()
    ids = arguments["block_indices"].clone()
    head, token, slot = (ids == 0).nonzero()[4].tolist()  # every query sees the first block
    ids[head, token, slot] = -1
    message = f"schedule: got one of other block_indices or lengths at [{head}, {token}]; wanted one made for these"
    for ours, others in ((arguments["block_indices"], ids), (ids, arguments["block_indices"])):
        made = schedule_for(arguments, block_indices=others)
        given = arguments | {"block_indices": ours, "schedule": made}
        refused("sparse_attention", {}, message, base=lambda op, given=given: given)


def test_a_schedule_of_other_lengths_and_positions():
    arguments = call("sparse_attention")
    message = "schedule: got one of other block_indices or lengths at "
    for other in (
        {"cu_seqlens_k": int32(0, 23, 23, 40)},
        {"seqused_k": int32(8, 0, 23)},
        {"cu_seqlens_q": int32(0, 4, 4, 11)},
        {"q_positions": torch.zeros(11, dtype=torch.int32)},
    ):
        refused("sparse_attention", {"schedule": schedule_for(arguments, **other)}, message)


@pytest.mark.parametrize("op", ["sparse_attention_backward", "index_kl"])
def test_training_looks_at_its_schedule(op):
    arguments = training_calls.call(op)
    names = ("block_indices", "cu_seqlens_q", "cu_seqlens_k", "block_size")
    own = {name: arguments[name] for name in names}
    run = training_calls.OPERATORS[op]
    run(**arguments, schedule=ops.build_schedule(**own), check=True)
    ids = own["block_indices"].clone()
    head, token, slot = (ids >= 0).nonzero()[-1].tolist()
    ids[head, token, slot] = -1
    message = rf"schedule: got one of other block_indices or lengths at \[{head}, {token}\]"
    with pytest.raises(ValueError, match=message):
        run(**arguments, schedule=ops.build_schedule(**own | {"block_indices": ids}), check=True)
