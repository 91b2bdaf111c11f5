"""dense_attention: causal attention over the whole prefix, for warm-up and for a model's dense layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import contents, validate
from msa_tiles.call.attention import attention_tensors
from msa_tiles.call.where import Where
from msa_tiles.launch import dense, lookup, places
from msa_tiles.library import autograd, registration
from msa_tiles.ops.sparse_attention import allocate_attention

BACKENDS = ("auto", *dense.NAMES, "reference")


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    check: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax over everything that a query may see of (<q, k> * softmax_scale)``, times v.

    ``q`` [T, Hq, D]; ``k``, ``v`` [Tk, Hkv, D]; one dtype. Sequences are packed as everywhere here: query i of one sees
    the keys up to ``len_k - len_q + i``. Returns out [T, Hq, D] in q's dtype, with ``return_lse`` also lse float32
    [T, Hq] (natural log). A row with nothing visible gives out 0 and lse -inf.

    Not written here but borrowed: on CUDA from FlashAttention-4 (``fa4``, the package flash-attn-4) where it is
    installed, else from torch's FlashAttention (``torch``), both in bfloat16; CPU tensors run on the reference. The
    bounds ``max_seqlen_*`` size the libraries' grids: give them where there are several sequences. Differentiable in
    q, k and v through ``out``, once; ``lse`` is a constant to autograd. ``deterministic`` gradients repeat bit for bit;
    None follows ``torch.use_deterministic_algorithms``. Under ``torch.autocast`` q, k and v are cast to its dtype.

    Raises `msa_tiles.runtime.NoKernelError` with the reason of each library where none serves the call.
    """
    q, k, v = autograd.autocast(q, k, v)
    where = Where(cu_seqlens_q, cu_seqlens_k, None, None, max_seqlen_q, max_seqlen_k, None, None)
    attention_tensors(q, k, v, where, 1)
    validate.one_of("backend", backend, BACKENDS)
    if q.device.type != "cuda" and backend in dense.NAMES:
        validate.refuse("backend", f"{backend!r} for tensors on {q.device}", "'auto' or 'reference'")
    where.validate(q.shape[0], q, "q", k)
    if check:
        contents.check_where(where, q.shape[0], k)
    out, lse = _OPERATOR.functional(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        q.shape[0] if max_seqlen_q is None else max_seqlen_q,
        k.shape[0] if max_seqlen_k is None else max_seqlen_k,
        validate.softmax_scale(softmax_scale, q.shape[2]),
        autograd.deterministic(deterministic),
        backend,
    )
    return (out, lse) if return_lse else out


def _write(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
    *place, scale, deterministic, backend, out, lse = rest
    if lookup.runs_reference(backend, q.device):
        results = reference.dense_attention(q, k, v, softmax_scale=scale, **_starts(place))
    elif _is_empty(q, k, place):
        dense.choose(q, backend)
        out.zero_()
        lse.fill_(-torch.inf)
        return
    else:
        library = dense.choose(q, backend)
        results = dense.forward(library, q, k, v, _call(q, k, place, scale, deterministic))
    out.copy_(results[0])
    lse.copy_(results[1])


def _allocate_gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _write_gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> None:
    *place, scale, deterministic, backend, dq, dk, dv = rest
    results: tuple[Tensor, ...]
    if lookup.runs_reference(backend, q.device):
        results = reference.dense_attention_backward(dout, q, k, v, out, lse, softmax_scale=scale, **_starts(place))
    elif _is_empty(q, k, place):
        results = tuple(torch.zeros_like(part) for part in (q, k, v))
    else:
        library = dense.choose(q, backend)
        call = _call(q, k, place, scale, deterministic)
        results = dense.backward(library, dout, q, k, v, out, lse, call)
    for destination, result in zip((dq, dk, dv), results, strict=True):
        destination.copy_(result)


def _starts(place: list[Any]) -> dict[str, Tensor | None]:
    return {"cu_seqlens_q": place[0], "cu_seqlens_k": place[1]}


def _is_empty(q: Tensor, k: Tensor, place: list[Any]) -> bool:
    return q.numel() == 0 or k.numel() == 0 or (place[0] is not None and place[0].shape[0] == 1)


def _call(q: Tensor, k: Tensor, place: list[Any], scale: float, deterministic: bool) -> dense.Call:
    starts_q, starts_k, longest_q, longest_k = place
    if starts_q is None:
        starts_q = places.one_sequence(q.shape[0], q.device)
    if starts_k is None:
        starts_k = places.one_sequence(k.shape[0], k.device)
    return dense.Call(starts_q, starts_k, longest_q, longest_k, scale, deterministic)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts_q, starts_k, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, starts_q, starts_k)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, ...]:
    q, k, v, out, lse, *starts = ctx.saved_tensors
    if dout is None:
        return ()
    return _GRADIENTS.functional(autograd.unit_last_stride(dout), q, k, v, out, lse, *starts, *ctx.rest)


_REST = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, "
    "bool deterministic, str backend"
)
_OPERATOR = registration.define(
    "dense_attention", f"Tensor q, Tensor k, Tensor v, {_REST}", ("out", "lse"), allocate_attention, _write
)
_GRADIENTS = registration.define(
    "dense_attention_backward",
    f"Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_REST}",
    ("dq", "dk", "dv"),
    _allocate_gradients,
    _write_gradients,
)
autograd.register(_OPERATOR, _setup, _backward)
