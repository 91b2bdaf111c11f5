"""One small call of every operator on CUDA, with its answer; run this file under a checking tool, with the names of a
DSL and of a group of operators."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.launch import attention
from msa_tiles.runtime import toolchain
from msa_tiles.runtime.registry import default_registry

LENGTHS_Q = [129, 0, 5, 64]
LENGTHS_K = [129, 70, 700, 200]


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)


class Named:
    """The operators, with a DSL named."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(getattr(ops, name), backend=self.backend)

    def has(self, name: str) -> bool:
        """Whether this DSL serves the operator; a decode step counts for its attention."""
        op = "sparse_decode" if name == "msa_decode" else name
        return toolchain.missing(self.backend) is None and bool(default_registry().select(op=op, dsl=self.backend))


def reading(copied: bool, op: str) -> Iterator[None]:
    """For a fixture: calls read quantised keys as they are stored, or prefills of them a copy."""
    if copied and op != "sparse_attention":
        pytest.skip("prefill alone reads copies")
    attention.COPY = copied
    yield
    attention.COPY = None


class Calls:
    """Inputs on the GPU, an operator's call for each name, and what the reference answers."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

        total_q, total_k = sum(LENGTHS_Q), sum(LENGTHS_K)
        self.where = {"cu_seqlens_q": starts(LENGTHS_Q), "cu_seqlens_k": starts(LENGTHS_K)}
        self.idx_q = torch.randint(-2, 3, (total_q, 4, 128), generator=generator, device="cuda").to(torch.bfloat16)
        self.idx_k = torch.randint(-2, 3, (total_k, 128), generator=generator, device="cuda").to(torch.bfloat16)
        self.q, self.k, self.v = normal(total_q, 64, 128), normal(total_k, 4, 128), normal(total_k, 4, 128)
        self.partial_out = normal(3, total_q, 8, 128)
        self.partial_lse = normal(3, total_q, 8).float()
        self.score = reference.index_score(self.idx_q.float(), self.idx_k.float(), **self.where)
        self.ids = reference.select_blocks(self.idx_q.float(), self.idx_k.float(), 4, **self.where)
        self.dout = normal(total_q, 64, 128)

    def all(self, module: object) -> dict[str, Callable[[], Tensor]]:
        """The calls, made through `msa_tiles.ops`, `Named` or `msa_tiles.reference`."""
        return {
            "index_score": lambda: module.index_score(self.idx_q, self.idx_k, **self.where),
            "topk_select": lambda: module.topk_select(self.score, 4, **self.where),
            "select_blocks": lambda: module.select_blocks(self.idx_q, self.idx_k, 4, **self.where),
            "sparse_attention": lambda: self._first(
                module.sparse_attention(self.q, self.k, self.v, self.ids, **self.where)
            ),
            "decode_score": lambda: self._like(module, "decode_score", "index_score")(
                self.idx_q, self.idx_k, **self.where
            ),
            "decode_topk": lambda: self._like(module, "decode_topk", "topk_select")(self.score, 4, **self.where),
            "sparse_decode": lambda: self._first(
                self._like(module, "sparse_decode", "sparse_attention")(self.q, self.k, self.v, self.ids, **self.where)
            ),
            "msa_decode": lambda: self._decoded(module),
            "combine": lambda: module.combine(self.partial_out, self.partial_lse)[0],
        }

    def training(self, module: object) -> dict[str, Callable[[], Tensor]]:
        """The gradients, one after the other in one row; those of the index KL, of a sum in place of the mean,
        behind its loss."""
        main = self.q, self.k, self.v
        out, lse = reference.sparse_attention(*(tensor.float() for tensor in main), self.ids, **self.where)

        def backward() -> Tensor:
            given = (self.dout, *main, out.to(torch.bfloat16), lse, self.ids)
            return _row(module.sparse_attention_backward(*given, **self.where))

        def divergence() -> Tensor:
            given = (self.q, self.k, lse)
            share = float(lse.shape[0] * self.k.shape[1])
            if module is reference:
                loss, *gradients = module.index_kl(*given, self.idx_q, self.idx_k, self.ids, **self.where)
                return _row((loss, *(share * gradient.float() for gradient in gradients)))
            leaves = [tensor.detach().requires_grad_() for tensor in (self.idx_q, self.idx_k)]
            loss = module.index_kl(*given, *leaves, self.ids, **self.where)
            return _row((loss.detach(), *torch.autograd.grad(loss, leaves, torch.full_like(loss, share))))

        return {"sparse_attention_backward": backward, "index_kl": divergence}

    @staticmethod
    def _like(module: object, name: str, plain: str) -> Callable[..., Any]:
        """The decode operator, or where the module has none, the one whose answer it gives."""
        return getattr(module, name, None) or getattr(module, plain)

    def _decoded(self, module: object) -> Tensor:
        tensors = (self.q, self.k, self.v)
        if module is not reference:
            return module.msa_decode(*tensors, self.idx_q, self.idx_k, 4, **self.where)
        ids = module.select_blocks(self.idx_q, self.idx_k, 4, num_kv_heads=4, **self.where)
        return self._first(module.sparse_attention(*tensors, ids, **self.where))

    @staticmethod
    def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
        return result[0] if isinstance(result, tuple) else result


def _row(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([tensor.float().flatten() for tensor in tensors])


def main(backend: str, group: str) -> None:
    calls, named = Calls(), Named(backend)
    # Gradients of keys are sums over many queries: larger, and rounded to bfloat16 like the others.
    every, atol = {"forward": (calls.all, 0.02), "training": (calls.training, 0.05)}[group]
    wanted = every(reference)
    served = {name: call for name, call in every(named).items() if named.has(name)}
    assert served
    for name, call in served.items():
        torch.testing.assert_close(call().float(), wanted[name]().float(), atol=atol, rtol=0.02, msg=name)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
