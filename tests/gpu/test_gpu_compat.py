"""Drop-ins of packages that are called by name, on a GPU: the same calls on the CPU, in float32, are what is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compat.packed_batches import BLOCK, Packed
from torch import Tensor

from msa_tiles.compat import flash_msa, flashinfer, fmha_sm100

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
HEADS, KV_HEADS, DIM, TOPK = 16, 2, 128, 4
LENGTHS_Q, LENGTHS_K = (3, 0, 140, 1, 2), (1300, 50, 890, 0, 129)
FP8 = torch.float8_e4m3fn
# Tolerances of the operators' specs: outputs of size 1, in bfloat16; gradients of keys are sums.
OUT, LSE, GRADIENT = 0.03, 0.005, 0.1


class Here:
    """Arguments on a device, of a dtype; the table of pages is as wide as the longest request."""

    def __init__(self, batch: Packed, paged: bool, k: Tensor, v: Tensor, idx_k: Tensor) -> None:
        self.where: dict[str, Tensor] = {"cu_seqlens_k": batch.cu_k}
        self.k, self.v, self.idx_k = k, v, idx_k
        if paged:
            self.k, self.v = batch.pages(k, 2 * DIM), batch.pages(v, 2 * DIM)
            self.idx_k = batch.pages(idx_k, DIM)
            self.where = {"page_table": batch.page_table, "seqused_k": batch.used}


def everywhere(call: Callable[..., Any], exact: torch.dtype, *tensors: Tensor, **named: Any) -> tuple[Any, Any]:
    """A call on the GPU, and on the CPU with floating tensors in ``exact`` (e4m3 stays: its scores are exact)."""

    def moved(value: Any) -> Any:
        return value.to(DEVICE) if isinstance(value, Tensor) else value

    def widened(value: Any) -> Any:
        return value.to(exact) if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value

    found = call(*map(moved, tensors), **{name: moved(value) for name, value in named.items()})
    wanted = call(*map(widened, tensors), **{name: widened(value) for name, value in named.items()})
    return found, wanted


def close(found: Tensor, wanted: Tensor, atol: float) -> None:
    torch.testing.assert_close(found.float().cpu(), wanted.float(), atol=atol, rtol=0.02, equal_nan=False)


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "flat"])
@pytest.mark.parametrize("stored", [torch.bfloat16, FP8])
def test_flashinfer(paged: bool, stored: torch.dtype) -> None:
    """Whole numbers in the indexer, so the same blocks; then prefill, causal and not."""
    batch = Packed(f"gpu flashinfer {paged} {stored}", LENGTHS_Q, LENGTHS_K)
    q = batch.queries(HEADS, dim=DIM).to(torch.bfloat16)
    k, v = (batch.keys(KV_HEADS, dim=DIM).to(stored) for _ in range(2))
    idx_q = batch.queries(KV_HEADS, whole=True, dim=DIM).to(stored)
    here = Here(batch, paged, k, v, batch.keys(1, whole=True, dim=DIM).to(stored))
    found, wanted = everywhere(
        flashinfer.msa_proxy_score, torch.float32, idx_q, here.idx_k, batch.cu_q, max_k_tiles=11, **here.where
    )
    assert torch.equal(found.cpu(), wanted)
    valid = torch.isfinite(wanted).any(0).sum(0, dtype=torch.int32)
    found, ids = everywhere(flashinfer.msa_topk_select, torch.float32, wanted, TOPK, num_valid_pages=valid)
    assert torch.equal(found.cpu(), ids)
    selected = ids.transpose(0, 1).contiguous()
    for causal in (True, False):
        found, wanted = everywhere(
            flashinfer.msa_sparse_attention, torch.float32, q, here.k, here.v, selected, batch.cu_q,
            causal=causal, return_softmax_lse=True, k_global_scale=0.5, **here.where,
        )  # fmt: skip
        close(found[0], wanted[0], OUT)
        close(found[1], wanted[1], LSE)


@pytest.mark.parametrize("stored", [torch.bfloat16, FP8])
@pytest.mark.parametrize("queries", [1, 4])
def test_decode(stored: torch.dtype, queries: int) -> None:
    """FlashInfer's decode and MiniMax's, which are one call here."""
    batch = Packed(f"gpu decode {stored} {queries}", (queries,) * 4, (1300, 50, 890, 129), 0)
    q, ids = batch.queries(HEADS, dim=DIM).to(torch.bfloat16), batch.ids(TOPK)
    k, v = (batch.pages(batch.keys(KV_HEADS, dim=DIM).to(stored), 2 * DIM) for _ in range(2))
    where = {"page_table": batch.page_table, "seqused_k": batch.used, "seqlen_q": queries, "return_softmax_lse": True}
    found, wanted = everywhere(flashinfer.msa_sparse_decode_attention, torch.float32, q, k, v, ids, **where)
    close(found[0], wanted[0], OUT)
    close(found[1], wanted[1], LSE)
    again = fmha_sm100.sparse_decode_atten_func(
        *(each.to(DEVICE) for each in (q, k, v, ids)), max_seqlen_k=1300,
        **{name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in where.items()},
    )  # fmt: skip
    assert torch.equal(again[0], found[0]) and torch.equal(again[1], found[1])


def test_an_inverted_selection() -> None:
    """The same rows on both devices, and attention over them."""
    batch = Packed("gpu csr", LENGTHS_Q, LENGTHS_K)
    q, ids = batch.queries(HEADS, dim=DIM).to(torch.bfloat16), batch.ids(TOPK)
    k, v = (batch.keys(KV_HEADS, dim=DIM).to(torch.bfloat16) for _ in range(2))
    csr, wanted = everywhere(
        fmha_sm100.build_k2q_csr, torch.float32, ids, batch.cu_q, batch.cu_k, BLOCK, total_k=sum(LENGTHS_K)
    )
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(csr, wanted, strict=True))
    found, wanted = everywhere(
        fmha_sm100.sparse_atten_func, torch.float32, q, k, v, *wanted, TOPK, cu_seqlens_q=batch.cu_q,
        cu_seqlens_k=batch.cu_k, max_seqlen_q=140, max_seqlen_k=1300, return_softmax_lse=True,
    )  # fmt: skip
    close(found[0], wanted[0], OUT)
    close(found[1], wanted[1], LSE)


@pytest.mark.parametrize("warmup", [False, True])
def test_flash_msa(warmup: bool) -> None:
    """A training step of two sequences; whole numbers in the proxy, so the same blocks."""
    call = flash_msa.flash_msa_func_warmup if warmup else flash_msa.flash_msa_func
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 640, DIM) for heads in (KV_HEADS, 1, HEADS, KV_HEADS, KV_HEADS)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[:2] = [torch.randint(-1, 2, shape, generator=generator).float() for shape in shapes[:2]]
    towards = torch.randn(2, 640, HEADS * DIM, generator=generator)

    def step(device: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [each.to(torch.bfloat16).to(device, dtype).requires_grad_() for each in tensors]
        out, kl = call(*leaves, TOPK * BLOCK, DIM**-0.5)
        loss = (out * towards.to(device, dtype)).sum() + 2 * 640 * KV_HEADS * kl.to(dtype)
        return [out.detach(), kl.detach(), *torch.autograd.grad(loss, leaves)]

    out, kl, *gradients = step(DEVICE, torch.bfloat16)
    exact, exact_kl, *wanted = step("cpu", torch.float32)
    close(out, exact, OUT)
    close(kl, exact_kl, 0.002)
    for mine, theirs in zip(gradients, wanted, strict=True):
        close(mine, theirs, GRADIENT * max(1.0, float(theirs.abs().max())))
