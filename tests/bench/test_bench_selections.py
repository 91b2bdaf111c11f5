"""The selections that attention is timed on are what they say they are."""

from __future__ import annotations

import pytest
import torch

from msa_tiles.bench import selections

CPU = torch.device("cpu")
HEADS, BLOCK = 3, 16


def _make(name: str, num_q: int, num_k: int, topk: int) -> torch.Tensor:
    torch.manual_seed(1)
    return selections.GENERATORS[name](HEADS, num_q, num_k, topk, BLOCK, CPU)


def _own(num_q: int, num_k: int) -> torch.Tensor:
    return torch.arange(num_k - num_q, num_k) // BLOCK


@pytest.mark.parametrize("name", ["uniform", "sticky"])
@pytest.mark.parametrize(("num_q", "num_k"), [(1, 1), (700, 700), (65, 1000), (1, 4000)])
def test_ids_are_distinct_ascending_visible_and_padded_behind(name, num_q, num_k):
    ids = _make(name, num_q, num_k, 8)
    own = _own(num_q, num_k)
    assert ids.dtype == torch.int32 and ids.shape == (HEADS, num_q, 8)
    assert ((ids >= -1) & (ids <= own[None, :, None])).all()
    for row in ids.flatten(0, 1).tolist():
        valid = [block for block in row if block >= 0]
        assert row == valid + [-1] * (8 - len(valid))
        assert valid == sorted(set(valid))
    assert (ids == own[None, :, None]).any(-1).all()  # the own block is always in


def test_uniform_takes_min_k_visible_blocks_and_spreads_evenly():
    num_q, topk = 6400, 8
    ids = _make("uniform", num_q, num_q, topk)
    own = _own(num_q, num_q)
    assert torch.equal((ids >= 0).sum(-1), (own + 1).clamp_max(topk)[None].expand(HEADS, -1))
    late = ids[:, own >= 350]
    earlier = late[late < 350].long()
    counts = torch.bincount(earlier, minlength=350).float()
    # Each of the 350 blocks is drawn about equally often: a few standard deviations of a binomial count.
    assert (counts - counts.mean()).abs().max() < 6 * counts.mean().sqrt()


def test_uniform_does_not_depend_on_how_it_is_cut(monkeypatch):
    num_q, topk = 900, 8
    monkeypatch.setattr(selections, "_CHUNK_ELEMENTS", HEADS * (num_q // BLOCK + 1) * 7)
    ids = _make("uniform", num_q, num_q, topk)
    assert torch.equal((ids >= 0).sum(-1), (_own(num_q, num_q) + 1).clamp_max(topk)[None].expand(HEADS, -1))


def test_sticky_keeps_first_previous_and_own_block():
    num_q = 3000
    ids, own = _make("sticky", num_q, num_q, 16), _own(num_q, num_q)
    late = own >= 2
    for wanted in (torch.zeros_like(own), own - 1, own):
        assert (ids[:, late] == wanted[late][None, :, None]).any(-1).all()
    # Enough candidates for every slot: 13 classes with one block each, behind the first and before the previous.
    full = own >= 15
    assert (ids[:, full] >= 0).all()


def test_sticky_carries_over_four_fifths():
    num_q = 16 * 400
    ids = _make("sticky", num_q, num_q, 16)
    own = _own(num_q, num_q)
    same_block = (own[1:] == own[:-1]) & (own[1:] >= 200)
    kept = (ids[:, 1:, :, None] == ids[:, :-1, None, :]).any(-1).sum(-1)[:, same_block].float().mean()
    # The three fixed blocks always carry over, 13 do with 0.8, and a renewed one may hit its old block by chance.
    assert 3 + 13 * 0.8 - 0.15 < kept < 3 + 13 * 0.8 + 0.35


def test_last_queries_of_a_long_prompt_select_over_the_whole_of_it():
    ids = _make("uniform", 64, 16 * 1000, 8)
    assert ids.float().std() > 150 and (ids >= 0).all()
