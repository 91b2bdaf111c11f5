"""Buffers and sizes that a caller had better not give: refused with a sentence, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from msa_tiles import ops

TOKENS, HEADS, GROUPS, DIM, TOPK, BLOCK = 96, 4, 2, 16, 2, 16


def make(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def operands() -> dict[str, Tensor]:
    ids = torch.zeros(GROUPS, TOKENS, TOPK, dtype=torch.int32)
    return {
        "q": make(TOKENS, HEADS, DIM),
        "k": make(TOKENS, GROUPS, DIM),
        "v": make(TOKENS, GROUPS, DIM),
        "block_indices": ids,
    }


def attend(given: dict[str, Tensor], **more: object) -> Tensor:
    return ops.sparse_attention(*given.values(), block_size=BLOCK, **more)  # type: ignore[arg-type]


def of_query(given: dict[str, Tensor]) -> Tensor:
    return given["q"]


def of_query_in_part(given: dict[str, Tensor]) -> Tensor:
    pool = make(TOKENS + 1, HEADS, DIM)
    given["q"] = pool[1:]
    return pool[:-1]


def of_keys(given: dict[str, Tensor]) -> Tensor:
    pool = make(2 * TOKENS, HEADS, DIM)
    given["k"] = pool.view(-1)[: TOKENS * GROUPS * DIM].view(TOKENS, GROUPS, DIM)
    return pool[:TOKENS]


def across_rows(given: dict[str, Tensor]) -> Tensor:
    """Rows that interleave, but for one element."""
    pool = make(TOKENS, 2 * HEADS * DIM)
    given["q"] = pool[:, : HEADS * DIM].unflatten(1, (HEADS, DIM))
    return pool[:, HEADS * DIM - 1 : -1].unflatten(1, (HEADS, DIM))


@pytest.mark.parametrize(
    ("share", "name"), [(of_query, "q"), (of_query_in_part, "q"), (of_keys, "k"), (across_rows, "q")]
)
def test_a_buffer_in_the_memory_of_an_operand_is_refused(
    share: Callable[[dict[str, Tensor]], Tensor], name: str
) -> None:
    given = operands()
    out = share(given)
    before = out.clone()
    with pytest.raises(ValueError, match=f"out: got memory of {name}; wanted a buffer of its own"):
        attend(given, out=out)
    assert torch.equal(out, before)


def test_two_buffers_in_the_same_memory_are_refused() -> None:
    memory = torch.empty(TOKENS * HEADS * DIM)
    out, lse = memory.view(TOKENS, HEADS, DIM), memory[: TOKENS * HEADS].view(TOKENS, HEADS)
    with pytest.raises(ValueError, match="lse: got memory of out; wanted a buffer of its own"):
        attend(operands(), out=out, lse=lse)


def test_buffers_beside_operands_in_one_tensor_are_taken() -> None:
    """A fused projection with room for the output, token by token, and a slice of a pool behind the keys."""
    given = operands()
    wanted = attend(given)
    fused = torch.empty(TOKENS, 2, HEADS, DIM)
    fused[:, 0] = given["q"]
    pool = torch.empty(3, TOKENS, GROUPS, DIM)
    pool[0], pool[1] = given["k"], given["v"]
    given |= {"q": fused[:, 0], "k": pool[0], "v": pool[1]}
    assert torch.equal(attend(given, out=fused[:, 1]), wanted)
    heads_first = torch.empty(2, HEADS, TOKENS, DIM).transpose(1, 2)
    heads_first[0] = given["q"]
    given["q"] = heads_first[0]
    assert torch.equal(attend(given, out=heads_first[1]), wanted)


@pytest.mark.parametrize("name", ["out", "lse"])
def test_a_buffer_that_requires_grad_is_refused(name: str) -> None:
    shape = (TOKENS, HEADS, DIM) if name == "out" else (TOKENS, HEADS)
    buffer = torch.empty(shape, requires_grad=True)
    with pytest.raises(ValueError, match=f"{name}: got a tensor that requires grad; wanted a buffer"):
        attend(operands(), **{name: buffer})
    with torch.no_grad():
        attend(operands(), **{name: buffer})


def test_tensors_of_numpy_that_hold_nothing_are_taken() -> None:
    """Their strides are zeros, where NumPy makes them."""
    empty = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (0, HEADS, DIM), (0, 0, 0))
    keys = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (0, GROUPS, DIM), (0, 0, 0))
    ids = torch.from_numpy(np.zeros((GROUPS, 0, TOPK), np.int32))
    q, k = torch.from_numpy(empty), torch.from_numpy(keys)
    assert q.stride(-1) == 0
    assert ops.sparse_attention(q, k, k, ids, block_size=BLOCK).shape == (0, HEADS, DIM)


def test_more_keys_than_there_are_allocate_nothing() -> None:
    starts = torch.tensor([0, TOKENS], dtype=torch.int32)
    for last in (TOKENS + 1, 2**31 - 1):
        ends = torch.tensor([0, last], dtype=torch.int32)
        with pytest.raises(ValueError, match=f"cu_seqlens_k: got 0 to {last}; wanted 0 to the {TOKENS} keys at most"):
            attend(operands(), cu_seqlens_q=starts, cu_seqlens_k=ends)
        with pytest.raises(ValueError, match=f"cu_seqlens_k: got 0 to {last}"):
            ops.select_blocks(
                make(TOKENS, 2, DIM), make(TOKENS, DIM), TOPK, block_size=BLOCK, cu_seqlens_q=starts, cu_seqlens_k=ends
            )


@pytest.mark.parametrize("size", [2**16 + 1, 2**40, 2**70])
def test_blocks_beyond_measure_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size: got {size}; wanted at most 65536"):
        ops.sparse_attention(*operands().values(), block_size=size)
    with pytest.raises(ValueError, match=f"block_size: got {size}; wanted at most 65536"):
        ops.select_blocks(make(TOKENS, 2, DIM), make(TOKENS, DIM), TOPK, block_size=size)
