"""Checks of the kernels that only index_kl calls."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import backends
from msa_tiles.call.where import Where
from msa_tiles.launch import kl, lookup, places, schedules
from msa_tiles.runtime import CallFacts
from msa_tiles.verify import compare
from msa_tiles.verify.cases import Case
from msa_tiles.verify.inputs import Lengths, Source, spread

TOKEN_MAJOR = (1, 0, 2)


class Parts(NamedTuple):
    """What index_gradients reads; whatever does not count holds NaN."""

    partial_dq: Tensor
    present: Tensor
    partial_dk: Tensor
    tasks: Tensor
    counts: Tensor
    dk: Tensor


def random_parts(source: Source, dims: Mapping[str, int], lengths: Lengths, schedule_heads: int) -> Parts:
    """The blocks of every request have no task, one, or several in a row, as far as the list is long."""
    block_size, heads, number = dims["block_size"], dims["num_kv_heads"], dims["num_tasks"]
    starts = lengths.cu_seqlens_k.tolist()
    partial_dk = torch.full((heads, number, block_size, dims["index_dim"]), torch.nan, device=source.device)
    tasks = torch.full((1, schedule_heads, number, 4), -1, dtype=torch.int32)
    counts = torch.zeros((1, schedule_heads), dtype=torch.int32)
    for head in range(schedule_heads):
        at = 0
        for request in range(len(starts) - 1):
            length = starts[request + 1] - starts[request]
            pieces = source.whole(0, 4, (-(-length // block_size),)).tolist()
            for block, piece in enumerate(pieces):
                valid = min(block_size, length - block * block_size)
                for _ in range(min(piece, number - at)):
                    tasks[0, head, at] = torch.tensor([starts[request] + block * block_size, 0, 1, valid << 1])
                    sharing = slice(head, heads if head == schedule_heads - 1 else head + 1)
                    shape = (len(range(heads)[sharing]), valid, dims["index_dim"])
                    partial_dk[sharing, at, :valid] = source.values(shape, torch.float32)
                    at += 1
        counts[0, head] = at
    shape = (dims["total_q"], dims["topk"], heads)
    counted = source.chance(0.8, shape)
    partial_dq = source.values((*shape, dims["index_dim"]), torch.float32).masked_fill(~counted[..., None], torch.nan)
    dk = source.values((dims["total_k"], dims["index_dim"]), torch.float32)
    return Parts(partial_dq, counted.int(), partial_dk, tasks.to(source.device), counts.to(source.device), dk)


class IndexGradients:
    """Both sums against the reference; strided calls have one schedule for all heads."""

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        self.case, self.backend, self.lengths = case, backend, source.lengths(case.workload.sequences, shortened=False)
        heads = 1 if strided else case.dims["num_kv_heads"]
        self.given = random_parts(source, case.dims, self.lengths, heads)

    def run(self, into_buffers: bool) -> tuple[Tensor, ...]:
        if backends.runs_reference(self.backend, self.given.present.device):
            return reference.index_gradients(*self.given)
        partial_dq, dk = self.given.partial_dq, self.given.dk.clone()
        dq = torch.full((len(partial_dq), *partial_dq.shape[2:]), torch.nan, device=dk.device)
        self._add(dq, dk)
        return dq, dk

    @functools.cached_property
    def _dq(self) -> Tensor:
        partial_dq = self.given.partial_dq
        return torch.empty((len(partial_dq), *partial_dq.shape[2:]), device=partial_dq.device)

    def call(self) -> None:
        """The kernel alone, as it is timed: it adds to the same sums again."""
        self._add(self._dq, self.given.dk)

    def _add(self, dq: Tensor, dk: Tensor) -> None:
        facts = _facts("index_gradients", self.case, self.given.present.device)
        kernel = kl.kernel(facts, self.backend, "index_gradients", dict(self.case.point))
        kl.add_gradients(kernel, *self.given[:5], self.lengths.cu_seqlens_k, dq, dk, window_index=0, first=True)

    def compare(self, outputs: tuple[Tensor, ...]) -> compare.Errors:
        wanted = reference.index_gradients(*self.given)
        errors: compare.Errors = {}
        for name, got, want in zip(("dq", "dk"), outputs, wanted, strict=True):
            errors |= compare.numbers(name, got, want, self.case.tolerance[name])
        return errors


class IndexLse:
    """LSE of the edges of a schedule, in windows, against the reference."""

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        dims, self.case, self.backend = case.dims, case, backend
        lengths = source.lengths(case.workload.sequences, shortened=strided)
        self.idx_q = source.values((dims["total_q"], dims["num_kv_heads"], dims["index_dim"]), torch.bfloat16)
        self.idx_k = source.values((dims["total_k"], dims["index_dim"]), torch.bfloat16)
        self.ids = source.selection(
            lengths, dims["num_kv_heads"], dims["topk"], dims["block_size"], case.workload.selection == "sticky"
        )
        self.where: dict[str, Any] = lengths.keywords()
        if strided:
            self.idx_q, self.idx_k = spread(self.idx_q), spread(self.idx_k)
            self.ids = spread(self.ids, TOKEN_MAJOR)
            self.where["q_positions"] = source.positions(lengths)

    def run(self, into_buffers: bool) -> tuple[Tensor, ...]:
        where, device, block_size = Where(**self.where), self.ids.device, self.case.dims["block_size"]
        total_q, topk = self.ids.shape[1:]
        nothing = self.ids.numel() == 0 or self.idx_k.numel() == 0 or where.num_requests == 0
        if backends.runs_reference(self.backend, device) or nothing:
            return (self._wanted(),)
        facts = _facts("index_lse", self.case, device)
        at = places.place(where, total_q, self.idx_k.shape[0], block_size, device)
        window = max(total_q // 2, 1)
        made = schedules.allocate(
            self.ids, num_requests=where.num_requests, max_seqlen_k=None, block_size=block_size, window=window
        )
        schedules.build(schedules.find(facts, "auto", block_size), self.ids, at, made)
        kernel = kl.kernel(facts, self.backend, "index_lse", dict(self.case.point))
        scale = self.idx_q.shape[2] ** -0.5
        lse = kl.edge_lse(kernel, self.idx_q, self.idx_k, made, topk, scale, range(len(made.edges)))
        return (lse,)

    def compare(self, outputs: tuple[Tensor, ...]) -> compare.Errors:
        return compare.numbers("partial_lse", outputs[0], self._wanted(), self.case.tolerance["partial_lse"])

    def _wanted(self) -> Tensor:
        return reference.index_lse(
            self.idx_q.float(), self.idx_k.float(), self.ids, block_size=self.case.dims["block_size"], **self.where
        )


def _facts(op: str, case: Case, device: torch.device) -> CallFacts:
    where = Where()
    return lookup.call_facts(op, where, device, "bf16", dict(case.point), queries=case.dims["total_q"])


CHECKS: dict[str, Any] = {"index_gradients": IndexGradients, "index_lse": IndexLse}
