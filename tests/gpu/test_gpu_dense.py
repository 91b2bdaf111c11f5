"""dense_attention on CUDA by each library that is installed, against the reference; and what CUDA refuses."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.launch import dense
from msa_tiles.runtime import NoKernelError

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LENGTHS_Q, LENGTHS_K = [129, 0, 300, 5, 64], [129, 70, 300, 700, 0]
BEHIND = 3  # rows past the last sequence, in queries and keys


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32, device=DEVICE)


def inputs(total_q: int, total_k: int, heads: int = 16, kv_heads: int = 2, dim: int = 128) -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = ((total_q, heads, dim), (total_k, kv_heads, dim), (total_k, kv_heads, dim), (total_q, heads, dim))
    return [torch.randn(shape, generator=generator, device=DEVICE).to(torch.bfloat16) for shape in shapes]


def skip_without(library: str) -> None:
    q = torch.empty(1, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    if (reason := dense._refusal(library, q)) is not None:
        pytest.skip(reason)


def gradients(dout: Tensor, *tensors: Tensor, **options) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out, lse = ops.dense_attention(*leaves, return_lse=True, **options)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("library", dense.NAMES)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "one"])
@pytest.mark.parametrize("dim", [128, 64])
def test_a_library_gives_what_the_reference_gives(library, packed, dim):
    """Empty sequences, queries without keys, keys without queries, rows behind: 0 and -inf, and close elsewhere."""
    skip_without(library)
    where = {}
    total_q, total_k = (513, 700)
    if packed:
        where = {"cu_seqlens_q": starts(LENGTHS_Q), "cu_seqlens_k": starts(LENGTHS_K)}
        where |= {"max_seqlen_q": max(LENGTHS_Q), "max_seqlen_k": max(LENGTHS_K)}
        total_q, total_k = sum(LENGTHS_Q) + BEHIND, sum(LENGTHS_K) + BEHIND
    q, k, v, dout = inputs(total_q, total_k, dim=dim)
    wide = [tensor.float() for tensor in (q, k, v)]
    short = {name: value for name, value in where.items() if not name.startswith("max_")}
    out, lse = reference.dense_attention(*wide, **short)
    wanted = [out, lse, *reference.dense_attention_backward(dout.float(), *wide, out, lse, **short)]
    found = gradients(dout, q, k, v, backend=library, **where)
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        assert torch.equal(got.isinf(), want.isinf()), name
        finite = want.isfinite()
        error = (got[finite].float() - want[finite]).abs().max()
        assert error <= 0.02 * max(1.0, float(want[finite].abs().max())), (name, error)
    # What sees nothing, and what nobody sees, is exactly 0.
    blind, unseen = wanted[1][:, 0] == -torch.inf, (wanted[4] == 0).flatten(1).all(1)
    assert not found[0][blind].any() and not found[2][blind].any()
    assert not found[3][unseen].any() and not found[4][unseen].any()
    assert bool(unseen.any()) == bool(blind.any()) == packed


@pytest.mark.parametrize("library", dense.NAMES)
def test_deterministic_gradients_repeat(library):
    skip_without(library)
    q, k, v, dout = inputs(2000, 2000)
    first, *others = (gradients(dout, q, k, v, backend=library, deterministic=True) for _ in range(3))
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    assert not torch.are_deterministic_algorithms_enabled()


def test_autocast_and_compile():
    q, k, v, dout = (tensor.float() for tensor in inputs(300, 300))

    def attend(q, k, v):
        with torch.autocast(DEVICE, torch.bfloat16):
            return ops.dense_attention(q, k, v, return_lse=True)[0]

    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    wanted = torch.autograd.grad(attend(*leaves), leaves, dout.to(torch.bfloat16))
    compiled = torch.compile(attend, fullgraph=True)
    found = torch.autograd.grad(compiled(*leaves), leaves, dout.to(torch.bfloat16))
    assert all(part.dtype == torch.float32 for part in found)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_float32_is_refused_with_the_reasons():
    q, k, v, _ = (tensor.float() for tensor in inputs(10, 10))
    with pytest.raises(NoKernelError, match=r"torch: it is called with bfloat16, the call is torch\.float32"):
        ops.dense_attention(q, k, v)
    out = ops.dense_attention(q, k, v, backend="reference")
    assert out.is_cuda and out.dtype == torch.float32
