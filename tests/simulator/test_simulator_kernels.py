"""Every generated TileLang kernel, in the simulator, against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import simulated_caches
import simulated_calls
import simulated_hybrid
import simulated_kl
import simulated_selection
import simulated_training
from simulated_calls import Call, name_of

from msa_tiles.runtime.registry import Cell, default_registry

# Several requests: whole blocks and parts of them, one without queries, one without keys, one of a single token. A long
# one whose last, short block many queries see stands before others, so that what lies behind its keys is not zero.
MIXED = [(131, 150), (0, 70), (1, 1), (5, 0), (70, 200)]
FEW = [(3, 129)]
# Few queries each, some without keys or queries.
DECODED = [(3, 150), (0, 70), (1, 1), (2, 0), (9, 200), (1, 700)]
# The first query of a request sees all of its only block but one key.
ONE_HIDDEN = [(2, 64)] * 6
# The last block of a request lacks one key, and NaN lies there.
ONE_MISSING = {"sequences": [(1, 64), (70, 128)], "used": [63, 127], "seed": 4}
LONG = [(3, 64 * 40)]
TIED = "ties behind block 8192"  # ids of 14 bits
SMALL = {"head_dim": 64, "block_size": 64, "group": 8}
# With two KV heads, an offset that is wrong from the third on would be right.
HEADS = {**SMALL, "heads": 3, "topk": 2}
PAGES = {"num_pages": 5, "page_size": 13}
TURNED = {"num_q_heads": 5, "num_kv_heads": 3, "num_index_heads": 2, "num_positions": 9}
LIKE_KEYS = {"bf16_index": 0}  # index keys
ONE_HEAD = {"num_q_heads": 2, "num_kv_heads": 1, "num_index_heads": 1}


# By operator and name: requests and other facts of the call, then the arguments of its function.
CASES: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "decode_score": {
        "mixed": ({"sequences": DECODED, "seed": 1}, {"head_dim": 64, "block_size": 64}),
        "strided, used": (
            {"sequences": DECODED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 3},
            {"head_dim": 128, "block_size": 128, "heads": 3, "ctas": 4},
        ),
        "not causal": (
            {"sequences": DECODED, "seed": 3},
            {"head_dim": 128, "block_size": 64, "causal": False, "ctas": 1},
        ),
        "several tiles": (
            {"sequences": [(40, 300), (33, 90)], "seed": 4, "pages_per_block": 2, "positions": True},
            {"head_dim": 64, "block_size": 64, "heads": 4, "ctas": 5},
        ),
        "more CTAs than blocks": (
            {"sequences": FEW, "seed": 5, "pages_per_block": 1},
            {"head_dim": 64, "block_size": 128, "ctas": 7},
        ),
        "at once": (
            {"sequences": DECODED, "seed": 6, "late": False, "pages_per_block": 4},
            {"head_dim": 64, "block_size": 64},
        ),
        "small pages": (
            {"sequences": DECODED, "seed": 7, "pages_per_block": 8, "shortened": True},
            {"head_dim": 64, "block_size": 64, "heads": 1},
        ),
    },
    **{
        f"decode_score_{precision}": {
            "mixed": ({"sequences": DECODED, "seed": 1}, {"head_dim": 64, "block_size": 64, **outer[0]}),
            "strided, used": (
                {"sequences": DECODED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 3},
                {"head_dim": 128, "block_size": 128, "heads": 3, "ctas": 4, **outer[1]},
            ),
            "several tiles": (
                {"sequences": [(40, 300), (33, 90)], "seed": 4, "pages_per_block": 2, "positions": True},
                {"head_dim": 64, "block_size": 64, "heads": 4, "ctas": 5},
            ),
            "more CTAs than blocks": (
                {"sequences": FEW, "seed": 5, "pages_per_block": 1, "strided": True},
                {"head_dim": 64, "block_size": 128, "ctas": 7},
            ),
            "more blocks than stages": (
                {"sequences": [(1, 700), (2, 400)], "seed": 6, "late": False, "pages_per_block": 4},
                {"head_dim": 128, "block_size": 64, "causal": False, "ctas": 1},
            ),
            "small pages, scales of 0": (
                {"sequences": DECODED, "seed": 7, "pages_per_block": 8, "shortened": True},
                {"head_dim": 64, "block_size": 64, "heads": 1, "zeros": True},
            ),
        }
        for queries in ("q16", "q8")
        for precision, outer in ((f"{queries}k4", ({"outer": 1e-6}, {"outer": 1e4})), (f"{queries}kmx4", ({}, {})))
    },
    "decode_topk": {
        "few blocks": ({"sequences": FEW, "seed": 1}, {"max_blocks": 1024, "k": 5, "blocks": 3, "heads": 2}),
        "given counts": (
            {"sequences": [(9, 9)], "seed": 2},
            {"max_blocks": 1024, "k": 8, "blocks": 700, "group": 3, "init_blocks": 1, "local_blocks": 2},
        ),
        "strided, local last": (
            {"sequences": [(7, 7)], "seed": 3, "strided": True},
            {"max_blocks": 1024, "k": 11, "blocks": 130, "heads": 2, "order": 2, "init_blocks": 2, "local_blocks": 3},
        ),
        "by position": (
            {"sequences": DECODED, "seed": 4, "rows_behind": 3, "positions": True},
            {"max_blocks": 8192, "k": 20, "blocks": 11, "mode": 0, "order": 1},
        ),
        "one count": ({"sequences": [(1, 1)], "seed": 5}, {"max_blocks": 16384, "k": 64, "blocks": 9000, "mode": 1}),
        "ties": (
            {"sequences": [(5, 5)], "seed": 6, "values": "integer"},
            {"max_blocks": 1024, "k": 16, "blocks": 600, "order": 1},
        ),
        "many ties": (
            {"sequences": [(3, 3)], "seed": 7, "values": "integer"},
            {"max_blocks": 1024, "k": 50, "blocks": 1000},
        ),
        TIED: (
            {"sequences": [(1, 64 * 16000)], "seed": 6},
            {"max_blocks": 16384, "k": 50, "blocks": 16000, "mode": 0, "ties_from": 9000},
        ),
    },
    "sparse_attention_q16kv8": {
        "scales of heads": (
            {"sequences": MIXED, "seed": 1},
            {"head_dim": 64, "block_size": 64, "group": 16, "topk": 3, "heads": 2, "ctas": 3, "token_scales": 0},
        ),
        "scales of tokens": (
            {"sequences": MIXED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 9},
            {"head_dim": 128, "block_size": 128, "group": 4, "topk": 2, "window": 128, "ctas": 3, "token_scales": 1},
        ),
        "scales in pages": (
            {"sequences": [(60, 150), (20, 70)], "seed": 3, "shortened": True, "pages_per_block": 4},
            {"head_dim": 64, "block_size": 64, "group": 8, "topk": 2, "heads": 2, "token_scales": 1},
        ),
        "at once, pages": (
            {"sequences": [(60, 150), (20, 70)], "seed": 4, "late": False, "pages_per_block": 1, "positions": True},
            {"head_dim": 64, "block_size": 128, "group": 1, "topk": 2, "heads": 3, "token_scales": 0},
        ),
        "small pages": (
            {"sequences": [(60, 150)], "seed": 5, "pages_per_block": 8},
            {"head_dim": 64, "block_size": 64, "group": 2, "topk": 3, "ctas": 1, "token_scales": 1},
        ),
        "half pages": (
            {"sequences": [(60, 150)], "seed": 6, "pages_per_block": 2},
            {"head_dim": 64, "block_size": 128, "group": 8, "topk": 2, "ctas": 5, "token_scales": 0},
        ),
        "scales of 0": (
            {"sequences": [(60, 150), (20, 70)], "seed": 7, "zeros": True},
            {"head_dim": 64, "block_size": 64, "group": 8, "topk": 2, "heads": 2, "token_scales": 0},
        ),
        "scales of 0 among tokens": (
            {"sequences": [(60, 150), (20, 70)], "seed": 8, "zeros": True},
            {"head_dim": 64, "block_size": 64, "group": 8, "topk": 2, "heads": 2, "token_scales": 1},
        ),
    },
    **{
        f"sparse_attention_{precision}": {
            "mixed": (
                {"sequences": MIXED, "seed": 1},
                {"head_dim": 64, "block_size": 64, "group": 16, "topk": 3, "heads": 2, "ctas": 3, **outer[0]},
            ),
            "strided, used": (
                {"sequences": MIXED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 9},
                {"head_dim": 128, "block_size": 128, "group": 4, "topk": 2, "window": 128, "ctas": 3},
            ),
            "interleaved in pages": (
                {"sequences": [(60, 150), (20, 70)], "seed": 3, "strided": True, "pages_per_block": 4},
                {"head_dim": 64, "block_size": 64, "group": 8, "topk": 2, "heads": 2},
            ),
            "at once, pages": (
                {"sequences": [(60, 150), (20, 70)], "seed": 4, "late": False, "pages_per_block": 1, "positions": True},
                {"head_dim": 64, "block_size": 128, "group": 1, "topk": 2, "heads": 3, **outer[1]},
            ),
            "small pages": (
                {"sequences": [(60, 150)], "seed": 5, "pages_per_block": 8, "strided": True, "shortened": True},
                {"head_dim": 128, "block_size": 64, "group": 2, "topk": 3, "ctas": 1},
            ),
            "half pages, scales of 0": (
                {"sequences": [(60, 150)], "seed": 6, "pages_per_block": 2, "zeros": True},
                {"head_dim": 64, "block_size": 128, "group": 8, "topk": 2, "heads": 2, "ctas": 5},
            ),
        }
        for precision, outer in (("q16kv4", ({"outer": 1e-6}, {"outer": 1e4})), ("q16kvmx4", ({}, {})))
    },
    "sparse_decode_q16kv8": {
        "scales of 0": (
            {"sequences": DECODED, "seed": 7, "zeros": True},
            {"head_dim": 64, "block_size": 64, "group": 16, "topk": 3, "heads": 3, "token_scales": 0},
        ),
        "scales of 0 among tokens": (
            {"sequences": DECODED, "seed": 8, "zeros": True},
            {"head_dim": 64, "block_size": 64, "group": 16, "topk": 3, "heads": 3, "token_scales": 1},
        ),
        "scales of heads": (
            {"sequences": DECODED, "seed": 1},
            {"head_dim": 64, "block_size": 64, "group": 16, "topk": 3, "heads": 3, "token_scales": 0},
        ),
        "scales of tokens": (
            {"sequences": DECODED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 3},
            {"head_dim": 128, "block_size": 128, "group": 4, "topk": 5, "heads": 2, "splits": 2, "token_scales": 1},
        ),
        "scales in pages": (
            {"sequences": DECODED, "seed": 3, "shortened": True, "pages_per_block": 8},
            {"head_dim": 64, "block_size": 64, "group": 2, "topk": 4, "heads": 2, "splits": 2, "token_scales": 1},
        ),
        "more blocks than stages": (
            {"sequences": [(2, 1000)], "seed": 4, "pages_per_block": 1},
            {"head_dim": 64, "block_size": 64, "group": 1, "topk": 9, "token_scales": 1},
        ),
        "at once, pages": (
            {"sequences": DECODED, "seed": 5, "late": False, "pages_per_block": 2, "positions": True},
            {"head_dim": 128, "block_size": 64, "group": 8, "topk": 4, "heads": 2, "splits": 3, "token_scales": 0},
        ),
        "chosen": (
            {"sequences": DECODED, "seed": 6, "shortened": True, "pages_per_block": 4},
            {
                "head_dim": 64, "block_size": 64, "group": 8, "topk": 3, "splits": 2, "scored_blocks": 1024,
                "token_scales": 1,
            },
        ),
        "chosen, of many": (
            {"sequences": [(2, 300)], "seed": 7, "strided": True},
            {"head_dim": 64, "block_size": 64, "group": 8, "topk": 9, "scored_blocks": 8192, "token_scales": 0},
        ),
        "chosen, of most": (
            {"sequences": [(1, 300)], "seed": 8},
            {"head_dim": 64, "block_size": 128, "group": 8, "topk": 2, "scored_blocks": 16384, "token_scales": 1},
        ),
    },
    **{
        f"sparse_decode_{precision}": {
            "mixed": (
                {"sequences": DECODED, "seed": 1},
                {"head_dim": 64, "block_size": 64, "group": 16, "topk": 3, "heads": 3, **outer[0]},
            ),
            "strided, used": (
                {"sequences": DECODED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 3},
                {"head_dim": 128, "block_size": 128, "group": 4, "topk": 5, "heads": 2, "splits": 2},
            ),
            "interleaved in small pages": (
                {"sequences": DECODED, "seed": 3, "shortened": True, "strided": True, "pages_per_block": 8},
                {"head_dim": 64, "block_size": 64, "group": 2, "topk": 4, "heads": 2, "splits": 2},
            ),
            "interleaved, more blocks than stages": (
                {"sequences": [(2, 1000)], "seed": 4, "strided": True, "pages_per_block": 1},
                {"head_dim": 128, "block_size": 64, "group": 1, "topk": 9},
            ),
            "at once, pages": (
                {"sequences": DECODED, "seed": 5, "late": False, "pages_per_block": 2, "positions": True},
                {"head_dim": 128, "block_size": 64, "group": 8, "topk": 4, "heads": 2, "splits": 3, **outer[1]},
            ),
            "chosen": (
                {"sequences": DECODED, "seed": 6, "shortened": True, "pages_per_block": 4},
                {"head_dim": 64, "block_size": 64, "group": 8, "topk": 3, "splits": 2, "scored_blocks": 1024},
            ),
            "chosen, of many, scales of 0": (
                {"sequences": [(2, 300)], "seed": 7, "strided": True, "zeros": True},
                {"head_dim": 64, "block_size": 64, "group": 8, "topk": 9, "scored_blocks": 8192, "heads": 2},
            ),
            "chosen, of most": (
                {"sequences": [(1, 300)], "seed": 8},
                {"head_dim": 64, "block_size": 128, "group": 8, "topk": 2, "scored_blocks": 16384},
            ),
        }
        for precision, outer in (("q16kv4", ({"outer": 1e-6}, {"outer": 1e4})), ("q16kvmx4", ({}, {})))
    },
    "sparse_decode": {
        "mixed": ({"sequences": DECODED, "seed": 1}, {"head_dim": 64, "block_size": 64, "group": 16, "topk": 3}),
        "strided, used": (
            {"sequences": DECODED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 3},
            {"head_dim": 128, "block_size": 128, "group": 4, "topk": 5, "heads": 2, "splits": 2},
        ),
        "more blocks than stages": (
            {"sequences": [(2, 1000)], "seed": 3},
            {"head_dim": 64, "block_size": 64, "group": 1, "topk": 9},
        ),
        "a split a slot": (
            {"sequences": [(3, 300), (1, 90)], "seed": 4, "pages_per_block": 4, "positions": True},
            {"head_dim": 64, "block_size": 64, "group": 8, "topk": 4, "heads": 2, "splits": 4},
        ),
        "at once": (
            {"sequences": DECODED, "seed": 5, "late": False, "pages_per_block": 1},
            {"head_dim": 64, "block_size": 128, "group": 2, "topk": 4, "splits": 3},
        ),
        "small pages": (
            {"sequences": DECODED, "seed": 6, "shortened": True, "pages_per_block": 8},
            {"head_dim": 64, "block_size": 64, "group": 2, "topk": 4, "splits": 2, "sticky": True},
        ),
        "chosen": (
            {"sequences": DECODED, "seed": 8, "shortened": True, "rows_behind": 2},
            {
                "head_dim": 64, "block_size": 64, "group": 16, "topk": 3, "heads": 2, "splits": 2,
                "scored_blocks": 1024, "heads_per_group": 2, "init_blocks": 1,
            },
        ),
        "chosen, of many": (
            {"sequences": [(2, 300)], "seed": 9, "strided": True},
            {"head_dim": 64, "block_size": 64, "group": 8, "topk": 9, "splits": 3, "scored_blocks": 8192},
        ),
        "chosen, of most": (
            {"sequences": [(1, 300)], "seed": 10, "pages_per_block": 1, "positions": True},
            {"head_dim": 64, "block_size": 64, "group": 8, "topk": 2, "scored_blocks": 16384, "local_blocks": 2},
        ),
        "pages of half a block": (
            {"sequences": DECODED, "seed": 7, "pages_per_block": 2},
            {"head_dim": 64, "block_size": 64, "group": 4, "topk": 3},
        ),
        "three heads": ({"sequences": [(2, 200)]}, HEADS),
        "one key hidden": ({"sequences": ONE_HIDDEN, "seed": 3}, {**SMALL, "topk": 1}),
        "one row missing": (ONE_MISSING, {**SMALL, "topk": 2}),
        TIED: (
            {"sequences": [(1, 64 * 9500)], "seed": 6},
            {**SMALL, "group": 1, "topk": 50, "scored_blocks": 16384, "ties_from": 9000},
        ),
    },
    "index_score": {
        "mixed": ({"sequences": MIXED, "seed": 1}, {"head_dim": 64, "block_size": 64}),
        "strided, used": (
            {"sequences": MIXED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 9},
            {"head_dim": 128, "block_size": 128, "heads": 3},
        ),
        "not causal": ({"sequences": MIXED, "seed": 3}, {"head_dim": 128, "block_size": 64, "causal": False}),
        "many blocks": (
            {"sequences": [(3, 2200), (66, 2113)], "seed": 4, "pages_per_block": 1},
            {"head_dim": 64, "block_size": 64},
        ),
        "wide output": (
            {"sequences": MIXED, "seed": 5, "pages_per_block": 2, "positions": True},
            {"head_dim": 64, "block_size": 128, "width": 40},
        ),
        "narrow output": (
            {"sequences": MIXED, "seed": 6, "pages_per_block": 4},
            {"head_dim": 64, "block_size": 64, "width": 2},
        ),
        "at once": (
            {"sequences": MIXED, "seed": 7, "late": False, "pages_per_block": 8},
            {"head_dim": 64, "block_size": 64},
        ),
    },
    **{
        f"index_score_{precision}": {
            "mixed": (
                {"sequences": MIXED, "seed": 1},
                {"head_dim": 64, "block_size": 64, "heads": 3, **outer[0]},
            ),
            "strided, used": (
                {"sequences": MIXED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 9},
                {"head_dim": 128, "block_size": 128, "heads": 3, **outer[1]},
            ),
            "not causal, more blocks than stages": (
                {"sequences": [(3, 700), (66, 520)], "seed": 3, "pages_per_block": 1, "strided": True},
                {"head_dim": 128, "block_size": 64, "causal": False},
            ),
            "wide output": (
                {"sequences": MIXED, "seed": 4, "pages_per_block": 2, "positions": True},
                {"head_dim": 64, "block_size": 128, "width": 40},
            ),
            "narrow output, scales of 0": (
                {"sequences": MIXED, "seed": 5, "pages_per_block": 4, "shortened": True},
                {"head_dim": 64, "block_size": 64, "width": 2, "zeros": True},
            ),
            "at once": (
                {"sequences": MIXED, "seed": 6, "late": False, "pages_per_block": 8},
                {"head_dim": 64, "block_size": 64, "heads": 1},
            ),
        }
        for precision, outer in (("q16k4", ({"outer": 1e-6}, {"outer": 1e4})), ("q16kmx4", ({}, {})))
    },
    "index_gradients": {
        "mixed": (
            {"sequences": MIXED, "seed": 1},
            {"index_dim": 64, "block_size": 64, "topk": 3, "num_tasks": 9, "heads": 3, "schedule_heads": 3},
        ),
        "shared by heads, added": (
            {"sequences": [(20, 256), (3, 0), (9, 130)], "seed": 2},
            {"index_dim": 128, "block_size": 128, "topk": 17, "num_tasks": 20, "heads": 2, "first": False},
        ),
    },
    "index_kl": {
        "mixed": (
            {"sequences": MIXED, "seed": 1},
            {
                "head_dim": 64, "index_dim": 64, "block_size": 64, "group": 16, "topk": 3, "heads": 2, "window": 77,
                "repeats": 2,
            },
        ),
        "strided, used": (
            {"sequences": MIXED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 3},
            {"head_dim": 64, "index_dim": 128, "block_size": 64, "group": 4, "topk": 3, "heads": 2, "weighted": True},
        ),
        "positions": (
            {"sequences": MIXED, "seed": 3, "positions": True},
            {"head_dim": 128, "index_dim": 64, "block_size": 128, "group": 1, "topk": 5, "window": 70, "ctas": 3},
        ),
        "wide": (
            {"sequences": [(150, 300), (3, 70)], "seed": 4},
            {
                "head_dim": 128, "index_dim": 128, "block_size": 128, "group": 16, "topk": 3, "heads": 2,
                "weighted": True, "given": True,
            },
        ),
        "several tasks a block, at once": (
            {"sequences": [(3, 300), (200, 700)], "seed": 5, "late": False},
            {"head_dim": 64, "index_dim": 64, "block_size": 64, "group": 2, "topk": 4, "sticky": True, "ctas": 3},
        ),
        "the loss alone": (
            {"sequences": MIXED, "seed": 6},
            {"head_dim": 64, "index_dim": 64, "block_size": 128, "group": 16, "heads": 3, "gradients": False},
        ),
        "prefix": (
            {"sequences": [(150, 300), (3, 70)], "seed": 7},
            {
                "head_dim": 128, "index_dim": 64, "block_size": 64, "group": 8, "prefix": 1, "heads": 2, "window": 80,
                "weighted": True,
            },
        ),
        "prefix of more blocks than slots": (
            {"sequences": [(3, 4400), (0, 9), (5, 0)], "seed": 8, "shortened": True},
            {"head_dim": 64, "index_dim": 64, "block_size": 64, "group": 2, "prefix": 1, "ctas": 3},
        ),
        "three heads": ({"sequences": [(40, 150)]}, {**HEADS, "index_dim": 64}),
        "slots beyond 31": ({"sequences": LONG, "seed": 5}, {**SMALL, "index_dim": 64, "topk": 35}),
    },
    "index_lse": {
        "mixed": (
            {"sequences": MIXED, "seed": 1},
            {"index_dim": 64, "block_size": 64, "topk": 3, "heads": 2, "window": 77},
        ),
        "strided, used": (
            {"sequences": MIXED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 3},
            {"index_dim": 128, "block_size": 128, "topk": 4, "heads": 2},
        ),
        "at once": (
            {"sequences": MIXED, "seed": 3, "late": False, "positions": True},
            {"index_dim": 128, "block_size": 64, "topk": 2},
        ),
        "slots beyond 31": ({"sequences": LONG, "seed": 5}, {"index_dim": 64, "block_size": 64, "topk": 35}),
    },
    "topk_select": {
        "few blocks": ({"sequences": FEW, "seed": 1}, {"topk": 8, "k": 5, "blocks": 3, "heads": 2}),
        "given counts": (
            {"sequences": [(140, 140)], "seed": 2},
            {"topk": 8, "k": 8, "blocks": 70, "group": 3, "init_blocks": 1, "local_blocks": 2},
        ),
        "a warp a row": (
            {"sequences": [(7, 7)], "seed": 3, "strided": True},
            {"topk": 16, "k": 11, "blocks": 130, "heads": 2, "lanes_log2": 5, "order": 2, "init_blocks": 2},
        ),
        "by position": (
            {"sequences": MIXED, "seed": 4, "rows_behind": 3, "positions": True},
            {"topk": 32, "k": 20, "blocks": 4, "mode": 0, "lanes_log2": 2, "order": 1},
        ),
        "one count": ({"sequences": FEW, "seed": 5}, {"topk": 64, "k": 40, "blocks": 100, "mode": 1}),
        "ties": (
            {"sequences": [(33, 33)], "seed": 6, "values": "integer"},
            {"topk": 16, "k": 16, "blocks": 60, "lanes_log2": 2},
        ),
    },
    "select_blocks": {
        "mixed": (
            {"sequences": MIXED, "seed": 1, "values": "integer"},
            {"head_dim": 64, "block_size": 64, "topk": 8, "k": 3, "heads_per_group": 2},
        ),
        "strided, used": (
            {"sequences": MIXED, "seed": 2, "values": "integer", "strided": True, "shortened": True, "rows_behind": 9},
            {
                "head_dim": 128, "block_size": 128, "topk": 16, "k": 16, "heads_per_group": 1, "heads": 2,
                "init_blocks": 1, "local_blocks": 2, "order": 2,
            },
        ),
        "long list": (
            {"sequences": [(20, 1000)], "seed": 3, "values": "integer", "pages_per_block": 1},
            {"head_dim": 64, "block_size": 64, "topk": 64, "k": 33, "heads_per_group": 1, "order": 1},
        ),
        "many blocks": (
            {"sequences": [(66, 1111)], "seed": 4, "values": "integer", "pages_per_block": 2, "positions": True},
            {"head_dim": 64, "block_size": 64, "topk": 32, "k": 20, "heads_per_group": 4},
        ),
        "at once": (
            {"sequences": MIXED, "seed": 5, "values": "integer", "late": False, "pages_per_block": 4},
            {"head_dim": 64, "block_size": 64, "topk": 8, "k": 5, "heads_per_group": 1},
        ),
        "small pages, used": (
            {
                "sequences": MIXED, "seed": 6, "values": "integer", "shortened": True, "rows_behind": 9,
                "pages_per_block": 8, "positions": True,
            },
            {"head_dim": 128, "block_size": 64, "topk": 8, "k": 4, "heads_per_group": 1, "heads": 2},
        ),
    },
    **{
        f"select_blocks_{precision}": {
            "mixed": (
                {"sequences": MIXED, "seed": 1, "values": "integer"},
                {"head_dim": 64, "block_size": 64, "topk": 8, "k": 3, "heads_per_group": 2, "heads": 3},
            ),
            "strided, used": (
                {
                    "sequences": MIXED, "seed": 2, "values": "integer", "strided": True, "shortened": True,
                    "rows_behind": 9,
                },
                {
                    "head_dim": 128, "block_size": 128, "topk": 16, "k": 16, "heads_per_group": 1, "heads": 2,
                    "init_blocks": 1, "local_blocks": 2, "order": 2,
                },
            ),
            "long list": (
                {"sequences": [(20, 1000)], "seed": 3, "values": "integer", "pages_per_block": 1, "strided": True},
                {"head_dim": 64, "block_size": 64, "topk": 64, "k": 33, "heads_per_group": 2, "order": 1},
            ),
            "many blocks": (
                {"sequences": [(66, 1111)], "seed": 4, "values": "integer", "pages_per_block": 2, "positions": True},
                {"head_dim": 64, "block_size": 64, "topk": 32, "k": 20, "heads_per_group": 4},
            ),
            "at once, scales of 0": (
                {"sequences": MIXED, "seed": 5, "values": "integer", "late": False, "pages_per_block": 4},
                {"head_dim": 64, "block_size": 64, "topk": 8, "k": 5, "heads_per_group": 1, "zeros": True},
            ),
            "small pages, used": (
                {
                    "sequences": MIXED, "seed": 6, "values": "integer", "shortened": True, "rows_behind": 9,
                    "pages_per_block": 8, "positions": True,
                },
                {"head_dim": 128, "block_size": 64, "topk": 8, "k": 4, "heads_per_group": 1, "heads": 2},
            ),
        }
        for precision in ("q16k4", "q16kmx4")
    },
    "index_score_q8k8": {
        "mixed": ({"sequences": MIXED, "seed": 1}, {"head_dim": 64, "block_size": 64, "key_scales": 1}),
        "strided, used": (
            {"sequences": MIXED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 9},
            {"head_dim": 128, "block_size": 128, "heads": 3, "key_scales": 0},
        ),
        "scales of 0": (
            {"sequences": [(66, 1111)], "seed": 3, "pages_per_block": 2, "positions": True, "strided": True},
            {"head_dim": 64, "block_size": 128, "key_scales": 1, "zeros": True},
        ),
        "many blocks": (
            {"sequences": [(3, 2200), (66, 2113)], "seed": 4, "pages_per_block": 1},
            {"head_dim": 128, "block_size": 64, "key_scales": 1},
        ),
        "one scale for all keys": (
            {"sequences": MIXED, "seed": 5, "pages_per_block": 4, "late": False},
            {"head_dim": 128, "block_size": 128, "key_scales": 0, "causal": False},
        ),
        "small pages, used": (
            {"sequences": MIXED, "seed": 6, "shortened": True, "rows_behind": 9, "pages_per_block": 8},
            {"head_dim": 64, "block_size": 64, "key_scales": 1, "width": 3},
        ),
    },
    "decode_score_q8k8": {
        "mixed": ({"sequences": DECODED, "seed": 1}, {"head_dim": 64, "block_size": 64, "key_scales": 1}),
        "strided, used": (
            {"sequences": DECODED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 3},
            {"head_dim": 128, "block_size": 128, "heads": 3, "ctas": 4, "key_scales": 0},
        ),
        "scales of 0": (
            {"sequences": DECODED, "seed": 3, "pages_per_block": 1, "strided": True},
            {"head_dim": 64, "block_size": 128, "ctas": 2, "key_scales": 1, "zeros": True},
        ),
        "several tiles, long": (
            {"sequences": [(40, 1300), (33, 90)], "seed": 4, "pages_per_block": 2, "positions": True},
            {"head_dim": 128, "block_size": 64, "heads": 4, "ctas": 2, "key_scales": 1},
        ),
        "one scale for all keys": (
            {"sequences": DECODED, "seed": 5, "pages_per_block": 4, "late": False},
            {"head_dim": 128, "block_size": 128, "ctas": 1, "key_scales": 0, "causal": False},
        ),
        "small pages": (
            {"sequences": DECODED, "seed": 6, "pages_per_block": 8},
            {"head_dim": 64, "block_size": 64, "ctas": 7, "key_scales": 1},
        ),
    },
    "select_blocks_q8k8": {
        "mixed": (
            {"sequences": MIXED, "seed": 1, "values": "integer"},
            {"head_dim": 64, "block_size": 64, "topk": 8, "k": 3, "heads_per_group": 2, "key_scales": 1},
        ),
        "strided, used": (
            {"sequences": MIXED, "seed": 2, "values": "integer", "strided": True, "shortened": True, "rows_behind": 9},
            {
                "head_dim": 128, "block_size": 128, "topk": 16, "k": 16, "heads_per_group": 1, "heads": 2,
                "init_blocks": 1, "local_blocks": 2, "order": 2, "key_scales": 1,
            },
        ),
        "long list": (
            {"sequences": [(20, 1000)], "seed": 3, "values": "integer", "pages_per_block": 1, "strided": True},
            {
                "head_dim": 64, "block_size": 64, "topk": 64, "k": 33, "heads_per_group": 2, "order": 1,
                "key_scales": 1,
            },
        ),
        "many blocks": (
            {
                "sequences": [(66, 1111)], "seed": 4, "values": "integer", "pages_per_block": 2, "positions": True,
                "strided": True,
            },
            {"head_dim": 64, "block_size": 64, "topk": 32, "k": 20, "heads_per_group": 4, "key_scales": 1},
        ),
        "one scale for all keys": (
            {"sequences": [(66, 1111)], "seed": 7, "values": "integer", "strided": True},
            {"head_dim": 128, "block_size": 64, "topk": 8, "k": 8, "heads_per_group": 4, "key_scales": 0},
        ),
        "at once": (
            {"sequences": MIXED, "seed": 5, "values": "integer", "late": False, "pages_per_block": 4},
            {"head_dim": 64, "block_size": 64, "topk": 8, "k": 5, "heads_per_group": 1, "key_scales": 0},
        ),
        "small pages, used": (
            {
                "sequences": MIXED, "seed": 6, "values": "integer", "shortened": True, "rows_behind": 9,
                "pages_per_block": 8, "positions": True,
            },
            {
                "head_dim": 128, "block_size": 64, "topk": 8, "k": 4, "heads_per_group": 1, "heads": 2,
                "key_scales": 1,
            },
        ),
    },
    "build_schedule": {
        "mixed": ({"sequences": MIXED, "seed": 1}, {"block_size": 64, "topk": 3, "heads": 2, "window": 128}),
        "strided, used": (
            {"sequences": MIXED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 9},
            {"block_size": 128, "topk": 5, "window": 300},
        ),
        "wide rows": ({"sequences": [(9, 6000)], "seed": 3}, {"block_size": 64, "topk": 40, "window": 128}),
        "sticky": (
            {"sequences": [(300, 333)], "seed": 4, "positions": True},
            {"block_size": 64, "topk": 2, "window": 256, "sticky": True},
        ),
        "more blocks than counters": (
            {"sequences": [(20, 140000), (20, 130)], "seed": 5},
            {"block_size": 64, "topk": 4, "window": 128},
        ),
        "two parts, rows of half a warp": (
            {"sequences": [(41, 140000), (7, 130), (1, 300)], "seed": 6},
            {"block_size": 64, "topk": 16, "window": 256, "heads": 2},
        ),
        "more ranges than parts": (
            {"sequences": [(30, 600000)], "seed": 7, "positions": True},
            {"block_size": 64, "topk": 17, "window": 640},
        ),
        "one key hidden": ({"sequences": ONE_HIDDEN, "seed": 3}, {"block_size": 64, "topk": 1, "window": 128}),
    },
    "sparse_attention": {
        "mixed": (
            {"sequences": MIXED, "seed": 1},
            {"head_dim": 64, "block_size": 64, "group": 8, "topk": 2, "heads": 2},
        ),
        "strided, used, windows": (
            {"sequences": MIXED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 9},
            {"head_dim": 128, "block_size": 128, "group": 4, "topk": 2, "window": 128, "ctas": 3},
        ),
        "large group": (
            {"sequences": [(60, 150), (20, 70)], "seed": 3, "pages_per_block": 1, "shortened": True},
            {"head_dim": 128, "block_size": 64, "group": 16, "topk": 2, "ctas": 1},
        ),
        "one head a group": (
            {"sequences": [(60, 150), (20, 70)], "seed": 4, "pages_per_block": 2, "positions": True},
            {"head_dim": 64, "block_size": 128, "group": 1, "topk": 2, "heads": 3},
        ),
        "two heads a group": (
            {"sequences": [(60, 150)], "seed": 5, "pages_per_block": 4},
            {"head_dim": 64, "block_size": 64, "group": 2, "topk": 3, "ctas": 5},
        ),
        "sticky": (
            {"sequences": [(200, 250), (40, 100)], "seed": 6},
            {"head_dim": 64, "block_size": 64, "group": 8, "topk": 3, "sticky": True, "ctas": 1},
        ),
        "at once": (
            {"sequences": MIXED, "seed": 7, "late": False, "pages_per_block": 8},
            {"head_dim": 64, "block_size": 64, "group": 8, "topk": 2},
        ),
        "three heads": ({"sequences": [(9, 150)]}, HEADS),
        "one row missing": (ONE_MISSING, {**SMALL, "topk": 2}),
        "slots beyond 31": ({"sequences": LONG, "seed": 5}, {**SMALL, "topk": 35}),
    },
    "split_selection": {
        "mixed": (
            {"sequences": MIXED, "seed": 1},
            {"block_size": 64, "tile_tokens": 8, "topk": 3, "heads": 2, "close": True},
        ),
        "strided, used": (
            {"sequences": MIXED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 9},
            {"block_size": 128, "tile_tokens": 4, "topk": 5, "close": True, "fill": 2},
        ),
        "long rows": (
            {"sequences": [(10, 9000), (3, 1)], "seed": 3},
            {"block_size": 64, "tile_tokens": 8, "topk": 64, "close": True, "fill": 30},
        ),
        "sticky": (
            {"sequences": [(90, 333)], "seed": 4, "positions": True},
            {"block_size": 64, "tile_tokens": 4, "topk": 2, "heads": 2, "sticky": True},
        ),
        "repeated ids": (
            {"sequences": MIXED, "seed": 5},
            {"block_size": 64, "tile_tokens": 4, "topk": 6, "close": True, "fill": 3, "repeated": True},
        ),
        "more wanted than there are": (
            {"sequences": [(1, 1)], "seed": 6},
            {"block_size": 128, "tile_tokens": 8, "topk": 1, "fill": 9},
        ),
        "one key hidden": ({"sequences": [(2, 64)], "seed": 5}, {"block_size": 64, "tile_tokens": 8, "topk": 1}),
    },
    "shared_attention": {
        "mixed": (
            {"sequences": MIXED, "seed": 1},
            {"head_dim": 64, "block_size": 64, "group": 8, "topk": 2, "heads": 2, "close": True},
        ),
        "strided, used, windows": (
            {"sequences": MIXED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 9},
            {"head_dim": 128, "block_size": 128, "group": 4, "topk": 2, "window": 128, "ctas": 3, "close": True},
        ),
        "large group": (
            {"sequences": [(60, 150), (20, 70)], "seed": 3, "pages_per_block": 1, "shortened": True},
            {"head_dim": 128, "block_size": 64, "group": 16, "topk": 2, "ctas": 1, "close": True},
        ),
        "one head a group": (
            {"sequences": [(60, 150), (20, 70)], "seed": 4, "pages_per_block": 2, "positions": True},
            {"head_dim": 64, "block_size": 128, "group": 1, "topk": 2, "heads": 3},
        ),
        "two heads a group": (
            {"sequences": [(60, 150)], "seed": 5, "pages_per_block": 4},
            {"head_dim": 64, "block_size": 64, "group": 2, "topk": 3, "ctas": 5, "close": True},
        ),
        "sticky": (
            {"sequences": [(200, 250), (40, 100)], "seed": 6},
            {"head_dim": 64, "block_size": 64, "group": 8, "topk": 3, "sticky": True, "ctas": 1},
        ),
        "at once": (
            {"sequences": MIXED, "seed": 7, "late": False, "pages_per_block": 8},
            {"head_dim": 64, "block_size": 64, "group": 8, "topk": 2, "close": True},
        ),
        "more slots than stages": (
            {"sequences": [(13, 2000)], "seed": 8},
            {"head_dim": 64, "block_size": 128, "group": 16, "topk": 9, "ctas": 3, "fill": 4},
        ),
        "nothing shared": (
            {"sequences": [(9, 1500), (3, 1)], "seed": 9},
            {"head_dim": 64, "block_size": 64, "group": 16, "topk": 11},
        ),
        "small scale": (
            {"sequences": [(33, 300)], "seed": 10},
            {"head_dim": 64, "block_size": 64, "group": 16, "topk": 3, "close": True, "scale": 0.01},
        ),
        "least scale": (
            {"sequences": [(33, 300)], "seed": 10},
            {"head_dim": 64, "block_size": 64, "group": 16, "topk": 3, "close": True, "scale": 2.0**-64},
        ),
        "three heads": ({"sequences": [(9, 150)]}, {**HEADS, "close": True}),
    },
    "shared_attention_q16kv8": {
        "scales of heads": (
            {"sequences": MIXED, "seed": 1},
            {"head_dim": 64, "block_size": 64, "group": 16, "topk": 3, "heads": 2, "ctas": 3, "close": True,
             "token_scales": 0},
        ),
        "scales of tokens": (
            {"sequences": MIXED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 9},
            {"head_dim": 128, "block_size": 128, "group": 4, "topk": 2, "window": 128, "ctas": 3, "close": True,
             "token_scales": 1},
        ),
        "scales in pages": (
            {"sequences": [(60, 150), (20, 70)], "seed": 3, "shortened": True, "pages_per_block": 4},
            {"head_dim": 64, "block_size": 64, "group": 8, "topk": 2, "heads": 2, "close": True, "token_scales": 1},
        ),
        "at once, pages": (
            {"sequences": [(60, 150), (20, 70)], "seed": 4, "late": False, "pages_per_block": 1, "positions": True},
            {"head_dim": 64, "block_size": 128, "group": 1, "topk": 2, "heads": 3, "token_scales": 0},
        ),
        "small pages": (
            {"sequences": [(60, 150)], "seed": 5, "pages_per_block": 8},
            {"head_dim": 128, "block_size": 64, "group": 2, "topk": 3, "ctas": 1, "close": True, "token_scales": 1},
        ),
        "more slots than stages": (
            {"sequences": [(13, 2000)], "seed": 6, "pages_per_block": 2},
            {"head_dim": 64, "block_size": 128, "group": 16, "topk": 9, "ctas": 3, "fill": 4, "token_scales": 1},
        ),
        "scales of 0": (
            {"sequences": [(60, 150), (20, 70)], "seed": 7, "zeros": True},
            {"head_dim": 64, "block_size": 64, "group": 8, "topk": 2, "heads": 2, "close": True, "token_scales": 0},
        ),
        "scales of 0 among tokens": (
            {"sequences": [(60, 150), (20, 70)], "seed": 8, "zeros": True},
            {"head_dim": 64, "block_size": 64, "group": 8, "topk": 2, "heads": 2, "close": True, "token_scales": 1},
        ),
    },
    **{
        f"shared_attention_{precision}": {
            "mixed": (
                {"sequences": MIXED, "seed": 1},
                {"head_dim": 64, "block_size": 64, "group": 16, "topk": 3, "heads": 2, "ctas": 3, "close": True,
                 **outer[0]},
            ),
            "strided, used": (
                {"sequences": MIXED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 9},
                {"head_dim": 128, "block_size": 128, "group": 4, "topk": 2, "window": 128, "ctas": 3, "close": True},
            ),
            "interleaved in pages": (
                {"sequences": [(60, 150), (20, 70)], "seed": 3, "strided": True, "pages_per_block": 4},
                {"head_dim": 64, "block_size": 64, "group": 8, "topk": 2, "heads": 2, "close": True},
            ),
            "at once, pages": (
                {"sequences": [(60, 150), (20, 70)], "seed": 4, "late": False, "pages_per_block": 1, "positions": True},
                {"head_dim": 64, "block_size": 128, "group": 1, "topk": 2, "heads": 3, "close": True, **outer[1]},
            ),
            "small pages": (
                {"sequences": [(60, 150)], "seed": 5, "pages_per_block": 8, "strided": True, "shortened": True},
                {"head_dim": 128, "block_size": 64, "group": 2, "topk": 3, "ctas": 1, "close": True},
            ),
            "more slots than stages": (
                {"sequences": [(13, 2000)], "seed": 6, "pages_per_block": 2},
                {"head_dim": 64, "block_size": 128, "group": 16, "topk": 9, "ctas": 3, "fill": 4},
            ),
            "scales of 0": (
                {"sequences": [(60, 150), (20, 70)], "seed": 7, "zeros": True},
                {"head_dim": 64, "block_size": 64, "group": 8, "topk": 2, "heads": 2, "close": True},
            ),
        }
        for precision, outer in (("q16kv4", ({"outer": 1e-6}, {"outer": 1e4})), ("q16kvmx4", ({}, {})))
    },
    "sparse_attention_backward": {
        "mixed": (
            {"sequences": MIXED, "seed": 1},
            {"head_dim": 64, "block_size": 64, "group": 8, "topk": 2, "heads": 2, "repeats": 2},
        ),
        "strided, used, windows": (
            {"sequences": MIXED, "seed": 2, "strided": True, "shortened": True, "rows_behind": 9},
            {"head_dim": 128, "block_size": 128, "group": 4, "topk": 2, "window": 128, "ctas": 3},
        ),
        "large group": (
            {"sequences": [(60, 150), (20, 70)], "seed": 3, "shortened": True},
            {"head_dim": 128, "block_size": 64, "group": 16, "topk": 2, "ctas": 1},
        ),
        "one head a group": (
            {"sequences": [(60, 150), (20, 70)], "seed": 4, "positions": True},
            {"head_dim": 64, "block_size": 128, "group": 1, "topk": 2, "heads": 3},
        ),
        "tasks that do not own their block": (
            {"sequences": [(600, 100), (3, 90)], "seed": 5},
            {"head_dim": 64, "block_size": 64, "group": 2, "topk": 3, "ctas": 5, "sticky": True},
        ),
        "at once": (
            {"sequences": MIXED, "seed": 7, "late": False},
            {"head_dim": 128, "block_size": 128, "group": 16, "topk": 2},
        ),
        "a schedule of the forward call": (
            {"sequences": [(300, 350)], "seed": 8},
            {"head_dim": 64, "block_size": 128, "group": 8, "topk": 2, "window": 160, "ctas": 3, "given": True},
        ),
        "three heads": ({"sequences": [(40, 150)]}, HEADS),
        "one row missing": (ONE_MISSING, {**SMALL, "topk": 2}),
        "slots beyond 31": ({"sequences": LONG, "seed": 5}, {**SMALL, "topk": 35}),
    },
    "gradient_rows": {
        "strided": ({"sequences": [(5, 5)], "seed": 1, "strided": True}, {"head_dim": 128, "heads": 18}),
        "without dlse": ({"sequences": [(3, 3)], "seed": 2}, {"head_dim": 64, "heads": 3, "with_dlse": False}),
    },
    "merge_gradients": {
        "several heads": (
            {"sequences": [(5, 500)], "seed": 1},
            {"head_dim": 128, "group": 16, "topk": 3, "num_tasks": 11, "heads": 2},
        ),
        "many slots": (
            {"sequences": [(3, 100)], "seed": 2},
            {"head_dim": 64, "group": 1, "topk": 19, "num_tasks": 5, "heads": 3},
        ),
    },
    **{
        f"norm_rope_append{precision}": {
            "three heads": (
                {"sequences": [(9, 9)], "seed": 1, "strided": True},
                {"head_dim": 128, "float32_table": 0, **LIKE_KEYS, **scales[0], **PAGES, **TURNED, "rotary_dim": 64},
            ),
            "float32 table, in place": (
                {"sequences": [(7, 7)], "seed": 2},
                {"head_dim": 64, "float32_table": 1, **LIKE_KEYS, **scales[1], **PAGES, **TURNED, "rotary_dim": 48},
            ),
            "slots alone, all rotated": (
                {"sequences": [(11, 11)], "seed": 3, "late": False},
                {
                    **{"head_dim": 64, "float32_table": 0, "bf16_index": plain, **scales[1], **TURNED, **ONE_HEAD},
                    **{"num_pages": 20, "page_size": 1, "rotary_dim": 64, "into_buffers": True},
                },
            ),
            "dense": (
                {"sequences": [(6, 6)], "seed": 4},
                {
                    **{"head_dim": 128, "float32_table": 1, **LIKE_KEYS, **scales[0], **TURNED},
                    **{"num_pages": 3, "page_size": 16, "rotary_dim": 16, "dense": True},
                },
            ),
        }
        for precision, plain, scales in (
            ("", 0, ({}, {})),
            ("_q16kv8", 1, ({"token_scales": 0}, {"token_scales": 1})),
            *((other, 1, ({}, {})) for other in ("_q16kv4", "_q16kvmx4")),
        )
    },
    **{
        f"append_kv{precision}": {
            "three heads": (
                {"sequences": [(23, 23)], "seed": 1, "strided": True},
                {"head_dim": 128, "float32_rows": 0, **scales[0], **PAGES, "num_kv_heads": 3},
            ),
            "float32": (
                {"sequences": [(19, 19)], "seed": 2},
                {"head_dim": 64, "float32_rows": 1, **scales[1], **PAGES, "num_kv_heads": 2},
            ),
            "slots alone": (
                {"sequences": [(40, 40)], "seed": 3, "late": False},
                {"head_dim": 64, "float32_rows": 0, **scales[1], "num_pages": 70, "page_size": 1, "num_kv_heads": 1},
            ),
            "pages of 16": (
                {"sequences": [(60, 60)], "seed": 4, "strided": True},
                {"head_dim": 64, "float32_rows": 1, **scales[0], "num_pages": 5, "page_size": 16, "num_kv_heads": 2},
            ),
        }
        for precision, scales in (
            ("_q16kv8", ({"token_scales": 0}, {"token_scales": 1})),
            *((other, ({}, {})) for other in ("", "_q16kv4", "_q16kvmx4")),
        )
    },
    **{
        f"append_index{precision}": {
            "pages": (
                {"sequences": [(37, 37)], "seed": 4, "strided": True},
                {"head_dim": 128, "float32_rows": 1, **scales[0], **PAGES},
            ),
            "a number": (
                {"sequences": [(50, 50)], "seed": 5},
                {"head_dim": 64, "float32_rows": 0, **scales[0], **PAGES},
            ),
            "slots alone": (
                {"sequences": [(40, 40)], "seed": 6},
                {"head_dim": 128, "float32_rows": 0, **scales[1], "num_pages": 70, "page_size": 1},
            ),
            "pages of 16": (
                {"sequences": [(60, 60)], "seed": 7, "strided": True},
                {"head_dim": 128, "float32_rows": 0, **scales[1], "num_pages": 5, "page_size": 16},
            ),
        }
        for precision, scales in (
            ("_q8k8", ({"token_scales": 0}, {"token_scales": 1})),
            *((other, ({}, {})) for other in ("", "_q16k4", "_q16kmx4")),
        )
    },
    **{
        f"dequantize_kv_{precision}": {
            "pages": (
                {"sequences": [(0, 60), (1, 0), (3, 100)], "seed": 1, "strided": True},
                {"head_dim": 128, "paged": 1, **scales[0], "page_size": 16, "num_kv_heads": 3},
            ),
            "flat": (
                {"sequences": [(9, 133)], "seed": 2},
                {"head_dim": 128, "paged": 0, **scales[1], "page_size": 16, "num_kv_heads": 2},
            ),
            "pages of 5": (
                {"sequences": [(9, 33), (1, 5)], "seed": 3, "late": False},
                {"head_dim": 64, "paged": 1, **scales[1], "page_size": 5, "num_kv_heads": 2},
            ),
            "flat, strided": (
                {"sequences": [(9, 68)], "seed": 4, "strided": True},
                {"head_dim": 64, "paged": 0, **scales[0], "page_size": 1, "num_kv_heads": 1},
            ),
        }
        for precision, scales in (
            ("q16kv8", ({"token_scales": 0}, {"token_scales": 1})),
            *((other, ({"token_scales": 0},) * 2) for other in ("q16kv4", "q16kvmx4")),
        )
    },
    "combine": {
        "few splits": ({"sequences": FEW, "seed": 1}, {"head_dim": 64, "splits": 3, "heads": 5}),
        "many splits": (
            {"sequences": [(5, 5)], "seed": 2, "strided": True},
            {"head_dim": 128, "splits": 37, "heads": 18},
        ),
        "one split": ({"sequences": [(2, 2)], "seed": 3}, {"head_dim": 64, "splits": 1, "heads": 1}),
    },
}  # fmt: skip


MODULES = (simulated_caches, simulated_calls, simulated_selection, simulated_hybrid, simulated_training, simulated_kl)
CELLS = default_registry().select(dsl="tilelang")


@pytest.mark.parametrize(
    ("cell", "case"),
    [pytest.param(cell, case, id=f"{cell.id}-{case}") for cell in CELLS for case in CASES[name_of(cell)]],
)
@pytest.mark.matrix
@pytest.mark.drawn(2)
def test_a_generated_kernel_is_right(cell: Cell, case: str) -> None:
    call, arguments = CASES[name_of(cell)][case]
    (calls,) = [calls for calls in MODULES if hasattr(calls, name_of(cell))]
    getattr(calls, name_of(cell))(Call(**call, target=cell.target), **arguments)


def test_rows_longer_than_a_warp_end_where_their_request_ends() -> None:
    call = Call([(127, 85), (1, 64), (3, 1)], seed=1)
    simulated_calls.build_schedule(call, block_size=128, topk=64, window=256)


@pytest.mark.parametrize("target", ["sm90", "sm100"])
@pytest.mark.parametrize("op", ["sparse_attention", "select_blocks", "index_score", "decode_score", "sparse_decode",
                                "shared_attention", "sparse_attention_backward", "index_lse", "index_kl"])  # fmt: skip
@pytest.mark.parametrize("keys", [1, 70])
@pytest.mark.drawn(1)
def test_the_stride_of_a_dimension_of_size_one_means_nothing(op: str, target: str, keys: int) -> None:
    """One query, one KV head, and one key or more: TMA is told other strides than such tensors have."""
    if not default_registry().select(op, "tilelang", target):
        pytest.skip("no such kernel")
    sizes: dict[str, int] = {"head_dim": 64, "block_size": 64, "topk": 2, "group": 8}
    if op in ("select_blocks", "index_score", "decode_score"):
        sizes = {"head_dim": 64, "block_size": 64}
        sizes |= {"topk": 8, "k": 2, "heads_per_group": 1} if op == "select_blocks" else {"heads": 1}
    elif op in ("index_lse", "index_kl"):
        sizes = {"index_dim": 64, "block_size": 128, "topk": 2}
        sizes |= {"head_dim": 128, "group": 8} if op == "index_kl" else {}
    (calls,) = [calls for calls in MODULES if hasattr(calls, op)]
    values = "integer" if op == "select_blocks" else "normal"
    getattr(calls, op)(Call([(1, keys)], seed=keys, loose=True, values=values, target=target), **sizes)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize(
    ("op", "call", "sizes"),
    [
        ("sparse_attention", {"sequences": [(90, 150), (70, 70)]}, {"head_dim": 64, "block_size": 64, "ctas": 3}),
        ("sparse_attention", {"sequences": [(130, 130)]}, {"head_dim": 128, "block_size": 128, "group": 16}),
        ("sparse_attention_q16kv8", {"sequences": [(90, 150)]}, {"head_dim": 64, "block_size": 64, "token_scales": 1}),
        ("sparse_attention_q16kv8", {"sequences": [(90, 150)]}, {"head_dim": 64, "block_size": 128, "token_scales": 0}),
        ("shared_attention", {"sequences": [(90, 150), (70, 70)]}, {"head_dim": 64, "block_size": 64, "ctas": 3}),
        ("shared_attention", {"sequences": [(66, 160)]}, {"head_dim": 128, "block_size": 128, "group": 16, "ctas": 3}),
        ("shared_attention_q16kv8", {"sequences": [(90, 150)]}, {"head_dim": 64, "block_size": 64, "token_scales": 1}),
        ("shared_attention_q16kv8", {"sequences": [(66, 160)]}, {"head_dim": 64, "block_size": 128, "token_scales": 0}),
        ("sparse_decode", {"sequences": [(8, 130), (3, 70)]}, {"head_dim": 64, "block_size": 64, "splits": 2}),
        ("sparse_decode", {"sequences": [(5, 130)], "pages_per_block": 2}, {"head_dim": 128, "block_size": 128}),
        ("sparse_decode_q16kv8", {"sequences": [(8, 130)]}, {"head_dim": 64, "block_size": 64, "token_scales": 1}),
        ("sparse_decode_q16kv8", {"sequences": [(5, 130)]}, {"head_dim": 64, "block_size": 128, "token_scales": 0}),
    ],
    ids=[
        "prefill",
        "prefill-wide",
        "prefill-tokens",
        "prefill-heads",
        "shared",
        "shared-wide",
        "shared-tokens",
        "shared-heads",
        "decode",
        "decode-wide",
        "decode-tokens",
        "decode-heads",
    ],
)
@pytest.mark.drawn(1)
def test_what_is_not_finite_reaches_who_sees_it(
    op: str, call: dict[str, Any], sizes: dict[str, Any], which: str, value: float
) -> None:
    """In a block that queries read, some of them see the place and some do not."""
    if op.endswith("q16kv8") and not math.isnan(value):
        pytest.skip("e4m3 has no infinities")
    (calls,) = [calls for calls in MODULES if hasattr(calls, op)]
    sizes = {"group": 8, "topk": 3, **({"close": True} if op.startswith("shared") else {}), **sizes}
    getattr(calls, op)(Call(**call, seed=5, spoilt=(which, value)), **sizes)


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.drawn(1)
def test_nan_comes_through_a_weight_of_zero(which: str) -> None:
    """Of a partial result whose scores are far below those of a shared block."""
    (calls,) = [calls for calls in MODULES if hasattr(calls, "shared_attention")]
    call = Call([(90, 250), (70, 70)], seed=5, spoilt=(which, math.nan))
    calls.shared_attention(call, group=8, topk=3, head_dim=64, block_size=64, scale=40.0, ctas=3)


@pytest.mark.parametrize("seed", range(10, 14))
@pytest.mark.drawn(1)
@pytest.mark.slow  # every simulated call draws an order of its own
def test_the_order_of_threads_and_copies_does_not_matter(seed: int) -> None:
    sequences = [(66, 150), (3, 20)]
    simulated_selection.select_blocks(
        Call(sequences, seed=seed, values="integer"), head_dim=64, block_size=64, topk=8, k=2, heads_per_group=2
    )
    for target in ("sm90", "sm100"):
        call = Call(sequences, seed=seed, target=target)
        simulated_calls.sparse_attention(call, head_dim=64, block_size=64, group=8, topk=2, ctas=3)
    simulated_hybrid.shared_attention(
        Call(sequences, seed=seed), head_dim=64, block_size=64, group=8, topk=2, window=40, ctas=3, close=True, fill=1
    )
    simulated_training.sparse_attention_backward(
        Call(sequences, seed=seed), head_dim=64, block_size=128, group=8, topk=2, window=40, ctas=3
    )


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_every_value_of_every_compile_time_dim_is_simulated(cell: Cell) -> None:
    for dim, values in cell.variants.items():
        assert {(call | arguments).get(dim, 0) for call, arguments in CASES[name_of(cell)].values()} == set(values)
