"""Checks of the operators that training calls: gradients of attention, and the index KL with its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.reference.batch import read_batch
from msa_tiles.verify import compare
from msa_tiles.verify.cases import Case
from msa_tiles.verify.inputs import Source, spread

TOKEN_MAJOR = (1, 0, 2)
# Above so many pairs of a query and a key the whole score matrices of the yardstick do not pay.
MOST_PAIRS = 1 << 20
# What float32 sums in another order leave where the yardstick happens to be exact, as with a single key: dP = delta.
ROUNDING = 1e-5


class _Training:
    """Inputs of one call of the main branch over its selection, and what torch makes of them in bfloat16."""

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        dims, self.case, self.backend = case.dims, case, backend
        self.lengths = source.lengths(case.workload.sequences, shortened=strided)
        self.q = source.values((dims["total_q"], dims["num_q_heads"], dims["head_dim"]), torch.bfloat16)
        keys = (dims["total_k"], dims["num_kv_heads"], dims["head_dim"])
        self.k, self.v = (source.values(keys, torch.bfloat16) for _ in range(2))
        self.ids: Tensor | None = source.selection(
            self.lengths, dims["num_kv_heads"], dims["topk"], dims["block_size"], case.workload.selection == "sticky"
        )
        self.where: dict[str, Any] = self.lengths.keywords()
        if strided:
            self.q, self.k, self.v = (spread(tensor) for tensor in (self.q, self.k, self.v))
            self.ids = spread(self.ids, TOKEN_MAJOR)
            self.where["q_positions"] = source.positions(self.lengths)
        self.block_size = dims["block_size"]
        # What autograd asks for by default repeats as well: only a workload that says so may not.
        self.repeatable = case.workload.parameters.get("deterministic", True)

    def teacher(self) -> tuple[Tensor, Tensor]:
        """Output and LSE of the main branch in float32."""
        tensors = (self.q.float(), self.k.float(), self.v.float())
        if self.ids is None:
            return reference.dense_attention(*tensors, **self.where)
        return reference.sparse_attention(*tensors, self.ids, block_size=self.block_size, **self.where)

    def small(self) -> bool:
        """Is the call small enough for whole score matrices?"""
        return self.q.shape[0] * self.k.shape[0] <= MOST_PAIRS

    def requests(self) -> Iterator[tuple[Tensor, slice, Tensor]]:
        """Per request: its rows that see something, its key rows, and what they see, bool [Hkv, rows, keys]."""
        batch = read_batch(self.q.shape[0], self.q.device, total_k=self.k.shape[0], **self.where)
        num_heads = self.k.shape[1]
        for request in batch.requests:
            rows = torch.arange(request.query_begin, request.query_end, device=self.q.device)
            positions = torch.arange(request.num_keys, device=self.q.device)
            seen = (positions <= batch.limit[rows, None]).expand(num_heads, -1, -1)
            if self.ids is not None:
                blocks = torch.div(positions, self.block_size, rounding_mode="floor")
                seen = seen & (self.ids[:, rows, :, None] == blocks).any(2)
            # One head may see nothing where another does: such a row is masked, and left out where nobody sees.
            some = seen.any(-1).any(0)
            if bool(some.any()):
                yield rows[some], slice(request.key_row, request.key_row + request.num_keys), seen[:, some]


class SparseAttentionBackward(_Training):
    """dq, dk and dv against the reference in float32 on the same inputs; what sees nothing has NaN gradients."""

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        super().__init__(case, source, strided, backend)
        out, self.lse = self.teacher()
        self.out = out.to(torch.bfloat16)
        empty = self.lse == -torch.inf
        self.dout = source.values(self.q.shape, torch.bfloat16).masked_fill(empty[..., None], torch.nan)
        self.dlse: Tensor | None = None
        if strided:
            self.dout, self.out = spread(self.dout), spread(self.out)
            self.dlse = source.values(self.lse.shape, torch.float32).masked_fill(empty, torch.nan)
        self.options: dict[str, Any] = {"dlse": self.dlse, "block_size": self.block_size, **self.where}

    def run(self, into_buffers: bool) -> tuple[Tensor, ...]:
        arguments: Any = (self.dout, self.q, self.k, self.v, self.out, self.lse, self.ids)
        return ops.sparse_attention_backward(
            *arguments, deterministic=self.repeatable, backend=self.backend, **self.options
        )

    def compare(self, outputs: tuple[Tensor, ...]) -> compare.Errors:
        tensors = [tensor.float() for tensor in (self.dout, self.q, self.k, self.v, self.out)]
        arguments: Any = (*tensors, self.lse, self.ids)
        wanted = reference.sparse_attention_backward(*arguments, **self.options)
        accepted = self._rounded(wanted) if self.small() else (None, None, None)
        errors: compare.Errors = {}
        for name, got, want, limit in zip(("dq", "dk", "dv"), outputs, wanted, accepted, strict=True):
            errors |= compare.numbers(name, got, want, self.case.tolerance[name])
            if limit is not None:
                compare.numbers(f"{name}, against the same in bfloat16", got, want, 2 * limit + ROUNDING)
        return errors

    def _rounded(self, wanted: tuple[Tensor, ...]) -> tuple[float, ...]:
        """The worst error of torch's autograd through the dense masked formula in bfloat16, for dq, dk and dv."""
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (self.q, self.k, self.v)]
        q, k, v = leaves
        group = q.shape[1] // k.shape[1]
        scale = q.shape[2] ** -0.5
        total = torch.stack([leaf.sum() for leaf in leaves]).sum() * 0.0
        for rows, keys, seen in self.requests():
            mask = seen.repeat_interleave(group, 0)
            empty = ~mask.any(-1)
            these, those = (part[keys].repeat_interleave(group, 1) for part in (k, v))
            scores = torch.einsum("thd,jhd->htj", q[rows], these) * scale
            scores = scores.masked_fill(~mask & ~empty[..., None], -torch.inf)
            out = torch.einsum("htj,jhd->thd", scores.softmax(-1), those)
            total = total + (out * self.dout[rows].masked_fill(empty.T[..., None], 0.0)).sum()
            if self.dlse is not None:
                dlse = self.dlse[rows].masked_fill(empty.T, 0.0).to(torch.bfloat16)
                total = total + (scores.logsumexp(-1).T * dlse).sum()
        found = torch.autograd.grad(total, leaves)
        return tuple(_worst(got, want) for got, want in zip(found, wanted, strict=True))


class IndexKl(_Training):
    """The loss and its gradients through autograd, times T * Hkv, against the reference in float32."""

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        super().__init__(case, source, strided, backend)
        dims = case.dims
        if dims["prefix"]:
            self.ids = None
        self.lse = self.teacher()[1]
        self.idx_q = source.values((dims["total_q"], dims["num_kv_heads"], dims["index_dim"]), torch.bfloat16)
        self.idx_k = source.values((dims["total_k"], dims["index_dim"]), torch.bfloat16)
        self.options: dict[str, Any] = {"block_size": self.block_size, **self.where}
        if strided:
            self.idx_q, self.idx_k = spread(self.idx_q), spread(self.idx_k)
            weights = source.values((dims["total_q"],), torch.float32).abs()
            self.options["token_weights"] = weights.masked_fill(source.chance(0.3, weights.shape), 0.0)
        self.share = float(dims["total_q"] * dims["num_kv_heads"])

    def run(self, into_buffers: bool) -> tuple[Tensor, ...]:
        idx_q, idx_k = (tensor.detach().requires_grad_() for tensor in (self.idx_q, self.idx_k))
        arguments = (self.q, self.k, self.lse, idx_q, idx_k, self.ids)
        loss = ops.index_kl(*arguments, deterministic=self.repeatable, backend=self.backend, **self.options)
        with torch.no_grad():
            # A call that wants no gradients takes another way to the same value.
            value = ops.index_kl(*arguments, deterministic=self.repeatable, backend=self.backend, **self.options)
        gradients = torch.autograd.grad(loss, (idx_q, idx_k), torch.full_like(loss, self.share))
        return loss.detach(), value, *gradients

    def compare(self, outputs: tuple[Tensor, ...]) -> compare.Errors:
        tensors = (self.q.float(), self.k.float(), self.lse, self.idx_q.float(), self.idx_k.float())
        loss, *gradients = reference.index_kl(*tensors, self.ids, **self.options)
        tolerance = self.case.tolerance
        errors = compare.numbers("loss", outputs[0], loss, tolerance["loss"])
        compare.numbers("loss, without gradients", outputs[1], loss, tolerance["loss"])
        wanted = tuple(gradient * self.share for gradient in gradients if gradient is not None)
        accepted = self._rounded(wanted) if self.small() else (None, None)
        for name, got, want, limit in zip(("d_idx_q", "d_idx_k"), outputs[2:], wanted, accepted, strict=True):
            errors |= compare.numbers(name, got, want, tolerance[name])
            if limit is not None:
                compare.numbers(f"{name}, against the same in bfloat16", got, want, 2 * limit + ROUNDING)
        return errors

    def _rounded(self, wanted: tuple[Tensor, ...]) -> tuple[float, ...]:
        """The worst error of torch's autograd through the dense masked formula in bfloat16, for idx_q and idx_k."""
        idx_q, idx_k = leaves = [tensor.detach().clone().requires_grad_() for tensor in (self.idx_q, self.idx_k)]
        group = self.q.shape[1] // self.k.shape[1]
        weights = self.options.get("token_weights")
        total = torch.stack([leaf.sum() for leaf in leaves]).sum() * 0.0
        for rows, keys, seen in self.requests():
            these = self.k[keys].repeat_interleave(group, 1)
            scores = torch.einsum("thd,jhd->htj", self.q[rows], these) * self.q.shape[2] ** -0.5
            empty = ~seen.any(-1)
            hidden = ~seen & ~empty[..., None]
            teacher = scores.unflatten(0, (-1, group)).masked_fill(hidden[:, None], -torch.inf).softmax(-1).mean(1)
            index_scores = torch.einsum("thd,jd->htj", idx_q[rows], idx_k[keys]) * idx_q.shape[2] ** -0.5
            student = index_scores.masked_fill(hidden, -torch.inf).log_softmax(-1)
            terms = (teacher * student).masked_fill(~seen, 0.0).sum(-1)
            share = 1.0 if weights is None else weights[rows].to(torch.bfloat16)
            total = total - (terms * share).sum()
        found = torch.autograd.grad(total, leaves)
        return tuple(_worst(got, want) for got, want in zip(found, wanted, strict=True))


def _worst(got: Tensor, wanted: Tensor) -> float:
    return float((got.to(wanted.dtype) - wanted).abs().max()) if got.numel() else 0.0


CHECKS: dict[str, Callable[[Case, Source, bool, str], Any]] = {
    "index_kl": IndexKl,
    "sparse_attention_backward": SparseAttentionBackward,
}
