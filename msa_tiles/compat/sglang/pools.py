"""SGLang's pools as pages: views of them, and tables made from its map of tokens to slots."""

from __future__ import annotations

import torch
from torch import Tensor


def of_heads(pool: Tensor, page: int) -> Tensor:
    """[pages, Hkv, page, D] of a pool [slots, Hkv, D], whatever its strides; slots behind the last whole page are not
    used by anyone."""
    return _pages(pool, page).transpose(1, 2)


def of_index(pool: Tensor, page: int) -> Tensor:
    """[pages, page, D] of a pool [slots, 1, D]."""
    return _pages(pool, page).squeeze(2)


def table(req_to_token: Tensor, requests: Tensor, most: int, page: int) -> Tensor:
    """The pages of requests of up to ``most`` tokens: int32 [B, pages].

    A page's tokens lie one after the other, so its first token tells which it is. What stands behind a request's last
    token in ``req_to_token`` [requests, longest] is some page's, or 0.
    """
    return torch.div(req_to_token[:, :most:page][requests], page, rounding_mode="floor").to(torch.int32)


def _pages(pool: Tensor, page: int) -> Tensor:
    pages = pool.shape[0] // page
    return pool[: pages * page].unflatten(0, (pages, page))
