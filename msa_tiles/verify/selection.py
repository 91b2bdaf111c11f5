"""Checks of scores of blocks and of the ids that are selected by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.reference.batch import read_batch
from msa_tiles.verify import compare, packed
from msa_tiles.verify.cases import Case
from msa_tiles.verify.inputs import TOKEN_MAJOR, Buffer, Source, placed, spread
from msa_tiles.verify.quantised import index_scales, spoil


class IndexScore:
    """Scores against the reference in float32 on the same inputs, dequantised where they are."""

    op = staticmethod(ops.index_score)

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        dims, self.case, self.strided = case.dims, case, strided
        lengths = source.lengths(case.workload.sequences, shortened=strided)
        queries = (dims["total_q"], dims["num_index_heads"], dims["head_dim"])
        self.idx_q = source.values(queries, case.dtype("query"))
        keys = source.values((dims["total_k"], dims["head_dim"]), case.dtype("index_key"))
        if strided:
            spoil(source, lengths, keys)
        self.idx_k: Any
        self.where, (self.idx_k,) = placed(source, lengths, dims["pages_per_block"], dims["block_size"], strided, keys)
        if strided:
            self.idx_q = spread(self.idx_q)
        # As the reference takes them.
        self.keys = self.idx_k.float()
        if case.packed:
            self.idx_k = packed.index_keys_of(case.packed, self.idx_k, strided, source.integers)
            self.keys = self.idx_k.dequantize()
        scaled = case.precision.scale is not None and not case.packed
        self.scales: dict[str, Any] = index_scales(source, dims, lengths, strided) if scaled else {}
        self.shape = (dims["num_index_heads"], dims["total_q"], dims["max_blocks"])
        causal = case.workload.parameters.get("causal", True)
        self.options: dict[str, Any] = {"block_size": dims["block_size"], "causal": causal}
        self.backend = backend

    def run(self, into_buffers: bool) -> tuple[Tensor, ...]:
        where = {**self.where, **self.scales, **self.options, "backend": self.backend}
        if not into_buffers:
            return (self.op(self.idx_q, self.idx_k, **where),)
        buffer = Buffer(self.shape, torch.float32, self.idx_q.device, TOKEN_MAJOR)
        self.op(self.idx_q, self.idx_k, out=buffer.view.transpose(0, 1), layout="token_major", **where)
        buffer.check_gaps("out")
        return (buffer.view,)

    def compare(self, outputs: tuple[Tensor, ...]) -> compare.Errors:
        wanted = reference.index_score(
            self.idx_q.float(),
            self.keys,
            num_blocks=self.shape[2],
            **self.where,
            **self.scales,
            **self.options,
        )
        # Of a head with small scales, small errors count.
        unit = unit_of_scores(self.scales, self.shape, wanted.device)
        metric = compare.OVER_SCALE if self.scales else compare.ABSOLUTE
        errors = compare.numbers("out", outputs[0] / unit, wanted / unit, self.case.tolerance["out"], metric)
        return errors | compare.beside_torch("out", outputs[0] / unit, wanted / unit, wanted.bfloat16() / unit)


def unit_of_scores(scales: Mapping[str, Tensor], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """What errors of scores [Hi, T, …] are counted in: the scales of the queries, [Hi, T, 1], or ones on `device`."""
    q_scale = scales["q_scale"] if "q_scale" in scales else torch.ones((), device=device)
    return q_scale.expand(shape[1], shape[0]).T[..., None]


class DecodeScore(IndexScore):
    """The same for decode_score."""

    op = staticmethod(ops.decode_score)


class TopkSelect:
    """Ids of scores that hold ties, NaN and infinities; equal to the reference's, always."""

    op = staticmethod(ops.topk_select)

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        dims = case.dims
        shape = (dims["num_index_heads"], dims["total_q"], dims["max_blocks"])
        score = source.values(shape, torch.float32)
        for value in (float("nan"), float("inf"), -float("inf"), -0.0):
            score = score.masked_fill(source.chance(0.02, shape), value)
        self.lengths = source.lengths(case.workload.sequences, shortened=False)
        self.options: dict[str, Any] = {
            **self.lengths.keywords(),
            **case.workload.parameters,
            "num_kv_heads": dims["num_kv_heads"],
            "block_size": dims["block_size"],
        }
        if strided:
            score = spread(score, TOKEN_MAJOR)
            if shape[2]:
                valid = source.whole(0, shape[2] + 1, (shape[1],)).to(torch.int32)
                self.options["num_valid_blocks"] = valid
        elif shape[2]:
            self.options["q_positions"] = source.positions(self.lengths) if source.whole(0, 2, (1,)).item() else None
        self.score, self.topk, self.backend = score, dims["topk"], backend
        self.shape = (dims["num_kv_heads"], dims["total_q"], self.topk)

    def run(self, into_buffers: bool) -> tuple[Tensor, ...]:
        if not into_buffers:
            return (self.op(self.score, self.topk, backend=self.backend, **self.options),)
        buffer = Buffer(self.shape, torch.int32, self.score.device, TOKEN_MAJOR)
        self.op(self.score, self.topk, out=buffer.view, backend=self.backend, **self.options)
        buffer.check_gaps("out")
        return (buffer.view,)

    def compare(self, outputs: tuple[Tensor, ...]) -> compare.Errors:
        return compare.same("out", outputs[0], reference.topk_select(self.score, self.topk, **self.options))


class DecodeTopk(TopkSelect):
    """The same for decode_topk."""

    op = staticmethod(ops.decode_topk)


class SelectBlocks:
    """Ids equal to the reference's on integers; on other values they may differ where scores nearly tie."""

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        dims, self.case, self.exact = case.dims, case, source.integers
        self.lengths = source.lengths(case.workload.sequences, shortened=strided)
        queries = (dims["total_q"], dims["num_index_heads"], dims["head_dim"])
        self.idx_q = source.values(queries, case.dtype("query"))
        keys = source.values((dims["total_k"], dims["head_dim"]), case.dtype("index_key"))
        if strided:
            spoil(source, self.lengths, keys)
        self.idx_k: Any
        self.where, (self.idx_k,) = placed(
            source, self.lengths, dims["pages_per_block"], dims["block_size"], strided, keys
        )
        if strided:
            self.idx_q = spread(self.idx_q)
        self.keys = self.idx_k.float()
        if case.packed:
            self.idx_k = packed.index_keys_of(case.packed, self.idx_k, strided, source.integers)
            self.keys = self.idx_k.dequantize()
        self.topk, self.block_size, self.backend = dims["topk"], dims["block_size"], backend
        self.shape = (dims["num_kv_heads"], dims["total_q"], self.topk)
        scaled = case.precision.scale is not None and not case.packed
        self.scales: dict[str, Any] = index_scales(source, dims, self.lengths, strided) if scaled else {}
        self.options: dict[str, Any] = {
            **self.where,
            **self.scales,
            **case.workload.parameters,
            "num_kv_heads": dims["num_kv_heads"],
            "block_size": self.block_size,
        }

    def run(self, into_buffers: bool) -> tuple[Tensor, ...]:
        if not into_buffers:
            return (ops.select_blocks(self.idx_q, self.idx_k, self.topk, backend=self.backend, **self.options),)
        buffer = Buffer(self.shape, torch.int32, self.idx_q.device, TOKEN_MAJOR)
        ops.select_blocks(self.idx_q, self.idx_k, self.topk, out=buffer.view, backend=self.backend, **self.options)
        buffer.check_gaps("out")
        return (buffer.view,)

    def compare(self, outputs: tuple[Tensor, ...]) -> compare.Errors:
        idx_q, idx_k = self.idx_q.float(), self.keys
        wanted = reference.select_blocks(idx_q, idx_k, self.topk, **self.options)
        if self.exact:
            return compare.same("out", outputs[0], wanted)
        scores = reference.index_score(idx_q, idx_k, block_size=self.block_size, **self.where, **self.scales)
        # Heads of a group are ranked together, so that errors count beside the largest scale among them.
        groups = (self.shape[0], -1)
        unit = unit_of_scores(self.scales, scores.shape, scores.device).unflatten(0, groups).amax(1)
        scores = scores.unflatten(0, groups).nan_to_num(nan=-torch.inf).amax(1) / unit
        errors = compare.selections(
            "out",
            outputs[0],
            wanted,
            scores,
            self._forced(scores.shape[-1]),
            self.options.get("order", "ascending"),
            2 * self.case.score_tolerance,
            compare.OVER_SCALE if self.scales else compare.ABSOLUTE,
        )
        # Blocks that torch's scores choose may be worse by what these are off by.
        of_torch = compare.error_of(scores.bfloat16(), scores)
        [worst] = errors.values()
        return errors if of_torch is None else errors | compare.times_torch("out", worst.worst, of_torch)

    def _forced(self, num_blocks: int) -> Tensor:
        """[T, NB]: the init and local blocks of each query."""
        where = {name: value for name, value in self.where.items() if not name.startswith("max_")}
        batch = read_batch(self.shape[1], self.idx_q.device, total_k=len(self.keys), **where)
        valid = batch.num_valid_blocks(self.block_size)[:, None]
        block = torch.arange(num_blocks, device=self.idx_q.device)
        init, local = self.options.get("init_blocks", 0), self.options.get("local_blocks", 1)
        return (block < valid) & ((block < init) | (block >= valid - local))


CHECKS: dict[str, Callable[[Case, Source, bool, str], Any]] = {
    "index_score": IndexScore,
    "topk_select": TopkSelect,
    "decode_topk": DecodeTopk,
    "select_blocks": SelectBlocks,
    "decode_score": DecodeScore,
}
