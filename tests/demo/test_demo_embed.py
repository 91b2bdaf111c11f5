"""The embedding: deterministic, and similar where contexts are alike."""

from __future__ import annotations

import pytest
import torch

from msa_tiles.demo import embed
from msa_tiles.demo.questions import PHRASE

SHAPE = embed.Shape(num_q_heads=4, num_kv_heads=2, num_index_heads=2, head_dim=64)
CPU = torch.device("cpu")


@pytest.fixture
def ids() -> list[int]:
    generator = torch.Generator().manual_seed(11)
    text = torch.randint(0, 300, (900,), generator=generator).tolist()
    return [*text, 300, *text[200 : 200 + PHRASE]]  # asks for the phrase whose answer is token 200 + PHRASE


def test_same_ids_same_tensors(ids):
    first, second = (embed.embed(ids, SHAPE, torch.float32, CPU) for _ in range(2))
    for name in ("q", "k", "v", "idx_q", "idx_k", "words"):
        assert torch.equal(getattr(first, name), getattr(second, name))


def test_shapes_are_those_of_the_operators(ids):
    layer = embed.embed(ids, SHAPE, torch.bfloat16, CPU)
    total = len(ids)
    assert layer.q.shape == (total, 4, 64) and layer.q.dtype == torch.bfloat16
    assert layer.k.shape == layer.v.shape == (total, 2, 64)
    assert layer.idx_q.shape == (total, 2, 64) and layer.idx_k.shape == (total, 64)


def test_a_repeated_context_scores_highest_where_it_occurred_before(ids):
    layer = embed.embed(ids, SHAPE, torch.float32, CPU)
    answer = 200 + PHRASE
    earlier = slice(0, 900)  # behind it stands the question itself
    for h in range(2):
        assert (layer.idx_k[earlier] @ layer.idx_q[-1, h]).argmax() == answer
    for h in range(4):
        assert (layer.k[earlier, h // 2] @ layer.q[-1, h]).argmax() == answer


def test_keys_know_the_context_but_not_their_own_token():
    """A key that held the token it stands at would let a query find the answer by knowing it."""
    context = [5, 6, 7, 8, 9, 10, 11, 12]
    ids = [*context, 1, 3, 2, *context, 4, 3]
    layer = embed.embed(ids, SHAPE, torch.float32, CPU)
    first, second = 8, 19
    assert ids[first] != ids[second]
    for tensor in (layer.k, layer.idx_k):
        torch.testing.assert_close(tensor[first], tensor[second])
    assert (torch.cosine_similarity(layer.q[first], layer.q[second], dim=-1) < 0.9).all()


def test_read_out_finds_the_word_that_values_point_at(ids):
    layer = embed.embed(ids, SHAPE, torch.float32, CPU)
    positions = torch.tensor([5, 250, 899])
    out = layer.v[positions].repeat_interleave(SHAPE.group, dim=1)
    assert embed.read_out(layer, out).tolist() == [ids[p] for p in positions.tolist()]


def test_ngram_ids_are_equal_exactly_where_ngrams_are():
    ids = torch.tensor([1, 2, 3, 1, 2, 4, 1, 2, 3])
    _, pairs, triples = embed._ngrams(ids, 3)
    for n, found in ((2, pairs), (3, triples)):
        grams = [tuple(ids[max(0, t - n + 1) : t + 1].tolist()) for t in range(len(ids))]
        for a in range(len(ids)):
            for b in range(len(ids)):
                assert (found[a] == found[b]).item() == (grams[a] == grams[b])
