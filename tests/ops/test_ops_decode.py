"""A decode step on CPU tensors: the answer of select_blocks and sparse_attention, whatever a batch holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from ops.calls import ATTENTION, BLOCK, OPERATORS, RANKERS, SCORERS, call, paged

from msa_tiles import ops

# (queries, keys) of each request: some have no queries, no keys or fewer keys than queries; the last pad a batch.
BATCHES = {
    "one": [(1, 700)],
    "batch": [(1, 90), (1, 1), (1, 64), (1, 300), (1, 7)],
    "ragged": [(3, 150), (0, 70), (1, 1), (2, 0), (9, 200), (0, 0), (4, 2)],
    "padded": [(1, 33), (1, 300), (1, 0), (1, 0)],
    "no keys": [(1, 0), (2, 0)],
    "all empty": [(0, 5), (0, 0)],
}
HEADS = {"one each": (2, 2, 4), "two index heads": (4, 2, 4), "one KV head": (3, 1, 4)}  # Hi, Hkv, Hq
FORCED = [{}, {"init_blocks": 1, "local_blocks": 2}, {"init_blocks": 3, "local_blocks": 3}, {"local_blocks": 0}]
TOPK = 4


def step(batch, heads, pages_per_block, seed=0):
    """Arguments of a step over random keys; pages of one batch lie in random order."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    num_index_heads, num_kv_heads, num_q_heads = HEADS[heads]
    queries, keys = (torch.tensor(lengths, dtype=torch.int32) for lengths in zip(*BATCHES[batch], strict=True))
    total_q = int(queries.sum())
    arguments = {
        "q": random(total_q, num_q_heads, 16),
        "idx_q": random(total_q, num_index_heads, 16),
        "topk": TOPK,
        "block_size": BLOCK,
        "cu_seqlens_q": starts(queries),
    }
    if not pages_per_block:
        total_k = int(keys.sum())
        pool = {"k": random(total_k, num_kv_heads, 16), "v": random(total_k, num_kv_heads, 16)}
        return arguments | pool | {"idx_k": random(total_k, 16), "cu_seqlens_k": starts(keys)}
    page = BLOCK // pages_per_block
    width = max(1, -(-int(keys.max()) // page))
    pages = len(keys) * width
    table = torch.randperm(pages, generator=generator).to(torch.int32).view(len(keys), width)
    cache = random(pages, num_kv_heads, page, 32)
    return arguments | {
        "k": cache[..., :16],
        "v": cache[..., 16:],
        "idx_k": random(pages, page, 16),
        "page_table": table,
        "seqused_k": keys,
    }


def starts(lengths):
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def in_two(arguments, **forced):
    """select_blocks, then sparse_attention: out, lse and ids."""
    own = {name: arguments[name] for name in ("q", "k", "v", "idx_q", "idx_k", "topk")}
    where = {name: value for name, value in arguments.items() if name not in own}
    num_kv_heads = own["k"].shape[1]
    ids = ops.select_blocks(own["idx_q"], own["idx_k"], own["topk"], num_kv_heads=num_kv_heads, **forced, **where)
    out, lse = ops.sparse_attention(own["q"], own["k"], own["v"], ids, return_lse=True, **where)
    return out, lse, ids


def equal(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("pages_per_block", [0, 1, 4], ids=["flat", "paged", "small pages"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.drawn(8)
def test_a_step_is_selection_and_attention(batch, heads, pages_per_block):
    arguments = step(batch, heads, pages_per_block)
    for forced in FORCED:
        out, lse, ids = in_two(arguments, **forced)
        chosen = torch.full_like(ids, 99)
        equal(ops.msa_decode(**arguments, **forced, return_lse=True, block_indices=chosen), (out, lse))
        equal(chosen, ids)


@pytest.mark.parametrize("pages_per_block", [0, 1], ids=["flat", "paged"])
def test_a_step_is_its_parts(pages_per_block):
    arguments = step("ragged", "two index heads", pages_per_block)
    own = {name: arguments.pop(name) for name in ("q", "k", "v", "idx_q", "idx_k", "topk")}
    score = ops.decode_score(own["idx_q"], own["idx_k"], **arguments)
    ids = ops.decode_topk(score, own["topk"], num_kv_heads=2, **arguments)
    out, lse = ops.sparse_decode(own["q"], own["k"], own["v"], ids, return_lse=True, **arguments)
    equal(ops.msa_decode(**own, **arguments, return_lse=True), (out, lse))


@pytest.mark.parametrize("positions", [False, True], ids=["rule", "positions"])
@pytest.mark.parametrize("base", [call, paged])
def test_decode_operators_give_the_answers_of_the_others(base, positions):
    where = {"q_positions": torch.tensor([0, 8, 3, 5, -1, 19, 2, 30, 7, 11, 0], dtype=torch.int32)}
    for pair in (SCORERS, RANKERS, ATTENTION):
        first, second = (OPERATORS[op](**base(op) | (where if positions else {})) for op in pair)
        equal(second, first)


def test_positions_reach_a_step():
    arguments = call("msa_decode") | {"q_positions": torch.arange(11, dtype=torch.int32).flip(0).contiguous()}
    out, lse, _ = in_two(arguments)
    equal(ops.msa_decode(**arguments, return_lse=True), (out, lse))
    assert not torch.equal(out, ops.msa_decode(**call("msa_decode")))


def test_rows_that_pad_a_batch_give_nothing():
    arguments = step("padded", "one each", 1)
    ids = torch.full((2, 4, TOPK), 99, dtype=torch.int32)
    out, lse = ops.msa_decode(**arguments, return_lse=True, block_indices=ids)
    assert not out[2:].any() and (lse[2:] == -torch.inf).all() and (ids[:, 2:] == -1).all()
    assert out[:2].any(-1).all() and lse[:2].isfinite().all() and (ids[:, :2, 0] >= 0).all()


def test_a_bound_on_the_keys_changes_nothing():
    arguments = step("ragged", "one each", 0)
    equal(ops.msa_decode(**arguments, max_seqlen_q=9, max_seqlen_k=200), ops.msa_decode(**arguments))


def test_all_buffers_of_the_caller():
    arguments = call("msa_decode")
    out, lse, ids = in_two(arguments)
    buffers = {
        "out": torch.full((11, 6, 20), 77.0)[:, 1:5, 2:18],
        "lse": torch.full((11, 9), torch.nan)[:, 3:7],
        "block_indices": torch.full((11, 2, 3), 99, dtype=torch.int32).transpose(0, 1),
        "workspace": torch.empty(ops.decode_workspace_bytes(arguments["q"], 3, 2), dtype=torch.uint8),
    }
    found = ops.msa_decode(**arguments, return_lse=True, **buffers)
    assert found[0] is buffers["out"] and found[1] is buffers["lse"]
    equal((*found, buffers["block_indices"]), (out, lse, ids))
    assert ops.msa_decode(**arguments, out=buffers["out"]) is buffers["out"]


@pytest.mark.parametrize("name", ["out", "lse", "block_indices"])
def test_one_buffer_alone(name):
    arguments = call("msa_decode")
    wanted = dict(zip(("out", "lse", "block_indices"), in_two(arguments), strict=True))
    buffer = torch.empty_like(wanted[name])
    equal(ops.msa_decode(**arguments, return_lse=True, **{name: buffer}), (wanted["out"], wanted["lse"]))
    equal(buffer, wanted[name])


def test_the_example_of_the_readme_runs_and_gives_what_its_comments_say(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the GPU here may be one without kernels
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    first, second = (re.search(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)[1] for language in ("python", "py"))
    prelude = first[: first.index("tokens =")]
    names: dict = {}
    exec(compile(prelude + second, "README.md", "exec"), names)
    out, lse, ids = names["out"], names["buffers"]["lse"], names["buffers"]["block_indices"]
    assert out.shape == (3, 64, 128) and out.dtype == torch.bfloat16
    assert out[:2].any(-1).all() and not out[2].any()
    assert (lse[2] == -torch.inf).all() and (ids[:, 2] == -1).all() and (ids[:, 0] >= 0).all()
