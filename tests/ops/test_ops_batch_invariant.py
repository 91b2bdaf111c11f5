"""batch_invariant: on the reference bit for bit, on kernels what is launched for it whatever the size of the batch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from ops.calls import BLOCK, OPERATORS, PARTIAL, call, paged, tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import msa_tiles
from msa_tiles import ops
from msa_tiles.launch import attention, decode, lookup, operands

SEED = int(os.environ["MSA_TILES_SEED"])
BF16 = torch.bfloat16
ATTENDING = ["sparse_attention", "sparse_decode", "msa_decode", "msa_attention"]
LENGTHS = [(3, 60), (1, 17), (5, 5), (0, 9), (2, 33)]  # queries and keys of requests


class Batch:
    """Random requests; a call of any of them, the ids of the operators without an indexer chosen beforehand."""

    def __init__(self, op: str, dtype: torch.dtype) -> None:
        self.op, self.generator = op, torch.Generator().manual_seed(SEED)
        self.q, self.idx_q = ([self.random(queries, 4, 16, dtype=dtype) for queries, _ in LENGTHS] for _ in range(2))
        self.k, self.v = ([self.random(keys, 2, 16, dtype=dtype) for _, keys in LENGTHS] for _ in range(2))
        self.idx_k = [self.random(keys, 16, dtype=dtype) for _, keys in LENGTHS]
        self.ids = [
            ops.select_blocks(idx_q, idx_k, 3, num_kv_heads=2, block_size=BLOCK)
            for idx_q, idx_k in zip(self.idx_q, self.idx_k, strict=True)
        ]

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def call(self, requests: list[int], rows: slice | None = None) -> Tensor:
        """out of some requests in this order, or of some queries of one request."""
        part = rows or slice(None)
        given = {name: torch.cat([getattr(self, name)[r][part] for r in requests]) for name in ("q", "idx_q")}
        given |= {name: torch.cat([getattr(self, name)[r] for r in requests]) for name in ("k", "v", "idx_k")}
        starts_k = torch.tensor([0, *(LENGTHS[r][1] for r in requests)]).cumsum(0).to(torch.int32)
        starts_q = torch.tensor([0, *(len(self.q[r][part]) for r in requests)]).cumsum(0).to(torch.int32)
        where: dict[str, Any] = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "block_size": BLOCK}
        if rows is not None:
            queries, keys = LENGTHS[requests[0]]
            where["q_positions"] = torch.arange(keys - queries, keys, dtype=torch.int32)[part]
        if self.op in ("sparse_attention", "sparse_decode"):
            ids = torch.cat([self.ids[r][:, part] for r in requests], 1)
            return getattr(ops, self.op)(
                given["q"], given["k"], given["v"], ids, batch_invariant=True, **where
            )  # fmt: skip
        return getattr(ops, self.op)(**given, topk=3, batch_invariant=True, **where)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("op", ATTENDING)
def test_a_row_does_not_depend_on_the_batch(op: str, dtype: torch.dtype) -> None:
    batch = Batch(op, dtype)
    whole = batch.call([0, 1, 2, 3, 4])
    other = batch.call([4, 2, 0])
    assert torch.equal(other, torch.cat([whole[9:11], whole[4:9], whole[:3]]))
    for request, first in ((0, 0), (1, 3), (4, 9)):
        for row in range(LENGTHS[request][0]):
            assert torch.equal(batch.call([request], slice(row, row + 1))[0], whole[first + row])


@pytest.mark.parametrize("op", ["sparse_attention", "sparse_decode", "msa_decode"])
def test_the_answer_is_the_same(op: str) -> None:
    for arguments in (call(op), paged(op)):
        found = OPERATORS[op](**arguments, return_lse=True, batch_invariant=True)
        wanted = OPERATORS[op](**arguments, return_lse=True)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_rows_of_no_request_and_shards() -> None:
    arguments = call("sparse_attention")
    starts = arguments["cu_seqlens_q"].clone()
    starts[-1] = 9
    arguments |= {"cu_seqlens_q": starts, "k_offset": torch.tensor([0, 8, 16], dtype=torch.int32)}
    found = ops.sparse_attention(**arguments, return_lse=True, batch_invariant=True)
    torch.testing.assert_close(found, ops.sparse_attention(**arguments, return_lse=True), rtol=1e-5, atol=1e-5)
    assert (found[0][9:] == 0).all() and (found[1][9:] == -torch.inf).all()


@pytest.mark.parametrize("op", ATTENDING)
def test_a_flag_is_true_or_false(op: str) -> None:
    batch = Batch(op, torch.float32)
    given = {name: getattr(batch, name)[0] for name in ("q", "k", "v", "idx_q", "idx_k")}
    given = given | {"topk": 3} if "msa" in op else {**{n: given[n] for n in "qkv"}, "block_indices": batch.ids[0]}
    with pytest.raises(TypeError, match="batch_invariant: got int; wanted True or False"):
        getattr(ops, op)(**given, block_size=BLOCK, batch_invariant=1)


def facts_of(op: str, total_q: int, batch_invariant: bool) -> Any:
    seen: list[Any] = []
    real = operands.facts

    def note(name: str, made: Any, **dims: int) -> Any:
        seen.append(real(name, made, **dims))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands, "facts", note)
        q, k = torch.empty(total_q, 16, 64, dtype=BF16), torch.empty(200, 1, 64, dtype=BF16)
        ids = torch.zeros(1, total_q, 3, dtype=torch.int32)
        told = msa_tiles.explain(
            getattr(ops, op), q, k, k, ids, batch_invariant=batch_invariant, device="sm90"
        )  # fmt: skip
    return seen[0], told


@pytest.mark.parametrize("op", ["sparse_attention", "sparse_decode"])
def test_kernels_are_chosen_and_launched_alike_at_every_size(op: str) -> None:
    sizes = (1, 37, 5000)
    found = [facts_of(op, total_q, True) for total_q in sizes]
    assert len({facts.size for facts, _ in found}) == 1
    assert len({facts_of(op, total_q, False)[0].size for total_q in sizes}) == len(sizes)
    for _, told in found:
        assert {kernel.op for kernel in told.kernels} <= {op, "build_schedule", "combine"}
        assert "batch_invariant" in str(told)
    cells = [{kernel.cell for kernel in told.kernels if kernel.op == op} for _, told in found]
    assert cells[0] == cells[1] == cells[2]
    assert "batch_invariant" not in str(facts_of(op, 37, False)[1])


def test_splits_follow_from_topk_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "num_sms", lambda index: 132)
    for topk, wanted in ((1, 1), (4, 1), (5, 2), (16, 4), (64, 16)):
        for total_q in (1, 37, 2000):
            q = torch.empty(total_q, 16, 64, dtype=BF16, device="meta")
            assert decode.splits_for(q, 1, topk, 1 << 40, True) == wanted
    q = torch.empty(8, 16, 64, dtype=BF16, device="meta")
    one = decode.split_bytes(*q.shape)
    assert decode.splits_for(q, 1, 16, 4 * one, True) == 4
    message = f"workspace: got {4 * one - 1} bytes; wanted at least {4 * one} with batch_invariant, for 4 splits of 8"
    with pytest.raises(ValueError, match=message):
        decode.splits_for(q, 1, 16, 4 * one - 1, True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        cuda = torch.empty(512, 64, 128, device="cuda", dtype=BF16)
        assert ops.decode_workspace_bytes(cuda, 16, 4, batch_invariant=True) == 4 * decode.split_bytes(512, 64, 128)


@pytest.mark.parametrize("op", ["sparse_decode", "msa_decode"])
def test_decode_kernels_get_as_many_splits(op: str, decode_kernels: Any) -> None:
    data = tensors(BF16)
    given = {name: data[name] for name in ("k", "v")} | {"block_size": BLOCK}
    for total_q in (1, 9):
        arguments = given | {"q": data["q"][:total_q]}
        if op == "msa_decode":
            arguments |= {"idx_q": data["idx_q"][:total_q], "idx_k": data["idx_k"], "topk": 5}
        else:
            ids = torch.tensor([0, 3, 1, 4, -1], dtype=torch.int32)
            arguments |= {"block_indices": ids.expand(2, total_q, 5).clone()}
        decode_kernels.launched.clear()
        found = OPERATORS[op](**arguments, batch_invariant=True)
        names = [name for name, _ in decode_kernels.launched]
        assert names[-2:] == ["sparse_decode", "combine"]
        assert len(decode_kernels.launched[-2][1]["partial_out"]) == 2
        accepted = {"rtol": 0, "atol": 2.0**-7 * PARTIAL["size"]}
        wanted = OPERATORS[op](**arguments, backend="reference")
        torch.testing.assert_close(found.float(), wanted.float(), **accepted)


def test_hybrid_kernels_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(lookup, "part_serves", lambda *arguments: asked.append(arguments[2]) or False)
    for flag in (False, True):
        facts_of("sparse_attention", 37, flag)
    assert attention.HYBRID is None and asked == ["shared_attention"]
