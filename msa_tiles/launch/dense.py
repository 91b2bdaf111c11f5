"""Dense attention on CUDA tensors, by libraries that have it: FlashAttention-4, or the FlashAttention in torch.

Both take packed sequences with their causal mask aligned to the last query and the last key, as ours is. They differ
from our contract in the layout of the LSE, and in what they leave unwritten; `forward` and `backward` mend both.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from msa_tiles.call import backends
from msa_tiles.call.dense import DenseCall, DenseGradients
from msa_tiles.launch import places
from msa_tiles.runtime import NoKernelError, facts

NAMES = ("fa4", "torch")


class Sequences(NamedTuple):
    """Where the sequences are, and how they attend."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    deterministic: bool


def run(call: DenseCall, out: Tensor, lse: Tensor) -> None:
    """Fill out and lse of a call."""
    if backends.rehearsed():  # other libraries do not run on tensors without values
        return
    library = choose(call.q, call.backend)
    if call.is_empty:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    results = forward(library, call.q, call.k, call.v, _sequences(call))
    out.copy_(results[0])
    lse.copy_(results[1])


def run_backward(given: DenseGradients, *gradients: Tensor) -> None:
    """Fill dq, dk and dv of a call."""
    dout, call, out, lse = given
    if call.is_empty:
        for gradient in gradients:
            gradient.zero_()
        return
    library = choose(call.q, call.backend)
    results = backward(library, dout, call.q, call.k, call.v, out, lse, _sequences(call))
    for destination, result in zip(gradients, results, strict=True):
        destination.copy_(result)


def _sequences(call: DenseCall) -> Sequences:
    starts_q, starts_k = call.cu_seqlens_q, call.cu_seqlens_k
    if starts_q is None:
        starts_q = places.one_sequence(call.q.shape[0], call.device)
    if starts_k is None:
        starts_k = places.one_sequence(call.k.shape[0], call.device)
    return Sequences(
        starts_q, starts_k, call.max_seqlen_q, call.max_seqlen_k, call.softmax_scale, call.deterministic
    )  # fmt: skip


def choose(q: Tensor, backend: str) -> str:
    """The library that serves a call on q [T, Hq, D]; the faster one first.

    Raises NoKernelError with the reason of each.
    """
    reasons = []
    for name in NAMES:
        reason = f"backend={backend!r} was asked for" if backend not in ("auto", name) else _refusal(name, q)
        if reason is None:
            return name
        reasons.append(f"{name}: {reason}")
    _refuse(q, reasons)


def _refuse(q: Tensor, reasons: list[str]) -> NoReturn:
    head = f"dense_attention: no library serves this call ({q.device}, {q.dtype}, head_dim={q.shape[2]}):"
    raise NoKernelError(head + "".join(f"\n  {reason}" for reason in reasons))


def _refusal(name: str, q: Tensor) -> str | None:
    """Why a library does not serve these queries, if it does not."""
    if q.dtype != torch.bfloat16:
        return f"it is called with bfloat16, the call is {q.dtype}"
    if name == "torch":
        missing = None if torch.backends.cuda.is_flash_attention_available() else "torch was built without it"
        least, widest = (8, 0), 256
    else:
        missing = None if isinstance(_fa4(), tuple) else str(_fa4())
        least, widest = (9, 0), 128
    if missing is not None:
        return missing
    if q.shape[2] > widest or q.shape[2] % 8:
        return f"head_dim is {q.shape[2]}, wanted a multiple of 8 up to {widest}"
    capability = facts.capability(q.device)
    if capability < least:
        return f"it needs capability {least[0]}.{least[1]}, the device has {capability[0]}.{capability[1]}"
    return None


@functools.lru_cache(maxsize=1)
def _fa4() -> tuple[Any, Any] | str:
    """FlashAttention-4's forward and backward, or why they are not here."""
    try:
        module = importlib.import_module("flash_attn.cute.interface")
        return module._flash_attn_fwd, module._flash_attn_bwd
    except Exception as error:  # a package that does not fit the others installed raises anything while it is imported
        return f"flash_attn.cute: {error}"


def _aten() -> Any:
    return torch.ops.aten


def forward(name: str, q: Tensor, k: Tensor, v: Tensor, call: Sequences) -> tuple[Tensor, Tensor]:
    """out [T, Hq, D] and lse float32 [T, Hq]; 0 and -inf where nothing is visible, past the last sequence too."""
    if name == "fa4":
        functions = _fa4()
        assert not isinstance(functions, str)
        out, lse = functions[0](q, k, v, causal=True, return_lse=True, **_fa4_keywords(call))[:2]
    else:
        out, lse, *_ = _aten()._flash_attention_forward(
            q, k, v, call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k, 0.0, True, False,
            scale=call.softmax_scale,
        )  # fmt: skip
    outside = _past_the_end(q, call.cu_seqlens_q)
    # torch writes +inf for a row without keys.
    lse = lse.T.masked_fill(torch.inf == lse.T, -torch.inf).masked_fill_(outside[:, None], -torch.inf)
    return out.masked_fill_((lse == -torch.inf)[..., None], 0.0), lse.contiguous()


def backward(
    name: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Sequences
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; 0 where no sequence is."""
    empty = lse == -torch.inf
    dout = dout.masked_fill(empty[..., None], 0.0).contiguous()
    if name == "fa4":
        functions = _fa4()
        assert not isinstance(functions, str)
        dq, dk, dv = functions[1](
            q, k, v, out, dout, lse.T.contiguous(), causal=True, deterministic=call.deterministic, **_fa4_keywords(call)
        )[:3]
    else:
        lse = lse.masked_fill(empty, torch.inf).T.contiguous()
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        with _deterministic(call.deterministic):
            dq, dk, dv = _aten()._flash_attention_backward(
                dout, q, k, v, out, lse, call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k,
                0.0, True, *no_dropout, scale=call.softmax_scale,
            )  # fmt: skip
    dq = dq.masked_fill_(empty[..., None], 0.0)
    outside = _past_the_end(k, call.cu_seqlens_k)[:, None, None]
    return dq, dk.masked_fill_(outside, 0.0), dv.masked_fill_(outside, 0.0)


def _fa4_keywords(call: Sequences) -> dict[str, Any]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale")
    return {name: getattr(call, name) for name in names}


def _past_the_end(rows: Tensor, starts: Tensor) -> Tensor:
    """Which rows belong to no sequence, bool [T]: libraries do not write them."""
    return torch.arange(rows.shape[0], device=rows.device) >= starts[-1]


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """torch's FlashAttention knows no argument for it, only the global switch."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
