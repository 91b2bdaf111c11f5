"""The parameters of a selection of blocks."""

from __future__ import annotations

from msa_tiles.call import validate

# The numbers by which kernels know the orders.
ORDERS = {"ascending": 0, "score": 1, "local_last": 2}


def selection(
    name: str,
    num_heads: int,
    topk: int,
    num_kv_heads: int | None,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    order: str,
) -> int:
    """Check the parameters of a selection over the ``num_heads`` index heads of ``name``; the number of KV heads."""
    validate.integer("topk", topk, 1)
    validate.integer("block_size", block_size, 1)
    validate.integer("init_blocks", init_blocks, 0)
    validate.integer("local_blocks", local_blocks, 0)
    validate.one_of("order", order, tuple(ORDERS))
    if num_heads == 0:
        validate.refuse(name, "0 index heads", "at least 1")
    if num_kv_heads is None:
        return num_heads
    validate.integer("num_kv_heads", num_kv_heads, 1)
    if num_heads % num_kv_heads != 0:
        validate.refuse("num_kv_heads", str(num_kv_heads), f"a divisor of the {num_heads} index heads of {name}")
    return num_kv_heads
