"""What caches of a million tokens take, by the bytes that are allocated."""

from __future__ import annotations

import pytest
import torch

from msa_tiles.quant import GROUPS, PACKED, QuantizedTensor, sglang_index_pages, sglang_pages, vllm_pages

TOKENS, PAGE, HEADS, DIM = 1 << 20, 128, 4, 128
PAGES = TOKENS // PAGE
MOST = 0.29  # of what BF16 takes


def allocated(*tensors: torch.Tensor) -> int:
    """Bytes of the storages behind tensors, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def keys_and_values(head_dim: int = DIM) -> int:
    return 2 * 2 * TOKENS * HEADS * head_dim


@pytest.mark.parametrize("head_dim", [64, 128])
def test_pages_of_vllm_and_sglang(head_dim: int) -> None:
    row = head_dim // PACKED + head_dim // GROUPS["nvfp4"].size
    vllm = vllm_pages(torch.empty(PAGES, 2 * HEADS, PAGE, row, dtype=torch.uint8))
    pool = torch.empty(PAGES, 2 * HEADS * PAGE * row, dtype=torch.uint8)
    sglang = sglang_pages(pool, HEADS, PAGE, head_dim)
    for pages in (vllm, sglang):
        assert pages.k.shape == pages.v.shape == (PAGES, HEADS, PAGE, head_dim)
        parts = (pages.pool, pages.k.data, pages.k.scale, pages.v.data, pages.v.scale)
        # Views of the pool: elements and scales, and nothing beside them.
        assert allocated(*parts) == pages.pool.nbytes == sum(part.nbytes for part in parts[1:])
        assert allocated(*parts) <= MOST * keys_and_values(head_dim)


def test_index_keys() -> None:
    pool = torch.empty(PAGES, PAGE * (DIM // PACKED + DIM // GROUPS["nvfp4"].size), dtype=torch.uint8)
    keys = sglang_index_pages(pool, PAGE, DIM)
    assert keys.shape == (PAGES, PAGE, DIM)
    assert allocated(pool, keys.data, keys.scale) <= MOST * 2 * TOKENS * DIM


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_tensors_of_their_own(name: str) -> None:
    groups = GROUPS[name]
    data = torch.empty(TOKENS, HEADS, DIM // PACKED, dtype=torch.uint8)
    scale = torch.empty(TOKENS, HEADS, DIM // groups.size, dtype=torch.uint8).view(groups.dtype)
    keys = QuantizedTensor(data, scale, name)
    assert 2 * allocated(keys.data, keys.scale) <= MOST * keys_and_values()
