"""Whether tensors share bytes, against sets of all their bytes."""

from __future__ import annotations

import os
import random

import torch
from torch import Tensor

from msa_tiles.library.overlap import _overlap
from msa_tiles.quant import vllm_pages

POOL = 2048


def bytes_of(value: Tensor, pool: Tensor) -> set[int]:
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(value.shape, value.stride(), strict=True):
        places = (places[:, None] + torch.arange(size) * stride * value.element_size()).flatten()
    begin = value.data_ptr() - pool.data_ptr()
    return {begin + place + byte for place in places.tolist() for byte in range(value.element_size())}


def view(pool: Tensor, draw: random.Random) -> Tensor:
    typed = pool.view(draw.choice((torch.uint8, torch.bfloat16, torch.float32)))
    while True:
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
        stride = [draw.choice((0, 1, 2, 3, 4, 8, 16, 32, 64)) for _ in shape]
        begin = draw.randint(0, 200)
        last = begin + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if last < typed.numel():
            return typed.as_strided(shape, stride, begin)


def test_random_views() -> None:
    draw = random.Random(int(os.environ["MSA_TILES_SEED"]))
    pool, met = torch.zeros(POOL, dtype=torch.uint8), 0
    for _ in range(500):
        one, other = view(pool, draw), view(pool, draw)
        shared = bool(bytes_of(one, pool) & bytes_of(other, pool))
        assert _overlap(one, other) >= shared, (one.shape, one.stride(), other.shape, other.stride())
        met += shared
    assert 10 < met < 490


def test_parts_of_one_pool() -> None:
    pages = vllm_pages(torch.zeros(3, 4, 128, 72, dtype=torch.uint8))
    parts = [pages.k.data, pages.k.scale, pages.v.data, pages.v.scale]
    assert [[_overlap(one, other) for other in parts] for one in parts] == torch.eye(4).bool().tolist()
    k, v = torch.zeros(3, 16, 2, 128).transpose(1, 2).split(64, -1)
    assert not _overlap(k, v) and _overlap(k[:, :1], k) and not _overlap(k[:, :1], k[:, 1:])
