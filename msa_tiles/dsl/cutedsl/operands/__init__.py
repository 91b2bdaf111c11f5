"""Keys and values of attention, and index keys, in one storage format each: from global memory to the product.

A module here is one format. A skeleton imports it by a marked line and knows its contract, not its name:

    from msa_tiles.dsl.cutedsl.operands import plain as key_value  # <- operands.key_value

Plain Python, read without the DSL:
  TENSORS       what a call passes for it, as endings of its name: ("",), or ("", "_scale") for k, k_scale
  multiplied(name, **scales)   the element of the product that keys ("k") or values ("v") are part of: queries and
                weights are of it, too
  parts(name, head_dim, block_size, stages, *, producer, readers, **scales) -> Parts
                its pipelines and buffers in the kernel's table, whose roles `producer` and `readers` are; scales are
                the compile-time dims that only formats with scales have (token_scales)

`Left(name, table, head_dim, block_size, pages_per_block, *, readers, transposed, **scales)` is the left side of
products of few columns: K (block_size rows) or, transposed, V (head_dim rows).
  element                           the DSL's type of `multiplied`
  Storage   arguments(kv_heads)     stand-ins for TENSORS; `stored(*tensors)` is what the kernel takes of them, and
                                    `atoms(stored)` their descriptors
            layouts()               of its buffers that are not plain; `held(buffers, barriers)`: memory and barriers
  Producer  load                    one block into a stage, once it is free
  Decode    prepare(right, …)       once: the right side as the product wants it
            take(…) -> tile         wait for a stage; `multiply(into, tile, right)` starts the product, and `release`
                                    hands the stage back behind it
            ahead                   whether `take` has work that may be done while another product runs
            row_of(…)               which row of the block an accumulator's row is
  Scales    fold(value, stored, head)   times the scale that all rows of a head share
            factors(held, stage, phase, first_row)   those of rows first_row + 64 m + 8 half, number 2 m + half, or None
                                    where no row has its own; before `take`

With PIECES in its module a consumer warpgroup takes 64 tokens of every block, a piece: `readers` are all of them,
`product` and `operand` are those of a piece, and
  take(…, valid, thread, member, piece)   takes the number of the piece, and of it valid rows, thread and warp
  column_of(member, lane, half, m)        says which column of values a row of an accumulator's m-th 64 is

`Right(name, table, head_dim, block_size, pages_per_block, **scales)` is the right side of products of 64-row tiles,
read by several warpgroups: K, or V by the name "v".
right_parts(name, head_dim, block_size, *, producer, keeper, readers, inspected, **scales) are pipelines and buffers;
`keeper` is a warp that blocks pass through where something is to be done with them: decoding, or with `inspected`,
what the kernel does with blocks that are seen in part.
  Storage   as above; `held(…)` has the tile, and who reads it waits for `full` and arrives at `free`
  Producer  load(…, parity, inspected), and end_of_loads behind the last block
  Keeper    bring(…) until a block is ready but for the inspection, then pass_on; end_of_tasks behind the last block
  Scales    fold, and of_head(stored, head): what outputs are multiplied with, or None
With KEEPERS in its module so many warps are the keeper, and all of them arrive where one does.

`InRing(…)` is that in a ring of tiles of 16 bits that belongs to the kernel, and also holds other things. Its `fold`
gives no 0, by which the kernel divides.
in_ring(name, **scales) is the element of the product, ring_parts(stages, *, producer, decoder, readers, **scales) are
the ring's pipelines, and query_parts(rows, *, producer, decoder, readers, **scales) those of a tile of queries, and its
buffers.
  LANDING, Q_LANDING   the barriers at which the bytes of a stage, or of queries, are awaited first
  decoded   whether decoding warps pass each stage on: decode_tile, then an arrival at ring_full; and queries before it:
            decode_queries, pass_queries_on
  scale_rows           of an accumulator's two rows the scale of the softmax, as decoded queries want it
  boxes     where TMA writes; load_scales beside it, and skip_scales for a stage that holds something else
With SCORES in its module, as where keys are multiplied as they are stored, it makes S = Q K^T, else the kernel does:
  product, left_sides, stages_of   the multiplications, the tile of queries and the ring's stages as they take them
  score     starts the product with a stage

Formats that are decoded share what surrounds it (msa_tiles.dsl.cutedsl.decoded_left, decoded_right, and decoding for
words). Beside them e4m3 has its storage and a file for each place (e4m3_storage, e4m3_left, e4m3_right, e4m3_ring);
formats of 4 bits share theirs (packed, packed_left and packed_pieces, packed_tile, packed_right, packed_ring), and a
module here has the group, the scales, and what a code becomes. nvfp4_pieces and mxfp4_pieces have left sides in pieces;
e4m3_by_warps, nvfp4_by_warps and mxfp4_by_warps right sides that several warps decode (by_warps).

Index keys have a contract of their own, and modules `index_<format>` that a row names (`operands: {index_key: …}`).
  multiplied()              the element of the product, and of queries
  parts(name, head_dim, block_size, stages, *, producer, freed, **scales) -> Parts
                            `freed` says who arrives when a stage has been read; what is stored in another element
                            than is multiplied is made by a role of the kernel's named decoder
  IndexKeys(name, table, head_dim, block_size, pages_per_block, **scales)
    element, scaled         of queries too: its type, and whether they and the keys have scales
    key_scales              whether every key has one of its own, which lies in the stage until a product is reduced
    arguments, stored, atoms, layouts, held   as above
    pages, load             the producer warp finds the pages of a block, and loads it
    decode_blocks(held, count, member, members)   one of the decoding warps, where there are some
    factors(held, stage)    column j of a product with the stage's `tiles` is multiplied by number j of these, or None
    row_factor(stored, scales, token, head)   what all products of a query are multiplied by, or None; `scales` are the
                            module's `Scales`, or None

Modules `index_<format>_left` have them as the left side of products of few columns instead, decoded in registers:
parts(…, readers, …) and IndexKeys(…, readers=…) as `Left` has them, with what index keys add (pages, load, row_factor).
Instead of whole blocks they are taken in units of 64 keys, of several pieces each:
  units, pieces             of a block, and of a unit
  wait(held, stage, phase)  until a stage is full; whoever waited calls the others
  unit_factors(held, stage, unit, member, lane), offset_of(stage, member, lane)   of a unit and of a stage, for `decode`
  decode(operand, held, offset, unit, piece, factors)   a piece, while the one decoded last is multiplied
  multiply(product, into, operand, unit, piece, right)  into = unit x right, one piece after the other

Modules `index_<format>_bytes` are such ones whose codes are multiplied as e4m3 and whose groups are scaled behind the
product, which the algorithm `post_scaled` of decode_score does. Columns of queries come from
msa_tiles.dsl.cutedsl.e4m3_columns, units have no pieces, and
  fetch(held, offset, unit)         the codes of a unit, for decode(operand, codes)
  multiply(product, into, operand, right)   into = unit x right, in the accumulators of a unit
  group_scales(held, stage, unit, member, lane)   the scales of a unit, as long as its stage is not handed back
  factors_of_rows(scales)           these as numbers
  scaled(into, factors, c, half)    what a lane's column c adds up to in one of its two rows, of the groups it has

Caches that rows are written into have modules `append_<format>`, which a row names likewise.
  Cache(head_dim, **scales)
    arguments(pages, heads, page), stored(*tensors)   as above
    scale_of(values, stored, head, use_scale)   the scale of a row, whose lanes have VECTOR values each, or of its group
                            (msa_tiles.dsl.cutedsl.append_groups), or None; all threads of a warp call it
    write(values, scale, stored, page, head, place, lane)   those values, and what belongs beside the row

Modules `dequantize_<format>` read such caches, and have of their `Cache` arguments and stored, too:
    read(stored, page, head, place, lane)   the words of a lane's VECTOR columns, and the scale of the row or group
    outer_of(stored, head)  what all rows of a head are multiplied with
    decode(words, scale, outer)   four words of two bfloat16, in the order of columns

What the docstring of `Left`, `Right` or `InRing` says behind its first paragraph, the kernel's says too: it speaks of K
and V, S and P, and of the kernel's roles.

Rows that nobody may see hold anything, NaN included: of V, `take` makes zeros of them, and a factor of such a row may
be anything, so that the caller chooses before it adds.

Identity methods emit nothing, so 16-bit kernels carry no trace of formats with scales.
"""
