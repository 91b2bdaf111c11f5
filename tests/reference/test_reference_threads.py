"""The reference computes on one thread: its steps are small, and threads would wait for each other in every one."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from rounding import close, softmax_terms
from torch.utils._python_dispatch import TorchDispatchMode

from msa_tiles import ops, reference
from msa_tiles.quant import FP8
from msa_tiles.reference.threads import one_thread

DEFAULT = 2
TOKENS, BLOCK = 24, 8


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """As torch has it on the smallest machine with more than one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(DEFAULT)
    yield
    torch.set_num_threads(threads)


class Threads(TorchDispatchMode):
    """The numbers of threads that torch had during its operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


def calls() -> dict[str, Callable[[], object]]:
    """A call of every function of the reference."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(TOKENS, heads, 8, generator=generator) for heads in (4, 2, 2, 4))
    idx_q, idx_k = torch.randn(TOKENS, 2, 8, generator=generator), torch.randn(TOKENS, 8, generator=generator)
    size = {"block_size": BLOCK}
    ids = reference.select_blocks(idx_q, idx_k, 2, **size)
    out, lse = reference.sparse_attention(q, k, v, ids, **size)
    dense, dense_lse = reference.dense_attention(q, k, v)
    none = torch.zeros(1, 2, dtype=torch.int32)
    tasks = torch.zeros(1, 2, 1, 5, dtype=torch.int32)
    narrow = tasks[..., :4]
    parts, marks, sums = torch.zeros(TOKENS, 2, 4, 8), torch.ones(TOKENS, 2, 2), torch.zeros(2, 2, BLOCK, 8)
    partial_dq, partial_dk = torch.zeros(TOKENS, 2, 2, 8), torch.zeros(2, 1, BLOCK, 8)
    score, outs, lses = torch.randn(2, TOKENS, 3, generator=generator), out[None], lse[None]
    cache, other, slots = torch.zeros(TOKENS, 2, 1, 8), torch.zeros(TOKENS, 2, 1, 8), torch.arange(TOKENS)
    index_cache = torch.zeros(TOKENS, 1, 8)
    weight = torch.ones(8)
    codes, rows = k.to(FP8), torch.zeros(2, TOKENS, 2, 8).bfloat16().unbind()
    return {
        "append_index": lambda: reference.append_index(idx_k, index_cache, slots),
        "append_kv": lambda: reference.append_kv(k, v, cache, other, slots),
        "append_rows": lambda: reference.append_rows(k, cache, slots),
        "each_alone": lambda: reference.each_alone(TOKENS, k),
        "build_schedule": lambda: reference.build_schedule(ids, **size),
        "combine": lambda: reference.combine(outs, lses),
        "dense_attention": lambda: reference.dense_attention(q, k, v),
        "dense_attention_backward": lambda: reference.dense_attention_backward(dout, q, k, v, dense, dense_lse),
        "dequantize_kv": lambda: reference.dequantize_kv(codes, codes, *rows),
        "gradient_rows": lambda: reference.gradient_rows(dout, out, lse),
        "index_gradients": lambda: reference.index_gradients(partial_dq, marks, partial_dk, narrow, none, idx_k),
        "index_kl": lambda: reference.index_kl(q, k, lse, idx_q, idx_k, ids, **size),
        "index_lse": lambda: reference.index_lse(idx_q, idx_k, ids, **size),
        "index_score": lambda: reference.index_score(idx_q, idx_k, **size),
        "merge_gradients": lambda: reference.merge_gradients(parts, marks, tasks, none, sums),
        "norm_rope": lambda: reference.norm_rope(k, weight, idx_k, slots),
        "norm_rope_append": lambda: reference.norm_rope_append(
            q, k, v, weight, weight, idx_k, slots, cache, other, slots, q_out=out
        ),
        "select_blocks": lambda: reference.select_blocks(idx_q, idx_k, 2, **size),
        "sparse_attention": lambda: reference.sparse_attention(q, k, v, ids, **size),
        "sparse_attention_backward": lambda: reference.sparse_attention_backward(dout, q, k, v, out, lse, ids, **size),
        "split_selection": lambda: reference.split_selection(ids, tile_tokens=8, **size),
        "topk_select": lambda: reference.topk_select(score, 2, **size),
    }


FUNCTIONS = sorted(name for name in reference.__all__ if inspect.isfunction(getattr(reference, name)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_computes_on_one_thread_and_gives_the_others_back(name: str) -> None:
    call = calls()[name]
    with Threads() as threads:
        call()
    assert threads.seen == {1}
    assert torch.get_num_threads() == DEFAULT


def test_the_threads_come_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="order: 'up'"):
        reference.topk_select(torch.zeros(1, 1, 1), 1, order="up")
    assert torch.get_num_threads() == DEFAULT
    with one_thread(), one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == DEFAULT


def last_queries(queries: int, keys: int, heads: int, kv_heads: int, topk: int, dim: int = 128, block: int = 128):
    """q, k, v and ids of the last ``queries`` of ``keys`` tokens: their own block and random ones before it."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(length, number, dim, generator=generator)
        for length, number in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )
    own = torch.arange(keys - queries, keys)[:, None] // block
    order = torch.rand(kv_heads, queries, keys // block, generator=generator)
    order.masked_fill_(torch.arange(keys // block) >= own, -1.0).scatter_(2, own.expand(kv_heads, -1, -1), 2.0)
    return q, k, v, order.argsort(-1, descending=True)[..., :topk].int()


def seconds(*functions: Callable[[], object], times: int) -> list[float]:
    """The shortest time of each function, all of them in turn."""
    best = [float("inf")] * len(functions)
    for _ in range(times):
        for place, function in enumerate(functions):
            began = time.perf_counter()
            function()
            best[place] = min(best[place], time.perf_counter() - began)
    return best


def on_one_thread(function: Callable[[], object]) -> None:
    torch.set_num_threads(1)
    try:
        function()
    finally:
        torch.set_num_threads(DEFAULT)


def test_attention_is_as_fast_on_torchs_threads_as_on_one() -> None:
    """Threads made it twenty times slower; the bound is what a busy machine does to two equal runs."""
    q, k, v, ids = last_queries(256, 4096, 16, 4, 8, dim=64)
    threaded, single = seconds(
        lambda: ops.sparse_attention(q, k, v, ids),
        lambda: on_one_thread(lambda: ops.sparse_attention(q, k, v, ids)),
        times=5,
    )
    assert threaded < 3 * single


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads"),
    [(256, 16384, 16, 1), (1024, 16384, 64, 4)],
)
@pytest.mark.slow  # it times torch's attention
def test_attention_is_not_slower_than_torchs_with_a_mask(queries: int, keys: int, heads: int, kv_heads: int) -> None:
    """An eighth of the products of torch's attention, on one thread against two."""
    q, k, v, ids = last_queries(queries, keys, heads, kv_heads, topk=16)
    blocks = torch.zeros(kv_heads, queries, keys // 128, dtype=torch.bool).scatter_(2, ids.long(), True)
    mask = blocks.repeat_interleave(128, 2) & (torch.arange(keys) <= torch.arange(keys - queries, keys)[:, None])
    mask = mask.repeat_interleave(heads // kv_heads, 0)[None]
    queries_first, keys_first, values_first = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))

    def masked() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            queries_first, keys_first, values_first, attn_mask=mask, enable_gqa=True
        )[0].transpose(0, 1)

    found: dict[str, torch.Tensor] = {}
    ours, torchs = seconds(
        lambda: found.update(ours=ops.sparse_attention(q, k, v, ids)), lambda: found.update(torchs=masked()), times=2
    )
    close(found["ours"], found["torchs"], terms=softmax_terms(16 * 128, 128, 8.0))
    assert ours < torchs
