"""sparse_attention: exact attention over each query's selected KV blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.ops import (
    _attention_kernels,
    _contents,
    _dispatch,
    _gradients,
    _library,
    _remember,
    _shard,
    _training,
    _validate,
    _where,
)
from msa_tiles.ops._where import Where
from msa_tiles.ops.schedule import Schedule

# Fills out and lse of a call: (q, k, v, block_indices, where, schedule, workspace, out, lse).
Launch = Callable[..., None]
Prepare = Callable[..., Launch | None]


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_positions: Tensor | None = None,
    k_offset: Tensor | None = None,
    check: bool = False,
    block_size: int = 128,
    softmax_scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    schedule: Schedule | None = None,
    workspace: int | Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax over the visible tokens of the selected blocks of (<q, k> * softmax_scale)``, times v.

    ``q`` [T, Hq, D]; ``k``, ``v`` [Tk, Hkv, D], or [pages, Hkv, page, D] with ``page_table``; one dtype.
    ``block_indices`` int32 [Hkv, T, k]: blocks of the query's own request, distinct, in any order, -1 anywhere; an id
    without a visible token is absent. Returns out [T, Hq, D] in q's dtype, with ``return_lse`` also lse float32 [T, Hq]
    (natural log). A row with nothing visible gives out 0 and lse -inf.

    ``schedule`` is `build_schedule`'s answer for the same ids and lengths. ``workspace`` bounds the memory of partial
    results: bytes, or a uint8 tensor to use (default: 1 GiB). ``out`` and ``lse`` are the caller's buffers.

    Differentiable in q, k and v through both results, on flat keys and without the caller's buffers (see
    `sparse_attention_backward`); once. ``deterministic`` is about these gradients: True repeats them bit for bit, None
    follows ``torch.use_deterministic_algorithms``. Under ``torch.autocast`` q, k and v are cast to its dtype.
    """
    q, k, v = _training.autocast(q, k, v)
    where = Where(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    scales = (q_scale, k_scale, v_scale)
    call = None
    if out is not None and not check and schedule is None:
        further = (deterministic, _attention_kernels.HYBRID, _attention_kernels.FILL)
        call = signature(
            q, k, v, block_indices, where, block_size, softmax_scale, scales, workspace, out, lse, backend, further
        )
        launch = _SEEN.get(call)
        if launch is not None:
            return run_again(launch, q, k, v, block_indices, where, workspace, out, lse, return_lse)
    arguments, scratch = attention_arguments(
        q, k, v, block_indices, where, check, block_size, softmax_scale, scales, schedule, workspace, backend
    )
    if _training.records(q, k, v):
        _training.no_buffers(out=out, lse=lse, workspace=scratch)
    repeats = _training.deterministic(deterministic)
    result = run(_OPERATOR, (*arguments[:-1], repeats, backend), scratch, q, out, lse, return_lse)
    if call is not None:
        _SEEN.keep(call, _PREPARE(*arguments, out))
    return result


def signature(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    where: Where,
    block_size: int,
    softmax_scale: float | None,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
    workspace: int | Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
    backend: str,
    further: tuple[Hashable, ...] = (),
) -> Hashable | None:
    """What a call of sparse attention is known by; None for one that is not remembered."""
    if where.k_offset is not None:
        return None
    scratch, most = (workspace, None) if isinstance(workspace, Tensor) else (None, workspace)
    tensors = (q, k, v, block_indices, *where.tensors(), *scales, scratch, out, lse)
    scalars = (where.max_seqlen_q, where.max_seqlen_k, block_size, softmax_scale, most, backend, *further)
    return _remember.signature(tensors, scalars)


def run_again(
    launch: Launch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    where: Where,
    workspace: int | Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Launch what was remembered of a call."""
    scratch = workspace if isinstance(workspace, Tensor) else None
    if lse is None:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    launch(q, k, v, block_indices, where, None, scratch, out, lse)
    _library.written((out, lse, scratch))
    return (out, lse) if return_lse else out


def attention_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    where: Where,
    check: bool,
    block_size: int,
    softmax_scale: float | None,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
    schedule: Schedule | None,
    workspace: int | Tensor | None,
    backend: str,
) -> tuple[tuple[Any, ...], Tensor | None]:
    """Validate a call of sparse attention; the arguments of `SCHEMA`, and the caller's scratch tensor, if any."""
    attention_tensors(q, k, v, where, block_size)
    total_q, _, head_dim = q.shape
    _validate.int32("block_indices", block_indices, [k.shape[1], total_q, None], "[Hkv, T, k]", q, "q")
    for name, factor in zip(("q_scale", "k_scale", "v_scale"), scales, strict=True):
        _validate.scale(name, factor)
    _validate.backend(backend, q.device)
    where.validate(total_q, q, "q", k, check)
    if check:
        _shard.check_offsets(where, block_size, backend, q.device)
        _contents.check_block_indices(block_indices, where, block_size, k)
    parts: tuple[Any, ...] = (None, None, None, 0)
    if schedule is not None:
        if not isinstance(schedule, Schedule):
            _validate.refuse_type("schedule", type(schedule).__name__, "a Schedule of build_schedule, or None")
        schedule.validate(block_indices, block_size, where, k.shape[0])
        parts = (schedule.edges, schedule.tasks, schedule.counts, schedule.window)
    scratch, scratch_bytes = _workspace(workspace, q)
    scale = _validate.softmax_scale(softmax_scale, head_dim)
    arguments = (q, k, v, block_indices, *where.arguments(), block_size, scale, *parts, scratch_bytes, backend)
    return arguments, scratch


def attention_tensors(q: Tensor, k: Tensor, v: Tensor, where: Where, block_size: int) -> None:
    """Check q, k and v, their head ratio and the page size."""
    _, num_q_heads, head_dim = _validate.floating("q", q, "[T, Hq, D]").shape
    if head_dim == 0:
        _validate.refuse("q", "head dim 0", "at least 1")
    keys_dims = "[Tk, Hkv, D]" if where.page_table is None else "[pages, Hkv, page, D]"
    for name, value in (("k", k), ("v", v)):
        _validate.floating(name, value, keys_dims, q, "q")
        if value.shape[-1] != head_dim:
            _validate.refuse(name, f"head dim {value.shape[-1]}", f"{head_dim} like q")
    if v.shape != k.shape:
        _validate.refuse("v", f"shape {_validate.shape_text(v.shape)}", f"{_validate.shape_text(k.shape)} like k")
    num_kv_heads = k.shape[1]
    if num_kv_heads == 0 or num_q_heads % num_kv_heads != 0:
        _validate.refuse("q", f"{num_q_heads} heads", f"a multiple of the {num_kv_heads} KV heads of k")
    _validate.integer("block_size", block_size, 1)
    if where.page_table is not None:
        _where.page_size("k", k, block_size)


def same_rows(idx_k: Tensor, k: Tensor, paged: bool) -> None:
    """Check that the index keys are of the tokens that k holds: positions are counted from their number."""
    _validate.floating("idx_k", idx_k, "[pages, page, Di]" if paged else "[Tk, Di]", k, "k")
    if idx_k.shape[:-1] != ((k.shape[0], k.shape[2]) if paged else k.shape[:1]):
        rows = "pages and page size" if paged else "tokens"
        _validate.refuse("idx_k", f"shape {_validate.shape_text(idx_k.shape)}", f"the {rows} of k")


def run(
    operator: _library.OperatorPair,
    arguments: tuple[Any, ...],
    scratch: Tensor | None,
    q: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Call the operator, into the caller's buffers where there are some."""
    if out is None and lse is None and scratch is None:
        out, lse = operator.functional(*arguments)
    else:
        out, lse = destinations(q, out, lse)
        operator.mutating(*arguments, out, lse, scratch)
    return (out, lse) if return_lse else out


def destinations(q: Tensor, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """The caller's buffers, checked, and new ones in the place of those that were not given."""
    if out is None:
        out = q.new_empty(q.shape)
    else:
        _validate.destination("out", out, list(q.shape), "[T, Hq, D]", q.dtype, q, "q")
    if lse is None:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    else:
        _validate.destination("lse", lse, list(q.shape[:2]), "[T, Hq]", torch.float32, q, "q")
    return out, lse


def _workspace(value: Any, q: Tensor) -> tuple[Tensor | None, int]:
    """The caller's scratch tensor, if any, and how many bytes partial results may take."""
    if value is None:
        return None, _dispatch.WORKSPACE_BYTES
    if isinstance(value, Tensor):
        _validate.scratch("workspace", value, q, "q")
        return value, value.numel()
    _validate.integer("workspace", value, 1)
    return None, value


def allocate_attention(q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def prepare_attention(
    op: str,
    own_dims: Mapping[str, int],
    prepare: Callable[..., Launch],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *rest: Any,
) -> Launch | None:
    """What runs the kernels of a validated call, given as the arguments of `SCHEMA` and ``out``.

    ``own_dims`` are compile-time dims that only this operator's kernels have. None where kernels have nothing to do: on
    the reference, and where a size is 0, though a kernel must be there for that call too.
    """
    where = Where(*rest[:8])
    block_size, scale, edges, _, _, window, workspace_bytes, backend, out = rest[8:]
    if _dispatch.runs_reference(backend, q.device):
        return None
    facts = _dispatch.call_facts(
        op,
        where,
        q.device,
        _dispatch.PRECISIONS[q.dtype],
        {
            "head_dim": q.shape[2],
            "block_size": block_size,
            "group": q.shape[1] // k.shape[1],
            "pages_per_block": _dispatch.pages_per_block(where, k, block_size),
            **own_dims,
        },
        (q, k, v),
        _dispatch.broken_rules("sparse_attention", topk=block_indices.shape[2])
        + _dispatch.oversized_table(where, block_size),
        queries=q.shape[0],
    )
    stored = k.shape[0] if where.page_table is None else where.page_table.shape[1] * k.shape[2]
    longest_k = stored if where.max_seqlen_k is None else min(stored, where.max_seqlen_k)
    if 0 in (q.numel(), k.numel(), block_indices.numel(), where.num_requests, longest_k):
        _dispatch.find_kernel(facts, backend)
        return None
    return prepare(
        facts,
        backend,
        q,
        block_indices,
        num_requests=where.num_requests,
        block_size=block_size,
        softmax_scale=scale,
        longest_k=longest_k,
        schedule_window=None if edges is None else window,
        workspace_bytes=workspace_bytes,
        out=out,
    )


def write_attention(prepare: Prepare, q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, *rest: Any) -> None:
    """Fill ``out`` and ``lse`` of the arguments: by the reference, or by what ``prepare`` finds for the call."""
    arguments, (out, lse, *scratch) = rest[:16], rest[16:]
    where = Where(*arguments[:8])
    block_size, scale, edges, tasks, counts, *_, backend = arguments[8:]
    workspace = scratch[0] if scratch else None
    if workspace is not None:
        _dispatch.check_alignment("workspace", workspace)
    schedule = None if edges is None else (edges, tasks, counts)
    if _dispatch.runs_reference(backend, q.device):
        # A schedule of the kernels is not the reference's: on their device it makes its own.
        made = schedule if q.device.type != "cuda" else None
        result, result_lse = reference.sparse_attention(
            q, k, v, block_indices, block_size=block_size, softmax_scale=scale, schedule=made, **where.keywords()
        )
        out.copy_(result)
        lse.copy_(result_lse)
        return
    launch = prepare(q, k, v, block_indices, *arguments, out)
    if launch is None:
        out.zero_()
        lse.fill_(-torch.inf)
    else:
        launch(q, k, v, block_indices, where, schedule, workspace, out, lse)


def _prepare(*arguments: Any, **sizes: Any) -> Launch:
    return _dispatch.attention_kernels().prepare(*arguments, **sizes)


def _write_forward(*arguments: Any) -> None:
    """`write_attention` as kernels and the reference take it: which gradients are wanted is no matter of theirs."""
    _WRITE(*arguments[:DETERMINISTIC], *arguments[DETERMINISTIC + 1 :])


SCHEMA = (
    f"Tensor q, Tensor k, Tensor v, Tensor block_indices, {_where.ARGUMENTS}, SymInt block_size, float softmax_scale, "
    "Tensor? edges, Tensor? tasks, Tensor? counts, SymInt window, SymInt workspace_bytes, str backend"
)
# Where `deterministic` stands among the arguments of the operator, in front of the backend.
DETERMINISTIC = 19
_SEEN: _remember.Remembered[Launch] = _remember.Remembered()
_PREPARE = functools.partial(prepare_attention, "sparse_attention", {}, _prepare)
_WRITE = _shard.attention(functools.partial(write_attention, _PREPARE))
_OPERATOR = _library.define(
    "sparse_attention",
    SCHEMA.replace("str backend", "bool deterministic, str backend"),
    ("out", "lse"),
    allocate_attention,
    _write_forward,
    scratch="workspace",
)
_training.register(_OPERATOR, _gradients.setup, _gradients.backward)
