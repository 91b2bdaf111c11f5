"""Scales of quantised inputs, and elements that are no numbers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from msa_tiles.verify.inputs import Lengths, Source, paged, spread

LOUD = 1024.0  # how many times the other heads' scales that of one head is; exact in every format
ENOUGH_KEYS = 1000  # fewer are visible to most queries, and of what they say nothing else would be seen beside NaN


def loud_head(source: Source, num_heads: int) -> Tensor:
    """float32 [num_heads]: 1 for one head, so little for the others that its scale is 1024 times theirs."""
    loud = int(source.whole(0, num_heads, (1,)))
    return torch.where(torch.arange(num_heads, device=source.device) == loud, 1.0, 1.0 / LOUD)


def index_scales(
    source: Source, dims: Mapping[str, int], lengths: Lengths, strided: bool, loud: bool = True
) -> dict[str, Tensor]:
    """q_scale and k_scale of a call on quantised queries and keys of the indexer.

    `strided` calls have a scale for every query and head, others one for each head; every key has one at points with
    key_scales, and elsewhere all together where the call is not `strided`. With `loud` one head is 1024 times as loud:
    it decides for its whole group, whatever the scales of the other heads.
    """
    num_heads, total_q = dims["num_index_heads"], dims["total_q"]
    q_scale = source.scales((total_q, num_heads) if strided else (num_heads,))
    if loud:
        q_scale = q_scale * loud_head(source, num_heads)
    scales = {"q_scale": spread(q_scale) if strided else q_scale}
    if dims["key_scales"]:
        pages = dims["pages_per_block"]
        page_size = dims["block_size"] // pages if pages else 0
        scales["k_scale"] = stored_scales(source, source.scales((dims["total_k"],)), lengths, page_size)
    elif not strided:
        scales["k_scale"] = source.scales(())
    return scales


def stored_scales(source: Source, scales: Tensor, lengths: Lengths, page_size: int) -> Tensor:
    """Scales [total_k, …] of flat keys where a call has them: [pages, …, page] where keys are in pages; NaN in gaps.

    They lie on the pages that `paged` gives the keys, and have strides of their own.
    """
    pairs = torch.stack((scales, torch.full_like(scales, torch.nan)), -1)
    if not page_size:
        return pairs[..., 0]
    pool = paged(source, pairs, lengths, page_size).pool[..., 0]
    return pool.transpose(1, -1) if scales.ndim > 1 else pool


def key_scales(source: Source, dims: Mapping[str, int], lengths: Lengths, strided: bool) -> list[tuple[Tensor, Tensor]]:
    """Of k and of v: the scale as the call gives it, and the same for every row and head, [total_k, num_kv_heads].

    At points with token_scales every token of a head has one, but for k or for v of `strided` calls; elsewhere there is
    one for each head, or for the whole tensor where the call is not `strided`. One head is 1024 times as loud.
    """
    heads, total_k = dims["num_kv_heads"], dims["total_k"]
    page_size = dims["block_size"] // dims["pages_per_block"] if dims["pages_per_block"] else 0
    without = int(source.whole(0, 2, (1,))) if strided else None
    found = []
    for which in range(2):
        if dims["token_scales"] and which != without:
            rows = source.scales((total_k, heads)) * loud_head(source, heads)
            found.append((stored_scales(source, rows, lengths, page_size), rows))
        else:
            per_head = strided or dims["token_scales"]
            scale = source.scales((heads,)) * loud_head(source, heads) if per_head else source.scales(())
            found.append((scale, scale.expand(total_k, heads)))
    return found


def dequantised(stored: Tensor, scale: Tensor) -> Tensor:
    """Keys or values [total_k, heads, dim] or [pages, heads, page, dim] as float32, times their scale."""
    if scale.ndim == 1:
        scale = scale.view(1, -1, *(1,) * (stored.ndim - 3))
    return stored.float() * scale[..., None]


def spoil(source: Source, lengths: Lengths, keys: Tensor) -> None:
    """NaN in the rows of flat keys that no request uses, and in two elements that some queries see; in place.

    Both codes of e4m3's NaN are written. Of few keys only those are spoilt that nobody uses.
    """
    starts = lengths.cu_seqlens_k.tolist()
    used = [end - start for start, end in pairwise(starts)] if lengths.seqused_k is None else lengths.seqused_k.tolist()
    codes = keys if keys.dtype.itemsize > 1 else keys.view(torch.uint8)
    nan = [torch.nan, torch.nan] if codes is keys else [0x7F, 0xFF]
    long = []
    for (start, end), length in zip(pairwise(starts), used, strict=True):
        codes[start + length : end] = nan[0]
        if length >= ENOUGH_KEYS:
            long.append(start + length // 2)
    for code in nan if long else ():
        row = long[int(source.whole(0, len(long), (1,)))] + int(source.whole(0, ENOUGH_KEYS // 2, (1,)))
        place = [int(source.whole(0, size, (1,))) for size in keys.shape[1:]]
        codes[(row, *place)] = code


def unit_of(rows: Tensor, group: int) -> Tensor:
    """The largest scale of each KV head's values, [num_q_heads, 1]: what errors of outputs are counted in."""
    largest = rows.amax(0) if len(rows) else torch.ones(rows.shape[1], device=rows.device)
    return largest.repeat_interleave(group)[:, None]
