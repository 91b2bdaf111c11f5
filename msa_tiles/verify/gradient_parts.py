"""Checks of the kernels that only the backward of sparse attention calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import backends
from msa_tiles.call.where import Where
from msa_tiles.launch import backward, lookup
from msa_tiles.runtime import CallFacts
from msa_tiles.verify import compare
from msa_tiles.verify.cases import Case
from msa_tiles.verify.inputs import Source, spread


class Rows(NamedTuple):
    """What gradient_rows reads; rows with LSE -inf hold NaN."""

    dout: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor


class Parts(NamedTuple):
    """What merge_gradients reads; whatever does not count holds NaN."""

    partial_dq: Tensor
    marks: Tensor
    tasks: Tensor
    counts: Tensor
    sums: Tensor


def random_rows(source: Source, dims: Mapping[str, int], strided: bool) -> Rows:
    shape = dims["total_q"], dims["num_q_heads"]
    out, dout = (source.values((*shape, dims["head_dim"]), torch.bfloat16) for _ in range(2))
    lse, dlse = (source.values(shape, torch.float32) for _ in range(2))
    empty = source.chance(0.2, shape)
    lse, dlse = lse.masked_fill(empty, -torch.inf), dlse.masked_fill(empty, torch.nan)
    dout = dout.masked_fill(empty[..., None], torch.nan)
    made = Rows(dout, out, lse, dlse)
    return Rows(*(spread(tensor) for tensor in made)) if strided else made


def random_parts(source: Source, dims: Mapping[str, int]) -> Parts:
    """The first blocks of every head have one task each, or several in a row; the last block may be short."""
    block_size, head_dim, total_k = dims["block_size"], dims["head_dim"], dims["total_k"]
    heads, number = dims["num_kv_heads"], dims["num_tasks"]
    tasks = torch.full((1, heads, number, 5), -1, dtype=torch.int32)
    counts = torch.zeros((1, heads), dtype=torch.int32)
    sums = torch.full((2, heads, dims["num_sums"], head_dim), torch.nan, device=source.device)
    sums[:, :, :total_k] = source.values((2, heads, total_k, head_dim), torch.float32)
    lengths = source.whole(1, 5, (heads, -(-total_k // block_size))).tolist()
    for head in range(heads):
        at, behind = 0, total_k
        for block, length in enumerate(lengths[head]):
            row = block * block_size
            valid = min(block_size, total_k - row)
            for piece in range(min(length, number - at)):
                if piece:
                    sums[:, head, behind : behind + valid] = source.values((2, valid, head_dim), torch.float32)
                tasks[0, head, at] = torch.tensor([row, 0, 1, valid << 1, behind if piece else row])
                behind += block_size if piece else 0
                at += 1
        counts[0, head] = at
    shape = (dims["total_q"], dims["topk"], dims["num_q_heads"], head_dim)
    counted = source.chance(0.8, (dims["total_q"], heads, dims["topk"])) & source.chance(0.9, (dims["total_q"], 1, 1))
    # What an earlier window left is no mark of this one.
    marks = torch.where(counted, 1, source.whole(-1, 1, counted.shape)).to(torch.int32)
    hidden = ~counted.repeat_interleave(dims["num_q_heads"] // heads, 1).transpose(1, 2)[..., None]
    partial_dq = source.values(shape, torch.bfloat16).masked_fill(hidden, torch.nan)
    return Parts(partial_dq, marks, tasks.to(source.device), counts.to(source.device), sums)


class GradientRows:
    """LSE in base two and delta against the reference."""

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        self.case, self.backend, self.given = case, backend, random_rows(source, case.dims, strided)
        self.with_dlse = strided

    def run(self, into_buffers: bool) -> tuple[Tensor, ...]:
        if backends.runs_reference(self.backend, self.given.out.device):
            return (self._wanted(),)
        facts = _facts("gradient_rows", self.case, self.given.out)
        dlse = self.given.dlse if self.with_dlse else None
        return (backward.gradient_rows(facts, self.backend, *self.given[:3], dlse),)

    def compare(self, outputs: tuple[Tensor, ...]) -> compare.Errors:
        return compare.numbers("rows", outputs[0], self._wanted(), self.case.tolerance["rows"])

    def _wanted(self) -> Tensor:
        return reference.gradient_rows(*self.given[:3], dlse=self.given.dlse if self.with_dlse else None)


class MergeGradients:
    """dQ and the sums of dK and dV against the reference."""

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        self.case, self.backend, self.given = case, backend, random_parts(source, case.dims)

    def run(self, into_buffers: bool) -> tuple[Tensor, ...]:
        if backends.runs_reference(self.backend, self.given.marks.device):
            return reference.merge_gradients(*self.given)
        return self._merged(self.given._replace(sums=self.given.sums.clone()))

    def call(self) -> tuple[Tensor, ...]:
        """The kernel alone, as it is timed: it adds to the same sums again."""
        return self._merged(self.given)

    def _merged(self, given: Parts) -> tuple[Tensor, ...]:
        facts = _facts("merge_gradients", self.case, given.partial_dq)
        return backward.merge_gradients(facts, self.backend, *given, self.case.dims["block_size"])

    def compare(self, outputs: tuple[Tensor, ...]) -> compare.Errors:
        wanted = reference.merge_gradients(*self.given)
        errors: compare.Errors = {}
        for name, got, want in zip(("dq", "sums"), outputs, wanted, strict=True):
            errors |= compare.numbers(name, got.float(), want.float(), self.case.tolerance[name])
        return errors


def _facts(op: str, case: Case, tensor: Tensor) -> CallFacts:
    return lookup.call_facts(op, Where(), tensor.device, "bf16", dict(case.point), queries=tensor.shape[0])


CHECKS: dict[str, Any] = {"gradient_rows": GradientRows, "merge_gradients": MergeGradients}
