"""One module per operator: its inputs, its call, its check and its peers."""

from __future__ import annotations

from msa_tiles.bench.harness import Benchmark
from msa_tiles.bench.operators import (
    batch_invariant,
    build_schedule,
    caches,
    combine,
    decode,
    decode_parts,
    dequantize,
    drafts,
    index_score,
    norm_rope,
    prefill,
    select_blocks,
    servers,
    sparse_attention,
    topk_select,
    training,
)

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.op: benchmark
    for benchmark in (
        index_score.BENCHMARK,
        topk_select.BENCHMARK,
        select_blocks.BENCHMARK,
        build_schedule.BENCHMARK,
        sparse_attention.BENCHMARK,
        combine.BENCHMARK,
        prefill.BENCHMARK,
        *decode_parts.BENCHMARKS,
        decode.BENCHMARK,
        drafts.BENCHMARK,
        *training.BENCHMARKS,
        *caches.BENCHMARKS,
        dequantize.BENCHMARK,
        norm_rope.BENCHMARK,
        *batch_invariant.BENCHMARKS,
        *servers.BENCHMARKS,
    )
}
"""By operator, in the order of tables."""
