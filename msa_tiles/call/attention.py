"""Checks of the tensors that attention takes."""

from __future__ import annotations

from torch import Tensor

from msa_tiles.call import validate
from msa_tiles.call.where import Where, page_size


def attention_tensors(q: Tensor, k: Tensor, v: Tensor, where: Where, block_size: int) -> None:
    """Check q, k and v, their head ratio and the page size."""
    _, num_q_heads, head_dim = validate.floating("q", q, "[T, Hq, D]").shape
    if head_dim == 0:
        validate.refuse("q", "head dim 0", "at least 1")
    keys_dims = "[Tk, Hkv, D]" if where.page_table is None else "[pages, Hkv, page, D]"
    for name, value in (("k", k), ("v", v)):
        validate.floating(name, value, keys_dims, q, "q")
        if value.shape[-1] != head_dim:
            validate.refuse(name, f"head dim {value.shape[-1]}", f"{head_dim} like q")
    if v.shape != k.shape:
        validate.refuse("v", f"shape {validate.shape_text(v.shape)}", f"{validate.shape_text(k.shape)} like k")
    num_kv_heads = k.shape[1]
    if num_kv_heads == 0 or num_q_heads % num_kv_heads != 0:
        validate.refuse("q", f"{num_q_heads} heads", f"a multiple of the {num_kv_heads} KV heads of k")
    validate.integer("block_size", block_size, 1)
    if where.page_table is not None:
        page_size("k", k, block_size)


def same_rows(idx_k: Tensor, k: Tensor, paged: bool) -> None:
    """Check that the index keys are of the tokens that k holds: positions are counted from their number."""
    validate.floating("idx_k", idx_k, "[pages, page, Di]" if paged else "[Tk, Di]", k, "k")
    if idx_k.shape[:-1] != ((k.shape[0], k.shape[2]) if paged else k.shape[:1]):
        rows = "pages and page size" if paged else "tokens"
        validate.refuse("idx_k", f"shape {validate.shape_text(idx_k.shape)}", f"the {rows} of k")
