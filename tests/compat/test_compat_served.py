"""On Hopper every operator that vLLM's and SGLang's layers come to has a kernel: nothing is left to the server there.

Not even beside what these servers pin, where CuTe DSL's kernels compile and TileLang's do not. Asked with
`msa_tiles.explain`, of the tensors that the drop-ins hand on, their shapes, strides and dtypes.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from compat.m3 import DIM, FP8, HEADS, PAGE, Batch, Parameters, drawn, token_major
from compat.sglang_files import decode_of, never, prefill_of

import msa_tiles
from msa_tiles import ops
from msa_tiles.compat import vllm
from msa_tiles.compat.sglang import hooks
from msa_tiles.compat.vllm import steps

OPERATORS = (
    *("index_score", "topk_select", "select_blocks", "sparse_attention"),
    *("decode_score", "decode_topk", "sparse_decode", "msa_decode"),
)
CACHES = pytest.mark.parametrize(
    ("dtype", "index_dtype"), [(torch.bfloat16, torch.bfloat16), (FP8, FP8), (FP8, torch.bfloat16)]
)
RANKS = pytest.mark.parametrize("ranks", [1, 8])
GIVEN = Parameters(16, 0, 1)


@pytest.fixture(params=["both DSLs", "CuTe DSL alone"])
def asked(request, monkeypatch):
    """The operators that were called; each was explained for an H100 first, which raises where no kernel serves."""
    names = []
    gone = "it is for another version" if request.param == "CuTe DSL alone" else None
    monkeypatch.setattr("msa_tiles.runtime.toolchain.missing", lambda dsl: gone if dsl == "tilelang" else None)
    own = {name: getattr(ops, name) for name in OPERATORS}

    def elsewhere(value):
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    def explained(name):
        def call(*given, **named):
            names.append(name)
            # A workspace of the CPU is empty.
            others = {key: elsewhere(value) for key, value in named.items() if key != "workspace"}
            with monkeypatch.context() as patch:
                for one, function in own.items():
                    patch.setattr(ops, one, function)
                text = str(msa_tiles.explain(own[name], *map(elsewhere, given), device="sm90", **others))
            assert "No kernel" not in text
            return own[name](*given, **named)

        return call

    for name in OPERATORS:
        monkeypatch.setattr(ops, name, explained(name))
    return names


@pytest.mark.drawn(2)
@CACHES
@RANKS
def test_vllms_operators(asked, ranks, dtype, index_dtype):
    draw = drawn(f"served {ranks}")
    batch = Batch(draw, HEADS[ranks], [4, 4], [300, 128], 65, dtype=dtype, index_dtype=index_dtype)
    heads, where = batch.num_kv_heads, (batch.cu_seqlens_q, batch.seq_lens, batch.prefix_lens, 4)
    buffer, out = token_major(heads, 9, 16), torch.empty_like(batch.q)
    tokens = torch.ones(batch.cache.shape[0] * PAGE, heads).T
    score = vllm.minimax_m3_index_score(batch.idx_q, batch.index_cache, batch.table, *where, 300, heads)
    ids = vllm.minimax_m3_index_topk(score, batch.cu_seqlens_q, batch.prefix_lens, 4, 16, 0, 1, out=buffer)
    vllm.minimax_m3_index_decode(
        batch.idx_q, batch.index_cache, batch.table, batch.seq_lens, 300, 16, 0, 1, heads, 4, 4, out=buffer
    )  # fmt: skip
    for scale in (None, torch.ones(1), tokens):
        vllm.minimax_m3_sparse_attn(
            batch.q, batch.cache, ids, batch.table, *where, heads, DIM**-0.5, out, scale, scale
        )  # fmt: skip
        vllm.minimax_m3_sparse_attn_decode(
            batch.q, batch.cache, ids, batch.table, batch.seq_lens, heads, DIM**-0.5, out, 4, scale, scale
        )  # fmt: skip
    assert set(asked) == {*OPERATORS} - {"select_blocks", "msa_decode"}


@pytest.mark.drawn(3)
@CACHES
@RANKS
def test_a_step_of_vllms_layer(asked, ranks, dtype, index_dtype):
    """One whose rows begin behind those of another part, at addresses that are no multiple of 16 bytes."""
    draw = drawn(f"served step {ranks}")
    batch = Batch(draw, HEADS[ranks], [1, 3, 3], [200, 300, 128], 65, dtype=dtype, index_dtype=index_dtype)
    metadata = SimpleNamespace(
        cu_seqlens_q=batch.cu_seqlens_q[1:] - 1,
        seq_lens=batch.seq_lens[1:],
        block_table=batch.table[1:],
        max_query_len=3,
        max_seq_len=300,
        decode_query_len=3,
    )
    by, attending = steps.Selecting(16, 0, 1), steps.Attending(batch.cache, batch.num_kv_heads, DIM**-0.5, None, None)
    ids, out = token_major(batch.num_kv_heads, 7, 16)[:, 1:], torch.empty_like(batch.q)[1:]
    steps.select_prefill(batch.idx_q[1:], batch.index_cache, metadata, by, ids)
    steps.attend_prefill(batch.q[1:], ids, metadata, attending, out)
    steps.decode(batch.q[1:], ids, steps.Deferred(batch.idx_q[1:], batch.index_cache, metadata, by), attending, out)
    assert asked == ["select_blocks", "sparse_attention", "msa_decode"]


@pytest.mark.drawn(3)
@RANKS
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_sglangs_functions(asked, monkeypatch, ranks, dtype):
    monkeypatch.setattr(hooks, "_deterministic", lambda: False)
    draw = drawn(f"served by pools {ranks}")
    batch = Batch(draw, HEADS[ranks], [1, 1], [300, 128], 65, dtype=dtype, index_dtype=dtype)
    _, _, ids = hooks.prefill(never, **prefill_of(draw, batch, GIVEN), return_topk_idx=True)
    hooks.decode(never, **decode_of(draw, batch, GIVEN))
    hooks.decode(never, **decode_of(draw, batch, GIVEN), cached_topk_idx=ids)
    assert asked == ["select_blocks", "sparse_attention", "msa_decode", "sparse_decode"]
