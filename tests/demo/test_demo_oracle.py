"""The dense computation that the demo trusts, against loops."""

from __future__ import annotations

import math

import torch

from msa_tiles.demo import embed, oracle
from msa_tiles.demo.run import rows_to_check, saved

BLOCK = 4
IDS = torch.tensor([[[0, -1], [0, -1], [-1, 0], [0, -1], [1, 0], [0, 1], [1, -1], [-1, -1], [2, 0], [2, 1]]]).int()
TOTAL = IDS.shape[1]


def _keys_of(row: int) -> list[int]:
    blocks = [b for b in IDS[0, row].tolist() if b >= 0]
    return [j for j in range(TOTAL) if j // BLOCK in blocks and j <= row]


def test_selected_tokens_are_the_visible_ones_of_the_blocks():
    seen = oracle.selected_tokens(IDS, torch.arange(TOTAL), TOTAL, BLOCK)
    for row in range(TOTAL):
        assert seen[0, row].nonzero().flatten().tolist() == _keys_of(row)


def test_dense_over_selection_is_softmax_attention_over_those_keys():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(TOTAL, 2, 8, generator=generator)
    k, v = torch.randn(2, TOTAL, 1, 8, generator=generator)
    rows = torch.tensor([0, 4, 5, 6, 9])
    found = oracle.dense_over_selection(q, k, v, IDS, rows, BLOCK)
    for i, row in enumerate(rows.tolist()):
        for h in range(2):
            logits = [float(q[row, h] @ k[j, 0]) / math.sqrt(8) for j in _keys_of(row)]
            weights = [math.exp(x) for x in logits]
            wanted = sum(w * v[j, 0] for w, j in zip(weights, _keys_of(row), strict=True)) / sum(weights)
            torch.testing.assert_close(found[i, h].float(), wanted, atol=1e-6, rtol=1e-5)


def test_chunks_make_no_difference(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(TOTAL, 1, 8, generator=generator) for _ in range(3))
    rows = torch.tensor([0, 1, 2, 5, 9])
    whole = oracle.dense_over_selection(q, k, v, IDS, rows, BLOCK)
    monkeypatch.setattr(oracle, "_CHUNK_BYTES", 1)
    torch.testing.assert_close(oracle.dense_over_selection(q, k, v, IDS, rows, BLOCK), whole)


def test_attended_pairs_counts_every_visible_key_once():
    assert oracle.attended_pairs(IDS, TOTAL, BLOCK) == sum(len(_keys_of(row)) for row in range(TOTAL))


def test_nothing_is_saved_when_every_block_is_selected():
    shape = embed.Shape(num_q_heads=2, num_kv_heads=1, num_index_heads=1, head_dim=8, block_size=BLOCK, topk=3)
    everything = torch.arange(3).int().expand(1, TOTAL, 3)
    attention, with_scoring = saved(everything, shape)
    assert attention == 0
    # Scoring costs Hi * D for every pair, attention 2 * G * D: a quarter of it here.
    assert with_scoring == -0.25


def test_the_rows_of_the_questions_are_always_checked():
    rows = rows_to_check(1000, [501, 777, 999], count=10).tolist()
    assert {501, 777, 999} <= set(rows)
    assert len(rows) <= 10 and rows == sorted(rows)
    assert rows_to_check(3, [2], count=512).tolist() == [0, 1, 2]
