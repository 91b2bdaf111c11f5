"""SGLang's sparse prefill and decode through our hooks, on a GPU: right, like SGLang's own, and safe in graphs.

SGLang's own Triton path is taken from `MSA_TILES_SGLANG_FILES`, as in tests/compat.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat.m3 import DIM, FP8, HEADS, PAGE, Batch, Parameters, draw_prefill, drawn
from compat.sglang_files import decode_of, decoding, never, prefill_of, sglang_files
from compat.stand_ins import source_of
from test_gpu_vllm import captured, nothing_waits, same_choice
from torch import Tensor

from msa_tiles.compat import notes
from msa_tiles.compat.sglang import hooks

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
DRAWS = pytest.mark.parametrize("number", range(6))
SCALES = {torch.bfloat16: {}, FP8: {"k_scale": 1.5, "v_scale": 0.75}}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(hooks, "kinds", notes.Kinds(hooks.log, "MiniMax M3"))
    monkeypatch.setattr(hooks, "_deterministic", lambda: False)


@pytest.fixture
def theirs():
    with sglang_files(source_of("sglang", "MSA_TILES_SGLANG_FILES"), kernels=True) as found:
        yield found.sparse


def close(out: Tensor, batch: Batch, ids: Tensor, dtype: torch.dtype) -> None:
    """Compare with the oracle, as `msa-tiles verify` accepts it."""
    scales = [torch.tensor(SCALES[dtype].get(name, 1.0)) for name in ("k_scale", "v_scale")]
    want, _ = batch.attention(ids.cpu(), DIM**-0.5, *scales)
    torch.testing.assert_close(out.double().cpu(), want, atol=0.03, rtol=0.02)


@DTYPES
@DRAWS
def test_prefill(number, dtype):
    draw = drawn(f"gpu sglang prefill {number} {dtype}")
    given, batch = Parameters.draw(draw), draw_prefill(draw, dtype=dtype, index_dtype=dtype, device=DEVICE)
    arguments = prefill_of(draw, batch, given, **SCALES[dtype], return_topk_idx=True)
    hooks.prefill(never, **arguments)
    with nothing_waits():
        _, out, ids = hooks.prefill(never, **arguments)
    want = batch.selections(given)
    assert torch.equal(ids.cpu().sort(-1)[0], want.sort(-1)[0])
    close(out, batch, want, dtype)


@DTYPES
@DRAWS
def test_decode(number, dtype):
    draw = drawn(f"gpu sglang decode {number} {dtype}")
    given, batch = Parameters.draw(draw), decoding(draw, dtype=dtype, index_dtype=dtype, device=DEVICE)
    ids = torch.full((batch.num_kv_heads, len(batch.queries), given.topk), -9, dtype=torch.int32, device=DEVICE)
    arguments = decode_of(draw, batch, given, **SCALES[dtype], topk_out=ids)
    hooks.decode(never, **arguments)
    with nothing_waits():
        _, out = hooks.decode(never, **arguments)
    want = batch.selections(given)
    assert torch.equal(ids.cpu().sort(-1)[0], want.sort(-1)[0])
    close(out, batch, want, dtype)
    _, again = hooks.decode(never, **arguments | {"topk_out": None, "cached_topk_idx": ids})
    close(again, batch, want, dtype)


@DTYPES
def test_like_sglangs_own(theirs, dtype):
    """Both are right: on equal scores they may choose different blocks."""
    draw = drawn(f"gpu sglang's own {dtype}")
    given = Parameters(8, 1, 2)
    batch = draw_prefill(draw, dtype=dtype, index_dtype=dtype, device=DEVICE)
    if dtype == FP8:
        batch.idx_q = batch.idx_q.to(torch.bfloat16)  # as on Hopper: its indexer selects, ours attends
    arguments = prefill_of(draw, batch, given, **SCALES[dtype], return_topk_idx=True)
    for _, out, ids in (
        theirs.minimax_sparse_prefill(**arguments),
        hooks.prefill(theirs.minimax_sparse_prefill, **arguments),
    ):
        same_choice(batch, given, ids)
        close(out, batch, ids, dtype)
    batch = decoding(draw, dtype=dtype, device=DEVICE)
    ids = torch.empty(batch.num_kv_heads, len(batch.queries), given.topk, dtype=torch.int32, device=DEVICE)
    arguments = decode_of(draw, batch, given, **SCALES[dtype], topk_out=ids)
    live = [length > 0 for length in batch.lengths]
    _, out = theirs.minimax_sparse_decode(**arguments)
    chosen = ids.cpu()
    out[[not one for one in live]] = 0
    same_choice(batch, given, chosen)
    close(out, batch, chosen, dtype)
    close(hooks.decode(never, **arguments | {"topk_out": None})[1], batch, batch.selections(given), dtype)


@DTYPES
def test_a_graph_serves_later_steps(dtype):
    """Captured once, replayed with other lengths and slots; the last requests pad the batch."""
    draw, given = drawn(f"gpu sglang graph {dtype}"), Parameters(4, 0, 1)

    def step(lengths: list[int]) -> dict[str, Any]:
        options = {"dtype": dtype, "index_dtype": dtype, "device": DEVICE, "pool": 80}
        batch = Batch(draw, HEADS[4], [1] * len(lengths), lengths, 65, **options)
        made = decode_of(draw, batch, given, **SCALES[dtype], max_seqlen=65 * PAGE)
        tokens = torch.zeros(7, 65 * PAGE, dtype=torch.int32, device=DEVICE)
        tokens[:, : made["req_to_token"].shape[1]] = made["req_to_token"]
        return made | {"batch": batch, "req_to_token": tokens}

    static = step([640, 300, 129, 5])
    static.pop("batch")
    ids = static["topk_out"] = torch.full((1, 4, 4), -9, dtype=torch.int32, device=DEVICE)
    result = []
    graph = captured(lambda: result.append(hooks.decode(never, **static)[1]))
    for lengths in ([640, 300, 129, 5], [1, 500, 0, 0], [8000, 0, 0, 0]):
        new = step(lengths)
        for name, target in static.items():
            if isinstance(target, torch.Tensor) and target is not ids:
                target.view(torch.uint8).copy_(new[name].view(torch.uint8))
        ids.fill_(-9)
        result[-1].fill_(torch.nan)
        graph.replay()
        want = new["batch"].selections(given)
        assert torch.equal(ids.cpu().sort(-1)[0], want.sort(-1)[0])
        close(result[-1], new["batch"], want, dtype)
