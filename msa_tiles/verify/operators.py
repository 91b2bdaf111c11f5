"""How each operator is called, and what its answer is compared with.

A check makes its inputs once. `run` calls the operator, into its own outputs or into poisoned buffers of the caller;
`compare` raises Disagreement or returns the worst error of each output. Those of attention, decode and merging are
here; those of the selection, of caches and of training stand in files beside this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.call.schedule import Schedule
from msa_tiles.call.where import Where
from msa_tiles.ops.build_schedule import build_on
from msa_tiles.verify import (
    caches,
    compare,
    dequantize,
    gradient_parts,
    index_parts,
    norm_rope,
    packed,
    schedules,
    selection,
    training,
)
from msa_tiles.verify.attention import rounded_error
from msa_tiles.verify.cases import Case
from msa_tiles.verify.hybrid import SplitSelection, hybrid
from msa_tiles.verify.inputs import TOKEN_MAJOR, Buffer, Lengths, Source, placed, spread
from msa_tiles.verify.quantised import dequantised, key_scales, loud_head, spoil, unit_of

LOUD_VALUES = 64.0  # times the others


class Check(Protocol):
    """One operator on one set of inputs.

    A check may say ``repeatable = False``: then runs need not be bitwise equal, and each is compared. One whose `run`
    works on what the operator gives has a method `call`, the operator alone, to be timed.
    """

    def run(self, into_buffers: bool) -> tuple[Tensor, ...]:
        """Call the operator; with `into_buffers` the outputs are the caller's, poisoned before and checked around."""

    def compare(self, outputs: tuple[Tensor, ...]) -> compare.Errors:
        """The worst error of each output.

        Raises Disagreement.
        """


class SparseAttention:
    """Outputs against the reference in float32 on the same inputs; every block goes through the kernel of that name."""

    op: Any = staticmethod(ops.sparse_attention)
    hybrid = False
    fill = 0

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        dims, self.case, self.backend = case.dims, case, backend
        self.lengths = source.lengths(case.workload.sequences, shortened=strided)
        keys, dtype = (dims["total_k"], dims["num_kv_heads"], dims["head_dim"]), case.dtype("key_value")
        self.q = source.values((dims["total_q"], dims["num_q_heads"], dims["head_dim"]), case.dtype("query"))
        flat: tuple[Tensor, ...] = (source.values(keys, dtype), source.values(keys, dtype))
        self.unit = torch.ones(1, 1, device=source.device)
        if case.packed:
            # One head's scales are large: of e8m0 those above 1 have the highest bit.
            loud = LOUD_VALUES * loud_head(source, dims["num_kv_heads"]).clamp_min(1 / LOUD_VALUES)
            flat = (flat[0], flat[1] * loud[:, None].to(dtype))
            self.unit = loud.repeat_interleave(dims["group"])[:, None]
        if strided:
            for part in flat:
                spoil(source, self.lengths, part)
        self.ids = source.selection(
            self.lengths, dims["num_kv_heads"], dims["topk"], dims["block_size"], case.workload.selection == "sticky"
        )
        self.k: Any
        self.v: Any
        where, (self.k, self.v) = placed(
            source, self.lengths, dims["pages_per_block"], dims["block_size"], strided, *flat
        )
        if strided:
            self.q = spread(self.q)
            self.ids = spread(self.ids, TOKEN_MAJOR)
        # As the reference takes them.
        self.keys: tuple[Tensor, ...] = (self.k.float(), self.v.float())
        self.scales: dict[str, Tensor] = {}
        self.scaled: tuple[Tensor, Tensor] | None = None
        if case.packed:
            (self.k, self.v), flat = packed.keys_of(case.packed, (self.k, self.v), flat, strided)
            self.keys = (self.k.dequantize(), self.v.dequantize())
        elif case.precision.scale is not None:
            given = key_scales(source, dims, self.lengths, strided)
            self.scales = dict(zip(("k_scale", "v_scale"), (stored for stored, _ in given), strict=True))
            self.keys = tuple(map(dequantised, (self.k, self.v), self.scales.values()))
            # A scale of a head is no weight's: kernels apply it to what they have summed in float32.
            self.scaled = (flat[1], given[1][1]) if dims["token_scales"] else None
            flat = tuple(dequantised(part, rows).bfloat16() for part, (_, rows) in zip(flat, given, strict=True))
            self.unit = unit_of(given[1][1], dims["group"])
        self.options: dict[str, Any] = {**where, "block_size": dims["block_size"]}
        self.flat, self.flat_options = flat, {**self.lengths.keywords(), "block_size": dims["block_size"]}
        self.flat_options["q_positions"] = where.get("q_positions")
        if "softmax_scale" in case.workload.parameters:
            for options in (self.options, self.flat_options):
                options["softmax_scale"] = case.workload.parameters["softmax_scale"]

    def run(self, into_buffers: bool) -> tuple[Tensor, ...]:
        arguments = (self.q, self.k, self.v, self.ids)
        options = {**self.options, **self.scales, "return_lse": True, "backend": self.backend}
        with hybrid(self.hybrid, self.fill):
            if not into_buffers:
                return tuple(self.op(*arguments, **options))
            out = Buffer(self.q.shape, self.q.dtype, self.q.device)
            lse = torch.full(self.q.shape[:2], torch.nan, device=self.q.device)
            self.op(*arguments, out=out.view, lse=lse, **options)
        out.check_gaps("out")
        return out.view, lse

    def compare(self, outputs: tuple[Tensor, ...]) -> compare.Errors:
        out, lse = outputs
        wanted, wanted_lse = reference.sparse_attention(
            self.q.float(), self.keys[0], self.keys[1], self.ids, **self.options
        )
        out, wanted = out / self.unit, wanted / self.unit
        rows, rounded = rounded_error(
            self.q,
            self.flat[0],
            self.flat[1],
            self.ids,
            wanted,
            unit=self.unit,
            scaled=self.scaled,
            **self.flat_options,
        )
        if self.scaled:
            # Scales of tokens multiply scores, or keys, which are rounded to bfloat16 then.
            keys, values = (part.float() for part in self.flat)
            of_rounded = reference.sparse_attention(self.q.float(), keys, values, self.ids, **self.flat_options)[1]
            nearer = (lse - of_rounded).abs() < (lse - wanted_lse).abs()
            wanted_lse = torch.where(nearer, of_rounded, wanted_lse)
        errors = compare.numbers("lse", lse, wanted_lse, self.case.tolerance["lse"])
        metric = compare.OVER_SCALE if self.scales or self.case.packed else compare.ABSOLUTE
        errors |= compare.numbers("out", out, wanted, self.case.tolerance["out"], metric)
        [worst] = compare.numbers("out, of these rows", out[rows], wanted[rows], math.inf).values()
        return errors | compare.times_torch("out", worst.worst, rounded)


class SharedAttention(SparseAttention):
    """The same by the hybrid kernels."""

    hybrid = True

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        super().__init__(case, source, strided, backend)
        self.fill = case.workload.parameters.get("fill", 0)


class SparseDecode(SparseAttention):
    """The same for sparse_decode; at points with scored_blocks the ids are chosen by msa_decode, from exact scores."""

    op = staticmethod(ops.sparse_decode)

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        super().__init__(case, source, strided, backend)
        dims = case.dims
        self.scored = dims["scored_blocks"]
        if not self.scored:
            return
        integers = Source(source.device, int(source.whole(0, 1 << 30, (1,))), "integer")
        shape = (dims["total_q"], 2 * dims["num_kv_heads"], dims["head_dim"])
        dtype = case.dtype("key_value")
        self.idx_q = integers.values(shape, dtype)
        self.topk = dims["topk"]
        # A table of as many pages as the point's rows have blocks, whatever the requests hold.
        pages = self.scored * dims["pages_per_block"]
        if pages:
            self.options["page_table"] = torch.nn.functional.pad(
                self.options["page_table"], (0, max(pages - self.options["page_table"].shape[1], 0)), value=-1
            )
            self.idx_k = integers.values((*self.k.shape[:1], *self.k.shape[2:]), dtype)
        else:
            self.idx_k = integers.values((self.k.shape[0], dims["head_dim"]), dtype)
        # Index queries and keys are quantised where keys and values are.
        self.index_scales: dict[str, Tensor] = {}
        if self.scales:
            heads = integers.scales(shape[1:2]) * loud_head(integers, shape[1])
            self.index_scales = {"q_scale": heads, "k_scale": integers.scales(self.idx_k.shape[:-1] if strided else ())}
        self.own = {"max_seqlen_k": self.scored * dims["block_size"], "local_blocks": 2}

    def run(self, into_buffers: bool) -> tuple[Tensor, ...]:
        if not self.scored:
            return super().run(into_buffers)
        arguments = (self.q, self.k, self.v, self.idx_q, self.idx_k, self.topk)
        ids = Buffer((self.k.shape[1], self.q.shape[0], self.topk), torch.int32, self.q.device, TOKEN_MAJOR)
        buffers: dict[str, Any] = {"block_indices": ids.view}
        if into_buffers:
            out = Buffer(self.q.shape, self.q.dtype, self.q.device)
            buffers |= {"out": out.view, "lse": torch.full(self.q.shape[:2], torch.nan, device=self.q.device)}
        index = {f"index_{name}": scale for name, scale in self.index_scales.items()}
        options: dict[str, Any] = {**self.options, **self.own, **self.scales, **index, **buffers}
        options |= {"return_lse": True, "backend": self.backend}
        result = ops.msa_decode(*arguments, **options)
        ids.check_gaps("block_indices")
        if into_buffers:
            out.check_gaps("out")
        return (*result, ids.view)

    def compare(self, outputs: tuple[Tensor, ...]) -> compare.Errors:
        if not self.scored:
            return super().compare(outputs)
        # The reference takes no bounds, and attention no forced blocks.
        options = {**self.options, **self.index_scales, "local_blocks": self.own["local_blocks"]}
        idx_q, idx_k = self.idx_q.float(), self.idx_k.float()
        self.ids = reference.select_blocks(idx_q, idx_k, self.topk, num_kv_heads=self.k.shape[1], **options)
        return compare.same("block_indices", outputs[2], self.ids) | super().compare(outputs[:2])


class Combine:
    """Merged outputs against the reference in float32; empty splits hold NaN."""

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        dims, self.case, self.backend = case.dims, case, backend
        shape = (dims["num_splits"], dims["total_q"], dims["num_q_heads"])
        self.partial_lse = source.values(shape, torch.float32)
        empty = source.chance(0.2, shape) | source.chance(0.1, shape[1:])
        self.partial_lse = self.partial_lse.masked_fill(empty, -torch.inf)
        self.partial_out = source.values((*shape, dims["head_dim"]), torch.bfloat16)
        self.partial_out = self.partial_out.masked_fill(empty[..., None], torch.nan)
        if strided:
            self.partial_out = spread(self.partial_out, (1, 0, 2, 3))

    def run(self, into_buffers: bool) -> tuple[Tensor, ...]:
        if not into_buffers:
            return ops.combine(self.partial_out, self.partial_lse, backend=self.backend)
        out = Buffer(self.partial_out.shape[1:], self.partial_out.dtype, self.partial_out.device)
        lse = torch.full(self.partial_lse.shape[1:], torch.nan, device=self.partial_out.device)
        ops.combine(self.partial_out, self.partial_lse, out=out.view, lse=lse, backend=self.backend)
        out.check_gaps("out")
        return out.view, lse

    def compare(self, outputs: tuple[Tensor, ...]) -> compare.Errors:
        wanted, wanted_lse = reference.combine(self.partial_out.float(), self.partial_lse)
        errors = compare.numbers("lse", outputs[1], wanted_lse, self.case.tolerance["lse"])
        errors |= compare.numbers("out", outputs[0], wanted, self.case.tolerance["out"])
        weights = (self.partial_lse - wanted_lse).exp().nan_to_num(0.0).to(self.partial_out.dtype)  # 0 of empty rows
        rounded = (weights[..., None] * self.partial_out.nan_to_num(0.0)).sum(0)
        return errors | compare.beside_torch("out", outputs[0], wanted, rounded)


class BuildSchedule:
    """The edges of a schedule, decoded, against the ids themselves."""

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        dims = case.dims
        self.lengths: Lengths = source.lengths(case.workload.sequences, shortened=strided)
        self.ids = source.selection(
            self.lengths, dims["num_kv_heads"], dims["topk"], dims["block_size"], case.workload.selection == "sticky"
        )
        if strided:
            self.ids = spread(self.ids, TOKEN_MAJOR)
        self.block_size = dims["block_size"]
        self.backend = backend

    def call(self) -> Schedule:
        return build_on(self.backend, self.ids, Where(**self.lengths.keywords()), self.block_size)

    def run(self, into_buffers: bool) -> tuple[Tensor, ...]:
        return schedules.defined_parts(self.call())

    def compare(self, outputs: tuple[Tensor, ...]) -> compare.Errors:
        return schedules.check(outputs, self.ids, self.block_size, self.lengths)


CHECKS: dict[str, Callable[[Case, Source, bool, str], Check]] = {
    "sparse_attention": SparseAttention,
    "sparse_decode": SparseDecode,
    "combine": Combine,
    "build_schedule": BuildSchedule,
    "split_selection": SplitSelection,
    "shared_attention": SharedAttention,
    **selection.CHECKS,
    **caches.CHECKS,
    **dequantize.CHECKS,
    **gradient_parts.CHECKS,
    **index_parts.CHECKS,
    **norm_rope.CHECKS,
    **training.CHECKS,
}
