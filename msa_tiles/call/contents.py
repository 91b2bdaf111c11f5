"""What ``check=True`` looks at: the contents of index tensors, read to the host. Synchronises."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from msa_tiles.call import backends, edges, formats, validate
from msa_tiles.call.schedule import WindowSchedule
from msa_tiles.call.where import Where
from msa_tiles.reference.batch import Batch, key_rows, read_batch

Check = TypeVar("Check", bound=Callable[..., None])


def _of_values(check: Check) -> Check:
    """In a rehearsal tensors hold no values: those that they stand for are looked at."""

    @functools.wraps(check)
    def checked(*arguments: Any, **named: Any) -> None:
        if torch.compiler.is_compiling() or not any(
            isinstance(part, FakeTensor) for value in (*arguments, *named.values()) for part in _parts(value)
        ):
            return check(*arguments, **named)
        with unset_fake_temporarily():
            real = {name: _real(value) for name, value in named.items()}
            return check(*map(_real, arguments), **real)

    return cast(Check, checked)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value


def _real(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _real(part) for name, part in value.items()}
    if isinstance(value, tuple):
        parts = [_real(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if not isinstance(value, FakeTensor):
        return value
    real = getattr(value, "stands_for", None)
    if real is None or real.is_meta:
        validate.refuse("check", "True for tensors without values", "False, or tensors on a CPU or a GPU")
    return real


@_of_values
def check_where(where: Where, total_q: int, keys: Tensor | None) -> None:
    """Cumulative lengths sorted and inside their tensors, lengths and pages inside the storage, host bounds kept."""
    if torch.compiler.is_compiling():
        validate.refuse("check", "True under torch.compile", "False: device contents cannot be traced")
    lengths_q = [total_q]
    if where.cu_seqlens_q is not None:
        lengths_q = _cumulative("cu_seqlens_q", where.cu_seqlens_q, total_q, "queries")
    flat = keys is not None and where.page_table is None
    room: list[int] | None = None
    if where.cu_seqlens_k is not None:
        most = keys.shape[0] if keys is not None and flat else None
        room = _cumulative("cu_seqlens_k", where.cu_seqlens_k, most, "keys")
    elif keys is not None:
        held = keys.shape[0] if where.page_table is None else where.page_table.shape[1] * keys.shape[-2]
        room = [held] * where.num_requests
    lengths_k = lengths_q if room is None else room
    if where.seqused_k is not None:
        lengths_k = where.seqused_k.tolist()
        for request, length in enumerate(lengths_k):
            most = None if room is None else room[request]
            if length < 0 or (most is not None and length > most):
                storage = "storage" if where.page_table is None else f"{where.page_table.shape[1]} pages of page_table"
                wanted = "at least 0" if most is None else f"0 to the {most} keys of {storage}"
                validate.refuse("seqused_k", f"{length} used keys in request {request}", wanted)
    offsets = [0] * len(lengths_k) if where.k_offset is None else where.k_offset.tolist()
    if any(offset < 0 for offset in offsets):
        validate.refuse("k_offset", str(min(offsets)), "at least 0")
    if where.max_seqlen_q is not None and max(lengths_q, default=0) > where.max_seqlen_q:
        validate.refuse("max_seqlen_q", str(where.max_seqlen_q), f"at least the longest request, {max(lengths_q)}")
    ends = [offset + length for offset, length in zip(offsets, lengths_k, strict=True)]
    if where.max_seqlen_k is not None and max(ends, default=0) > where.max_seqlen_k:
        validate.refuse("max_seqlen_k", str(where.max_seqlen_k), f"at least the longest request, {max(ends)}")
    if where.page_table is not None and keys is not None:
        _check_pages(where.page_table, lengths_k, keys)


@_of_values
def check_offsets(where: Where, block_size: int, backend: str, device: torch.device) -> None:
    """Refuse offsets that kernels cannot serve. Reads them to the host."""
    if where.k_offset is None or backends.runs_reference(backend, device):
        return
    for request, offset in enumerate(where.k_offset.tolist()):
        if offset % block_size:
            wanted = f"multiples of block_size = {block_size}: kernels serve shards of whole blocks, the reference any"
            validate.refuse("k_offset", f"{offset} for request {request}", wanted)


@_of_values
def check_block_indices(block_indices: Tensor, where: Where, block_size: int, keys: Tensor | None) -> None:
    """Ids are -1 or a block of the query's request, and distinct within a row."""
    batch = _batch(where, block_indices.shape[1], block_indices.device, keys)
    ends = torch.tensor([request.key_end for request in batch.requests] or [0], device=block_indices.device)
    blocks = torch.div(ends + block_size - 1, block_size, rounding_mode="floor")
    inside = batch.request >= 0
    limit = torch.where(inside, blocks[batch.request.clamp_min(0)], 0)
    if where.k_offset is not None:
        # Blocks behind a shard belong to the request too, and nobody says how many there are.
        limit = torch.full_like(limit, 1 << 31)
    ids = block_indices.to(torch.int64)
    wrong = ((ids < -1) | (ids >= limit[:, None])) & (ids != -1) & inside[:, None]
    if bool(wrong.any()):
        head, token, slot = wrong.nonzero()[0].tolist()
        last = int(limit[token]) - 1
        validate.refuse(
            "block_indices",
            f"id {int(ids[head, token, slot])} at [{head}, {token}, {slot}]",
            f"-1 or a block of the request, {f'0 to {last}' if last >= 0 else 'which has no keys'}",
        )
    ordered = ids.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0) & inside[:, None]
    if bool(twice.any()):
        head, token, slot = twice.nonzero()[0].tolist()
        validate.refuse(
            "block_indices", f"id {int(ordered[head, token, slot])} twice at [{head}, {token}]", "distinct ids in a row"
        )


@_of_values
def check_schedule(
    made: WindowSchedule | None, block_indices: Tensor, where: Where, block_size: int, keys: Tensor
) -> None:
    """A schedule has the edges of these ids, lengths and positions, in whichever order and slots."""
    if made is None:
        return
    num_kv_heads, total_q, topk = block_indices.shape
    batch = _batch(where, total_q, block_indices.device, keys)
    starts = None
    if edges.is_of_kernels(made):
        span = 0 if where.page_table is None else max(where.page_table.shape[1], 1) * block_size
        rows = [request.key_row + span * request.index for request in batch.requests]
        starts = torch.tensor([*rows, 0], device=block_indices.device)
    for head in range(num_kv_heads):
        # One head at a time: edges take much more room here than in the schedule.
        ours = slice(head, head + 1)
        part = WindowSchedule(made.edges[:, ours], made.tasks[:, ours], made.counts[:, ours], made.window)
        found, _ = edges.decoded(part, topk)
        wanted = edges.of_ids(block_indices[ours], batch, block_size, starts)
        selected = (edges.by_query(each, total_q, topk) for each in (found, wanted))
        wrong = torch.ne(*selected).any(-1)
        if bool(wrong.any()):
            token = int(wrong.nonzero()[0])
            validate.refuse(
                "schedule", f"one of other block_indices or lengths at [{head}, {token}]", "one made for these"
            )


@_of_values
def check_valid_blocks(name: str, value: Tensor, width: int) -> None:
    """Per-token counts of valid blocks lie within the score's columns."""
    if value.numel() and (int(value.min()) < 0 or int(value.max()) > width):
        validate.refuse(
            name, f"values from {int(value.min())} to {int(value.max())}", f"0 to the {width} columns of score"
        )


@_of_values
def check_score_width(
    width: int, where: Where, total_q: int, block_size: int, like: Tensor, keys: Tensor | None
) -> None:
    """A score has a column for every block of every request."""
    batch = _batch(where, total_q, like.device, keys)
    blocks = max((-(-request.key_end // block_size) for request in batch.requests), default=0)
    if width < blocks:
        validate.refuse(
            "score" if keys is None else "out", f"{width} columns", f"at least the {blocks} blocks of a request"
        )


@_of_values
def check_scales(
    where: Where, queries: Tensor, keys: Tensor, of_queries: Mapping[str, Any], of_keys: Mapping[str, Any]
) -> None:
    """Scales of the queries and keys in use are finite and not below 0; others may hold anything."""
    if all(scale is None for scale in (*of_queries.values(), *of_keys.values())):
        return
    batch = _batch(where, queries.shape[0], queries.device, keys)
    for name, scale in of_queries.items():
        if scale is not None:
            _check_scale(name, scale[batch.request >= 0] if scale.dim() == 2 else scale)
    for name, scale in of_keys.items():
        if scale is None:
            continue
        if scale.dim() < keys.dim() - 1:
            _check_scale(name, scale)
            continue
        of_rows = scale[..., None]
        if formats.is_packed(keys):
            # As many bytes for each row, whatever the layout: of four tokens together, or of one.
            of_rows = scale.to(torch.float32)
            if scale.dim() > keys.dim():
                of_rows = of_rows.transpose(-1, -2).flatten(-3, -2)
        for request in batch.requests:
            rows, present = key_rows(of_rows, request, 0, request.num_keys, where.page_table)
            used = rows if present is None else rows[present]
            # A group of 4-bit values may be NaN: that is what its scale is for.
            _check_scale(name, used.nan_to_num(nan=0.0) if formats.is_packed(keys) else used)


def _check_scale(name: str, scale: Tensor) -> None:
    wrong = scale[~((scale >= 0) & scale.isfinite())]
    if wrong.numel():
        validate.refuse(name, str(wrong.flatten()[0].item()), "finite numbers, not below 0")


def _batch(where: Where, total_q: int, device: torch.device, keys: Tensor | None) -> Batch:
    held: dict[str, Any] = {}
    if keys is not None:
        held = {"total_k": keys.shape[0]} if where.page_table is None else {"page_size": keys.shape[-2]}
    return read_batch(total_q, device, **held, **where.keywords())


def _cumulative(name: str, starts: Tensor, most: int | None, what: str) -> list[int]:
    """Lengths of a sorted array that starts at 0 and ends within ``most``."""
    values = starts.tolist()
    if values[0] != 0:
        validate.refuse(name, f"{values[0]} first", "0 first")
    for index in range(1, len(values)):
        if values[index] < values[index - 1]:
            validate.refuse(name, f"{values[index]} after {values[index - 1]}", "sorted values")
    if most is not None and values[-1] > most:
        validate.refuse(name, f"{values[-1]} last", f"at most the {most} {what} given")
    return [after - before for before, after in pairwise(values)]


def _check_pages(page_table: Tensor, lengths: list[int], keys: Tensor) -> None:
    num_pages, page = keys.shape[0], keys.shape[-2]
    for request, length in enumerate(lengths):
        used = page_table[request, : -(-length // page)].tolist()
        for slot, number in enumerate(used):
            if not 0 <= number < num_pages:
                validate.refuse(
                    "page_table", f"page {number} at [{request}, {slot}]", f"0 to {num_pages - 1} for a page in use"
                )
