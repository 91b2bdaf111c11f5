"""The call of a whole decode step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from msa_tiles.call import attention, contents, formats, indexer, scales, validate
from msa_tiles.call.attention import Attention
from msa_tiles.call.indexer import Index
from msa_tiles.call.where import Where
from msa_tiles.quant import QuantizedTensor


class Step(NamedTuple):
    """What a decode step reads: the operands of attention and those of its indexer, which share places and pages."""

    q: Tensor
    k: Tensor
    v: Tensor
    idx_q: Tensor
    idx_k: Tensor
    where: Where
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    index_q_scale: Tensor | None = None
    index_k_scale: Tensor | None = None
    k_global_scale: Tensor | None = None
    v_global_scale: Tensor | None = None
    index_k_global_scale: Tensor | None = None

    @property
    def of_indexer(self) -> Index:
        return Index(
            self.idx_q, self.idx_k, self.where, self.index_q_scale, self.index_k_scale, self.index_k_global_scale
        )  # fmt: skip

    def of_attention(self, block_indices: Tensor) -> Attention:
        return Attention(
            self.q, self.k, self.v, block_indices, self.where, self.q_scale, self.k_scale, self.v_scale, None,
            self.k_global_scale, self.v_global_scale,
        )  # fmt: skip

    def tensors(self) -> tuple[Tensor | None, ...]:
        return (
            self.q, self.k, self.v, self.idx_q, self.idx_k, *self.where.tensors(), self.q_scale, self.k_scale,
            self.v_scale, self.index_q_scale, self.index_k_scale, self.k_global_scale, self.v_global_scale,
            self.index_k_global_scale,
        )  # fmt: skip


class StepCall(NamedTuple):
    """A validated decode step."""

    operands: Step
    topk: int
    block_size: int
    init_blocks: int
    local_blocks: int
    softmax_scale: float
    num_blocks: int
    backend: str
    batch_invariant: bool = False

    @property
    def device(self) -> torch.device:
        return self.operands.q.device

    @property
    def num_kv_heads(self) -> int:
        return self.operands.k.shape[1]


def operands_of(
    q: Any,
    k: Any,
    v: Any,
    idx_q: Any,
    idx_k: Any,
    where: Where,
    q_scale: Any,
    k_scale: Any,
    v_scale: Any,
    index_q_scale: Any,
    index_k_scale: Any,
) -> Step:
    """The operands of a call that is not checked yet, quantised tensors taken apart."""
    k_global = v_global = index_global = None
    if QuantizedTensor in (type(q), type(k), type(v), type(idx_q), type(idx_k)):
        q, q_scale = scales.unpacked("q", q, q_scale, "q_scale")
        k, k_scale, k_global = scales.unpacked_keys("k", k, k_scale, "k_scale")
        v, v_scale, v_global = scales.unpacked_keys("v", v, v_scale, "v_scale")
        idx_q, index_q_scale = scales.unpacked("idx_q", idx_q, index_q_scale, "index_q_scale")
        idx_k, index_k_scale, index_global = scales.unpacked_keys("idx_k", idx_k, index_k_scale, "index_k_scale")
    elif formats.is_packed(k) or formats.is_packed(v) or formats.is_packed(idx_k):
        for name, value in (("k", k), ("v", v), ("idx_k", idx_k)):
            scales.refuse_bytes(name, value)
    return Step(
        q, k, v, idx_q, idx_k, where, q_scale, k_scale, v_scale, index_q_scale, index_k_scale, k_global, v_global,
        index_global,
    )  # fmt: skip


def validated(
    operands: Step,
    topk: int,
    *,
    check: bool,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    softmax_scale: float | None,
    backend: str,
    batch_invariant: bool,
) -> StepCall:
    """Check everything."""
    operands = operands._replace(where=operands.where.plain())
    topk, block_size, init_blocks, local_blocks = map(validate.plain, (topk, block_size, init_blocks, local_blocks))
    q, k, v, idx_q, idx_k, where, q_scale, k_scale, v_scale, *_ = operands
    k_global, v_global = operands.k_global_scale, operands.v_global_scale
    indexer.check_operands(operands.of_indexer, block_size, backend, check, "index_q_scale", "index_k_scale")
    attention.check_tensors(q, k, v, where, block_size, quantised=True)
    attention.check_scales(q, k, v, where, q_scale, k_scale, v_scale)
    check_beside(idx_q, idx_k, q, k, where.page_table is not None)
    if check:
        of_keys = {"k_scale": k_scale, "v_scale": v_scale, "k.global_scale": k_global, "v.global_scale": v_global}
        contents.check_scales(where, q, k, {"q_scale": q_scale}, of_keys)
    num_kv_heads = k.shape[1]
    indexer.kv_heads("idx_q", idx_q.shape[1], topk, num_kv_heads, block_size, init_blocks, local_blocks, "ascending")
    num_blocks = indexer.score_width(operands.of_indexer, block_size, False, None)
    scale = validate.softmax_scale(softmax_scale, q.shape[2])
    validate.boolean("batch_invariant", batch_invariant)
    return StepCall(
        operands, topk, block_size, init_blocks, local_blocks, scale, num_blocks, backend, batch_invariant
    )  # fmt: skip


def check_beside(idx_q: Any, idx_k: Any, q: Tensor, k: Tensor, paged: bool) -> None:
    """Check that queries and keys of the indexer are of the tokens of attention's, on its device."""
    validate.same_device("idx_q", idx_q, q, "q")
    if not (formats.is_quantised(idx_q) or formats.is_quantised(q)) and idx_q.dtype != q.dtype:
        validate.refuse_type("idx_q", f"dtype {idx_q.dtype}", f"{q.dtype} like q")
    if idx_q.shape[0] != q.shape[0]:
        validate.refuse("idx_q", f"{idx_q.shape[0]} tokens", f"{q.shape[0]} like q")
    if idx_q.shape[1] % k.shape[1] != 0:
        validate.refuse("idx_q", f"{idx_q.shape[1]} index heads", f"a multiple of the {k.shape[1]} KV heads of k")
    # Positions are counted from the number of keys.
    if idx_k.shape[:-1] != ((k.shape[0], k.shape[2]) if paged else k.shape[:1]):
        rows = "pages and page size" if paged else "tokens"
        validate.refuse("idx_k", f"shape {validate.shape_text(idx_k.shape)}", f"the {rows} of k")
