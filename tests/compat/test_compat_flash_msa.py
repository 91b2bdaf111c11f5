"""flash-msa's training functions by name: values and gradients against dense attention in float64."""

from __future__ import annotations

import inspect
import os

import pytest
import rounding
import torch
from torch import Tensor

from msa_tiles.compat import flash_msa

BLOCK, DIM = 128, 16
LOGIT = 32.0  # no score is larger, nor an LSE
# Heads of the proxy's queries and keys, and of the main branch's: one proxy head for each KV head, several, or a part.
HEADS = [(2, 1, 4, 2), (4, 2, 8, 4), (4, 1, 8, 2), (2, 2, 8, 4), (2, 1, 4, 1)]


def drawn(heads: tuple[int, int, int, int], batch: int, length: int, name: str) -> list[Tensor]:
    """q_proxy, k_proxy, q, k, v in float64, all leaves."""
    generator = torch.Generator().manual_seed(int(os.environ["MSA_TILES_SEED"]) + sum(map(ord, name)) + sum(heads))
    proxy, proxy_keys, main, stored = heads
    shapes = [(batch, count, length, DIM) for count in (proxy, proxy_keys, main, stored, stored)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def dense(
    q_proxy: Tensor, k_proxy: Tensor, q: Tensor, k: Tensor, v: Tensor, blocks: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """out [B, S, Hq * D] and the loss, with whole matrices; ``blocks`` None for the whole prefix."""
    batch, proxy, length, _ = q_proxy.shape
    main, stored = q.shape[1], k.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    scores = q_proxy @ k_proxy.repeat_interleave(proxy // k_proxy.shape[1], 1).transpose(2, 3)
    seen = causal.expand(batch, proxy, length, length)
    if blocks is not None:
        chosen = torch.zeros(batch, proxy, length, -(-length // BLOCK), dtype=torch.bool)
        for one, head, row in torch.cartesian_prod(*map(torch.arange, (batch, proxy, length))).tolist():
            best = [part.max() for part in scores[one, head, row, : row + 1].split(BLOCK)]
            own = len(best) - 1
            order = sorted(range(own), key=lambda block, best=best: -float(best[block].detach()))
            chosen[one, head, row, [own, *order[: blocks - 1]]] = True
        seen = seen & chosen.repeat_interleave(BLOCK, -1)[..., :length]
    logits = q @ k.repeat_interleave(main // stored, 1).transpose(2, 3) * scale
    weights = logits.masked_fill(~seen.repeat_interleave(main // proxy, 1), -torch.inf).softmax(-1)
    out = (weights @ v.repeat_interleave(main // stored, 1)).transpose(1, 2).reshape(batch, length, -1)
    # A proxy head has its teachers' mean, or one teacher for each of its KV heads.
    teachers = max(proxy, stored)
    teacher = weights.detach().unflatten(1, (teachers, main // teachers)).mean(2)
    student = (scores * scale).masked_fill(~seen, -torch.inf).log_softmax(-1).repeat_interleave(teachers // proxy, 1)
    terms = torch.where(teacher > 0, teacher * (teacher.clamp(min=1e-300).log() - student), 0.0)
    return out, terms.sum(-1).mean()


def compared(function: object, tensors: list[Tensor], top_k: int, blocks: int | None, scale: float) -> None:
    found, wanted = function(*tensors, top_k, scale), dense(*tensors, blocks, scale)
    assert found[1].dim() == 0 and float(found[1].detach()) > 0
    length = tensors[0].shape[2]
    terms = rounding.softmax_terms(length, DIM, LOGIT)
    rounding.close(found[0], wanted[0], terms=terms, size=float(tensors[4].detach().abs().max()))
    # An LSE is float32 whatever the tensors are: what is made of weights exp(s - lse) is off by what that rounds off,
    # in a divergence times the logarithms of the weights besides.
    rounded = LOGIT * rounding.unit(torch.float32)
    assert abs(float(found[1].detach() - wanted[1].detach())) <= 2 * LOGIT * rounded
    towards = torch.randn(found[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradients = [
        torch.autograd.grad((out * towards).sum() + 3 * kl, tensors, retain_graph=True) for out, kl in (found, wanted)
    ]
    for mine, theirs in zip(*gradients, strict=True):
        # A gradient of a key is a sum over as many queries.
        assert float((mine - theirs).abs().max()) <= 4 * length * rounded * float(theirs.abs().max())
    for each in torch.autograd.grad(function(*tensors, top_k, scale)[1], tensors, allow_unused=True)[2:]:
        assert each is None or not bool(each.any())


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "-".join(map(str, heads)))
@pytest.mark.drawn(2)
def test_sparse_step(heads: tuple[int, int, int, int]) -> None:
    """``top_k`` counts tokens; three blocks, of which two are chosen."""
    compared(flash_msa.flash_msa_func, drawn(heads, 1, 3 * BLOCK, "sparse"), 2 * BLOCK, 2, 0.3)


@pytest.mark.parametrize("heads", [HEADS[0], HEADS[3]], ids=lambda heads: "-".join(map(str, heads)))
def test_other_lengths_and_several_sequences(heads: tuple[int, int, int, int]) -> None:
    compared(flash_msa.flash_msa_func, drawn(heads, 2, 150, "lengths"), BLOCK, 1, DIM**-0.5)
    # More blocks than there are: everything.
    compared(flash_msa.flash_msa_func, drawn(heads, 2, 150, "many"), 32 * BLOCK, None, DIM**-0.5)


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "-".join(map(str, heads)))
@pytest.mark.drawn(2)
def test_warmup_step(heads: tuple[int, int, int, int]) -> None:
    compared(flash_msa.flash_msa_func_warmup, drawn(heads, 2, 130, "warmup"), 0, None, 0.3)


def test_names_and_signatures() -> None:
    assert flash_msa.flash_msa_warmup_func is flash_msa.sparse_attention_warmup is flash_msa.flash_msa_func_warmup
    for function in (flash_msa.flash_msa_func, flash_msa.flash_msa_func_warmup):
        assert [*inspect.signature(function).parameters] == ["q_proxy", "k_proxy", "q", "k", "v", "top_k", "scale"]


def test_what_does_not_fit_is_a_sentence() -> None:
    tensors = [each.detach() for each in drawn((2, 1, 4, 2), 1, 40, "errors")]
    short = tensors[3][:, :, 1:]
    for message, given, top_k in (
        ("top_k: got 100", tensors, 100),
        ("top_k: got 0", tensors, 0),
        (
            r"k: got shape \[1, 2, 39, 16\]; wanted B = 1 and S = 40",
            [*tensors[:3], short, tensors[4]],
            128,
        ),
        (r"q_proxy: got shape \[2, 40, 16\]", [tensors[0][0], *tensors[1:]], 128),
        ("q_proxy: got 2 heads beside 1 of k_proxy, 3 of q", [*tensors[:2], tensors[2][:, :3], *tensors[3:]], 128),
    ):
        with pytest.raises(ValueError, match=message):
            flash_msa.flash_msa_func(*given, top_k, 0.3)
