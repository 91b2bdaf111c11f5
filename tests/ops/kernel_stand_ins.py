"""Stand-ins for the kernels of prefill: they compute on the CPU from exactly what a launch hands to a kernel."""

from __future__ import annotations

import types

import pytest

from msa_tiles import reference
from msa_tiles.call import backends
from msa_tiles.launch import attention, lookup, operands, places, schedules


def where_of(at: places.Place, block_size: int, pages_per_block: int = 0):
    """The reference's arguments for what a kernel is told, read as a kernel reads it."""
    where = {"cu_seqlens_q": at.cu_seqlens_q, "cu_seqlens_k": at.cu_seqlens_k}
    if at.use_seqused:
        where["seqused_k"] = at.seqused_k
    if at.use_positions:
        where["q_positions"] = at.q_positions
    if pages_per_block:
        span = at.page_table.shape[1] * block_size
        assert at.cu_seqlens_k.tolist() == [span * request for request in range(len(at.page_table) + 1)]
        where |= {"cu_seqlens_k": None, "page_table": at.page_table}
    return where


def index_score(
    variant, idx_q, idx_k, table, starts_q, starts_k, used, positions, out, use_seqused, use_positions, causal
):
    at = places.Place(starts_q, starts_k, used, use_seqused, table, positions, use_positions)
    parameters = {"block_size": variant["block_size"], "causal": bool(causal), "num_blocks": out.shape[2]}
    where = where_of(at, variant["block_size"], variant["pages_per_block"])
    out.copy_(reference.index_score(idx_q, idx_k, **parameters, **where))


def topk_select(
    variant, score, starts_q, starts_k, used, positions, num_valid, out, use_seqused, use_positions, mode, scalar,
    block_size, init, local, order, lanes_log2,
):  # fmt: skip
    assert 0 <= lanes_log2 <= 5
    valid = {0: None, 1: scalar, 2: num_valid}[mode]
    at = places.Place(starts_q, starts_k, used, use_seqused, starts_q[None], positions, use_positions)
    names = {"block_size": block_size, "init_blocks": init, "local_blocks": local, "num_valid_blocks": valid}
    heads = out.shape[0]
    order = ("ascending", "score", "local_last")[order]
    where = where_of(at, block_size)
    out.copy_(reference.topk_select(score, out.shape[2], num_kv_heads=heads, order=order, **names, **where))


def select_blocks(
    variant,
    idx_q,
    idx_k,
    table,
    starts_q,
    starts_k,
    used,
    positions,
    out,
    use_seqused,
    use_positions,
    init,
    local,
    order,
):
    at = places.Place(starts_q, starts_k, used, use_seqused, table, positions, use_positions)
    names = {"block_size": variant["block_size"], "init_blocks": init, "local_blocks": local}
    heads = idx_q.shape[1] // variant["heads_per_group"]
    order = ("ascending", "score", "local_last")[order]
    where = where_of(at, variant["block_size"], variant["pages_per_block"])
    out.copy_(reference.select_blocks(idx_q, idx_k, out.shape[2], num_kv_heads=heads, order=order, **names, **where))


def combine(variant, partial_out, partial_lse, out, lse):
    result = reference.combine(partial_out, partial_lse)
    out.copy_(result[0])
    lse.copy_(result[1])


class Attention:
    """Stands in for how the kernels of attention are found and launched."""

    seen = None

    def build(self, block_size, ids, at, made):
        parts = reference.build_schedule(ids, block_size=block_size, **where_of(at, block_size))
        for destination, part in zip(made[:3], parts, strict=True):
            destination.copy_(part)

    def find(self, facts, call, out):
        block_size, longest_k = call.block_size, operands.longest_k(call.operands)
        num_requests, scale, workspace_bytes = (
            call.operands.where.num_requests,
            call.softmax_scale,
            call.workspace_bytes,
        )

        def launch(given, workspace, out, lse):
            at = places.place(given.where, given.q.shape[0], given.k.shape[0], block_size, given.q.device)
            assert len(at.cu_seqlens_q) == num_requests + 1
            assert (at.seqused_k if at.use_seqused else at.cu_seqlens_k.diff()).max() <= longest_k
            where = where_of(at, block_size, facts.variant["pages_per_block"])
            made = given.schedule
            parameters = {
                "block_size": block_size,
                "softmax_scale": scale,
                "schedule": None if made is None else made[:3],
            }
            result = reference.sparse_attention(given.q, given.k, given.v, given.block_indices, **parameters, **where)
            out.copy_(result[0])
            lse.copy_(result[1])
            self.seen = (facts, made, workspace, workspace_bytes)

        return launch


STAND_INS = {
    "index_score": index_score, "topk_select": topk_select, "select_blocks": select_blocks, "combine": combine
}  # fmt: skip


@pytest.fixture
def kernels(monkeypatch):
    """Route CPU tensors to the stand-ins; what they were found by."""
    found = []
    made = Attention()

    def find_kernel(facts, backend):
        found.append((facts, backend))
        stand_in = STAND_INS.get(facts.op)
        return lambda *args: stand_in(facts.variant, *args)

    monkeypatch.setattr(backends, "runs_reference", lambda backend, device: backend == "reference")
    monkeypatch.setattr(lookup, "find_kernel", find_kernel)
    monkeypatch.setattr(attention, "find", lambda *call: made.find(*call))
    monkeypatch.setattr(schedules, "find", lambda facts, backend, block_size: block_size)
    monkeypatch.setattr(schedules, "build", lambda *parts: made.build(*parts))
    return types.SimpleNamespace(found=found, attention=made)
