"""dense_attention: causal attention over the whole prefix, for warm-up and for a model's dense layers."""

from __future__ import annotations

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import backends, contents, validate
from msa_tiles.call.attention import check_tensors
from msa_tiles.call.dense import DenseCall, DenseGradients
from msa_tiles.call.where import Where
from msa_tiles.launch import dense
from msa_tiles.library import autograd, registration

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
    max_seqlen_q, max_seqlen_k = validate.plain(max_seqlen_q), validate.plain(max_seqlen_k)
    where = Where(cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    check_tensors(q, k, v, where, 1)
    validate.one_of("backend", backend, BACKENDS)
    if not backends.has_kernels(q.device) and backend in dense.NAMES:
        validate.refuse("backend", f"{backend!r} for tensors on {q.device}", "'auto' or 'reference'")
    where.validate(q.shape[0], q, "q", k)
    validate.boolean("return_lse", return_lse)
    if validate.boolean("check", check):
        contents.check_where(where, q.shape[0], k)
    call = DenseCall(
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
    out, lse = _OPERATOR.functional(call)
    return (out, lse) if return_lse else out


def _allocate(call: DenseCall) -> tuple[Tensor, ...]:
    return call.q.new_empty(call.q.shape), call.q.new_empty(call.q.shape[:2], dtype=torch.float32)


def _by_reference(call: DenseCall, out: Tensor, lse: Tensor) -> None:
    starts = {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
    results = reference.dense_attention(call.q, call.k, call.v, softmax_scale=call.softmax_scale, **starts)
    out.copy_(results[0])
    lse.copy_(results[1])


def _allocate_gradients(given: DenseGradients) -> tuple[Tensor, ...]:
    return tuple(part.new_empty(part.shape) for part in given.call[:3])


def _gradients_by_reference(given: DenseGradients, *gradients: Tensor) -> None:
    dout, call, out, lse = given
    starts = {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
    results = reference.dense_attention_backward(
        dout, call.q, call.k, call.v, out, lse, softmax_scale=call.softmax_scale, **starts
    )
    for destination, result in zip(gradients, results, strict=True):
        destination.copy_(result)


def _backward(
    call: DenseCall, outputs: tuple[Tensor, ...], dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, ...]:
    if dout is None:
        return ()
    return _GRADIENTS.functional(DenseGradients(autograd.unit_last_stride(dout), call, *outputs))


_OPERATOR = registration.define(
    "dense_attention",
    DenseCall,
    ("out", "lse"),
    allocate=_allocate,
    reference=_by_reference,
    kernels=dense.run,
)
_GRADIENTS = registration.define(
    "dense_attention_backward",
    DenseGradients,
    ("dq", "dk", "dv"),
    allocate=_allocate_gradients,
    reference=_gradients_by_reference,
    kernels=dense.run_backward,
)
autograd.register(_OPERATOR, _backward, constants=(1,))
