"""The baselines: other people's operators, found if installed, and the layouts they want.

Every function returns a Contender, or Skipped with the reason why it cannot be timed here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from msa_tiles.bench import checks, precisions
from msa_tiles.bench.cases import Case
from msa_tiles.bench.harness import Contender, Skipped
from msa_tiles.bench.inputs import Attention, Indexer, Stored, wide
from msa_tiles.bench.timing import Call

VLLM_MODULES = ("vllm.models.minimax_m3.common.ops", "minimax_m3_ops")
"""Where vLLM's MiniMax-M3 Triton operators may be importable from, best first."""

VLLM_PAGE = 128


@functools.lru_cache(maxsize=1)
def vllm_module() -> ModuleType | str:
    """vLLM's MiniMax-M3 operators, or why they cannot be imported."""
    reasons = []
    for name in VLLM_MODULES:
        try:
            return importlib.import_module(name)
        except Exception as error:  # a half-installed peer raises anything, and the reason goes into the row
            reasons.append(f"{name}: {error}")
    return "; ".join(reasons)


@functools.lru_cache
def optional_function(module: str, name: str) -> Callable[..., Any] | str:
    """A function of a peer, or why it cannot be imported."""
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:
        return f"{module}: {error}"
    return found


def flash_attention_4() -> Callable[..., Any] | str:
    return optional_function("flash_attn.cute", "flash_attn_func")


@dataclass(frozen=True)
class OneRequest:
    """vLLM's description of one request on consecutive pages."""

    block_table: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    prefix_lens: Tensor

    @staticmethod
    def of(case: Case, device: torch.device) -> OneRequest:
        def ints(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        pages = -(-case.num_k // VLLM_PAGE)
        table = torch.arange(pages, dtype=torch.int32, device=device)[None]
        return OneRequest(table, ints(0, case.num_q), ints(case.num_k), ints(case.first_position))


def takes(precision: str, role: str, peer: Contender | Skipped) -> Contender | Skipped:
    """The peer, unless it does not know the 4 bits that tensors of a role have."""
    form = precisions.stored(precision, role)
    if form.bits >= 8 or isinstance(peer, Skipped):
        return peer
    return Skipped(peer.name, f"it takes no keys of {form.name}")


def paged(tensor: Stored) -> Tensor:
    """`[pages, 128, …]` of `[Tk, …]`, the last page padded with zeros; formats of 4 bits widened."""
    tensor = tensor if isinstance(tensor, Tensor) else wide(tensor)
    missing = -tensor.shape[0] % VLLM_PAGE
    if missing:
        tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
    return tensor.unflatten(0, (-1, VLLM_PAGE))


def interleaved_cache(k: Stored, v: Stored) -> Tensor:
    """vLLM's main cache `[pages, Hkv, 128, 2 * D]`, K then V, of `k v [Tk, Hkv, D]`."""
    return torch.cat([paged(k), paged(v)], dim=-1).transpose(1, 2).contiguous()


def token_major(block_indices: Tensor) -> Tensor:
    """The same `[H, T, k]`, stored token-major as vLLM stores it."""
    return block_indices.transpose(0, 1).contiguous().transpose(0, 1)


def vllm_unless(case: Case, head_dim: int) -> ModuleType | Skipped:
    """vLLM's operators, or why they cannot run this case."""
    module = vllm_module()
    if isinstance(module, str):
        return Skipped("vllm", module)
    if case["block_size"] != VLLM_PAGE:
        return Skipped("vllm", f"its blocks hold {VLLM_PAGE} tokens, the case's {case['block_size']}")
    if head_dim & (head_dim - 1):
        return Skipped("vllm", f"head dims are powers of two, the case's is {head_dim}")
    return module


def vllm_index_score(case: Case) -> Contender | Skipped:
    """The score kernel alone: `[Hi, T, blocks]`, blocks that a row does not see unwritten."""
    module = vllm_unless(case, case["head_dim"])
    if isinstance(module, Skipped):
        return module

    def bind(inputs: Indexer) -> Call:
        where, cache = OneRequest.of(case, inputs.idx_q.device), paged(inputs.idx_k)
        return lambda: _vllm_scores(module, case, inputs.idx_q, cache, where)

    return Contender("vllm", bind, functools.partial(checks.scores, case))


def vllm_select(case: Case, topk: int) -> Contender | Skipped:
    """Score, then top-k, through a score matrix; FP8 queries and keys are multiplied as they are."""
    module = vllm_unless(case, case["head_dim"])
    if isinstance(module, Skipped):
        return module

    def bind(inputs: Indexer) -> Call:
        where, cache = OneRequest.of(case, inputs.idx_q.device), paged(inputs.idx_k)
        out = token_major_buffer(case, inputs.idx_q.shape[1], topk, inputs.idx_q.device)

        def call() -> Tensor:
            score = _vllm_scores(module, case, inputs.idx_q, cache, where)
            return _vllm_topk(module, case, score, topk, where, out)

        return call

    return Contender("vllm", bind, functools.partial(checks.selected, case))


def vllm_topk(case: Case, topk: int, check: Callable[[Any, Any], str | None]) -> Contender | Skipped:
    """The top-k kernel alone, on scores `[H, T, blocks]`."""
    module = vllm_unless(case, 1)
    if isinstance(module, Skipped):
        return module

    def bind(score: Tensor) -> Call:
        where = OneRequest.of(case, score.device)
        out = token_major_buffer(case, score.shape[0], topk, score.device)
        return lambda: _vllm_topk(module, case, score, topk, where, out)

    return Contender("vllm", bind, check)


def vllm_attention(case: Case) -> Contender | Skipped:
    """Attention over given blocks."""
    module = vllm_unless(case, case["head_dim"])
    if isinstance(module, Skipped):
        return module

    def bind(inputs: Attention) -> Call:
        where, cache = OneRequest.of(case, inputs.q.device), interleaved_cache(inputs.k, inputs.v)
        ids, out = token_major(inputs.block_indices), torch.empty_like(inputs.q)
        return lambda: _vllm_attend(module, case, inputs.q, cache, ids, where, out)

    return Contender("vllm", bind, functools.partial(checks.attended, case))


def vllm_prefill(case: Case, topk: int, check: Callable[[Any, Any], str | None]) -> Contender | Skipped:
    """Score, top-k and attention; inputs are `(Indexer, Attention)`."""
    module = vllm_unless(case, case["head_dim"])
    return module if isinstance(module, Skipped) else prefill_of(module, case, topk, check)


def prefill_of(module: ModuleType, case: Case, topk: int, check: Callable[[Any, Any], str | None]) -> Contender:
    """The same through the operators of a module that has vLLM's names."""

    def bind(inputs: tuple[Indexer, Attention]) -> Call:
        index, main = inputs
        where = OneRequest.of(case, main.q.device)
        index_cache, cache = paged(index.idx_k), interleaved_cache(main.k, main.v)
        ids = token_major_buffer(case, index.idx_q.shape[1], topk, main.q.device)
        out = torch.empty_like(main.q)

        def call() -> tuple[Tensor, Tensor]:
            score = _vllm_scores(module, case, index.idx_q, index_cache, where)
            chosen = _vllm_topk(module, case, score, topk, where, ids)
            return chosen, _vllm_attend(module, case, main.q, cache, chosen, where, out)

        return call

    return Contender("vllm", bind, check)


def token_major_buffer(case: Case, heads: int, topk: int, device: torch.device) -> Tensor:
    """An `[H, T, k]` view of a `[T, H, k]` buffer."""
    return torch.empty(case.num_q, heads, topk, dtype=torch.int32, device=device).transpose(0, 1)


def _vllm_scores(module: ModuleType, case: Case, idx_q: Tensor, cache: Tensor, where: OneRequest) -> Tensor:
    return module.minimax_m3_index_score(
        idx_q,
        cache,
        where.block_table,
        where.cu_seqlens_q,
        where.seq_lens,
        where.prefix_lens,
        case.num_q,
        case.num_k,
        idx_q.shape[1],
    )


def _vllm_topk(module: ModuleType, case: Case, score: Tensor, topk: int, where: OneRequest, out: Tensor) -> Tensor:
    return module.minimax_m3_index_topk(score, where.cu_seqlens_q, where.prefix_lens, case.num_q, topk, 0, 1, out=out)


def _vllm_attend(
    module: ModuleType, case: Case, q: Tensor, cache: Tensor, ids: Tensor, where: OneRequest, out: Tensor
) -> Tensor:
    module.minimax_m3_sparse_attn(
        q,
        cache,
        ids,
        where.block_table,
        where.cu_seqlens_q,
        where.seq_lens,
        where.prefix_lens,
        case.num_q,
        cache.shape[1],
        q.shape[-1] ** -0.5,
        out,
    )
    return out


def in_bfloat16(x: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v for kernels that take one dtype: quantised keys and values widened, which is exact."""
    return x.q, wide(x.k), wide(x.v)


def fa4_dense(case: Case, main: Callable[[Any], Attention] = lambda inputs: inputs) -> Contender | Skipped:
    """FlashAttention-4 over all keys; `main(inputs)` finds q, k and v."""
    attend = flash_attention_4()
    if isinstance(attend, str):
        return Skipped("fa4", attend)

    def bind(inputs: Any) -> Call:
        q, k, v = in_bfloat16(main(inputs))

        def call() -> Tensor:
            # Its causal mask is aligned to the last query and the last key, as ours is.
            result = attend(q[None], k[None], v[None], causal=True)
            return (result[0] if isinstance(result, tuple) else result)[0]

        return call

    return Contender("fa4", bind, lambda inputs, out: checks.dense(case, main(inputs), out))


def cudnn_dense(case: Case, main: Callable[[Any], Attention] = lambda inputs: inputs) -> Contender | Skipped:
    """torch's scaled_dot_product_attention on its cuDNN backend, over all keys."""
    if case.num_q != case.num_k:
        return Skipped("cudnn", "its causal mask is aligned to the first key, wrong for the last queries of a prompt")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def bind(inputs: Any) -> Call:
        q, k, v = (x.transpose(0, 1)[None] for x in in_bfloat16(main(inputs)))

        def call() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1)

        return call

    return Contender("cudnn", bind, lambda inputs, out: checks.dense(case, main(inputs), out))


def flash_msa(case: Case, topk: int) -> Contender | Skipped:
    """flash-msa's forward and backward with its KL; inputs have `index`, `main` and `dout`.

    It selects by itself, a little differently where scores nearly tie, so most rows must be right, not all.
    """
    attend = optional_function("flash_msa", "flash_msa_func")
    if isinstance(attend, str):
        return Skipped("flash_msa", attend)
    if case["block_size"] != 128 or case["head_dim"] != 128 or case.num_q != case.num_k or case.num_q % 128:
        return Skipped("flash_msa", "it takes whole prompts of whole blocks of 128 tokens, and heads of 128 dims")

    def bind(inputs: Any) -> Call:
        main, index = inputs.main, inputs.index
        tensors = index.idx_q, index.idx_k[:, None], main.q, main.k, main.v
        leaves = [tensor.transpose(0, 1)[None].contiguous().requires_grad_() for tensor in tensors]
        weights = inputs.dout.flatten(1)[None], torch.ones((), device=main.q.device)

        def call() -> tuple[Tensor, Tensor]:
            out, loss = attend(*leaves, topk * case["block_size"], main.q.shape[-1] ** -0.5)
            gradients = torch.autograd.grad((out, loss), leaves, weights)
            return out[0].unflatten(1, (-1, main.q.shape[-1])), gradients[2][0].transpose(0, 1)

        return call

    return Contender("flash_msa", bind, functools.partial(checks.mostly_trained, case, topk))
