"""Keys and values of attention in one storage format each: from global memory to the tile that a product reads.

A module here is one format. A skeleton imports it by a marked line and knows its contract, not its name:

    from msa_tiles.dsl.tilelang.operands import plain as key_value  # <- operands.key_value

Plain Python:
  TENSORS       what a call passes for it, as endings of its name: ("",), or ("", "_scale") for k, k_scale
  AHEAD         whether `take` has work that may be done while another product runs
  Stored        what a kernel holds of those tensors
  Operand(name, head_dim, block_size, pages_per_block, **scales)   keys ("k") or values ("v"); `scales` are the
                compile-time dims that only formats with scales have (token_scales)
    element     of the tile, and so of the other side of the product: queries, weights
    tensor(heads), scale(heads)   the parameters of the kernel
    place(stage)                  where the tile of a stage is: an index of `tiles`
    fold(value, stored, head)     times the scale that all rows of a head share

Macros, whose first argument is an operand:
  allocate(operand, stages) -> Held   shared memory: the ring that TMA fills, tiles, scales of tokens
  load(…)       the producer warpgroup: start a block's way into a stage, and its scales; it arrives afterwards
  take(…)       the consumer warpgroup: wait for a stage, make its tile; rows from `rows` on become zeros
  release(…)    the consumer warpgroup, behind the product: hand the stage back
  weigh(…)      multiply column j of a tile of registers by the scale of row j of the block

Rows that nobody may see hold anything, NaN included: `take` makes zeros of them, and their scales count as 0.
"""
