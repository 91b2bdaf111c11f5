"""A top-k list that one thread keeps in registers: keys descending, equal keys by ascending block id.

Keys are int32 whose order is the order of the scores, so that comparisons are exact and total: NaN is below -inf, both
zeros are equal, and forced blocks stand above every score. A list is two register tensors, keys and ids, of `capacity`
int32 each.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

EMPTY = -(2**31)
NAN_KEY = EMPTY + 1
INFINITY_BITS = 0x7F800000
INIT_KEY = 2**31 - 1
LOCAL_KEY = INIT_KEY - 1
NO_ID = 2**31 - 1


@cute.jit
def pick(condition: Boolean, value: Int32, other: Int32) -> Int32:
    """`value` where the condition holds, else `other`; both are evaluated, nothing branches."""
    return Int32(cutlass.select_(condition, Int32(value), Int32(other)))


@cute.jit
def order_key(score: Float32) -> Int32:
    """The int32 key of a float32 score; bits only, since simplifiers take `x != x` and `x + 0` for what they seem."""
    bits = score.bitcast(Int32)
    magnitude = bits & Int32(0x7FFFFFFF)
    return pick(magnitude > INFINITY_BITS, NAN_KEY, pick(bits < 0, -magnitude, magnitude))


@cute.jit
def forced_key(key: Int32, block: Int32, valid: Int32, init_blocks: Int32, local_blocks: Int32) -> Int32:
    """The key of a block once forced: the first init_blocks of a row, then its last local_blocks, above all scores."""
    return pick(block < init_blocks, INIT_KEY, pick(block >= valid - local_blocks, LOCAL_KEY, key))


@cute.jit
def clear(keys: cute.Tensor, ids: cute.Tensor):
    """Empty the list."""
    for j in cutlass.range_constexpr(cute.size(keys)):
        keys[j] = Int32(EMPTY)
        ids[j] = Int32(NO_ID)


@cute.jit
def insert(keys: cute.Tensor, ids: cute.Tensor, key: Int32, block: Int32):
    """Insert a block that comes after every block in the list: among equal keys it goes last."""
    capacity = cute.size(keys)
    if key > keys[capacity - 1]:
        for back in cutlass.range_constexpr(capacity - 1):
            j = capacity - 1 - back
            ids[j] = pick(key > keys[j - 1], ids[j - 1], pick(key > keys[j], block, ids[j]))
            keys[j] = cutlass.max(keys[j], cutlass.min(key, keys[j - 1]))
        ids[0] = pick(key > keys[0], block, ids[0])
        keys[0] = cutlass.max(keys[0], key)


@cute.jit
def ranks_above(key: Int32, block: Int32, other_key: Int32, other_block: Int32) -> Boolean:
    """A larger key, or an equal one and a lower id."""
    return (key > other_key) | ((key == other_key) & (block < other_block))


@cute.jit
def order_pair(keys: cute.Tensor, ids: cute.Tensor, upper: cutlass.Constexpr, lower: cutlass.Constexpr):
    """Exchange two entries unless the upper one ranks first."""
    key, block, other_key, other_block = keys[upper], ids[upper], keys[lower], ids[lower]
    exchange = ranks_above(other_key, other_block, key, block)
    keys[upper] = pick(exchange, other_key, key)
    ids[upper] = pick(exchange, other_block, block)
    keys[lower] = pick(exchange, key, other_key)
    ids[lower] = pick(exchange, block, other_block)


@cute.jit
def merge(keys: cute.Tensor, ids: cute.Tensor, lanes: Int32, keep: Boolean):
    """Merge the list of the thread `lanes` lanes up into the list of each thread with `keep`; ids in any order.

    The better of entry j here and entry capacity - 1 - j there make up the best `capacity` of both, as a bitonic
    sequence, which log2(capacity) rounds of exchanges put in order. capacity is a power of two. All lanes of the warp
    must call it, and a lane that another one reads does not keep.
    """
    capacity = cute.size(keys)
    for j in cutlass.range_constexpr(capacity):
        key = cute.arch.shuffle_sync_down(keys[capacity - 1 - j], lanes)
        block = cute.arch.shuffle_sync_down(ids[capacity - 1 - j], lanes)
        take = keep & ranks_above(key, block, keys[j], ids[j])
        keys[j] = pick(take, key, keys[j])
        ids[j] = pick(take, block, ids[j])
    for level in cutlass.range_constexpr(capacity.bit_length() - 1):
        for pair in cutlass.range_constexpr(capacity // 2):
            stride = capacity >> (level + 1)
            upper = pair // stride * (2 * stride) + pair % stride
            order_pair(keys, ids, upper, upper + stride)


@cute.jit
def sort_ids(ids: cute.Tensor):
    """Sort the ids ascending; NO_ID ends up last."""
    capacity = cute.size(ids)
    for _ in cutlass.range(capacity // 2, unroll=1):
        for j in cutlass.range_constexpr(capacity // 2):
            smaller = cutlass.min(ids[2 * j], ids[2 * j + 1])
            ids[2 * j + 1] = cutlass.max(ids[2 * j], ids[2 * j + 1])
            ids[2 * j] = smaller
        for j in cutlass.range_constexpr(capacity // 2 - 1):
            smaller = cutlass.min(ids[2 * j + 1], ids[2 * j + 2])
            ids[2 * j + 2] = cutlass.max(ids[2 * j + 1], ids[2 * j + 2])
            ids[2 * j + 1] = smaller


@cute.jit
def emit(keys: cute.Tensor, ids: cute.Tensor, valid: Int32, topk: Int32, order: Int32, row: cute.Tensor):
    """Write the first topk ids of the list to row[:topk] in the wanted order, padded with -1.

    order: 0 ascending ids, 1 as ranked (init, local, descending score), 2 init, descending score, local last.
    """
    capacity = cute.size(keys)
    taken = cutlass.min(valid, topk)
    inits = Int32(0)
    locals_ = Int32(0)
    for j in cutlass.range_constexpr(capacity):
        inits = inits + pick((j < taken) & (keys[j] == INIT_KEY), 1, 0)
        locals_ = locals_ + pick((j < taken) & (keys[j] == LOCAL_KEY), 1, 0)
        ids[j] = pick(j < taken, ids[j], NO_ID)
    if order == 0:
        sort_ids(ids)
    for j in cutlass.range_constexpr(capacity):
        if j < topk:
            place = Int32(j)
            if (order == 2) & (j < taken) & (j >= inits):
                if j < inits + locals_:
                    place = j + taken - inits - locals_
                else:
                    place = j - locals_
            row[place] = pick(ids[j] == NO_ID, -1, ids[j])
