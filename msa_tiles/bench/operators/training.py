"""Training: the backward of attention, the index KL, and both with the forward pass, which flash-msa does too."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from msa_tiles import ops
from msa_tiles.bench import cases, checks, inputs, peers
from msa_tiles.bench.harness import Bench, Benchmark
from msa_tiles.bench.inputs import Attention, Indexer
from msa_tiles.bench.operators._own import of_spec
from msa_tiles.bench.operators.sparse_attention import attention_bytes
from msa_tiles.bench.precisions import BF16
from msa_tiles.bench.timing import Call
from msa_tiles.spec.work import Work

OP = "msa_attention"
BACKWARD, KL = "sparse_attention_backward", "index_kl"
PARTS = ("select_blocks", "sparse_attention", BACKWARD, KL)
_WHOLE = {"train_32k": "prefill_32k_u", "train_128k": "prefill_128k_u"}
"""Cases of the whole, and what the forward operators call them; the selection is the indexer's, so U."""


@dataclass(frozen=True)
class Trained:
    """Attention's inputs, the gradient of its output `[T, Hq, D]`, and its results `[T, Hq, D]` and `[T, Hq]`."""

    main: Attention
    dout: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Taught:
    """The index branch, and the main branch that teaches it with its LSE `[T, Hq]`."""

    index: Indexer
    main: Attention
    lse: Tensor


@dataclass(frozen=True)
class Whole:
    """Both branches and the gradient of the output `[T, Hq, D]`; the main branch has no selection yet."""

    index: Indexer
    main: Attention
    dout: Tensor


def _dout(case: cases.Case, device: torch.device, seed: int) -> Tensor:
    return inputs.normal(1000 + seed, device, case.num_q, case["num_q_heads"], case["head_dim"])


def _attend(case: cases.Case, main: Attention) -> tuple[Tensor, Tensor]:
    result = ops.sparse_attention(
        main.q, main.k, main.v, main.block_indices, block_size=case["block_size"], return_lse=True
    )
    return result[0], result[1]


def prepare_backward(case: cases.Case, device: torch.device, precision: str) -> Bench:
    def make(seed: int) -> Trained:
        main = inputs.attention(case, device, seed)
        return Trained(main, _dout(case, device, seed), *_attend(case, main))

    def ours(dsl: str, x: Trained) -> Call:
        return lambda: ops.sparse_attention_backward(
            x.dout,
            x.main.q,
            inputs.wide(x.main.k),
            inputs.wide(x.main.v),
            x.out,
            x.lse,
            x.main.block_indices,
            block_size=case["block_size"],
            backend=dsl,
        )

    return Bench(
        case=case,
        make=make,
        # dout and out are as large as q.
        bytes_per_set=attention_bytes(case, BF16) + 4 * case.num_q * case["num_q_heads"] * case["head_dim"],
        ours=ours,
        check=lambda x, found: checks.attention_gradients(case, x.main, x.dout, x.out, found),
        peers=[],
    )


def prepare_kl(case: cases.Case, device: torch.device, precision: str) -> Bench:
    heads, dim = case["num_kv_heads"], case["index_dim"]

    def make(seed: int) -> Taught:
        main = inputs.attention(case, device, seed)
        return Taught(inputs.indexer(case, heads, dim, device, seed), main, _attend(case, main)[1])

    def ours(dsl: str, x: Taught) -> Call:
        idx_q, idx_k = leaves = [
            tensor.detach().requires_grad_() for tensor in (x.index.idx_q, inputs.wide(x.index.idx_k))
        ]
        weight = torch.tensor(float(case.num_q * heads), device=device)

        def call() -> tuple[Tensor, ...]:
            loss = ops.index_kl(
                x.main.q,
                inputs.wide(x.main.k),
                x.lse,
                idx_q,
                idx_k,
                x.main.block_indices,
                block_size=case["block_size"],
                backend=dsl,
            )
            return (loss.detach(), *torch.autograd.grad(loss, leaves, weight))

        return call

    return Bench(
        case=case,
        make=make,
        bytes_per_set=attention_bytes(case, BF16) + 2 * dim * (case.num_q * heads + case.num_k),
        ours=ours,
        check=lambda x, found: checks.index_gradients(case, x.index, x.main, found),
        peers=[],
    )


def find(label: str) -> cases.Case:
    if label not in _WHOLE:
        raise ValueError(f"--cases: {OP} has no case {label!r}; it has {', '.join(_WHOLE)}")
    return dataclasses.replace(cases.find(KL, f"{label}_u"), op=OP, label=label)


def check(case: cases.Case, x: Whole, result: tuple[Tensor, ...]) -> str | None:
    """The selection, the output over it, and all gradients. The loss is only compared where `verify` runs."""
    out, loss, ids, dq, dk, dv, *of_index = result
    main = dataclasses.replace(x.main, block_indices=ids)
    return (
        checks.selected(case, x.index, ids)
        or checks.attended(case, main, out)
        or checks.attention_gradients(case, main, x.dout, out, (dq, dk, dv))
        or checks.index_gradients(case, x.index, main, (loss, *of_index))
    )


def prepare(case: cases.Case, device: torch.device, precision: str) -> Bench:
    heads, dim, topk = case["num_kv_heads"], case["index_dim"], case["topk"]

    def make(seed: int) -> Whole:
        return Whole(
            inputs.indexer(case, heads, dim, device, seed),
            inputs.attention(case, device, seed, with_selection=False),
            _dout(case, device, seed),
        )

    def ours(dsl: str, x: Whole) -> Call:
        tensors = x.main.q, inputs.wide(x.main.k), inputs.wide(x.main.v), x.index.idx_q, inputs.wide(x.index.idx_k)
        q, k, v, idx_q, idx_k = leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        # The loss is a mean; its gradients as large as the others.
        weights = x.dout, torch.tensor(float(case.num_q * heads), device=device)

        def call() -> tuple[Tensor, ...]:
            out, loss, ids = ops.msa_attention(
                q,
                k,
                v,
                idx_q,
                idx_k,
                topk,
                block_size=case["block_size"],
                return_kl=True,
                return_block_indices=True,
                backend=dsl,
            )
            return (out.detach(), loss.detach(), ids, *torch.autograd.grad((out, loss), leaves, weights))

        return call

    return Bench(
        case=case,
        make=make,
        bytes_per_set=attention_bytes(case, BF16) + 2 * dim * (case.num_q * heads + case.num_k),
        ours=ours,
        check=functools.partial(check, case),
        peers=[peers.flash_msa(case, topk)],
    )


def work(label: str, precision: str) -> list[Work]:
    of_forward = _WHOLE[label]
    of_training = f"{label}_u"
    return [cases.work(op, of_training if op in (BACKWARD, KL) else of_forward, precision) for op in PARTS]


BENCHMARKS = (
    of_spec(BACKWARD, prepare_backward),
    of_spec(KL, prepare_kl),
    Benchmark(OP, tuple(_WHOLE), find, prepare, work, PARTS),
)
