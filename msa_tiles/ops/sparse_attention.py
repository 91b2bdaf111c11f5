"""sparse_attention: exact attention over each query's selected KV blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import contents, validate
from msa_tiles.call.attention import attention_tensors
from msa_tiles.call.schedule import Schedule, schedule_parts
from msa_tiles.call.where import ARGUMENTS, Where
from msa_tiles.launch import attention, lookup, shards, workspaces
from msa_tiles.library import autograd, registration, remember
from msa_tiles.ops.sparse_attention_backward import gradients, keep_for_backward

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
    q, k, v = autograd.autocast(q, k, v)
    where = Where(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    scales = (q_scale, k_scale, v_scale)
    call = None
    if out is not None and not check and schedule is None:
        further = (deterministic, attention.HYBRID, attention.FILL)
        call = signature(
            q, k, v, block_indices, where, block_size, softmax_scale, scales, workspace, out, lse, backend, further
        )
        launch = _SEEN.get(call)
        if launch is not None:
            return run_again(launch, q, k, v, block_indices, where, workspace, out, lse, return_lse)
    arguments, scratch = attention_arguments(
        q, k, v, block_indices, where, check, block_size, softmax_scale, scales, schedule, workspace, backend
    )
    if autograd.records(q, k, v):
        autograd.no_buffers(out=out, lse=lse, workspace=scratch)
    repeats = autograd.deterministic(deterministic)
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
    return remember.signature(tensors, scalars)


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
    registration.written((out, lse, scratch))
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
    validate.int32("block_indices", block_indices, [k.shape[1], total_q, None], "[Hkv, T, k]", q, "q")
    for name, factor in zip(("q_scale", "k_scale", "v_scale"), scales, strict=True):
        validate.scale(name, factor)
    validate.backend(backend, q.device)
    where.validate(total_q, q, "q", k)
    if check:
        contents.check_where(where, total_q, k)
        shards.check_offsets(where, block_size, backend, q.device)
        contents.check_block_indices(block_indices, where, block_size, k)
    parts = schedule_parts(schedule, block_indices, block_size, where, k.shape[0])
    scratch, scratch_bytes = _workspace(workspace, q)
    scale = validate.softmax_scale(softmax_scale, head_dim)
    arguments = (q, k, v, block_indices, *where.arguments(), block_size, scale, *parts, scratch_bytes, backend)
    return arguments, scratch


def run(
    operator: registration.OperatorPair,
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
        validate.destination("out", out, list(q.shape), "[T, Hq, D]", q.dtype, q, "q")
    if lse is None:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    else:
        validate.destination("lse", lse, list(q.shape[:2]), "[T, Hq]", torch.float32, q, "q")
    return out, lse


def _workspace(value: Any, q: Tensor) -> tuple[Tensor | None, int]:
    """The caller's scratch tensor, if any, and how many bytes partial results may take."""
    if value is None:
        return None, workspaces.WORKSPACE_BYTES
    if isinstance(value, Tensor):
        validate.scratch("workspace", value, q, "q")
        return value, value.numel()
    validate.integer("workspace", value, 1)
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
    if lookup.runs_reference(backend, q.device):
        return None
    facts = lookup.call_facts(
        op,
        where,
        q.device,
        lookup.precision(query=q, key_value=k),
        {
            "head_dim": q.shape[2],
            "block_size": block_size,
            "group": q.shape[1] // k.shape[1],
            "pages_per_block": lookup.pages_per_block(where, k, block_size),
            **own_dims,
        },
        (q, k, v),
        lookup.broken_rules("sparse_attention", topk=block_indices.shape[2])
        + lookup.oversized_table(where, block_size),
        queries=q.shape[0],
        heads=q.shape[1],
    )
    stored = k.shape[0] if where.page_table is None else where.page_table.shape[1] * k.shape[2]
    longest_k = stored if where.max_seqlen_k is None else min(stored, where.max_seqlen_k)
    if 0 in (q.numel(), k.numel(), block_indices.numel(), where.num_requests, longest_k):
        lookup.find_kernel(facts, backend)
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
        workspaces.check_alignment("workspace", workspace)
    schedule = None if edges is None else (edges, tasks, counts)
    if lookup.runs_reference(backend, q.device):
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
    return attention.prepare(*arguments, **sizes)


def _write_forward(*arguments: Any) -> None:
    """`write_attention` as kernels and the reference take it: which gradients are wanted is no matter of theirs."""
    _WRITE(*arguments[:DETERMINISTIC], *arguments[DETERMINISTIC + 1 :])


SCHEMA = (
    f"Tensor q, Tensor k, Tensor v, Tensor block_indices, {ARGUMENTS}, SymInt block_size, float softmax_scale, "
    "Tensor? edges, Tensor? tasks, Tensor? counts, SymInt window, SymInt workspace_bytes, str backend"
)
# Where `deterministic` stands among the arguments of the operator, in front of the backend.
DETERMINISTIC = 19
_SEEN: remember.Remembered[Launch] = remember.Remembered()
_PREPARE = functools.partial(prepare_attention, "sparse_attention", {}, _prepare)
_WRITE = shards.attention(functools.partial(write_attention, _PREPARE))
_OPERATOR = registration.define(
    "sparse_attention",
    SCHEMA.replace("str backend", "bool deterministic, str backend"),
    ("out", "lse"),
    allocate_attention,
    _write_forward,
    scratch="workspace",
)
autograd.register(_OPERATOR, keep_for_backward, gradients)
