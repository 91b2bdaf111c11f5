"""Keys and values of attention in one storage format each: from global memory to the tile that a product reads.

A module here is one format. A skeleton imports it by a marked line and knows its contract, not its name:

    from msa_tiles.dsl.tilelang.operands import plain as key_value  # <- operands.key_value

Plain Python:
  TENSORS       what a call passes for it, as endings of its name: ("",), or ("", "_scale") for k, k_scale
  STARTS        whether a block has a way to go before its tile is free: then `start` begins it, in a ring of its own
  multiplied(name, **scales)    the element of the tile that suits the format
  parts(name, head_dim, block_size, stages, *, producer, readers, own, **scales)   its share of the kernel's table
                (msa_tiles.dsl.table): the pipeline `name`, as deep as there are tiles, what it has besides, and its
                buffers; without `own` the tiles and their pipeline are the kernel's
  Stored        what a kernel holds of those tensors
  Operand(name, head_dim, block_size, pages_per_block, element, **scales)   keys ("k") or values ("v"); `scales` are
                the compile-time dims that only formats with scales have (token_scales)
    element     of the tile, and so of the other side of the product: queries, weights. Named, where the tile lies in
                memory that others use too; None: what suits the format
    tensor(heads), scale(heads)   the parameters of the kernel
      fold(value, stored, head)     times the scale that all rows of a head share; of keys never 0: softmax multiplies
                                    -inf by it, and shared_attention divides by it
  allocate(operand, table, stages, tiles) -> Held   shared memory, as the table says; `tiles` is [places, block_size,
                head_dim], and given where others use it too

Macros, whose first argument is an operand:
  start(…, stage, rows, thread)          the producer warpgroup: a block into a stage of the ring of those that start,
                                         which no barrier frees: its threads have met since they filled from the stage
  fill(…, full, place, stage, phase, …)  the producer warpgroup: lay down the tile, of the block in that stage and phase
                                         of the ring if it was started; the kernel has it arrive at
                                         full[place] afterwards
  weigh(…)                               the readers: multiply column j of registers by the scale of row j of the tile,
                                         if `fill` has not multiplied the row

Caches that rows are written into have modules `append_<format>`, which a row names (`operands: {key_value: …}`):
  TENSORS, Stored               as above
  Cache(name, head_dim, **scales)   tensor(pages, heads, page), scale(pages, heads, page), and global_scale(heads) of a
                                format that has one: the parameters of the kernel
  find_scale(cache, stored, values, head, use_scale, scale)   macro: the scale of a row, whose lanes have VECTOR values
                                each, or of its group (msa_tiles.dsl.tilelang.append_groups); all threads of a warp call
  write(cache, stored, values, scale, page, head, place, column, packed)   macro: those values, and what belongs beside
                                the row

Modules `dequantize_<format>` read such caches, and have Cache, Stored and TENSORS, too:
  WORDS                         of a lane's eight columns
  find_outer(cache, stored, head, outer)   macro: what all rows of a head are multiplied with
  read(cache, stored, page, head, place, column, step, words, scales)   macro: the words of a lane of row number `step`,
                                and what the scale of the row or group is
  decode(cache, step, words, scales, outer, packed)   macro: four words of two bfloat16, in the order of columns

Rows that nobody may see hold anything, NaN included, until `clear_rows`. The scales of rows from `rows` on, of which a
block has one or more, are not looked at, and a weight of 0 stays 0, whatever the scale that `weigh` multiplies it by.
"""
